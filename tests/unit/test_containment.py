"""When a sweep acts upon its run's cgroup as a whole: pure, step by step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safepool.core import planner
from safepool.core.containment import (
    ContainerState,
    Containment,
    Listing,
    doubtful,
    inside,
    may_hide_others,
    needless,
    plan,
    refused,
)
from safepool.core.identity import Incarnation, ProcessRow, Snapshot
from safepool.core.lineage import detached_tag, tag_of
from safepool.core.membership import find_members
from safepool.core.planner import Sig, Signal, Step, Target
from safepool.core.policy import StopPolicy
from safepool.core.values import replace

RUN = "0123456789abcdef0123456789abcdef"
SWEEPER = Incarnation(5, 5)


def name(pid: int) -> Incarnation:
    return Incarnation(pid, pid)


def row(pid: int, parent: int = 5, **more: object) -> ProcessRow:
    return ProcessRow(pid, pid, parent, **more)  # type: ignore[arg-type]


def seen(*rows: ProcessRow, within: set[int] | None) -> Snapshot:
    """A look, and the pids that are in the container."""
    table = {each.pid: each for each in (row(5, 1), *rows)}
    listed = None if within is None else frozenset(name(pid) for pid in within)
    return Snapshot(table, 0.0, listed)


class Sweeping:
    """Planner and containment in step, with a container that does as it is told."""

    def __init__(self, *, grace: float = 0.0, **target: object) -> None:
        aim = {"subtree_of": SWEEPER, "spare": frozenset({SWEEPER}), **target}
        self.state = planner.begin(Target(**aim), StopPolicy(grace), 0.0)  # type: ignore[arg-type]
        self.container = ContainerState()
        self.step = Step(self.state, (), None, None, ())

    def look(self, snapshot: Snapshot, now: float) -> tuple[Containment | None, set[int]]:
        """One step; what is done to the container, and who gets a signal of his own."""
        self.step = planner.advance(self.state, snapshot, now)
        planned = self.planned = plan(self.container, self.step, snapshot)
        self.state, self.container = self.step.state, planned.state
        for each in planned.let_go:
            self.state = planner.note_unsent(self.state, planner.Signal(each, Sig.STOP))
        signals = self.step.signals
        return planned.action, {s.incarnation.pid for s in signals} - {n.pid for n in planned.met}

    def sigs(self) -> set[Sig]:
        return {signal.sig for signal in self.step.signals}


def test_members_inside_are_frozen_and_killed_in_one_step_each() -> None:
    """HOLD and KILL meet those inside; who is outside gets the signals, as ever."""
    sweep = Sweeping()
    look = seen(row(10), row(11, 10), row(12), within={10, 11})
    assert sweep.look(look, 0.0) == (Containment.HOLD, {12})
    assert sweep.sigs() == {Sig.STOP}
    assert sweep.look(look, 0.0) == (None, set())
    assert sweep.look(look, 0.0) == (Containment.KILL, {12})
    assert sweep.sigs() == {Sig.KILL}


def test_the_polite_phase_stays_polite() -> None:
    """SIGTERM goes to each; what an earlier sweeper has left frozen is let go, once."""
    sweep = Sweeping(grace=4.0)
    look = seen(row(10), row(11), within={10, 11})
    assert sweep.look(look, 0.0) == (Containment.RELEASE, {10, 11})
    assert sweep.sigs() == {Sig.TERM}
    assert sweep.look(look, 1.0) == (None, set())
    assert sweep.look(look, 4.0) == (Containment.HOLD, set())


@pytest.mark.parametrize(
    "other",
    [
        row(20, 1),
        row(20, tag=detached_tag(RUN)),
        row(5, 1),
    ],
    ids=["foreign", "detached", "the sweeper itself"],
)
def test_one_that_is_no_member_keeps_the_container_from_use(other: ProcessRow) -> None:
    """Whoever it is: the members get signals, and nobody else gets anything."""
    sweep = Sweeping()
    look = seen(row(10), other, within={10, other.pid})
    for sig in (Sig.STOP, None, Sig.KILL):
        action, signalled = sweep.look(look, 0.0)
        assert action is None
        assert signalled == ({10} if sig else set())
        assert sweep.sigs() == ({sig} if sig else set())


def test_who_comes_in_while_it_is_frozen_is_let_go_at_once() -> None:
    """The members are held by signals then, before they are killed."""
    sweep = Sweeping()
    assert sweep.look(seen(row(10), within={10}), 0.0) == (Containment.HOLD, set())
    mixed = seen(row(10), row(20, 1), within={10, 20})
    assert sweep.look(mixed, 0.0) == (Containment.RELEASE, set())
    assert sweep.look(mixed, 0.0) == (None, {10})
    assert sweep.sigs() == {Sig.STOP}
    # Never again, also when the stranger has left.
    pure = seen(row(10), within={10})
    assert sweep.look(pure, 0.0) == (None, set())
    assert sweep.look(pure, 0.0) == (None, {10})
    assert sweep.sigs() == {Sig.KILL}


@pytest.mark.parametrize("within", [None, set()], ids=["unreadable", "empty"])
def test_without_a_list_everything_goes_by_signals(within: set[int] | None) -> None:
    """A container that cannot be read, or in which nobody is, changes nothing."""
    sweep = Sweeping()
    look = seen(row(10), within=within)
    assert sweep.look(look, 0.0) == (None, {10})
    assert sweep.look(look, 0.0) == (None, set())
    assert sweep.look(look, 0.0) == (None, {10})


def test_what_the_kernel_refuses_is_not_asked_again() -> None:
    """No cgroup.kill before Linux 5.14: SIGKILL for each, which ends the frozen as well."""
    sweep = Sweeping()
    look = seen(row(10), within={10})
    assert sweep.look(look, 0.0) == (Containment.HOLD, set())
    sweep.container = refused(sweep.container)
    sweep.look(look, 0.0)
    assert sweep.look(look, 0.0) == (None, {10})


def test_a_list_means_only_who_was_there_when_it_was_read() -> None:
    """Not the dead, not the gone, and nobody who got a listed pid afterwards."""
    rows = {
        10: row(10),
        11: row(11, state="Z"),
        12: ProcessRow(12, 900, 5),
    }
    assert inside(Listing(frozenset({10, 11, 12, 13}), 500), rows) == {name(10)}


def test_who_was_born_in_the_tick_of_the_list_may_have_got_a_listed_pid() -> None:
    """Before the list or after it: the start time does not tell, so it is neither in nor out."""
    listing, rows = Listing(frozenset({10, 11, 12}), 11), {pid: row(pid) for pid in (10, 11, 12)}
    assert inside(listing, rows) == {name(10)}
    assert doubtful(listing, rows) == {name(11)}


def test_one_that_has_gone_meanwhile_may_have_left_somebody_there() -> None:
    """Of a dead run, where not all that is inside belongs."""
    listing, late = Listing(frozenset({10, 11}), 500), Target(run_id=RUN, born_until=80)
    assert may_hide_others(listing, frozenset({name(10)}), late)
    assert not may_hide_others(listing, frozenset({name(10), name(11)}), late)
    assert not may_hide_others(listing, frozenset({name(10)}), Target(run_id=RUN))


def test_who_went_out_before_the_freeze_is_held_by_a_signal() -> None:
    """It was in the list, but the freeze has not met it."""
    sweep = Sweeping()
    rows = [row(10), row(11)]
    assert sweep.look(seen(*rows, within={10, 11}), 0.0) == (Containment.HOLD, set())
    after = seen(*rows, within={10})
    assert sweep.look(after, 0.0) == (None, set())
    assert sweep.look(after, 0.0) == (None, {11})
    assert sweep.sigs() == {Sig.STOP}
    assert sweep.look(after, 0.0) == (None, set())
    assert sweep.look(after, 0.0) == (Containment.KILL, {11})


def test_who_went_out_before_the_kill_is_killed_by_a_signal() -> None:
    """A late sweeper freezes nothing, so a member can leave between list and kill."""
    sweep = Sweeping()
    rows = [row(10), row(11)]
    assert sweep.look(seen(*rows, within={10, 11}), 0.9) == (Containment.KILL, set())
    sweep.look(seen(row(11), within=set()), 0.9)
    assert sweep.planned.outlived == {name(11)}
    sweep.look(seen(row(11), within=set()), 0.9)
    assert not sweep.planned.outlived


def test_who_only_stood_still_with_the_others_needs_no_waking() -> None:
    """It was let go and the container is thawed; it never got a SIGSTOP."""
    sweep = Sweeping()
    sweep.look(seen(row(10), row(11), within={10, 11}), 0.0)
    held = sweep.container
    free = row(11, tag=detached_tag(RUN))
    action, _ = sweep.look(seen(row(10), free, within={10, 11}), 0.0)
    assert action is Containment.RELEASE
    assert Signal(name(11), Sig.CONT) in sweep.step.signals
    assert needless(held, sweep.step) == {name(11)}


def test_nothing_stays_frozen_when_all_have_gone_out() -> None:
    """An empty container is thawed: who is moved in later must not stand still."""
    sweep = Sweeping()
    assert sweep.look(seen(row(10), within={10}), 0.0) == (Containment.HOLD, set())
    assert sweep.look(seen(row(10), within=set()), 0.0) == (Containment.RELEASE, set())
    assert not sweep.container.frozen


def test_a_container_that_may_hide_others_is_not_used() -> None:
    """Signals go to those who were seen."""
    sweep = Sweeping()
    look = replace(seen(row(10), within={10}), hides_others=True)
    assert sweep.look(look, 0.0) == (None, {10})


def test_being_inside_is_a_witness_for_those_born_in_the_life_of_the_run() -> None:
    """Neither older ones nor, in a dead run, younger ones belong for that reason."""
    look = seen(row(30, 1), row(10, 1), row(90, 1), row(40, 1), within={10, 30, 90})
    target = Target(run_id=RUN, born_from=20, born_until=80)
    assert [(found.row.pid, found.how) for found in find_members(target, (), look)] == [
        (30, "cgroup")
    ]


def test_a_detached_process_is_no_member_though_it_is_inside() -> None:
    """Its tag says that it was let go."""
    look = seen(row(30, 1, tag=detached_tag(RUN)), row(31, 1, tag=tag_of(RUN, 1)), within={30, 31})
    target = Target(run_id=RUN, born_from=20)
    assert [found.row.pid for found in find_members(target, (), look)] == [31]


PIDS = st.sets(st.integers(10, 16))


@given(st.lists(st.tuples(PIDS, PIDS, PIDS | st.none()), max_size=12))
def test_whatever_is_seen_nobody_but_members_is_held_or_killed(
    looks: list[tuple[set[int], set[int], set[int] | None]],
) -> None:
    """At every act upon the container all inside are members, and a foreigner ends the hold."""
    sweep = Sweeping()
    is_held = False
    for number, (members, others, listed) in enumerate(looks):
        foreign = others - members
        within = None if listed is None else listed & (members | foreign)
        rows = [row(pid) for pid in members] + [row(pid, 1) for pid in foreign]
        look = seen(*rows, within=within)
        action, _ = sweep.look(look, number * 0.01)
        remembered = {each.pid for each in sweep.state.members}
        if action in (Containment.HOLD, Containment.KILL):
            assert within is not None
            assert within <= remembered
        is_held = action is Containment.HOLD or (is_held and action is not Containment.RELEASE)
        if within is None or not within <= remembered:
            assert not is_held
