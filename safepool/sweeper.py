"""Carries out a sweep: looks, asks the planner, sends, waits. Decides nothing.

:class:`Sweep` is made for poll loops, which have more to do than one sweep: call
``advance()`` when ``wake_at`` has come or a descriptor in ``watched`` is readable,
until ``report`` is there. :func:`run` is such a loop, for callers with nothing else
to do. Not for use from several threads.

* A handle that was opened once stays with its process, so a signal through it can
  meet nobody else. The first few hundred members keep theirs and are watched; more
  would use up the descriptors. Whatever is not watched is found at the next look.
* A process whose pidfd is readable is dead, whatever an earlier row says, and no
  longer watched: a zombie would keep the poll loop spinning.
* A member that a look has missed is asked for by pid before it counts as gone.
* What goes wrong with one process never stops the sweep of the others.

Called by: launcher, sidecar, the start-up sweep, the command line.
"""

from __future__ import annotations

import math
import os
import select
from collections.abc import Callable, Iterable

from safepool.core import planner
from safepool.core.identity import Incarnation, ProcessRow, Snapshot
from safepool.core.planner import Signal, SweepReport, Target
from safepool.core.policy import StopPolicy
from safepool.core.values import replace
from safepool.host.base import Handle, Host, NoHandle, Sending

MOST_WATCHED = 256
_ROOM = 8
_RETRY = 0.02


class Sweep:
    """One sweep under way. Close it, also when it is given up half way.

    ``look`` reads the part of the process table in which members can be, such as
    ``lambda: host.look_subtree(os.getpid())``. ``start`` is the instant (monotonic)
    at which the grace began; None means now. The calling process, ``own``, is spared
    always; give its name if a descriptor to look it up may be lacking.

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
    ) -> None:
        self._host = host
        self._look = look
        self._handles: dict[Incarnation, Handle] = {}
        self._living: frozenset[Incarnation] = frozenset()
        self._last_rows: dict[int, ProcessRow] = {}
        self._is_starved = False
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
        """Look once and do what the planner says. Never waits; raises no OSError."""
        if self.report is not None:
            return
        snapshot = self._see(self._drop_dead())
        now = self._host.now()
        if snapshot is None:
            if now >= self._state.ends_at + planner.BLIND_WAIT:
                self._state = planner.abandon(self._state, now)
                self.wake_at = None
                self.close()
            else:
                self.wake_at = now + _RETRY
            return
        step = planner.advance(self._state, snapshot, now)
        self._state, self._living = step.state, frozenset(step.living)
        self._note_command_lines()
        if step.report is None:
            self._watch(step.living)
        for signal in step.signals:
            self._deliver(signal)
        self.wake_at = step.look_at
        if step.look_at is not None and self._is_starved:
            self.wake_at = max(step.look_at, now + _RETRY)
        if step.report is not None:
            self.close()

    def wait(self) -> None:
        """Wait until it is time to call ``advance``: for loops with nothing else to poll."""
        if self.wake_at is None:
            return
        poll = select.poll()
        for fd in self.watched:
            poll.register(fd, select.POLLIN)
        poll.poll(math.ceil(max(0.0, self.wake_at - self._host.now()) * 1000))

    def close(self) -> None:
        """Let go of all descriptors. Closing twice does nothing."""
        self._release(len(self._handles))

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

    def _see(self, dead: frozenset[Incarnation]) -> Snapshot | None:
        """Look, without the dead and with the members that the look has missed.

        When there is nothing to look with (EMFILE, ENFILE), the last look without
        those that died since has to do: the known ones are dealt with through the
        handles that are open. It proves nobody's absence, so None if none is left.
        """
        try:
            rows = dict(self._look().rows)
            for name in self._living - dead:
                if name.pid not in rows:
                    row = self._host.row(name.pid)
                    if row is not None and row.incarnation == name:
                        rows[name.pid] = row
            self._is_starved = False
        except OSError:
            if not self._is_starved:
                # Once only: if that does not help, somebody else takes what we give.
                self._make_room()
            self._is_starved = True
            rows = dict(self._last_rows)
        self._last_rows = {pid: r for pid, r in rows.items() if r.incarnation not in dead}
        left = {row.incarnation for row in self._last_rows.values()}
        if self._is_starved and self._living.isdisjoint(left):
            return None
        return Snapshot(self._last_rows, self._host.now())

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


def run(sweep: Sweep) -> SweepReport:
    """Carry ``sweep`` through, waiting between its looks, and close it."""
    try:
        while True:
            sweep.advance()
            if sweep.report is not None:
                return sweep.report
            sweep.wait()
    finally:
        sweep.close()
