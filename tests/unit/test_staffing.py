"""How many workers there are: as many as there is work for, and nobody leaves who has some."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from safepool.core.commands import Retire, Send, Start, Unit
from safepool.core.ledger import Ledger
from safepool.core.staffing import Staff

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["submit", "submit", "run", "run", "die", "time", "resize"]),
        st.integers(0, 5),
    ),
    max_size=80,
)


class Pool:
    """Plays a pool whose workers are ready at once."""

    def __init__(self, size: int, *, lazy: bool, idle_timeout: float | None) -> None:
        self.size = size
        self.ledger: Ledger[Unit] = Ledger(
            size, None, Staff(size, lazy=lazy, idle_timeout=idle_timeout)
        )
        self.workers: dict[int, list[Unit]] = {}
        self.leaving: set[int] = set()
        self.last_work: dict[int, float] = {}
        self.started = 0
        self.open = 0
        self.now = 0.0

    def advance(self) -> None:
        while commands := self.ledger.advance(self.now):
            for command in commands:
                if isinstance(command, Start):
                    for _ in range(command.count):
                        self.started += 1
                        self.workers[self.started] = []
                        self.last_work[self.started] = self.now
                        self.ledger.started(self.started)
                        self.ledger.ready(self.started, self.now)
                elif isinstance(command, Send):
                    assert command.worker not in self.leaving
                    self.workers[command.worker] += command.units
                elif isinstance(command, Retire):
                    assert not self.workers[command.worker], "it has something to do"
                    self.leaving.add(command.worker)

    def run(self, worker: int) -> None:
        if self.workers[worker]:
            unit = self.workers[worker].pop(0)
            unit.done = 1
            self.open -= 1
            self.ledger.progressed(worker, 1, tasks=1)
            self.ledger.answered(worker, unit)
            self.last_work[worker] = self.now

    def bury(self, worker: int) -> None:
        units = self.workers.pop(worker)
        self.leaving.discard(worker)
        self.open -= bool(units)
        self.ledger.lost(worker, units[0].number if units else 0)


@given(st.integers(1, 5), st.booleans(), st.sampled_from([None, 1.0]), STEPS)
def test_the_number_of_workers(
    size: int, lazy: bool, idle_timeout: float | None, steps: list[tuple[str, int]]
) -> None:
    """Never more than the size after those who leave are gone; none leaves at work or early."""
    pool = Pool(size, lazy=lazy, idle_timeout=idle_timeout)
    pool.advance()
    assert pool.started == (0 if lazy else size)
    for count, (step, value) in enumerate(steps):
        living = sorted(pool.workers)
        worker = living[value % len(living)] if living else None
        if step == "submit":
            pool.ledger.submitted([Unit(1, count, 1, 10)])
            pool.open += 1
        elif step == "time":
            pool.now += (0.01, 0.3, 2.0)[value % 3]
        elif step == "resize":
            pool.size = value + 1
            pool.ledger.resize(pool.size)
        elif worker is not None and step == "run":
            pool.run(worker)
        elif worker is not None and step == "die":
            pool.bury(worker)
        pool.advance()
        for each in list(pool.leaving):
            pool.bury(each)
        pool.advance()
        at_work = sum(bool(units) for units in pool.workers.values())
        assert len(pool.workers) <= pool.size + at_work, "who is too many is at work"
        if idle_timeout is not None:
            for each, units in pool.workers.items():
                assert units or pool.now - pool.last_work[each] <= idle_timeout
        if pool.open > sum(map(len, pool.workers.values())):
            assert at_work >= pool.size, "work waits, and workers could"


def test_three_tasks_start_three_workers() -> None:
    """Of a thousand."""
    pool = Pool(1000, lazy=True, idle_timeout=None)
    pool.ledger.submitted([Unit(1, index, 1, 10) for index in range(3)])
    pool.advance()
    assert pool.started == 3
    assert sorted(map(len, pool.workers.values())) == [1, 1, 1]
