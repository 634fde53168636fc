"""The kill order on the real kernel: families of real processes, every signal watched.

The planner's tests play all this against a made-up table, thousands of times. Here the
kernel keeps the table: families of up to 30 processes that fork, ignore, drain, stop,
leave their parents, sessions and environments, and are swept by real sweeps. A witness
beside the sweep (tests/kit/sweeping.py) records of every signal who was there in that
instant: incarnation, parent, children, and the badge that says which worker a process
comes from. Strangers stand beside the families, some with the look of members.

``SAFEPOOL_TEST_EXAMPLES=1000`` looks longer. An example is not made smaller after a
failure, since the same family rarely fails twice in the same way: the message has the
whole order.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from safepool.core.lineage import MARK_VARIABLE, extend, tag_of
from tests.kit import family, truth
from tests.kit.family import BADGE, RELEASED, Relative
from tests.kit.jail import ROOT, Jail, Owner
from tests.kit.sweeping import KILL_TIMEOUT, Order, Person, Record, Shot, Trace

EXAMPLES = int(os.environ.get("SAFEPOOL_TEST_EXAMPLES", "10"))
STRANGERS = 4
AIMS = ("subtree", "worker", "each", "table")
ESCALATION = ("TERM", "CONT", "STOP", "KILL")

as_it_comes = settings(
    max_examples=EXAMPLES,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


# -- the families ----------------------------------------------------------------------


@st.composite
def plans(draw: st.DrawFn) -> list[Relative]:
    """Up to three workers and 30 processes, at most two of which fork all the time."""
    count = draw(st.integers(1, 30))
    workers = draw(st.integers(1, min(3, count)))
    plan: list[Relative] = []
    forkers = 0
    for place in range(count):
        fertile = [-1] if place < workers else [p for p in range(place) if not plan[p].is_scrubbed]
        if not fertile:
            break
        kind = draw(st.sampled_from(["", "", "", "stopped", "scrubbed", "forker", "released"]))
        manners = ["willing", "willing", "ignoring"]
        if kind != "scrubbed":
            manners += ["late", "draining"]
        forks = kind == "forker" and forkers < 2
        forkers += forks
        released = kind == "released"
        plan.append(
            Relative(
                parent=draw(st.sampled_from(fertile)),
                is_orphan=place >= workers and draw(st.booleans()),
                # Kept in a group with the swept, it would get the kernel's SIGHUP: see the notes.
                session="own" if released else draw(st.sampled_from(["", "", "group", "own"])),
                manner=draw(st.sampled_from(manners)),
                delay=draw(st.sampled_from([0.01, 0.05, 0.3])),
                is_stopped=kind == "stopped",
                is_scrubbed=kind == "scrubbed" and place >= workers,
                forks=forks,
                is_released=released,
            )
        )
    return plan


def orders(aim: str) -> st.SearchStrategy[Order]:
    graces = st.lists(st.sampled_from([0.0, 0.15, 0.4]), min_size=1, max_size=2)
    return st.builds(Order, plans(), st.just(aim), graces, st.sampled_from([0, 0, 1, 2, 3, 5]))


def badge_of(plan: list[Relative], place: int) -> int:
    """What the process at ``place`` wears: of its worker, or of the released."""
    one = plan[place]
    if one.is_released:
        return RELEASED
    if one.parent < 0:
        return BADGE + 1 + [p for p, each in enumerate(plan) if each.parent < 0].index(place)
    return badge_of(plan, one.parent)


class Verdict:
    """What happened to one order, and the promises that it is held to."""

    def __init__(self, order: Order, record: Record) -> None:
        self.order = order
        self.record = record
        badges = {badge_of(order.plan, place) for place in range(len(order.plan))} - {RELEASED}
        self.members = {BADGE + 1} & badges if order.aim == "worker" else badges

    def is_member(self, one: Person, trace: Trace | None = None) -> bool:
        """Is it meant by that sweep, or by any?"""
        if trace is not None and trace.worker:
            return one.badge == BADGE + trace.worker
        return one.badge in self.members

    def is_living_member(self, one: Person) -> bool:
        return one.is_alive and self.is_member(one)

    def workers(self) -> set[int]:
        pairs = zip(self.record.pids, self.order.plan, strict=True)
        return {pid for pid, one in pairs if one.parent < 0}

    def story(self, *pids: int) -> str:
        """What happened to these processes, for the message of a failure."""
        lines = [f"aim {self.order.aim}, graces {self.order.graces}, cut {self.order.cut}"]
        for number, trace in enumerate(self.record.traces):
            looks = " ".join(f"{at:.4f}" for at in trace.looks)
            lines.append(f"sweep {number} began {trace.began:.4f}, looked {looks}")
        for place, pid in enumerate(self.record.pids):
            if pid in pids:
                lines.append(f"{pid} is {self.order.plan[place]}")
        lines += [str(shot) for shot in self.record.shots if shot.pid in pids]
        return "\n".join(["", *lines])

    def each(self) -> Iterator[tuple[Trace, list[Shot]]]:
        """The sweeps with their own signals."""
        for number, trace in enumerate(self.record.traces):
            yield trace, [shot for shot in self.record.shots if shot.sweep == number]

    def only_members_are_signalled(self) -> None:
        """Whoever has the pid at that moment is the one who is meant, and a member."""
        for trace, shots in self.each():
            for shot in shots:
                assert shot.pid not in (0, 1, self.record.me), self.story(shot.pid)
                if shot.target.start:
                    assert shot.target.start == shot.start, self.story(shot.pid)
                    assert self.is_member(shot.target, trace), self.story(shot.pid)
                else:
                    assert shot.outcome == "GONE", self.story(shot.pid)
            for one in trace.opened:
                assert not one.start or self.is_member(one, trace), self.story(one.pid)

    def nothing_forced_before_the_grace(self) -> None:
        """No SIGSTOP, no SIGKILL; and SIGTERM before, where there was a look to decide it."""
        for trace, shots in self.each():
            forced_at = trace.began + trace.grace
            asked = {(shot.pid, shot.start) for shot in shots if shot.sig == "TERM"}
            late = [at for at in trace.looks if trace.began + trace.grace / 2 <= at < forced_at]
            seen = {(one.pid, one.start) for one in trace.opened if one.start} if late else set()
            for shot in shots:
                if shot.sig in ("STOP", "KILL"):
                    assert shot.at >= forced_at, self.story(shot.pid)
                    was_there = any(one.pid == shot.pid for one in self.record.before)
                    if was_there and (shot.pid, shot.start) in seen:
                        assert (shot.pid, shot.start) in asked, self.story(shot.pid)

    def escalation_never_goes_back(self) -> None:
        """Each signal once to each process, in the one order."""
        for _, shots in self.each():
            sent: dict[tuple[int, int], list[int]] = {}
            for shot in shots:
                sent.setdefault((shot.pid, shot.start), []).append(ESCALATION.index(shot.sig))
            for name, levels in sent.items():
                assert levels == sorted(set(levels)), self.story(name[0])

    def parents_are_asked_first(self) -> None:
        """Before half the grace nobody whose parent lives; later, parents before children."""
        for trace, shots in self.each():
            asked: set[int] = set()
            roots = self.workers() if trace.worker else set()
            for shot in shots:
                if shot.sig != "TERM":
                    continue
                if shot.pid not in roots and self.is_living_member(shot.parent):
                    assert shot.at >= trace.began + trace.grace / 2, self.story(
                        shot.pid, shot.parent.pid
                    )
                    assert shot.parent.pid in asked, self.story(shot.pid, shot.parent.pid)
                asked.add(shot.pid)

    def parents_are_held_first(self) -> None:
        """SIGSTOP goes from the top down: nobody is restarted by a parent that still runs."""
        for _, shots in self.each():
            held: set[int] = set()
            for shot in shots:
                if shot.sig != "STOP":
                    continue
                if self.is_living_member(shot.parent) and shot.parent.is_known:
                    assert shot.parent.pid in held, self.story(shot.pid, shot.parent.pid)
                held.add(shot.pid)

    def leaves_are_killed_first(self) -> None:
        """At a SIGKILL no child lives that has not got its own before.

        None was born unseen either, unless another sweep, which is still polite, has woken
        whom this one held.
        """
        is_alone = len(self.order.graces) == 1 and not self.order.cut
        killed: set[int] = set()
        for shot in self.record.shots:
            if shot.sig != "KILL":
                continue
            for child in filter(self.is_living_member, shot.children):
                if child.is_known or is_alone:
                    assert child.pid in killed, self.story(shot.pid, child.pid)
            killed.add(shot.pid)

    def ends_in_time_and_tells(self) -> None:
        """Nobody is stuck, all are in the report, no descriptor is left."""
        before, after = self.record.open_files
        assert before == after, "descriptors are left"
        finished = [trace for trace in self.record.traces if trace.finished is not None]
        assert finished
        for trace in finished:
            assert trace.stuck == {}
            assert trace.finished is not None
            assert trace.finished <= trace.began + trace.grace + KILL_TIMEOUT
        told = {pid for trace in self.record.traces for pid in trace.ended}
        if len(finished) == len(self.record.traces):
            members = {str(one.pid) for one in self.record.before if self.is_living_member(one)}
            assert members <= told


# -- the stage -------------------------------------------------------------------------


class Stage:
    """Strangers, and the process that builds and sweeps."""

    def __init__(self, jail: Jail) -> None:
        self._jail = jail
        self._run_id = uuid.uuid4().hex
        self._played = 0
        self._strangers = [self._stranger(number) for number in range(STRANGERS)]
        jail.hear("stranger", STRANGERS)
        for number, stranger in enumerate(self._strangers):
            self._tag(number, stranger)
        argv = [sys.executable, str(ROOT / "tests/kit/sweeping.py"), self._run_id]
        self._sweeping: Owner = jail.start(argv)

    def _stranger(self, number: int) -> Owner:
        """The first two bear a mark: of another run, and of this one from before it began."""
        mark = {0: extend(None, uuid.uuid4().hex, 1), 1: extend(None, self._run_id, 1)}
        words = [sys.executable, str(ROOT / "tests/kit/stranger.py"), "--stay"]
        return self._jail.start(words, environment={MARK_VARIABLE: mark.get(number, "")})

    def _tag(self, number: int, stranger: Owner) -> None:
        """The last two bear a tag, likewise."""
        tag = {2: tag_of(uuid.uuid4().hex, 1), 3: tag_of(self._run_id, 1)}.get(number)
        if tag is not None:
            hard = resource.prlimit(stranger.pid, resource.RLIMIT_RTTIME)[1]
            resource.prlimit(stranger.pid, resource.RLIMIT_RTTIME, (tag, hard))

    def play(self, order: Order) -> Verdict:
        """Build, sweep, and ask the kernel who is left; then clear the stage."""
        self._say(json.dumps(asdict(order)))
        self._played += 1
        line = self._jail.hear("swept", self._played)[-1]
        verdict = Verdict(order, Record.read(line.text))
        try:
            self._the_right_ones_are_left(verdict)
        finally:
            self._say("")
        self._jail.hear("clean", self._played)
        return verdict

    def _say(self, text: str) -> None:
        stdin = self._sweeping.process.stdin
        assert stdin is not None
        stdin.write(text.encode() + b"\n")
        stdin.flush()

    def _the_right_ones_are_left(self, verdict: Verdict) -> None:
        """No member lives; whoever is none lives, and is stopped only if it was before."""
        apart = {self._sweeping.pid, *(stranger.pid for stranger in self._strangers)}
        left = [pid for pid in self._jail.pids() if pid not in apart]
        members = [truth.describe(p) for p in left if family.badge(p) in verdict.members]
        assert members == [], "members are left"
        for one, relative in zip(verdict.record.before, verdict.order.plan, strict=True):
            if not verdict.is_member(one):
                assert truth.started(one.pid) == one.start, f"{relative} is gone"
                assert truth.is_alive(one.pid), f"{relative} is dead"
                stopped = truth.state(one.pid) == "T"
                assert stopped == relative.is_stopped, f"{relative} was stopped or woken"
        for stranger in self._strangers:
            assert truth.is_alive(stranger.pid), "a stranger is dead"
            assert truth.state(stranger.pid) != "T", "a stranger is stopped"
        assert not [line for line in self._jail.heard if line.word == "signalled"]


PROMISES: list[Callable[[Verdict], None]] = [
    Verdict.only_members_are_signalled,
    Verdict.nothing_forced_before_the_grace,
    Verdict.escalation_never_goes_back,
    Verdict.parents_are_asked_first,
    Verdict.parents_are_held_first,
    Verdict.leaves_are_killed_first,
    Verdict.ends_in_time_and_tells,
]


@pytest.mark.parametrize("aim", AIMS)
def test_every_real_sweep_keeps_the_kill_order(aim: str, jail: Jail) -> None:
    """Only members, parents first, leaves first, no force before the grace, nobody is left.

    Also with two sweeps at once, and when one is given up half way and the next begins.
    """
    stage = Stage(jail)

    @as_it_comes
    @given(orders(aim))
    def holds(order: Order) -> None:
        verdict = stage.play(order)
        for promise in PROMISES:
            promise(verdict)

    holds()
