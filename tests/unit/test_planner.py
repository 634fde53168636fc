"""The kill order: who is signalled, in which order, when, and that every sweep ends.

Walks through looks that are written down, and tries looks that no kernel would show.
What must be true of every sweep, whatever the processes do, is in ``tests/sim``.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safepool.core.identity import Incarnation, ProcessRow, Snapshot
from safepool.core.lineage import detached_tag, extend, helper_tag, tag_of
from safepool.core.planner import (
    LAST_WAIT,
    Phase,
    Sig,
    Signal,
    Step,
    Target,
    advance,
    begin,
    note_denied,
    note_unsent,
)
from safepool.core.policy import StopPolicy
from safepool.core.values import replace

RUN = "0123456789abcdef0123456789abcdef"
OTHER_RUN = "fedcba9876543210fedcba9876543210"
POLICY = StopPolicy(grace=4.0, kill_timeout=1.0)
AT_ONCE = StopPolicy(grace=0.0, kill_timeout=1.0)


def row(pid: int, ppid: int, state: str = "S", **facts: object) -> ProcessRow:
    """A process that started at tick ``10 * pid``."""
    return replace(ProcessRow(pid, 10 * pid, ppid, state), **facts)  # type: ignore[arg-type]


def name(pid: int) -> Incarnation:
    return Incarnation(pid, 10 * pid)


def names(*pids: int) -> frozenset[Incarnation]:
    return frozenset(map(name, pids))


def look(*rows: ProcessRow) -> Snapshot:
    return Snapshot({one.pid: one for one in rows})


def sent(step: Step) -> list[tuple[str, int]]:
    """The signals of a step, short: ("TERM", pid)."""
    return [(sig.name, incarnation.pid) for incarnation, sig in step.signals]


def first(target: Target, *rows: ProcessRow, policy: StopPolicy = POLICY) -> Step:
    """The first step of a sweep that begins at 100."""
    return advance(begin(target, policy, 100.0), look(*rows), 100.0)


TREE = (row(10, 5), row(20, 10), row(30, 20))


# -- polite ----------------------------------------------------------------------------


def test_the_root_is_asked_first_and_its_children_when_it_is_gone() -> None:
    """A parent may need its children to drain: they are asked when it is dead, once each."""
    step = first(Target(roots=names(10)), *TREE)
    assert sent(step) == [("TERM", 10)]
    step = advance(step.state, look(*TREE), 100.5)
    assert sent(step) == []
    step = advance(step.state, look(row(20, 5), row(30, 20)), 100.6)
    assert sent(step) == [("TERM", 20)]
    step = advance(step.state, look(row(30, 5)), 100.7)
    assert sent(step) == [("TERM", 30)]


def test_at_half_the_grace_everybody_is_asked() -> None:
    """A root that does not end keeps nobody else from being asked, parents first."""
    step = first(Target(roots=names(10)), *TREE)
    step = advance(step.state, look(*TREE), 101.9)
    assert (sent(step), step.look_at) == ([], 102.0)
    step = advance(step.state, look(*TREE), 102.0)
    assert sent(step) == [("TERM", 20), ("TERM", 30)]


def test_a_stopped_process_is_woken_once_to_hear_the_question() -> None:
    """SIGTERM waits while a process is stopped; SIGCONT after it lets it be heard."""
    stopped = row(10, 5, "T")
    step = first(Target(roots=names(10)), stopped)
    assert sent(step) == [("TERM", 10), ("CONT", 10)]
    assert sent(advance(step.state, look(stopped), 100.1)) == []
    late = first(Target(roots=names(10)), row(10, 5))
    assert sent(advance(late.state, look(stopped), 100.1)) == [("CONT", 10)]


def test_a_look_is_due_long_before_the_grace_is_over() -> None:
    """What has no death notice is still found: looks follow each other within 0.25 s."""
    step = first(Target(roots=names(10)), *TREE)
    now = 100.0
    while now < 103.9:
        assert step.look_at is not None
        assert now < step.look_at <= now + 0.25
        now = step.look_at
        step = advance(step.state, look(*TREE), now)


def test_all_tops_of_a_subtree_are_asked_at_once() -> None:
    """Without roots, the children of the sweeping process are asked, not their children."""
    target = Target(subtree_of=name(5), spare=names(5))
    step = first(target, row(5, 1), row(10, 5), row(11, 5), row(20, 10))
    assert sent(step) == [("TERM", 10), ("TERM", 11)]


def test_a_child_found_in_the_last_moment_of_the_grace_is_asked_not_killed() -> None:
    """Being nearly done does not bring the forced end forward for a late comer."""
    step = first(Target(roots=names(10)), *TREE)
    step = advance(step.state, look(), 101.0)
    assert step.state.phase is Phase.CONFIRM
    step = advance(step.state, look(row(20, 1)), 101.0)
    assert (sent(step), step.state.phase) == ([("TERM", 20)], Phase.POLITE)


# -- forced ----------------------------------------------------------------------------


def test_at_the_end_of_the_grace_all_are_held_from_the_top_then_killed_from_the_leaves() -> None:
    """SIGSTOP downwards, two looks without anybody new, then SIGKILL upwards."""
    step = advance(first(Target(roots=names(10)), *TREE).state, look(*TREE), 104.0)
    assert sent(step) == [("STOP", 10), ("STOP", 20), ("STOP", 30)]
    assert step.look_at == 104.0
    step = advance(step.state, look(*TREE), 104.0)
    assert sent(step) == []
    step = advance(step.state, look(*TREE), 104.0)
    assert sent(step) == [("KILL", 30), ("KILL", 20), ("KILL", 10)]


def test_without_grace_nobody_is_asked() -> None:
    """Grace 0 holds at once."""
    assert sent(first(Target(roots=names(10)), *TREE, policy=AT_ONCE))[0] == ("STOP", 10)


def test_whoever_turns_up_while_the_rest_is_held_is_held_first() -> None:
    """A newcomer starts the two quiet looks again: it may have forked as well."""
    target = Target(roots=names(10))
    step = first(target, *TREE[:2], policy=AT_ONCE)
    step = advance(step.state, look(*TREE[:2]), 100.0)
    step = advance(step.state, look(*TREE), 100.0)
    assert sent(step) == [("STOP", 30)]
    step = advance(step.state, look(*TREE), 100.0)
    assert sent(step) == []
    step = advance(step.state, look(*TREE), 100.0)
    assert sent(step) == [("KILL", 30), ("KILL", 20), ("KILL", 10)]


def test_whoever_turns_up_after_the_killing_is_held_then_killed() -> None:
    """The killed ones get nothing more."""
    step = first(Target(roots=names(10)), *TREE, policy=AT_ONCE)
    for _ in range(2):
        step = advance(step.state, look(*TREE), 100.0)
    newcomer = row(40, 30)
    step = advance(step.state, look(row(30, 20), newcomer), 100.1)
    assert sent(step) == [("STOP", 40)]
    step = advance(step.state, look(newcomer), 100.1)
    assert sent(step) == []
    step = advance(step.state, look(newcomer), 100.1)
    assert sent(step) == [("KILL", 40)]


def test_holding_takes_no_more_than_half_the_kill_timeout() -> None:
    """A process that forks faster than it can be held is killed all the same."""
    step = first(Target(roots=names(10)), row(10, 5), policy=AT_ONCE)
    pid, now, rows = 11, 100.0, [row(10, 5)]
    while ("KILL", 10) not in sent(step):
        rows.append(row(pid, 10))
        pid, now = pid + 1, now + 0.05
        assert now < 100.6
        step = advance(step.state, look(*rows), now)
    assert {one for _, one in sent(step)} == {one.pid for one in rows}


def test_pids_say_nothing_about_who_is_whose_parent() -> None:
    """The order is that of the tree, also when pids have started again from the bottom."""
    young = ProcessRow(7, 9999, 20)
    step = first(Target(roots=names(10)), *TREE[:2], young, policy=AT_ONCE)
    assert sent(step) == [("STOP", 10), ("STOP", 20), ("STOP", 7)]


# -- the end ---------------------------------------------------------------------------


def test_two_quiet_looks_end_the_sweep() -> None:
    """One look can miss a process; the second follows at once."""
    step = advance(first(Target(roots=names(10)), row(10, 5)).state, look(), 100.2)
    assert (step.report, step.look_at) == (None, 100.2)
    step = advance(step.state, look(), 100.2)
    assert step.report is not None
    assert [one.incarnation for one in step.report.ended] == [name(10)]
    assert step.report.stuck == ()
    assert step.look_at is None


def test_quiet_looks_count_only_in_a_row() -> None:
    """Somebody seen in between starts the count again."""
    step = first(Target(roots=names(10)), row(10, 5))
    for seen in (look(), look(row(10, 5)), look()):
        step = advance(step.state, seen, 100.2)
        assert step.report is None
    assert advance(step.state, look(), 100.2).report is not None


def test_a_zombie_is_dead() -> None:
    """A sweep does not wait for somebody to reap."""
    step = first(Target(roots=names(10)), row(10, 5))
    for _ in range(2):
        step = advance(step.state, look(row(10, 5, "Z")), 100.2)
    assert step.state.phase is Phase.DONE


def test_the_report_says_how_each_was_found_and_what_it_got() -> None:
    """Who, how found, last signal, first seen."""
    target = Target(roots=names(10), run_id=RUN, spare=names(5))
    tagged, marked = row(50, 1, tag=tag_of(RUN, 3)), row(60, 1, mark=extend(None, RUN, 3))
    step = first(target, row(10, 5), row(20, 10), tagged, marked)
    for _ in range(2):
        step = advance(step.state, look(), 100.5)
    assert step.report is not None
    ended = {one.incarnation.pid: (one.how, one.last_signal) for one in step.report.ended}
    assert ended == {
        10: ("named", Sig.TERM),
        20: ("child of 10", None),
        50: ("tag", Sig.TERM),
        60: ("mark", Sig.TERM),
    }
    assert {one.first_seen for one in step.report.ended} == {100.0}
    assert (step.report.started_at, step.report.finished_at) == (100.0, 100.5)


def test_a_finished_sweep_stays_finished() -> None:
    """More looks change nothing and signal nobody."""
    step = first(Target(roots=names(10)))
    step = advance(step.state, look(), 100.0)
    again = advance(step.state, look(*TREE), 200.0)
    assert again.state == step.state
    assert again.report == step.report
    assert again.signals == ()


@pytest.mark.parametrize(
    ("state", "word"), [("D", "uninterruptible"), ("S", "in spite of SIGKILL")]
)
def test_what_is_left_at_the_deadline_is_reported_with_the_reason(state: str, word: str) -> None:
    """The sweep ends at grace + kill timeout, and says what is left and why."""
    wedged = row(10, 5, state)
    step = first(Target(roots=names(10)), wedged, policy=AT_ONCE)
    for now in (100.0, 100.0, 100.9):
        step = advance(step.state, look(wedged), now)
        assert step.report is None
    step = advance(step.state, look(wedged), 101.0)
    assert step.report is not None
    ((stuck, reason),) = step.report.stuck
    assert stuck == name(10)
    assert word in reason
    assert step.report.ended == ()


def test_a_denied_signal_is_tried_again_and_reported_in_the_end() -> None:
    """EPERM neither holds up the others nor stays silent, and nothing stays stopped."""
    rows = (row(10, 5), row(20, 10))
    step = first(Target(roots=names(10)), *rows, policy=AT_ONCE)
    state = note_denied(step.state, Signal(name(20), Sig.STOP))
    for _ in range(2):
        step = advance(state, look(*rows), 100.0)
        state = step.state
    assert sent(step) == [("KILL", 20), ("KILL", 10)]
    state = note_denied(state, Signal(name(20), Sig.KILL))
    step = advance(state, look(row(20, 5)), 100.2)
    assert sent(step) == [("KILL", 20)]
    state = note_denied(step.state, Signal(name(20), Sig.KILL))
    step = advance(state, look(row(20, 5)), 101.0)
    assert step.report is not None
    assert step.report.stuck == ((name(20), "no permission to signal it"),)
    assert [one.incarnation for one in step.report.ended] == [name(10)]


def test_who_took_the_stop_but_refuses_the_kill_is_let_go_on() -> None:
    """Nothing that a sweep leaves alive is left stopped."""
    step = first(Target(roots=names(10)), row(10, 5), policy=AT_ONCE)
    for _ in range(2):
        step = advance(step.state, look(row(10, 5, "T")), 100.0)
    assert sent(step) == [("KILL", 10)]
    state = note_denied(step.state, Signal(name(10), Sig.KILL))
    step = advance(state, look(row(10, 5, "T")), 101.0)
    assert sent(step) == [("KILL", 10), ("CONT", 10)]


def test_a_signal_that_could_not_be_tried_is_asked_for_again() -> None:
    """Without a free descriptor nothing went out, so the same signal is due at the next look."""
    step = first(Target(roots=names(10)), row(10, 5))
    state = note_unsent(step.state, Signal(name(10), Sig.TERM))
    assert sent(advance(state, look(row(10, 5)), 100.1)) == [("TERM", 10)]
    step = first(Target(roots=names(10)), row(10, 5), policy=AT_ONCE)
    state = note_unsent(step.state, Signal(name(10), Sig.STOP))
    step = advance(state, look(row(10, 5)), 100.1)
    assert sent(step) == [("STOP", 10)]
    assert step.look_at is not None
    assert step.look_at > 100.1, "a look at once would find no descriptor either"


def test_a_sweeper_that_comes_too_late_still_kills_before_it_reports() -> None:
    """One that got no time until the deadline kills, waits a moment, then tells."""
    step = first(Target(roots=names(10)), *TREE)
    step = advance(step.state, look(*TREE), 110.0)
    assert sent(step) == [("KILL", 30), ("KILL", 20), ("KILL", 10)]
    assert step.report is None
    step = advance(step.state, look(row(10, 5)), 110.0 + LAST_WAIT)
    assert step.report is not None
    assert [stuck.incarnation for stuck in step.report.stuck] == [name(10)]


def test_a_late_sweeper_gives_up_on_what_refuses_too() -> None:
    """The moment of waiting is given once, also when the last signal is denied each time."""
    step = advance(first(Target(roots=names(10))).state, look(row(10, 5)), 110.0)
    assert (sent(step), step.report) == ([("KILL", 10)], None)
    state = note_denied(step.state, Signal(name(10), Sig.KILL))
    step = advance(state, look(row(10, 5)), 110.0 + LAST_WAIT)
    assert step.report is not None
    assert [stuck.incarnation for stuck in step.report.stuck] == [name(10)]


# -- who belongs -----------------------------------------------------------------------


def asked(target: Target, *rows: ProcessRow) -> list[int]:
    """Everybody that a sweep would signal for these rows."""
    return sorted(pid for _, pid in sent(first(target, *rows, policy=AT_ONCE)))


def test_a_recycled_pid_is_a_stranger() -> None:
    """A root that is gone takes nobody with it who has its number now, nor their children."""
    recycled = replace(row(10, 1), start=999)
    assert asked(Target(roots=names(10)), recycled, replace(row(20, 10), start=1000)) == []


def test_a_member_that_was_reparented_is_remembered() -> None:
    """Losing its parents does not free a process that was seen among them."""
    step = first(Target(roots=names(10)), *TREE)
    step = advance(step.state, look(row(30, 1)), 104.0)
    assert sent(step) == [("STOP", 30)]


def test_a_child_older_than_its_parent_is_none() -> None:
    """Rows are read one after the other: the parent's pid may be another's by now."""
    assert asked(Target(roots=names(30)), row(30, 5), row(20, 30)) == [30]


def test_what_a_spared_process_started_is_left_alone_unless_it_belongs_otherwise() -> None:
    """Parentage does not lead through the spared; root, tag and mark still do."""
    target = Target(roots=names(10), run_id=RUN, spare=names(20))
    free, tagged = row(30, 20), row(31, 20, tag=tag_of(RUN, 1))
    assert asked(target, row(10, 5), row(20, 10), free, tagged) == [10, 31]


def test_a_spared_pid_without_start_time_spares_whoever_has_it() -> None:
    """What cannot be told apart is not signalled."""
    target = Target(roots=names(10), spare=frozenset({Incarnation(10, 0)}))
    assert asked(target, row(10, 5)) == []


def test_who_was_held_when_it_was_let_go_is_woken() -> None:
    """By the one that has stopped it; nobody else would, since it is nobody's now."""
    step = first(Target(roots=names(10)), row(10, 5), row(20, 10), policy=StopPolicy(0.0, 1.0))
    assert ("STOP", 20) in sent(step)
    step = advance(step.state, look(row(10, 5), row(20, 10, tag=detached_tag(RUN))), 100.1)
    assert ("CONT", 20) in sent(step)
    assert 20 not in {pid for _, pid in sent(advance(step.state, look(row(10, 5)), 100.2))}


def test_what_was_let_go_is_never_signalled_nor_what_it_has_started() -> None:
    """By whichever way it would belong: as root, child, bearer of tag and mark, or seen before."""
    gone: dict[str, Any] = {"tag": detached_tag(RUN), "mark": extend(None, RUN, 1)}
    rows = (row(10, 5), row(20, 10, **gone), row(30, 20, **gone), row(40, 7, **gone))
    target = Target(roots=names(10, 20), subtree_of=name(7), run_id=RUN)
    assert asked(target, row(7, 1), *rows) == [10]
    before = first(Target(roots=names(10)), row(10, 5), row(20, 10))
    late = advance(before.state, look(*rows), 200.0)
    assert {incarnation.pid for incarnation, _ in late.signals} == {10}


def test_who_is_let_go_during_the_sweep_has_not_been_ended() -> None:
    """It lives, so the report does not name it, and nobody signals it any more."""
    step = first(Target(roots=names(10)), row(10, 5), row(20, 10))
    free = row(20, 5, tag=detached_tag(RUN))
    step = advance(step.state, look(free), 100.5)
    while step.report is None:
        assert sent(step) == []
        step = advance(step.state, look(free), 100.6)
    assert [ended.incarnation for ended in step.report.ended] == [name(10)]


def test_the_helpers_of_a_detached_owner_are_ended_by_their_own_run_alone() -> None:
    """They bear its tag; only a sweep that names them, as their run's does, may end them."""
    tag = helper_tag(detached_tag(RUN), "cd" * 16)
    helper = row(20, 10, tag=tag)
    assert asked(Target(roots=names(10), run_id=RUN), row(10, 5), helper) == [10]
    assert asked(Target(roots=names(20)), row(10, 5), helper) == [20]


def test_pid_1_and_processes_without_start_time_never_belong() -> None:
    """Not even when they are named."""
    target = Target(
        roots=frozenset({Incarnation(1, 10), Incarnation(10, 0), Incarnation(0, 1)}),
        subtree_of=name(5),
    )
    nobody = Snapshot({0: ProcessRow(0, 1, 5), 1: ProcessRow(1, 10, 5), 10: ProcessRow(10, 0, 5)})
    nobody = replace(nobody, rows={**nobody.rows, 5: row(5, 1)})
    assert advance(begin(target, AT_ONCE, 0.0), nobody, 0.0).signals == ()


def test_the_subtree_is_that_of_the_very_process() -> None:
    """A process that has the pid of the subreaper but is another has no subtree of ours."""
    target = Target(subtree_of=name(5))
    assert asked(target, row(5, 1), row(10, 5)) == [10]
    assert asked(target, replace(row(5, 1), start=7), row(10, 5)) == []
    assert asked(target, row(10, 5)) == []


def test_tag_and_mark_count_only_for_those_born_in_time() -> None:
    """A shell that inherited the mark from somewhere and opened days later is spared."""
    target = Target(run_id=RUN, born_from=200, born_until=400)
    rows = [row(pid, 1, tag=tag_of(RUN, 1)) for pid in (19, 20, 40, 41)]
    marked = [row(pid, 1, mark=extend(None, RUN, 1)) for pid in (18, 21, 39, 42)]
    assert asked(target, *rows, *marked) == [20, 21, 39, 40]


def test_other_runs_and_other_workers_are_strangers() -> None:
    """The sweep of one worker takes its bearers, those of an inner run too, and no others."""
    inner = extend(extend(None, RUN, 2), OTHER_RUN, 9)
    rows = [
        row(10, 1, tag=tag_of(RUN, 2)),
        row(11, 1, tag=tag_of(RUN, 3)),
        row(12, 1, tag=tag_of(OTHER_RUN, 2)),
        row(13, 1, mark=inner, tag=tag_of(OTHER_RUN, 9)),
        row(14, 1, mark=extend(None, RUN, 22)),
        row(15, 1),
        row(16, 13),
    ]
    assert asked(Target(run_id=RUN, workers=frozenset({2})), *rows) == [10, 13, 16]
    assert asked(Target(run_id=RUN), *rows) == [10, 11, 13, 14, 16]


# -- whatever happens ------------------------------------------------------------------

any_name = st.builds(Incarnation, st.integers(-1, 12), st.integers(0, 4))
any_row = st.builds(
    ProcessRow,
    pid=st.integers(-1, 12),
    start=st.integers(0, 4),
    ppid=st.integers(-1, 12),
    state=st.sampled_from("RSDTtZX"),
    tag=st.sampled_from([None, 3, tag_of(RUN, 1), tag_of(RUN, 2), tag_of(OTHER_RUN, 1)]),
    mark=st.sampled_from([None, "", "//:", extend(None, RUN, 1), extend(RUN, OTHER_RUN, 1)]),
)
any_look = st.builds(
    Snapshot, st.lists(any_row, max_size=12).map(lambda rows: {one.pid: one for one in rows})
)
any_target = st.builds(
    Target,
    roots=st.frozensets(any_name, max_size=3),
    subtree_of=st.none() | any_name,
    run_id=st.sampled_from([None, RUN]),
    workers=st.none() | st.frozensets(st.integers(0, 2), max_size=2),
    born_from=st.integers(0, 3),
    born_until=st.none() | st.integers(0, 4),
    spare=st.frozensets(any_name, max_size=3),
)
any_policy = st.builds(
    StopPolicy,
    st.sampled_from([0.0, 0.5, 4.0, math.inf]),
    st.sampled_from([0.0, 1.0, math.inf]),
)


@given(any_target, any_policy, st.lists(st.tuples(any_look, st.floats(0, 3)), max_size=12))
def test_no_look_makes_a_step_fail_or_signal_the_spared(
    target: Target, policy: StopPolicy, looks: list[tuple[Snapshot, float]]
) -> None:
    """Circles, torn rows, pids below 2: the planner answers, twice the same, and harms no one."""
    state, now = begin(target, policy, 0.0), 0.0
    for snapshot, pause in looks:
        now += pause
        before = copy.deepcopy((state, snapshot))
        step = advance(state, snapshot, now)
        assert (state, snapshot) == before, "the arguments were changed"
        assert advance(state, snapshot, now) == step
        for incarnation, sig in step.signals:
            assert incarnation.pid > 1
            assert incarnation.start > 0
            assert incarnation not in target.spare
            assert snapshot.find(incarnation) is not None
            assert sig in (Sig.TERM, Sig.CONT) or now >= policy.grace
        assert (step.look_at is None) == (step.report is not None)
        assert step.look_at is None or now <= step.look_at
        state = step.state


def test_no_member_is_older_than_the_oldest_that_can_head_a_tree() -> None:
    """The earliest of roots, subreaper and, where tag and mark count, the run's beginning."""
    assert Target(run_id=RUN, born_from=200).oldest_birth() == 200
    assert Target(run_id=RUN, born_from=200, roots=names(30)).oldest_birth() == 200
    assert Target(run_id=RUN, born_from=200, roots=names(10, 30)).oldest_birth() == 100
    assert Target(run_id=RUN, born_from=200, subtree_of=name(5)).oldest_birth() == 50
    assert Target(roots=names(10, 30)).oldest_birth() == 100, "born_from is for bearers only"
    assert Target().oldest_birth() == 0


@given(any_target, any_look, any_look)
def test_the_witnesses_of_elders_do_not_matter(
    target: Target, first_look: Snapshot, second_look: Snapshot
) -> None:
    """Whoever is older than ``oldest_birth`` is no member, whatever its tag and mark say."""
    oldest = target.oldest_birth()
    state = begin(target, POLICY, 0.0)
    unread = state
    for snapshot in (first_look, second_look):
        state = advance(state, snapshot, 0.0).state
        rows = {
            pid: one if one.start >= oldest else replace(one, tag=None, mark=None)
            for pid, one in snapshot.rows.items()
        }
        unread = advance(unread, Snapshot(rows), 0.0).state
    assert unread == state
    assert all(name.start >= oldest for name in state.members)
