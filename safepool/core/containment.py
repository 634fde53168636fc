"""When a sweep acts upon its run's cgroup as a whole, and in place of which signals.

A *container* is the cgroup that a run made for its workers. The planner says who gets
which signal; where those who get it live in the container, HOLD freezes it instead of
SIGSTOP, and KILL ends it instead of SIGKILL, in one step each. SIGTERM stays a signal.

Both meet everybody inside. So the container is used only while everybody inside is a
member of the sweep: one detached, spared or foreign process in it, or a list that
cannot be read, and the signals go out one by one. A container that is frozen when
that turns out is thawed at once, and not used again by this sweep.

Who is inside comes from a list of pids that was read *before* the look: whoever was
there by then is in the look, or is gone. A process that started after the list was
read is not meant by it, even if it has a listed pid. Of one that started in the tick of
the list that cannot be told: it has to be in another list, and the same process after it.

Where members are told from others by the time of their birth (a dead run that is swept
later), that is not enough: one of the list who has gone meanwhile may have been none, and
have left a child there that is none either. Then it is not used.

Decides; reads and freezes nothing. Called by: the sweeper.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import NamedTuple

from safepool.core.identity import Incarnation, ProcessRow, Snapshot
from safepool.core.membership import Target
from safepool.core.planner import Sig, Step
from safepool.core.values import dataclass, replace


class Containment(Enum):
    """What is done to a container as a whole."""

    HOLD = "freeze"
    KILL = "kill"
    RELEASE = "thaw"


@dataclass(frozen=True)
class ContainerState:
    """What a sweep remembers of its container: ``frozen`` are the members that it
    holds in place of a SIGSTOP.

    ``killed``: those that were to die with it. ``has_thawed``: what an earlier sweeper may have
    left frozen was let go. ``is_given_up``: it is not to be used any more.
    """

    frozen: frozenset[Incarnation] = frozenset()
    killed: frozenset[Incarnation] = frozenset()
    has_thawed: bool = False
    is_given_up: bool = False


class Listing(NamedTuple):
    """Who was in a container, by pid, and the tick (since boot) at which reading began."""

    pids: frozenset[int]
    begun_at: int


class Plan(NamedTuple):
    """``action`` is to be done before the step's signals are sent. ``met`` need no signal
    if it works. ``let_go`` were held by the container and are not any more; ``outlived`` have
    gone out of it before they could die with it."""

    state: ContainerState
    action: Containment | None = None
    met: frozenset[Incarnation] = frozenset()
    let_go: frozenset[Incarnation] = frozenset()
    outlived: frozenset[Incarnation] = frozenset()


def inside(listing: Listing, rows: Mapping[int, ProcessRow]) -> frozenset[Incarnation]:
    """Name the living of a list that was begun before the rows were read."""
    return frozenset(name for name in _listed(listing, rows) if name.start < listing.begun_at)


def doubtful(listing: Listing, rows: Mapping[int, ProcessRow]) -> frozenset[Incarnation]:
    """Those of the tick in which the list was begun: after it, on the number of one listed?"""
    return frozenset(name for name in _listed(listing, rows) if name.start == listing.begun_at)


def _listed(listing: Listing, rows: Mapping[int, ProcessRow]) -> Iterator[Incarnation]:
    found = (rows[pid] for pid in listing.pids if pid in rows)
    return (row.incarnation for row in found if row.is_alive)


def may_hide_others(listing: Listing, within: frozenset[Incarnation], target: Target) -> bool:
    """May somebody be inside who is no member, besides those that were found there?"""
    if target.born_until is None:
        return False
    return not listing.pids <= {name.pid for name in within}


def plan(state: ContainerState, step: Step, snapshot: Snapshot) -> Plan:
    """Return what is to be done to the container at a step of the planner."""
    within = snapshot.inside
    if within is None or snapshot.hides_others or not within <= frozenset(step.living):
        return _without(state)
    # Who went out between list and freeze, or kill, was not met, and needs a signal of his own.
    outside = frozenset(step.living) - within
    left, outlived = state.frozen & outside, state.killed & outside
    if left or outlived:
        after = replace(state, frozen=state.frozen - left, killed=state.killed - outlived)
        action = Containment.RELEASE if state.frozen and not after.frozen else None
        return Plan(after, action, let_go=left, outlived=outlived)
    met = frozenset(signal.incarnation for signal in step.signals) & within
    sigs = {signal.sig for signal in step.signals if signal.incarnation in met}
    if state.is_given_up or step.report is not None:
        return Plan(state)
    if Sig.STOP in sigs:
        return Plan(replace(state, frozen=state.frozen | met), Containment.HOLD, met)
    if Sig.KILL in sigs:
        return Plan(replace(state, killed=state.killed | met), Containment.KILL, met)
    if not state.has_thawed and not state.frozen and within:
        return Plan(replace(state, has_thawed=True), Containment.RELEASE)
    return Plan(state)


def _without(state: ContainerState) -> Plan:
    """It must not be used now; if it is frozen, somebody in it who is no member is held."""
    if not state.frozen:
        return Plan(state)
    state, let_go = replace(state, frozen=frozenset(), is_given_up=True), state.frozen
    return Plan(state, Containment.RELEASE, let_go=let_go)


def needless(state: ContainerState, step: Step) -> frozenset[Incarnation]:
    """Who needs no SIGCONT, since he stood still in the frozen container and got no SIGSTOP."""
    woken = {signal.incarnation for signal in step.signals if signal.sig is Sig.CONT}
    return state.frozen & woken


def refused(state: ContainerState) -> ContainerState:
    """The state after the kernel refused what came next: signals are sent, now and later."""
    return replace(state, is_given_up=True)
