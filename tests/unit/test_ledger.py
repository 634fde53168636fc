"""The ledger: every item is resolved once and is never with two workers, whatever happens.

The model below plays owner and workers: it carries out commands, begins units in
order of their claims, and lets workers answer, die, hang or fail to start as
hypothesis says. It keeps its own book of what ran where.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from safepool.core.commands import Break, Finish, Retire, Send, Start, TakeBack, Unit
from safepool.core.ledger import QUICK, Ledger


@dataclass
class Worker:
    """A worker of the model: offered units, and the one that it runs."""

    ready: bool = False
    offered: list[Unit] = field(default_factory=list)
    running: Unit | None = None
    retiring: bool = False
    units_run: int = 0


class Model:
    """Carries out the ledger's commands and checks each."""

    def __init__(self, processes: int, lifetime: int | None) -> None:
        self.ledger: Ledger[Unit] = Ledger(processes, lifetime)
        self.processes = processes
        self.lifetime = lifetime
        self.workers: dict[int, Worker] = {}
        self.next_worker = 0
        self.now = 0.0
        self.submitted: set[tuple[int, int]] = set()
        self.resolved: Counter[tuple[int, int]] = Counter()
        self.begun: Counter[tuple[int, int]] = Counter()
        self.postponed: list[Unit] = []
        self.finished = self.broken = False
        self.starts_fail = False

    def submit(self, index: int, size: int) -> None:
        self.submitted |= {(index, item) for item in range(size)}
        self.ledger.submitted([Unit(1, index, size, 100)])

    def advance(self) -> None:
        for _ in range(10_000):
            commands = self.ledger.advance(self.now)
            if not commands:
                return
            for command in commands:
                self.carry_out(command)
        raise AssertionError("the ledger never comes to rest")

    def carry_out(self, command: object) -> None:
        if isinstance(command, Start):
            for _ in range(command.count):
                if self.starts_fail:
                    self.ledger.start_failed(self.now)
                    continue
                self.next_worker += 1
                self.workers[self.next_worker] = Worker()
                self.ledger.started(self.next_worker)
            assert len(self.workers) <= self.processes
        elif isinstance(command, Send):
            worker = self.workers[command.worker]
            assert worker.ready
            assert not worker.retiring
            held = [unit for other in self.workers.values() for unit in self.held(other)]
            for unit in command.units:
                assert not any(unit is other for other in held), "with two workers at a time"
            worker.offered += command.units
        elif isinstance(command, TakeBack):
            worker = self.workers[command.worker]
            numbers = [unit.number for unit in worker.offered]
            worker.offered.clear()
            self.ledger.taken_back(command.worker, numbers)
        elif isinstance(command, Retire):
            worker = self.workers[command.worker]
            assert not self.held(worker)
            worker.retiring = True
        elif isinstance(command, Break):
            self.broken = True
            for unit in [*self.ledger.terminated(), *self.postponed]:
                self.give_up(unit)
            for worker in self.workers.values():
                worker.offered.clear()
                worker.running = None
        else:
            assert isinstance(command, Finish)
            assert self.broken or not self.postponed
            assert not self.finished
            assert not self.workers
            self.finished = True

    @staticmethod
    def held(worker: Worker) -> list[Unit]:
        return worker.offered + ([worker.running] if worker.running else [])

    def give_up(self, unit: Unit) -> None:
        for item in range(unit.done, unit.size):
            self.resolved[unit.index, item] += 1

    def make_ready(self, number: int) -> None:
        worker = self.workers[number]
        if not worker.ready:
            worker.ready = True
            self.ledger.ready(number, self.now)

    def begin(self, number: int) -> None:
        worker = self.workers[number]
        if worker.retiring:
            return
        if worker.running is None and worker.offered:
            worker.running = worker.offered.pop(0)
            self.begun[worker.running.index, worker.running.done] += 1

    def finish_item(self, number: int) -> None:
        worker = self.workers[number]
        unit = worker.running
        if unit is None:
            return
        self.resolved[unit.index, unit.done] += 1
        unit.done += 1
        if unit.done < unit.size:
            self.begun[unit.index, unit.done] += 1
            return
        worker.running = None
        worker.units_run += 1
        assert self.lifetime is None or worker.units_run <= self.lifetime
        self.ledger.answered(number, unit)

    def bounce(self, number: int) -> None:
        """The worker cannot read the unit that it has just begun."""
        worker = self.workers[number]
        unit = worker.running
        if unit is not None and self.begun[unit.index, unit.done] == 1 and not unit.done:
            worker.running = None
            del self.begun[unit.index, unit.done]
            self.ledger.bounced(number, unit)

    def postpone(self, number: int) -> None:
        """What the worker runs has failed, and is to be tried again later."""
        worker = self.workers[number]
        unit = worker.running
        if unit is None or unit.size != 1:
            return
        worker.running = None
        worker.units_run += 1
        del self.begun[unit.index, 0]
        self.ledger.answered(number, unit)
        self.ledger.postponed()
        self.postponed.append(unit)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        if seconds > 0.01:
            self.resume()

    def resume(self) -> None:
        """Now is later."""
        for unit in self.postponed:
            self.ledger.resumed(unit)
        self.postponed.clear()

    def die(self, number: int) -> None:
        worker = self.workers.pop(number)
        ran = worker.running
        lost = self.ledger.lost(number, [unit.number for unit in worker.offered])
        if ran is None or self.broken:
            assert lost is None
        else:
            assert lost is not None
            assert lost.unit is ran, "the death is put down to the wrong unit"
            self.resolved[ran.index, lost.item] += 1

    def run_down(self) -> None:
        """From here on everything goes well: all is to be resolved and the ledger to finish."""
        self.starts_fail = False
        self.ledger.closed()
        for turn in range(10_000):
            self.now += 1.0
            # Long after all else is done: the ledger has to wait for it.
            if turn % 500 == 499:
                self.resume()
            self.advance()
            if self.finished:
                return
            for number, worker in list(self.workers.items()):
                self.make_ready(number)
                self.begin(number)
                self.finish_item(number)
                if self.broken or (worker.retiring and not self.held(worker)):
                    self.die(number)
        raise AssertionError("the ledger never finishes")


KINDS = ["submit"] * 3 + ["ready"] * 2 + ["begin"] * 3 + ["finish"] * 4 + ["die", "time"]
RARE = ["bounce", "fail", "heal", "postpone", "postpone"]
EVENTS = st.lists(
    st.tuples(st.sampled_from(KINDS + RARE), st.integers(0, 7)), min_size=10, max_size=150
)


@settings(max_examples=300)
@given(st.integers(1, 4), st.one_of(st.none(), st.integers(1, 3)), EVENTS)
def test_each_item_once(
    processes: int, lifetime: int | None, events: list[tuple[str, int]]
) -> None:
    """Each item is resolved exactly once and begun at most once, and the pool ends."""
    model = Model(processes, lifetime)
    model.advance()
    for count, (event, value) in enumerate(events):
        living = sorted(model.workers)
        number = living[value % len(living)] if living else None
        if event == "submit" and not model.broken:
            model.submit(count, value % 4 + 1)
        elif event == "time":
            model.pass_time((0.0001, 0.002, 0.1)[value % 3])
        elif event in ("fail", "heal"):
            model.starts_fail = event == "fail"
        elif number is not None and event == "ready":
            model.make_ready(number)
        elif number is not None and event == "begin":
            model.begin(number)
        elif number is not None and event == "finish":
            model.finish_item(number)
        elif event == "postpone":
            for each in living:
                model.postpone(each)
        elif number is not None and event == "bounce":
            model.bounce(number)
        elif number is not None and event == "die":
            model.die(number)
        model.advance()
    model.run_down()
    assert set(model.resolved) == model.submitted
    assert set(model.resolved.values()) <= {1}
    assert set(model.begun.values()) <= {1}


def quick_ledger(units: int) -> Ledger[Unit]:
    """Two workers that have shown themselves quick, and so many units in the queue."""
    ledger: Ledger[Unit] = Ledger(2)
    for worker in (1, 2):
        ledger.started(worker)
        ledger.ready(worker, 0.0)
    warm_up = [Unit(0, index, 1, 10) for index in range(2)]
    ledger.submitted(warm_up)
    for command in ledger.advance(0.0):
        assert isinstance(command, Send)
        for unit in command.units:
            ledger.answered(command.worker, unit)
    assert not ledger.advance(QUICK / 100)
    ledger.submitted([Unit(1, index, 1, 10) for index in range(units)])
    return ledger


def sent(commands: list[object]) -> dict[int, list[int]]:
    return {
        command.worker: [unit.index for unit in command.units]
        for command in commands
        if isinstance(command, Send)
    }


def test_slow_workers_get_one_unit_at_a_time() -> None:
    """Before a worker has shown itself quick nothing waits behind its task."""
    ledger: Ledger[Unit] = Ledger(2)
    for worker in (1, 2):
        ledger.started(worker)
        ledger.ready(worker, 0.0)
    ledger.submitted([Unit(1, index, 1, 10) for index in range(5)])
    assert sent(list(ledger.advance(0.0))) == {1: [0], 2: [1]}
    assert not ledger.advance(1.0)


def test_quick_workers_get_equal_shares() -> None:
    """A short queue is divided, not given to whoever comes first."""
    assert sent(list(quick_ledger(10).advance(0.001))) == {
        1: [0, 1, 2, 3, 4],
        2: [5, 6, 7, 8, 9],
    }


def test_large_units_are_not_prefetched() -> None:
    """What is large waits in the owner, where any worker can get it."""
    ledger = quick_ledger(0)
    ledger.submitted([Unit(1, index, 1, 1 << 20) for index in range(6)])
    assert sent(list(ledger.advance(0.001))) == {1: [0], 2: [1]}


def test_waiting_units_are_taken_back_from_a_worker_that_is_held_up() -> None:
    """A unit never waits behind a slow task while another worker has nothing to do."""
    ledger = quick_ledger(6)
    commands = ledger.advance(0.001)
    units = {c.worker: c.units for c in commands if isinstance(c, Send)}
    for unit in units[2]:
        ledger.answered(2, unit)
    soon = ledger.look_again_in(0.002)
    assert soon is not None
    assert soon <= QUICK
    assert not ledger.advance(0.002)
    assert ledger.advance(0.002 + soon) == [TakeBack(1)]
    ledger.taken_back(1, [unit.number for unit in units[1][1:]])
    again = sent(list(ledger.advance(0.1)))
    assert again[2][0] == units[1][1].index


def test_a_failing_start_is_tried_a_bounded_number_of_times() -> None:
    """Workers that never get ready break the pool instead of being started for ever."""
    ledger: Ledger[Unit] = Ledger(3)
    attempts = 0
    for _ in range(100):
        commands = ledger.advance(0.0)
        if any(isinstance(command, Break) for command in commands):
            break
        for command in commands:
            assert isinstance(command, Start)
            for _ in range(command.count):
                attempts += 1
                ledger.started(attempts)
        ledger.lost(attempts, [])
    else:
        raise AssertionError("never gave up")
    assert attempts <= 3 + 5


def test_an_open_source_keeps_a_closed_pool_going() -> None:
    """close() while an input is being read: what is still to come is run, too."""
    ledger: Ledger[Unit] = Ledger(1)
    ledger.started(1)
    ledger.ready(1, 0.0)
    ledger.source_opened()
    ledger.closed()
    assert not ledger.advance(0.0)
    unit = Unit(1, 0, 1, 10)
    ledger.submitted([unit])
    assert ledger.advance(0.0) == [Send(1, [unit])]
    ledger.answered(1, unit)
    assert not ledger.advance(0.0)
    ledger.source_ended()
    assert ledger.advance(0.0) == [Retire(1)]
    ledger.lost(1, [])
    assert ledger.advance(0.0) == [Finish()]
