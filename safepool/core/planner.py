"""The kill order: which signals a sweep sends next, and when it looks again.

Decides everything about a sweep and does nothing: ``advance(state, snapshot, now)``
takes what was seen and returns the next state, the signals and the next look. The
same input gives the same step, and no snapshot makes it raise.

1. POLITE, until the grace is over. SIGTERM to roots and tops; to the others when their parent is
   gone, or at half the grace: a parent may need its children in order to drain. One SIGCONT after
   it for whoever is stopped.
2. HOLD. SIGSTOP from the top down, until two looks in a row find nobody new: a process that forks
   all the time cannot get away. At most half the kill timeout.
3. FORCED. SIGKILL, leaves first. Whoever turns up now is held first.
4. CONFIRM. Two looks in a row with nobody alive: DONE. The deadline: STUCK.

Who is let go meanwhile is no member any more; if it was held, it gets a SIGCONT.
The grace runs from ``begin``. Instants (``*_at``) are monotonic seconds.

Called by: the sweeper, which carries the steps out and tells what did not work (``note_denied``,
``note_unsent``); such a signal counts as not sent and is asked for again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from safepool.core.identity import Incarnation, Snapshot
from safepool.core.lineage import is_helper_tag
from safepool.core.membership import Found, Target, find_members
from safepool.core.policy import StopPolicy
from safepool.core.values import dataclass, field, replace

__all__ = [
    "EndedProcess",
    "Member",
    "Phase",
    "Sig",
    "Signal",
    "Step",
    "StuckProcess",
    "SweepReport",
    "SweepState",
    "Target",
    "abandon",
    "advance",
    "begin",
    "note_denied",
    "note_unsent",
]

QUIET_LOOKS = 2
"""Looks in a row that must agree: one alone can be torn and miss a process."""

LAST_WAIT = 0.25
"""What a sweeper that first looks after its deadline waits for the end of what it kills."""

BLIND_WAIT = 30.0
"""Seconds beyond its deadline that a sweep goes on trying to look, which proves who is left."""

_SHORTEST_WAIT = 0.005
_LONGEST_WAIT = 0.25


class Sig(Enum):
    """The signals that a sweep uses; there are no others."""

    TERM = "SIGTERM"
    CONT = "SIGCONT"
    STOP = "SIGSTOP"
    KILL = "SIGKILL"


BLIND = "the process table could not be read (no descriptor was free?)"
"""Why a sweep gave up that could not look any more."""


class Phase(Enum):
    """How far a sweep has come."""

    POLITE = "polite"
    HOLD = "hold"
    FORCED = "forced"
    CONFIRM = "confirm"
    DONE = "done"
    STUCK = "stuck"


class Signal(NamedTuple):
    """One signal to send, to just this incarnation."""

    incarnation: Incarnation
    sig: Sig


@dataclass(frozen=True)
class EndedProcess:
    """A process that is gone: how it was found, the last signal it got (None: none
    was needed) and when it was first seen (monotonic seconds)."""

    incarnation: Incarnation
    how: str
    last_signal: Sig | None
    first_seen: float


class StuckProcess(NamedTuple):
    """A process that was alive at the deadline, and why."""

    incarnation: Incarnation
    reason: str


@dataclass(frozen=True)
class SweepReport:
    """What a sweep came to; instants in monotonic seconds.

    ``is_blind``: the process table could not be read until the time was up, so there may
    be others of whom nothing is known.
    """

    ended: tuple[EndedProcess, ...]
    stuck: tuple[StuckProcess, ...]
    started_at: float
    finished_at: float
    is_blind: bool = False

    @property
    def is_clean(self) -> bool:
        """Is nobody left?"""
        return not self.stuck and not self.is_blind


@dataclass(frozen=True)
class Member:
    """What a sweep remembers of one process, from its first sight on.

    ``sent`` are the signals that went out, in order. ``is_denied`` says that the last one was
    refused for lack of permission, ``is_unsent`` that it could not be tried.
    """

    incarnation: Incarnation
    how: str
    first_seen: float
    sent: tuple[Sig, ...] = ()
    is_denied: bool = False
    is_unsent: bool = False


@dataclass(frozen=True)
class SweepState:
    """One sweep between two steps. Make it with ``begin``; treat it as opaque."""

    target: Target
    started_at: float
    half_at: float
    forced_at: float
    hold_ends_at: float
    ends_at: float
    phase: Phase = Phase.POLITE
    members: Mapping[Incarnation, Member] = field(default_factory=dict)
    has_forced: bool = False
    held_looks: int = 0
    quiet_looks: int = 0
    report: SweepReport | None = None


class Step(NamedTuple):
    """What to do now: ``signals`` in this order, then look again at ``look_at``
    (monotonic; or earlier, when one of ``living`` dies). ``look_at`` is None when
    ``report`` is there. ``living`` are the members alive, parents first."""

    state: SweepState
    signals: tuple[Signal, ...]
    look_at: float | None
    report: SweepReport | None
    living: tuple[Incarnation, ...]


def begin(target: Target, policy: StopPolicy, now: float) -> SweepState:
    """Return the state of a sweep whose grace begins ``now``."""
    forced_at = now + policy.grace
    return SweepState(
        target=target,
        started_at=now,
        half_at=now + policy.grace / 2,
        forced_at=forced_at,
        hold_ends_at=forced_at + policy.kill_timeout / 2,
        ends_at=forced_at + policy.kill_timeout,
    )


def advance(state: SweepState, snapshot: Snapshot, now: float) -> Step:
    """Return the next step after a look. A sweep that is over only repeats its report."""
    if state.report is not None:
        return Step(state, (), None, state.report, ())
    found = find_members(state.target, state.members.keys(), snapshot)
    kept = _without_the_let_go(state, found, snapshot)
    step = _next(_remember(kept, found, now), found, now)
    # Held by this sweep, it would stand still for ever: nobody else touches it now.
    freed = tuple(
        Signal(name, Sig.CONT)
        for name, member in state.members.items()
        if name not in kept.members and Sig.STOP in member.sent
    )
    return step._replace(signals=(*freed, *step.signals))


def _next(state: SweepState, found: Sequence[Found], now: float) -> Step:
    """The step of the phase that it is time for."""
    if not found:
        return _confirm(state, now)
    if now < state.forced_at:
        return _ask(state, found, now)
    if now < state.ends_at:
        return _force(state, found, now)
    if not state.has_forced:
        # The sweeper got no time before the deadline. It still kills, and waits a
        # moment: otherwise it would report as stuck what dies of that very signal.
        return _force(replace(state, ends_at=now + LAST_WAIT), found, now)
    return _give_up(state, found, now)


def abandon(state: SweepState, now: float) -> SweepState:
    """Return the state of a sweep that could not look any more until its time was up.

    Nobody was seen to be gone, so roots that were never seen are reported with the members.
    """
    unseen = sorted(state.target.roots - state.members.keys())
    stuck = tuple(StuckProcess(name, BLIND) for name in (*state.members, *unseen))
    state = _finish(state, (), stuck, now).state
    assert state.report is not None
    return replace(state, phase=Phase.STUCK, report=replace(state.report, is_blind=True))


def note_denied(state: SweepState, signal: Signal) -> SweepState:
    """Return the state after ``signal`` was refused for lack of permission."""
    return _take_back(state, signal, is_denied=True)


def note_unsent(state: SweepState, signal: Signal) -> SweepState:
    """Return the state after ``signal`` could not be tried (no descriptor was free)."""
    return _take_back(state, signal, is_denied=False)


def _take_back(state: SweepState, signal: Signal, *, is_denied: bool) -> SweepState:
    member = state.members.get(signal.incarnation)
    if member is None:
        return state
    kept = tuple(sig for sig in member.sent if sig is not signal.sig)
    member = replace(member, sent=kept, is_denied=is_denied, is_unsent=not is_denied)
    return replace(state, members={**state.members, member.incarnation: member})


def _remember(state: SweepState, found: Sequence[Found], now: float) -> SweepState:
    """Add those seen for the first time."""
    new = {
        one.row.incarnation: Member(one.row.incarnation, one.how, now)
        for one in found
        if one.row.incarnation not in state.members
    }
    quiet = 0 if found else state.quiet_looks
    return replace(state, members={**state.members, **new}, quiet_looks=quiet)


def _without_the_let_go(
    state: SweepState, found: Sequence[Found], snapshot: Snapshot
) -> SweepState:
    """Forget the members that live and are none any more: they were detached meanwhile."""
    members = {one.row.incarnation for one in found}
    left = {
        row.incarnation
        for row in snapshot.alive()
        if row.incarnation in state.members and row.incarnation not in members
    }
    if not left:
        return state
    return replace(state, members={n: m for n, m in state.members.items() if n not in left})


def _sent(state: SweepState, one: Found) -> tuple[Sig, ...]:
    return state.members[one.row.incarnation].sent


def _ask(state: SweepState, found: Sequence[Found], now: float) -> Step:
    """POLITE: ask those whose turn has come, and wake them so that they can hear it."""
    signals = []
    for one in found:
        name, sent = one.row.incarnation, _sent(state, one)
        is_due = one.is_top or now >= state.half_at or name in state.target.roots
        # Sidecars and launchers of inner runs see their owner's end themselves, and sweep.
        if is_helper_tag(one.row.tag) and name not in state.target.roots:
            continue
        if is_due and Sig.TERM not in sent:
            signals.append(Signal(name, Sig.TERM))
        if is_due and Sig.CONT not in sent and one.row.state == "T":
            signals.append(Signal(name, Sig.CONT))
    deadline = state.forced_at if now >= state.half_at else state.half_at
    look_at = min(deadline, now + _patience(now - state.started_at))
    return _step(replace(state, phase=Phase.POLITE), signals, look_at, found)


def _force(state: SweepState, found: Sequence[Found], now: float) -> Step:
    """HOLD while there are new ones, then FORCED, then wait for the deaths."""
    pending = [one for one in found if Sig.KILL not in _sent(state, one)]
    may_hold = now < state.hold_ends_at
    new = [one for one in pending if may_hold and _is_to_hold(state, one)]
    if new:
        signals = [Signal(one.row.incarnation, Sig.STOP) for one in new]
        is_starved = all(state.members[name].is_unsent for name, _ in signals)
        look_at = now + _SHORTEST_WAIT if is_starved else now
        return _step(replace(state, phase=Phase.HOLD, held_looks=0), signals, look_at, found)
    if may_hold and any(Sig.STOP in _sent(state, one) for one in pending):
        state = replace(state, held_looks=state.held_looks + 1)
        if state.held_looks < QUIET_LOOKS:
            return _step(state, (), now, found)
    signals = [Signal(one.row.incarnation, Sig.KILL) for one in reversed(pending)]
    phase = Phase.FORCED if signals else Phase.CONFIRM
    look_at = min(state.ends_at, now + _patience(now - state.forced_at))
    state = replace(state, phase=phase, has_forced=True, held_looks=0)
    return _step(state, signals, look_at, found)


def _is_to_hold(state: SweepState, one: Found) -> bool:
    """Not held yet, and worth trying: one that refuses signals must not keep the rest waiting."""
    member = state.members[one.row.incarnation]
    return Sig.STOP not in member.sent and not member.is_denied


def _confirm(state: SweepState, now: float) -> Step:
    """Nobody is alive in this look: done when the look before said so as well."""
    looks = state.quiet_looks + 1
    if looks < QUIET_LOOKS:
        return _step(replace(state, phase=Phase.CONFIRM, quiet_looks=looks), (), now, ())
    return _finish(state, (), (), now)


def _give_up(state: SweepState, found: Sequence[Found], now: float) -> Step:
    """STUCK: a last SIGKILL for whoever has none yet, and nobody is left stopped.

    What took its SIGKILL cannot stay stopped. What refuses it may have taken a
    SIGSTOP before, so it is let go on: it stays, but it works.
    """
    signals = []
    for one in reversed(found):
        name, member = one.row.incarnation, state.members[one.row.incarnation]
        if Sig.KILL in member.sent:
            continue
        signals.append(Signal(name, Sig.KILL))
        if Sig.STOP in member.sent and (member.is_denied or member.is_unsent):
            signals.append(Signal(name, Sig.CONT))
    stuck = tuple(StuckProcess(one.row.incarnation, _reason(state, one)) for one in found)
    return _finish(state, signals, stuck, now)


def _reason(state: SweepState, one: Found) -> str:
    member = state.members[one.row.incarnation]
    if member.is_denied:
        return "no permission to signal it"
    if member.is_unsent:
        return "no file descriptor was free to signal it"
    if Sig.KILL not in member.sent:
        return "seen only when the time was up"
    if one.row.state == "D":
        return "in uninterruptible sleep (state D): the kernel ends it when the call returns"
    return "alive in spite of SIGKILL"


def _finish(
    state: SweepState, signals: Iterable[Signal], stuck: tuple[StuckProcess, ...], now: float
) -> Step:
    """Close the sweep with its report."""
    left = {process.incarnation for process in stuck}
    ended = tuple(
        EndedProcess(m.incarnation, m.how, m.sent[-1] if m.sent else None, m.first_seen)
        for m in state.members.values()
        if m.incarnation not in left
    )
    report = SweepReport(ended, stuck, state.started_at, now)
    phase = Phase.STUCK if stuck else Phase.DONE
    state = replace(state, phase=phase, report=report)
    return Step(state, tuple(signals), None, report, ())


def _step(
    state: SweepState, signals: Iterable[Signal], look_at: float, found: Sequence[Found]
) -> Step:
    """A step of a sweep that goes on; its signals count as sent until the sweeper objects."""
    signals = tuple(signals)
    members = dict(state.members)
    for name, sig in signals:
        member = members[name]
        members[name] = replace(member, sent=(*member.sent, sig), is_denied=False, is_unsent=False)
    living = tuple(one.row.incarnation for one in found)
    return Step(replace(state, members=members), signals, look_at, None, living)


def _patience(waited: float) -> float:
    """How long to rely on death notices alone: half of what was waited already."""
    return min(_LONGEST_WAIT, max(_SHORTEST_WAIT, waited / 2))
