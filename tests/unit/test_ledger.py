"""The ledger: every item is resolved once and is never with two workers, whatever happens.

The model below plays owner and workers: it carries out commands, notes and begins items as
workers do, and lets workers answer, die, hang or fail to start as hypothesis says. Between a
worker's note and its beginning it may be recalled. It keeps its own book of what ran where.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from safepool.core.commands import Break, Finish, Retire, Send, Start, TakeBack, Unit
from safepool.core.dealing import HELD_UP, QUICK, STALLED
from safepool.core.ledger import Ledger


class Piece(Unit):
    """A unit that can be cut and dealt out; ``places`` are the positions of its items."""

    def __init__(self, places: Sequence[int], nbytes: int, kind: str) -> None:
        super().__init__(1, places[0], len(places), nbytes, may_split=kind != "chunk")
        self.places = places
        self.kind = kind
        self.is_group = kind == "group"

    def _part(self, which: slice) -> Piece:
        places = self.places[which]
        nbytes = self.nbytes * len(places) // self.size if self.is_group else self.nbytes
        part = Piece(places, nbytes, self.kind)
        part.is_rest = self.is_rest
        return part

    def split(self, at: int) -> Piece:
        assert self.may_split
        assert self.done < at < self.size
        rest = self._part(slice(at, None))
        self.places = self.places[:at]
        self.size = at
        return rest

    def deal(self, ways: int) -> list[Piece]:
        if not self.is_group:
            return [self]
        assert not self.done
        return [self._part(slice(place, None, ways)) for place in range(min(ways, self.size))]


def unit(first: int, size: int = 1, nbytes: int = 10, kind: str = "chunk") -> Piece:
    """A "chunk" is whole; a "map" may be cut; a "group" has tasks of their own."""
    return Piece(range(first, first + size), nbytes, kind)


@dataclass
class Worker:
    """A worker of the model: sent units, and the one that it is at."""

    ready: bool = False
    sent: list[Piece] = field(default_factory=list)
    running: Piece | None = None
    is_in_item: bool = False
    is_recalled: bool = False
    retiring: bool = False
    tasks_run: int = 0


class Model:
    """Carries out the ledger's commands and checks each."""

    def __init__(self, processes: int, lifetime: int | None) -> None:
        self.ledger: Ledger[Piece] = Ledger(processes, lifetime)
        self.processes = processes
        self.lifetime = lifetime
        self.workers: dict[int, Worker] = {}
        self.next_worker = 0
        self.now = 0.0
        self.submitted: set[int] = set()
        self.resolved: Counter[int] = Counter()
        self.begun: Counter[int] = Counter()
        self.postponed: list[Piece] = []
        self.finished = self.broken = False
        self.starts_fail = False

    def submit(self, index: int, size: int, kind: str) -> None:
        first = index * 100
        self.submitted |= set(range(first, first + size))
        self.ledger.submitted([unit(first, size, 100, kind)])

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
            held = [each for other in self.workers.values() for each in self.held(other)]
            for each in command.units:
                assert not any(each is other for other in held), "with two workers at a time"
                assert each.done < each.size
            worker.sent += command.units
        elif isinstance(command, TakeBack):
            self.take_back(command.worker)
        elif isinstance(command, Retire):
            worker = self.workers[command.worker]
            assert not self.held(worker)
            worker.retiring = True
        elif isinstance(command, Break):
            self.broken = True
            for each in [*self.ledger.terminated(), *self.postponed]:
                self.give_up(each)
            for worker in self.workers.values():
                worker.sent.clear()
                worker.running = None
        else:
            assert isinstance(command, Finish)
            assert self.broken or not self.postponed
            assert not self.finished
            assert not self.workers
            self.finished = True

    def recall(self, number: int) -> None:
        """Somebody cancels something."""
        if self.workers[number].ready:
            self.take_back(number)

    def take_back(self, number: int) -> None:
        """What was not begun comes back; the worker notices when it looks next."""
        worker = self.workers[number]
        if worker.running is None:
            self.ledger.not_begun(number)
            return
        self.ledger.taken_back(number, worker.running.number)
        worker.sent.clear()
        worker.is_recalled = True

    @staticmethod
    def held(worker: Worker) -> list[Piece]:
        return worker.sent + ([worker.running] if worker.running else [])

    def give_up(self, piece: Piece) -> None:
        for item in range(piece.done, piece.size):
            self.resolved[piece.places[item]] += 1

    def make_ready(self, number: int) -> None:
        worker = self.workers[number]
        if not worker.ready:
            worker.ready = True
            self.ledger.ready(number, self.now)

    def begin(self, number: int) -> None:
        """The next step of a worker: to note an item, or to look for a recall and begin it."""
        worker = self.workers[number]
        if worker.retiring or worker.is_in_item:
            return
        if worker.running is None:
            if worker.sent:
                worker.running = worker.sent.pop(0)
                worker.is_recalled = False
            return
        piece = worker.running
        if worker.is_recalled and (piece.may_split or not piece.done):
            worker.running = None
            self.ledger.handed_back(number, piece)
            return
        worker.is_in_item = True
        self.begun[piece.places[piece.done]] += 1

    def finish_item(self, number: int) -> None:
        worker = self.workers[number]
        piece = worker.running
        if piece is None or not worker.is_in_item:
            return
        worker.is_in_item = False
        self.resolved[piece.places[piece.done]] += 1
        piece.done += 1
        is_through = piece.done == piece.size
        tasks = 1 if piece.is_group else int(is_through)
        worker.tasks_run += tasks
        assert self.lifetime is None or worker.tasks_run <= self.lifetime
        self.ledger.progressed(number, 1, tasks=tasks)
        if is_through:
            worker.running = None
            self.ledger.answered(number, piece)

    def bounce(self, number: int) -> None:
        """The worker cannot read the unit that it has just begun."""
        worker = self.workers[number]
        piece = worker.running
        if piece is None or piece.done or not worker.is_in_item:
            return
        if self.begun[piece.first] == 1:
            worker.running = None
            worker.is_in_item = False
            del self.begun[piece.first]
            parts = [piece]
            if piece.is_group:
                parts = [unit(place) for place in piece.places]
            self.ledger.bounced(number, piece.number, parts)

    def postpone(self, number: int) -> None:
        """What the worker runs has failed, and is to be tried again later."""
        worker = self.workers[number]
        piece = worker.running
        if piece is None or piece.size != 1 or piece.may_split or not worker.is_in_item:
            return
        worker.running = None
        worker.is_in_item = False
        worker.tasks_run += 1
        del self.begun[piece.first]
        self.ledger.progressed(number, 1, tasks=1)
        self.ledger.answered(number, piece)
        self.ledger.postponed()
        self.postponed.append(piece)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        if seconds > 0.01:
            self.resume()

    def resume(self) -> None:
        """Now is later."""
        for each in self.postponed:
            self.ledger.resumed(each)
        self.postponed.clear()

    def die(self, number: int) -> None:
        worker = self.workers.pop(number)
        ran = worker.running
        lost = self.ledger.lost(number, ran.number if ran else 0)
        if self.broken:
            assert lost is None
        elif ran is None:
            if lost is not None:
                assert lost.unit.missed >= 3
                self.resolved[lost.unit.places[lost.item]] += 1
        else:
            assert lost is not None
            assert lost.unit is ran, "the death is put down to the wrong unit"
            assert lost.item == ran.done - 1
            self.resolved[ran.places[lost.item]] += 1

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
                self.begin(number)
                self.finish_item(number)
                if self.broken or (worker.retiring and not self.held(worker)):
                    self.die(number)
        raise AssertionError("the ledger never finishes")


KINDS = ["submit"] * 3 + ["ready"] * 2 + ["begin"] * 3 + ["finish"] * 4 + ["die", "time"]
SIZES = (1, 2, 3, 1, 4, 9, 5, 40)
RARE = ["recall", "bounce", "fail", "heal", "postpone", "postpone"]
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
    steps: dict[str, Callable[[int], None]] = {
        "ready": model.make_ready,
        "begin": model.begin,
        "finish": model.finish_item,
        "postpone": model.postpone,
        "bounce": model.bounce,
        "recall": model.recall,
        "die": model.die,
    }
    for count, (event, value) in enumerate(events):
        living = sorted(model.workers)
        if event == "submit" and not model.broken:
            model.submit(count, SIZES[value], ("chunk", "map", "group")[value % 3])
        elif event == "time":
            model.pass_time((0.0001, 0.002, 0.1)[value % 3])
        elif event in ("fail", "heal"):
            model.starts_fail = event == "fail"
        elif living and event in steps:
            steps[event](living[value % len(living)])
        model.advance()
    model.run_down()
    assert set(model.resolved) == model.submitted
    assert set(model.resolved.values()) <= {1}
    assert set(model.begun.values()) <= {1}


def ready_ledger(workers: int = 2, lifetime: int | None = None) -> Ledger[Piece]:
    """Workers that have nothing to do and have shown nothing yet."""
    ledger: Ledger[Piece] = Ledger(workers, lifetime)
    for worker in range(1, workers + 1):
        ledger.started(worker)
        ledger.ready(worker, 0.0)
    return ledger


def run(ledger: Ledger[Piece], worker: int, piece: Piece, items: int) -> None:
    """The worker is through with so many items."""
    piece.done += items
    is_through = piece.done == piece.size
    ledger.progressed(worker, items, tasks=items if piece.is_group else int(is_through))
    if is_through:
        ledger.answered(worker, piece)


def quick_ledger(units: list[Piece]) -> Ledger[Piece]:
    """Two workers that have shown themselves quick, and these units in the queue."""
    ledger = ready_ledger()
    ledger.submitted([unit(-1), unit(-2)])
    for command in ledger.advance(0.0):
        assert isinstance(command, Send)
        for each in command.units:
            run(ledger, command.worker, each, 1)
    assert not ledger.advance(QUICK / 100)
    ledger.submitted(units)
    return ledger


def pieces(commands: list[object]) -> dict[int, list[Piece]]:
    return {each.worker: each.units for each in commands if isinstance(each, Send)}


def sent(commands: list[object]) -> dict[int, list[int]]:
    """The items that each worker got."""
    return {
        worker: [place for each in units for place in each.places[each.done :]]
        for worker, units in pieces(commands).items()
    }


def test_slow_workers_get_one_item_at_a_time() -> None:
    """Before a worker has shown itself quick nothing waits behind its task."""
    for units in ([unit(index) for index in range(5)], [unit(0, 5, kind="group")]):
        ledger = ready_ledger()
        ledger.submitted(units)
        assert sent(list(ledger.advance(0.0))) == {1: [0], 2: [1]}
        assert not ledger.advance(1.0)


def test_quick_workers_get_equal_shares() -> None:
    """A short queue is divided, not given to whoever comes first."""
    singles = [unit(index) for index in range(10)]
    for units in (singles, [unit(0, 5, kind="group"), unit(5, 5, kind="group")]):
        ledger = quick_ledger(units)
        assert sent(list(ledger.advance(0.001))) == {1: [0, 2, 4, 6, 8], 2: [1, 3, 5, 7, 9]}


@given(st.integers(2, 4), st.lists(st.integers(1, 25), min_size=1, max_size=6), st.integers())
def test_as_many_tasks_as_workers_can_wait_for_each_other(
    workers: int, sizes: list[int], seed: int
) -> None:
    """Each task ends when those behind it, up to the number of workers in all, have begun."""
    ledger = ready_ledger(workers)
    ledger.submitted([unit(-1 - each) for each in range(workers)])
    for command in ledger.advance(0.0):
        assert isinstance(command, Send)
        for each in command.units:
            run(ledger, command.worker, each, 1)
    now, count = QUICK / 100, sum(sizes)
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    groups = [unit(start, size, kind="group") for start, size in zip(starts, sizes, strict=True)]
    at_hand: dict[int, list[Piece]] = {worker: [] for worker in range(1, workers + 1)}
    chance = random.Random(seed)
    begun: set[int] = set()
    done: set[int] = set()
    while len(done) < count:
        if groups and chance.random() < 0.3:
            ledger.submitted([groups.pop(0)])
        for command in ledger.advance(now):
            if isinstance(command, Send):
                at_hand[command.worker] += command.units
            elif isinstance(command, TakeBack):
                ledger.taken_back(command.worker, at_hand[command.worker][0].number)
                del at_hand[command.worker][1:]
        before = len(begun), len(done)
        for worker in chance.sample(range(1, workers + 1), workers):
            if not at_hand[worker]:
                continue
            piece = at_hand[worker][0]
            place = piece.places[piece.done]
            begun.add(place)
            if all(other in begun for other in range(place, min(place + workers, count))):
                done.add(place)
                if piece.done + 1 == piece.size:
                    del at_hand[worker][0]
                run(ledger, worker, piece, 1)
        is_stuck = before == (len(begun), len(done))
        assert not (is_stuck and now > 100 and not groups), (begun, done)
        now += 1.0 if is_stuck else 0.0001


def test_large_units_are_not_prefetched() -> None:
    """What is large waits in the owner, where any worker can get it."""
    ledger = quick_ledger([unit(index, nbytes=1 << 20) for index in range(6)])
    assert sent(list(ledger.advance(0.001))) == {1: [0], 2: [1]}


def test_a_group_is_cut_by_its_bytes() -> None:
    """Many items of some kilobytes each do not all go at once."""
    ledger = quick_ledger([unit(0, 100, nbytes=100 * (1 << 13), kind="group")])
    assert {worker: len(items) for worker, items in sent(list(ledger.advance(0.001))).items()} == {
        1: 8,
        2: 8,
    }


def test_waiting_units_are_taken_back_from_a_worker_that_is_held_up() -> None:
    """A unit never waits behind a slow task while another worker has nothing to do."""
    ledger = quick_ledger([unit(index) for index in range(6)])
    units = pieces(list(ledger.advance(0.001)))
    for each in units[2]:
        run(ledger, 2, each, 1)
    assert not ledger.advance(0.002)
    soon = ledger.look_again_in(0.002)
    assert soon is not None
    assert soon <= STALLED
    assert ledger.advance(0.002 + soon) == [TakeBack(1)]
    ledger.taken_back(1, units[1][0].number)
    assert sent(list(ledger.advance(0.1)))[2][0] == units[1][1].first
    assert ledger.look_again_in(0.1) is None, "nothing is left that could be taken back"


def test_a_group_is_cut_behind_the_item_that_holds_it_up() -> None:
    """Also while all have something to do: what was finished must not wait in the page."""
    ledger = quick_ledger([unit(0, 20, kind="group")])
    group = pieces(list(ledger.advance(0.001)))[1][0]
    assert group.places == range(0, 20, 2)
    soon = ledger.look_again_in(0.001)
    assert soon is not None
    assert HELD_UP / 2 < soon <= HELD_UP
    assert TakeBack(1) in ledger.advance(0.001 + soon)
    run(ledger, 1, group, 3)  # in its page
    ledger.taken_back(1, group.number)
    assert (group.done, group.size) == (3, 4)
    run(ledger, 1, group, 1)
    assert sent(list(ledger.advance(0.1)))[1] == [8], "one at a time again"


def test_what_was_not_begun_after_all_is_queued_again() -> None:
    """The worker saw the recall before the item that it had noted."""
    ledger = quick_ledger([unit(0, 4, kind="group")])
    group = pieces(list(ledger.advance(0.001)))[1][0]
    ledger.taken_back(1, group.number)
    assert group.size == 1
    ledger.handed_back(1, group)
    again = sent(list(ledger.advance(0.002)))
    assert 0 in [*again.get(1, []), *again.get(2, [])]


def test_idle_workers_get_parts_of_a_chunk() -> None:
    """The end of a map of uneven items: smaller and smaller parts for whoever has nothing."""
    ledger = ready_ledger(4)
    ledger.submitted([unit(0, 101, kind="map")])
    (chunk,) = pieces(list(ledger.advance(0.0)))[1]
    assert chunk.size == 101, "not cut before somebody waits for it"
    assert ledger.advance(STALLED) == [TakeBack(1)]
    ledger.taken_back(1, chunk.number)
    parts = sent(list(ledger.advance(STALLED)))
    assert [len(parts[worker]) for worker in (2, 3, 4)] == [13, 11, 10]
    assert parts[2][0] == 1
    assert ledger.queued() == 66 + 12 + 10 + 9


def test_a_worker_gets_no_more_tasks_than_it_may_run() -> None:
    """Items of a group are tasks; a chunk is one."""
    ledger = ready_ledger(1, lifetime=3)
    ledger.submitted([unit(-1)])
    (first,) = pieces(list(ledger.advance(0.0)))[1]
    run(ledger, 1, first, 1)
    assert not ledger.advance(QUICK / 100)
    ledger.submitted([unit(0, 5, kind="group")])
    assert sent(list(ledger.advance(0.001))) == {1: [0, 1]}


def test_a_failing_start_is_tried_a_bounded_number_of_times() -> None:
    """Workers that never get ready break the pool instead of being started for ever."""
    ledger: Ledger[Piece] = Ledger(3)
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
        ledger.lost(attempts, 0)
    else:
        raise AssertionError("never gave up")
    assert attempts <= 3 + 5


def test_a_task_that_nobody_can_take_is_given_up() -> None:
    """Three workers die before they begin it: it is put down to the task."""
    ledger = ready_ledger(1)
    piece = unit(0)
    ledger.submitted([piece])
    for worker in (1, 2, 3):
        assert [each for each in ledger.advance(1.0) if isinstance(each, Send)] == [
            Send(worker, [piece])
        ]
        lost = ledger.lost(worker, 0)
        assert (lost is None) == (worker < 3)
        ledger.started(worker + 1)
        ledger.ready(worker + 1, 1.0)
    assert lost is not None
    assert lost.complete


def test_an_open_source_keeps_a_closed_pool_going() -> None:
    """close() while an input is being read: what is still to come is run, too."""
    ledger = ready_ledger(1)
    ledger.source_opened()
    ledger.closed()
    assert not ledger.advance(0.0)
    piece = unit(0)
    ledger.submitted([piece])
    assert ledger.advance(0.0) == [Send(1, [piece])]
    run(ledger, 1, piece, 1)
    assert not ledger.advance(0.0)
    ledger.source_ended()
    assert ledger.advance(0.0) == [Retire(1)]
    ledger.lost(1, 0)
    assert ledger.advance(0.0) == [Finish()]
