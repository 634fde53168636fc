"""Carries out a sweep: looks, asks the planner, sends, waits. Decides nothing.

:class:`Sweep` is made for poll loops, which have more to do than one sweep: call
``advance()`` when ``wake_at`` has come or a descriptor in ``watched`` is readable,
until ``report`` is there; calls in between cost next to nothing. Sweeps that look at
the same part of the table advance with :func:`advance_together`. :func:`run` is such
a loop, for callers with nothing else to do. Not for use from several threads.

* A handle that was opened once stays with its process, so a signal through it can
  meet nobody else. The first few hundred members keep theirs and are watched; more
  would use up the descriptors. Whatever is not watched is found at the next look.
* A process whose pidfd is readable is dead, whatever an earlier row says, and no
  longer watched: a zombie would keep the poll loop spinning.
* A member that a look has missed is asked for by pid before it counts as gone.
* Looks are paid for: after each, deaths alone bring on the next only when as much time
  has passed as it took. A thousand deaths one after the other are no thousand looks.
* What goes wrong with one process never stops the sweep of the others.

Called by: launcher, sidecar, the start-up sweep, the command line.
"""

from __future__ import annotations

import math
import os
import select
from collections.abc import Callable, Iterable

from safepool.core import containment, planner
from safepool.core.containment import Containment
from safepool.core.identity import Incarnation, ProcessRow, Snapshot
from safepool.core.planner import Signal, SweepReport, Target
from safepool.core.policy import StopPolicy
from safepool.core.values import replace
from safepool.host.base import Container, Handle, Host, NoHandle, Sending

MOST_WATCHED = 256
_ROOM = 8
_RETRY = 0.02


class Sweep:
    """One sweep under way. Give it up when it is not to go on: then nobody stays held.

    ``look`` reads the part of the process table in which members can be, such as
    ``lambda: host.look_subtree(os.getpid())``. ``start`` is the instant (monotonic)
    at which the grace began; None means now. The calling process, ``own``, is spared
    always; give its name if a descriptor to look it up may be lacking. ``container`` is
    the cgroup in which all members should be; it is closed with the sweep.

    Attributes: ``wake_at``, the instant at which to call ``advance`` at the latest
    (None when over); ``watched``, descriptors that are readable when a member has
    died; ``report``, None until the sweep is over; ``command_lines`` of all members
    as they were first seen.
    """

    def __init__(
        self,
        host: Host,
        target: Target,
        policy: StopPolicy,
        look: Callable[[], Snapshot],
        start: float | None = None,
        own: Incarnation | None = None,
        container: Container | None = None,
    ) -> None:
        self._host = host
        self._look = look
        self._container = container
        self._containment = containment.ContainerState()
        self._handles: dict[Incarnation, Handle] = {}
        self._living: frozenset[Incarnation] = frozenset()
        self._last_rows: dict[int, ProcessRow] = {}
        self._is_starved = False
        self._dead: set[Incarnation] = set()
        self._rested_at = -math.inf
        self._most_watched = MOST_WATCHED
        now = host.now() if start is None else start
        if own is None:
            own = host.incarnation(os.getpid())
        if own is not None:
            target = replace(target, spare=target.spare | {own})
        self._state = planner.begin(target, policy, now)
        self.command_lines: dict[Incarnation, str] = {}
        self.wake_at: float | None = now

    @property
    def report(self) -> SweepReport | None:
        """The outcome, once the sweep is over."""
        return self._state.report

    @property
    def watched(self) -> list[int]:
        """Descriptors to poll for reading besides one's own; changes with ``advance``."""
        return [handle.fd for handle in self._handles.values() if handle.fd >= 0]

    def advance(self) -> None:
        """Look once, if it is time, and do what the planner says. Never waits; raises no OSError.

        It is time when ``wake_at`` has come or a member has died.
        """
        if self.is_due():
            self.step(self._look)

    def is_due(self) -> bool:
        """Note who has died; True when that or the time is a reason to look again.

        A True is to be followed by ``step``: what it has noted counts as dead there.
        """
        if self.report is not None or self.wake_at is None:
            return False
        self._dead |= self._drop_dead()
        now = self._host.now()
        if now >= self.wake_at or (self._living and self._living <= self._dead):
            return True
        if not self._dead and len(self._handles) >= len(self._living):
            return False
        if now >= self._rested_at:
            return True
        self.wake_at = min(self.wake_at, self._rested_at)
        return False

    def step(self, look: Callable[[], Snapshot]) -> None:
        """Do what the planner says to a look that is taken now, after ``is_due``."""
        began = self._host.now()
        dead, self._dead = frozenset(self._dead), set()
        snapshot = self._see(look, dead)
        now = self._host.now()
        if snapshot is None:
            if now >= self._state.ends_at + planner.BLIND_WAIT:
                self._state = planner.abandon(self._state, now)
                self.wake_at = None
                self.give_up()
            else:
                self.wake_at = self._rested_at = now + _RETRY
            return
        step = planner.advance(self._state, snapshot, now)
        self._state, self._living = step.state, frozenset(step.living)
        self._note_command_lines()
        if step.report is None:
            self._watch(step.living)
        met = self._contain(step, snapshot)
        for signal in step.signals:
            if signal.incarnation not in met:
                self._deliver(signal)
        self.wake_at = step.look_at
        ended = self._host.now()
        self._rested_at = ended + (ended - began)
        if step.look_at is not None and self._is_starved:
            self.wake_at = max(step.look_at, now + _RETRY)
        if step.report is not None:
            self.give_up()

    def wait(self) -> None:
        """Wait until it is time to call ``advance``: for loops with nothing else to poll."""
        if self.wake_at is None:
            return
        poll = select.poll()
        for fd in self.watched:
            poll.register(fd, select.POLLIN)
        poll.poll(math.ceil(max(0.0, self.wake_at - self._host.now()) * 1000))

    def close(self) -> None:
        """Let go of all descriptors, and do nothing else: right in a forked child, too.

        Closing twice does nothing.
        """
        self._release(len(self._handles))
        if self._container is not None:
            self._container.close()

    def give_up(self) -> None:
        """Thaw what is frozen, and close. What got a SIGSTOP is let go by the next sweeper."""
        # First these: to thaw takes a descriptor, and they may have all that there are.
        self._release(len(self._handles))
        if self._container is not None and self._containment.frozen:
            self._container.thaw()
        self._containment = containment.ContainerState(is_given_up=True)
        self.close()

    def _drop_dead(self) -> frozenset[Incarnation]:
        """Close the handles whose process is dead, and name these processes."""
        names = {handle.fd: name for name, handle in self._handles.items() if handle.fd >= 0}
        poll = select.poll()
        for fd in names:
            poll.register(fd, select.POLLIN)
        try:
            dead = frozenset(names[fd] for fd, _ in poll.poll(0))
        except OSError:
            return frozenset()  # ENOMEM: the look has to tell alone
        for name in dead:
            self._handles.pop(name).close()
        return dead

    def _see(self, look: Callable[[], Snapshot], dead: frozenset[Incarnation]) -> Snapshot | None:
        """Look, without the dead and with the members that the look has missed.

        When there is nothing to look with (EMFILE, ENFILE), the last look without
        those that died since has to do: the known ones are dealt with through the
        handles that are open. It proves nobody's absence, so None if none is left.
        """
        # Before the look, so that whoever is listed is in it, or is gone.
        listing = None if self._container is None else self._container.listing()
        try:
            # A look that is shared may be older than the list.
            rows = dict((look if listing is None else self._look)().rows)
            self._add_missed(rows, dead, frozenset() if listing is None else listing.pids)
            self._is_starved = False
        except OSError:
            if not self._is_starved:
                # Once only: if that does not help, somebody else takes what we give.
                self._make_room()
            self._is_starved = True
            rows = dict(self._last_rows)
        for name in dead:
            if name.pid in rows and rows[name.pid].incarnation == name:
                del rows[name.pid]
        self._last_rows = rows
        if self._is_starved:
            left = {row.incarnation for row in rows.values()}
            if self._living.isdisjoint(left):
                return None
        if listing is None or self._is_starved:
            return Snapshot(rows, self._host.now())
        sure = self._still_inside(containment.doubtful(listing, rows))
        inside = containment.inside(listing, rows) | (sure or frozenset())
        hides = containment.may_hide_others(listing, inside, self._state.target)
        return Snapshot(rows, self._host.now(), inside, hides or sure is None)

    def _still_inside(self, doubtful: frozenset[Incarnation]) -> frozenset[Incarnation] | None:
        """Who of these is in the container for sure; None when that cannot be told."""
        if not doubtful or self._container is None:
            return doubtful
        listing = self._container.listing()
        if listing is None:
            return None
        try:
            return frozenset(
                name
                for name in doubtful
                if name.pid in listing.pids and self._host.incarnation(name.pid) == name
            )
        except OSError:
            return None

    def _add_missed(
        self, rows: dict[int, ProcessRow], dead: frozenset[Incarnation], listed: frozenset[int]
    ) -> None:
        """Ask by pid for members, and for those in the container, that a look has missed."""
        missed = {name.pid: name for name in self._living - dead if name.pid not in rows}
        for pid in {*missed, *(listed - rows.keys())}:
            row = self._host.row(pid)
            if row is not None and (pid in listed or row.incarnation == missed[pid]):
                # Its tag may say that it was let go.
                rows[pid] = replace(row, tag=self._host.read_tag(pid))

    def _note_command_lines(self) -> None:
        """Read the command lines of new members while they can still be read."""
        for name in self._state.members:
            if name not in self.command_lines:
                try:
                    self.command_lines[name] = self._host.command_line(name.pid)
                except OSError:
                    self.command_lines[name] = ""

    def _watch(self, living: Iterable[Incarnation]) -> None:
        """Hold handles of the living, the topmost first; let those of the others go."""
        for name in self._handles.keys() - self._living:
            self._handles.pop(name).close()
        for name in living:
            if len(self._handles) >= self._most_watched:
                break
            if name not in self._handles:
                handle = self._open(name)
                if not isinstance(handle, NoHandle):
                    self._handles[name] = handle

    def _contain(self, step: planner.Step, snapshot: Snapshot) -> frozenset[Incarnation]:
        """Act upon the container as is planned; return who needs no signal for that."""
        if self._container is None:
            return frozenset()
        before = self._containment
        needless = containment.needless(before, step)
        plan = containment.plan(before, step, snapshot)
        self._containment = plan.state
        for name in plan.let_go:
            self._state = planner.note_unsent(self._state, Signal(name, planner.Sig.STOP))
        for name in plan.outlived:
            self._state = planner.note_unsent(self._state, Signal(name, planner.Sig.KILL))
        if plan.action is None:
            return needless
        act = {
            Containment.HOLD: self._container.freeze,
            Containment.KILL: self._container.kill,
            Containment.RELEASE: self._container.thaw,
        }
        if act[plan.action]():
            return plan.met | needless
        self._containment = containment.refused(before)
        return frozenset()

    def _deliver(self, signal: Signal) -> None:
        """Send one signal and tell the planner if it did not go out."""
        name = signal.incarnation
        handle = self._handles.get(name) or self._open(name)
        if handle is NoHandle.GONE:
            return
        outcome = None
        if not isinstance(handle, NoHandle):
            try:
                outcome = self._host.send(handle, signal.sig)
            except OSError:
                outcome = None
            if name not in self._handles:
                handle.close()
        if outcome is Sending.DENIED:
            self._state = planner.note_denied(self._state, signal)
        elif outcome is None:
            self._state = planner.note_unsent(self._state, signal)

    def _open(self, name: Incarnation) -> Handle | NoHandle:
        """Open a handle; if that fails for want of room, make some and try again."""
        handle = self._host.open(name)
        if handle is NoHandle.UNKNOWN and self._handles and not self._is_starved:
            self._is_starved = True
            self._make_room()
            handle = self._host.open(name)
        return handle

    def _make_room(self) -> None:
        """Give back some descriptors and hold no more than that from now on."""
        self._release(min(_ROOM, (len(self._handles) + 1) // 2))
        self._most_watched = len(self._handles)

    def _release(self, count: int) -> None:
        """Close ``count`` handles at most, those taken last first."""
        for _ in range(min(count, len(self._handles))):
            self._handles.popitem()[1].close()


def advance_together(sweeps: Iterable[Sweep], look: Callable[[], Snapshot]) -> None:
    """Advance all of ``sweeps`` whose time has come, on one look that they have in common.

    ``look`` reads what the ``look`` of each of them reads. It is taken after all have
    noted their dead, as each would on its own; a hundred workers that end at once then
    do not cost a hundred looks at a hundred workers.
    """
    due = [sweep for sweep in sweeps if sweep.is_due()]
    seen: list[Snapshot] = []

    def shared() -> Snapshot:
        if not seen:
            seen.append(look())
        return seen[0]

    for sweep in due:
        sweep.step(shared)


def run(sweep: Sweep) -> SweepReport:
    """Carry ``sweep`` through, waiting between its looks, and let go of all."""
    try:
        while True:
            sweep.advance()
            if sweep.report is not None:
                return sweep.report
            sweep.wait()
    finally:
        sweep.give_up()
