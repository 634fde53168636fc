"""The sweeper's part of a sweep, on a made-up host whose every answer the test decides.

Handles are real pipes, since the sweeper polls them; the clock stands still unless the
test moves it. Real processes are swept in tests/real.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

import pytest

from safepool import sweeper
from safepool.core.identity import Incarnation, ProcessRow, Snapshot
from safepool.core.planner import Sig, Target
from safepool.core.policy import StopPolicy
from safepool.core.values import replace
from safepool.host.base import Handle, NoHandle, Sending
from safepool.sweeper import Sweep, advance_together, run
from tests.kit import truth

POLICY = StopPolicy(4.0, 1.0)


def name(pid: int) -> Incarnation:
    return Incarnation(pid, pid)


class Pipe:
    """A handle that becomes readable when ``die`` is called."""

    def __init__(self, incarnation: Incarnation) -> None:
        self.incarnation = incarnation
        self.fd, self._writer = os.pipe()
        self._is_open = True

    def die(self) -> None:
        if self._writer >= 0:
            os.close(self._writer)
            self._writer = -1

    def close(self) -> None:
        self.die()
        if self._is_open:
            self._is_open = False
            os.close(self.fd)


class Stand:
    """A host with the processes that the test puts into ``rows``."""

    def __init__(self, *pids: int) -> None:
        self.clock = 0.0
        self.looks = 0
        self.cost_of_a_look = 0.0
        self.rows = {pid: ProcessRow(pid, pid, 5) for pid in (5, *pids)}
        self.sent: list[tuple[int, Sig]] = []
        self.denied: set[int] = set()
        self.broken: set[int] = set()
        self.immortal: set[int] = set()
        self.is_blind = False
        self.hidden: set[int] = set()
        self.pipes: dict[int, Pipe] = {}

    def look(self) -> Snapshot:
        self.looks += 1
        self.clock += self.cost_of_a_look
        if self.is_blind:
            raise OSError(errno.ENFILE, "no descriptors")
        rows = {pid: row for pid, row in self.rows.items() if pid not in self.hidden}
        return Snapshot(rows, self.clock)

    def look_subtree(self, pid: int, run_id: str | None = None) -> Snapshot:
        return self.look()

    def look_all(self, *, tags: bool, since: int = 0) -> Snapshot:
        return self.look()

    def row(self, pid: int) -> ProcessRow | None:
        return self.rows.get(pid)

    def incarnation(self, pid: int) -> Incarnation | None:
        return None if pid not in self.rows else self.rows[pid].incarnation

    def open(self, incarnation: Incarnation) -> Handle | NoHandle:
        if self.is_blind:
            return NoHandle.UNKNOWN
        if self.incarnation(incarnation.pid) != incarnation:
            return NoHandle.GONE
        pipe = self.pipes[incarnation.pid] = Pipe(incarnation)
        return pipe

    def send(self, handle: Handle, sig: Sig) -> Sending:
        pid = handle.incarnation.pid
        if pid in self.broken:
            raise OSError(errno.ENOMEM, "broken")
        if pid in self.denied:
            return Sending.DENIED
        self.sent.append((pid, sig))
        if sig is Sig.KILL and pid not in self.immortal:
            self.end(pid)
        return Sending.SENT

    def end(self, pid: int) -> None:
        del self.rows[pid]
        if pid in self.pipes:
            self.pipes[pid].die()

    def now(self) -> float:
        return self.clock

    def command_line(self, pid: int) -> str:
        return f"program {pid}"

    def read_tag(self, pid: int) -> int | None:
        return None

    def read_mark(self, pid: int) -> str | None:
        return None

    def boot_id(self) -> str:
        return "boot"

    def pid_namespace(self) -> int:
        return 1

    def sweep(self, policy: StopPolicy = POLICY) -> Sweep:
        return Sweep(
            self, Target(subtree_of=name(5), spare=frozenset({name(5)})), policy, self.look
        )


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    before = truth.open_files()
    yield
    assert truth.open_files() == before


def finish(stand: Stand, sweep: Sweep) -> None:
    """Advance to the end as a poll loop would, the clock running along."""
    for _ in range(1000):
        sweep.advance()
        if sweep.wake_at is None:
            return
        stand.clock = max(stand.clock + 0.001, sweep.wake_at)
    raise AssertionError("the sweep does not end")


def test_the_dead_are_no_longer_watched() -> None:
    """A zombie's pidfd stays readable: left in the poll loop it would spin."""
    stand = Stand(10, 11)
    sweep = stand.sweep()
    sweep.advance()
    assert len(sweep.watched) == 2
    stand.pipes[10].die()  # the row stays as it is, as that of a zombie that nobody reaps
    sweep.advance()
    assert sweep.watched == [stand.pipes[11].fd]
    stand.end(11)
    finish(stand, sweep)
    assert sweep.report is not None
    assert len(sweep.report.ended) == 2


def test_the_start_of_the_grace_may_lie_in_the_past() -> None:
    """Who has asked politely before hands that time over."""
    stand = Stand(10)
    stand.clock = 4.0
    target = Target(roots=frozenset({name(10)}))
    run_out = Sweep(stand, target, POLICY, stand.look, start=0.0)
    run_out.advance()
    assert stand.sent == [(10, Sig.STOP)]
    run_out.close()
    run_out.close()


def test_the_sweeping_process_spares_itself() -> None:
    """Also when the caller names it."""
    stand, own = Stand(10), os.getpid()
    stand.rows[own] = ProcessRow(own, own, 5)
    sweep = Sweep(
        stand, Target(roots=frozenset({name(own), name(10)})), StopPolicy(0.0), stand.look
    )
    assert [process.incarnation for process in run(sweep).ended] == [name(10)]
    assert own not in {pid for pid, _ in stand.sent}


def test_trouble_with_one_process_does_not_stop_the_others() -> None:
    """One that cannot be signalled and one that may not be: the rest is ended, they are told."""
    stand = Stand(10, 11, 12, 13)
    stand.denied, stand.broken = {10}, {12}
    sweep = stand.sweep(StopPolicy(0.0, 1.0))
    finish(stand, sweep)
    assert sweep.report is not None
    assert sorted(process.incarnation.pid for process in sweep.report.ended) == [11, 13]
    reasons = {stuck.incarnation.pid: stuck.reason for stuck in sweep.report.stuck}
    assert reasons == {
        10: "no permission to signal it",
        12: "no file descriptor was free to signal it",
    }


def test_a_sweep_that_gives_up_keeps_no_descriptor() -> None:
    """A poll loop that sees the report has nothing left to close."""
    stand = Stand(10)
    stand.immortal = {10}
    sweep = stand.sweep(StopPolicy(0.0, 1.0))
    finish(stand, sweep)
    assert sweep.report is not None
    assert [stuck.incarnation for stuck in sweep.report.stuck] == [name(10)]
    assert sweep.watched == []
    again = stand.sent.copy()
    sweep.advance()
    assert stand.sent == again


def test_a_member_that_a_look_has_missed_is_not_given_up() -> None:
    """Orphans move while they are listed: who is missing is asked for by pid."""
    stand = Stand(10)
    sweep = stand.sweep()
    sweep.advance()
    stand.hidden = {10}
    for _ in range(3):
        sweep.advance()
        assert sweep.report is None
    stand.end(10)
    finish(stand, sweep)
    assert sweep.report is not None
    assert [process.incarnation for process in sweep.report.ended] == [name(10)]


def test_a_look_that_fails_proves_nobody_dead() -> None:
    """Without descriptors there is no end of the sweep before there is a look, for a long time."""
    stand = Stand(10, 11)
    sweep = stand.sweep()
    sweep.advance()
    stand.end(10)
    stand.is_blind = True
    stand.end(11)
    stand.rows[12] = ProcessRow(12, 12, 5)
    for _ in range(20):
        sweep.advance()
        assert sweep.report is None
        assert sweep.wake_at is not None
        assert sweep.wake_at > stand.clock, "it would spin"
        assert sweep.watched == [], "it would spin"
        stand.clock += 1.0
    stand.is_blind = False
    finish(stand, sweep)
    assert sweep.report is not None
    assert {process.incarnation.pid for process in sweep.report.ended} == {10, 11, 12}


@pytest.mark.parametrize("pids", [(), (10,), (10, 11)])
def test_a_blind_sweep_looks_at_its_pace(pids: tuple[int, ...]) -> None:
    """However often it is called, and whether nobody was seen yet or all who were are dead."""
    stand = Stand(*pids)
    sweep = stand.sweep()
    if pids:
        sweep.advance()
    stand.is_blind = True
    for pid in pids:
        stand.end(pid)
    for _ in range(50):
        sweep.advance()
    assert stand.looks <= 2
    stand.clock += 0.1
    for _ in range(50):
        sweep.advance()
    assert 2 <= stand.looks <= 3
    sweep.close()


def test_a_sweep_that_can_never_look_again_ends_all_the_same() -> None:
    """After half a minute it reports whom it had seen as stuck, and lets its caller go on."""
    stand = Stand(10)
    sweep = stand.sweep()
    sweep.advance()
    stand.is_blind = True
    stand.end(10)
    for _ in range(60):
        sweep.advance()
        stand.clock += 1.0
    assert sweep.report is not None
    assert [stuck.incarnation for stuck in sweep.report.stuck] == [name(10)]
    assert sweep.wake_at is None


def test_a_sweep_that_never_saw_anybody_does_not_pass_for_a_clean_one() -> None:
    """It names nobody, and says that it was blind; and it has not looked at every call."""
    stand = Stand(10)
    stand.is_blind = True
    sweep = stand.sweep()
    for _ in range(600):
        sweep.advance()
        stand.clock += 0.1
    assert sweep.report is not None
    assert (sweep.report.ended, sweep.report.stuck) == ((), ())
    assert sweep.report.is_blind
    assert not sweep.report.is_clean
    seen = stand.looks
    assert seen < 400
    fresh = stand.sweep()
    fresh.advance()
    for _ in range(50):
        fresh.advance()
    assert stand.looks == seen + 1


def test_without_a_look_the_known_are_ended_through_their_handles() -> None:
    """What is held already needs no descriptor; between tries there is a pause."""
    stand = Stand(10, 11)
    sweep = stand.sweep(StopPolicy(0.0, 1.0))
    sweep.advance()
    stand.is_blind = True
    while sweep.watched:
        sweep.advance()
        assert sweep.report is None
        assert sweep.wake_at is not None
        assert sweep.wake_at > stand.clock, "it would spin"
        stand.clock = sweep.wake_at
    assert (11, Sig.KILL) in stand.sent or (10, Sig.KILL) in stand.sent
    stand.is_blind = False
    finish(stand, sweep)
    assert sweep.report is not None
    assert len(sweep.report.ended) == 2


def test_few_of_many_are_watched_and_all_are_signalled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Descriptors are a limited good."""
    monkeypatch.setattr(sweeper, "MOST_WATCHED", 3)
    stand = Stand(*range(10, 30))
    sweep = stand.sweep()
    sweep.advance()
    assert len(sweep.watched) == 3
    assert stand.sent == [(pid, Sig.TERM) for pid in range(10, 30)]
    assert sweep.command_lines[name(29)] == "program 29"
    stand.clock = 4.0
    finish(stand, sweep)
    assert sweep.report is not None
    assert len(sweep.report.ended) == 20


def test_a_recycled_pid_gets_nothing() -> None:
    """Between look and signal the process has ended and its number went to another."""
    stand = Stand(10)
    sweep = stand.sweep()
    real = stand.look

    def look() -> Snapshot:
        snapshot = real()
        stand.rows[10] = replace(stand.rows[10], start=99)
        return snapshot

    sweep._look = look
    sweep.advance()
    assert stand.sent == []
    sweep.close()


# -- how often is looked ---------------------------------------------------------------


def test_a_call_before_its_time_does_not_look() -> None:
    """Poll loops have other business: being called for that costs no look."""
    stand = Stand(10)
    sweep = stand.sweep()
    sweep.advance()
    assert stand.looks == 1
    assert sweep.wake_at is not None
    for _ in range(5):
        sweep.advance()
    assert stand.looks == 1
    stand.clock = sweep.wake_at
    sweep.advance()
    assert stand.looks == 2
    stand.end(10)
    sweep.advance()
    assert stand.looks == 3
    finish(stand, sweep)


def test_many_deaths_one_after_the_other_are_few_looks() -> None:
    """After a look, deaths wait as long as it took; then all of them have one look."""
    stand = Stand(*range(10, 210))
    stand.cost_of_a_look = 0.05
    sweep = stand.sweep()
    sweep.advance()
    for pid in range(10, 210):
        stand.clock += 0.005
        stand.end(pid)
        sweep.advance()
        # Every death is noticed at once all the same: its pidfd would keep the loop spinning.
        assert pid == 209 or len(sweep.watched) == 209 - pid
    assert stand.looks <= 2 + stand.clock / (2 * stand.cost_of_a_look)
    finish(stand, sweep)
    assert sweep.report is not None
    assert len(sweep.report.ended) == 200


def test_the_last_death_is_looked_at_at_once() -> None:
    """However long a look takes: when nobody is left there is nothing to save."""
    stand = Stand(10, 11)
    stand.cost_of_a_look = 10.0
    sweep = stand.sweep(StopPolicy(100.0))
    sweep.advance()
    stand.end(10)
    sweep.advance()
    assert stand.looks == 1, "the other one is alive, and the look has just been taken"
    assert sweep.wake_at is not None
    assert stand.clock < sweep.wake_at <= stand.clock + 10.0
    stand.end(11)
    sweep.advance()
    assert stand.looks == 2
    finish(stand, sweep)


def test_who_is_not_watched_is_looked_for_whenever_there_is_a_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a handle there is no notice of a death, so any call may be one."""
    monkeypatch.setattr(sweeper, "MOST_WATCHED", 1)
    stand = Stand(10, 11)
    sweep = stand.sweep()
    sweep.advance()
    sweep.advance()
    assert stand.looks == 2
    sweep.close()


def in_turn(stand: Stand, *pids: int) -> list[Sweep]:
    """A sweep for each of these alone."""
    return [
        Sweep(stand, Target(roots=frozenset({name(pid)})), POLICY, stand.look, own=name(5))
        for pid in pids
    ]


def test_sweeps_that_advance_together_share_their_looks() -> None:
    """A hundred workers end at once: no hundred looks; and each sweep has two quiet ones."""
    pids = range(10, 110)
    stand = Stand(*pids)
    sweeps = in_turn(stand, *pids)
    advance_together(sweeps, stand.look)
    assert stand.looks == 1
    assert stand.sent == [(pid, Sig.TERM) for pid in pids]
    for pid in pids:
        stand.end(pid)
    advance_together(sweeps, stand.look)
    assert stand.looks == 2
    assert not [sweep for sweep in sweeps if sweep.report is not None]
    advance_together(sweeps, stand.look)
    assert stand.looks == 3
    assert all(sweep.report is not None for sweep in sweeps)
    advance_together(sweeps, stand.look)
    assert stand.looks == 3


def test_only_sweeps_with_a_reason_take_part_in_a_look() -> None:
    """One worker ends while the others keep their grace: one sweep advances."""
    stand = Stand(10, 11, 12)
    sweeps = in_turn(stand, 10, 11, 12)
    advance_together(sweeps, stand.look)
    stand.end(11)
    for _ in range(2):
        advance_together(sweeps, stand.look)
    assert [sweep.report is not None for sweep in sweeps] == [False, True, False]
    assert stand.looks == 3
    for sweep in sweeps:
        sweep.close()


def test_a_shared_look_is_taken_after_all_have_noted_their_dead() -> None:
    """Else a look from before a death would count as one of the two that prove it."""
    stand = Stand(10, 11)
    sweeps = in_turn(stand, 10, 11)
    advance_together(sweeps, stand.look)
    stand.end(10)
    real = stand.look

    def look() -> Snapshot:
        snapshot = real()
        stand.end(11)  # too late for this look
        return snapshot

    advance_together(sweeps, look)
    advance_together(sweeps, real)
    assert [sweep.report is not None for sweep in sweeps] == [True, False]
    advance_together(sweeps, real)
    assert [sweep.report is not None for sweep in sweeps] == [True, True]


def test_a_shared_look_that_fails_leaves_each_with_its_own_means() -> None:
    """No descriptors: every sweep goes on with what it holds, and tries again soon."""
    stand = Stand(10, 11)
    sweeps = in_turn(stand, 10, 11)
    advance_together(sweeps, stand.look)
    stand.is_blind = True
    stand.clock = 4.0
    advance_together(sweeps, stand.look)
    assert [sweep.report for sweep in sweeps] == [None, None]
    assert all(sweep.wake_at is not None and sweep.wake_at > stand.clock for sweep in sweeps)
    stand.is_blind = False
    for sweep in sweeps:
        finish(stand, sweep)
        assert sweep.report is not None
        assert sweep.report.stuck == ()
