"""The owner's watch over its sidecar and launchers: one thread, one poll.

It hears what the sidecar says and logs it, sees a launcher's end and asks for the
sweep of what that left, and starts a new sidecar when the old one was killed.

The thread leaves when there is nothing to watch, and is started again with the next
launcher: so a program whose pools are closed has no thread of ours. A sidecar that dies
meanwhile is replaced then.

Nothing here decides about the user's processes, and nothing of the user's code runs
in this thread. ``quiet`` is held while it logs, so that a fork can wait until no
lock of logging is held.

Called by: :mod:`safepool.run`, which owns the one instance.
"""

from __future__ import annotations

import _thread
import os
import select
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from safepool import in_flight
from safepool.core.identity import Incarnation
from safepool.core.wire import MAX_MESSAGE, WireError, decode, encode
from safepool.errors import ProtectionError
from safepool.latch import Latch
from safepool.launcher_link import LauncherLink
from safepool.loop import signals_blocked
from safepool.sidecar_keeper import SidecarKeeper
from safepool.sidecar_link import SidecarLink
from safepool.voice import Voice

if TYPE_CHECKING:
    from safepool.run import Run

_MOST_FAILURES = 10

_LINGER = 0.05
"""Seconds that the thread stays without a launcher: the next pool may come at once."""

_LAST_WORDS = 1.0
"""Seconds that the program's exit waits for a logging handler."""


class Monitor:
    """Watches for one run. Methods without a thread of their own are safe in threads."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._links: dict[int, LauncherLink] = {}
        self._lost: dict[int, LauncherLink] = {}
        self._lock = threading.RLock()
        self._bell_out, self._bell_in = socket.socketpair()
        self._has_begun = False
        self._leaves_at: float | None = None
        self._is_over = False
        self._thread_done = Latch(is_set=True)
        self._voice = Voice()
        self.quiet = self._voice.quiet
        self.sidecar = SidecarKeeper(run, self._brief, self._let_go, self._voice.say)

    # -- the sidecar ---------------------------------------------------------------------

    def ensure_sidecar(self) -> None:
        """Start the thread and the sidecar, once. Raises ProtectionError."""
        with in_flight.gate.lock, self._lock:
            self._start_thread()
            self.sidecar.ensure()
        self.ring()

    def _start_thread(self) -> None:
        self._leaves_at = None
        if self._has_begun:
            return
        self._thread_done.clear()
        try:
            # Signals are for the program's own threads.
            with signals_blocked():
                _thread.start_new_thread(self._serve, ())
        except RuntimeError as error:
            self._thread_done.set()
            raise ProtectionError(f"the run cannot be watched: {error}") from error
        self._has_begun = True

    def _brief(self) -> None:
        """Tell a new sidecar what there is to watch, and to sweep."""
        for link in list(self._links.values()):
            self.attach(link)
        for launcher_id, link in list(self._lost.items()):
            self._tell("lost", launcher_id, sorted([*link.numbers]))

    def _let_go(self) -> None:
        """The run has failed: end what was started."""
        for link in list(self._links.values()):
            self.release(link)

    def attach(self, link: LauncherLink) -> None:
        """Have the sidecar watch a launcher."""
        name = link.incarnation
        if name is not None:
            self._tell("attach", link.launcher_id, name.pid, name.start, link.policy.fields())

    def launch(self, link: LauncherLink, method: str, control_fd: int, blob: int) -> None:
        """Have the sidecar fork a launcher. If it is killed just now, the link is lost."""
        message = encode("launch", link.launcher_id, method, link.policy.fields())
        self.sidecar.tell(message, [control_fd, blob])
        self.ring()

    def _tell(self, *message: Any) -> None:
        self.sidecar.tell(encode(*message), [])
        self.ring()

    # -- launchers -----------------------------------------------------------------------

    def watch(self, link: LauncherLink) -> None:
        """Notice when this launcher ends."""
        with self._lock:
            self._links[link.launcher_id] = link
            self._start_thread()
        self.ring()

    def release(self, link: LauncherLink) -> None:
        """Dismiss a launcher that is not needed any more; wait for it if it is our child.

        One that takes longer (what it has to end is unwilling) is reaped when it leaves.
        """
        link.close()
        link.reap()

    def _launcher_ended(self, link: LauncherLink) -> None:
        with self._lock:
            if self._links.pop(link.launcher_id, None) is None:
                return
            link.is_lost = True
            link.drop()
        link.reap()
        if not link.numbers:
            link.swept.set()
            return
        who = f" {link.incarnation.pid}" if link.incarnation is not None else ""
        self._voice.say(
            "warning",
            f"launcher{who} was killed: its {len(link.numbers)} workers died with it, "
            "what they had started is being ended",
        )
        with self._lock:
            self._lost[link.launcher_id] = link
            self._tell("lost", link.launcher_id, sorted([*link.numbers]))

    # -- the thread ----------------------------------------------------------------------

    def _serve(self) -> None:
        failures = 0
        has_left = False
        try:
            while not self._is_over:
                has_left = self._may_leave()
                if has_left:
                    return
                try:
                    self._serve_once()
                    failures = 0
                except Exception:
                    # A defect of ours, or of a logging handler of the program. The watch goes on.
                    sys.excepthook(*sys.exc_info())
                    failures += 1
                    if failures >= _MOST_FAILURES:
                        self.sidecar.fail(
                            "the monitor of the run fails again and again, see stderr"
                        )
                        return
        finally:
            if not has_left:
                self._thread_done.set()

    def _serve_once(self) -> None:
        with self._lock:
            sidecar = self.sidecar.link
            links = {
                link.control.fileno(): link
                for link in self._links.values()
                if link.control.fileno() >= 0
            }
        poll = select.poll()
        bell = self._bell_out.fileno()
        poll.register(bell, select.POLLIN)
        if sidecar is not None and sidecar.control.fileno() >= 0:
            waits = select.POLLOUT if sidecar.waiting else 0
            poll.register(sidecar.control, select.POLLIN | waits)
        for fd in links:
            poll.register(fd, select.POLLIN)
        tracker = self._run.tracker.reader
        if tracker >= 0:
            poll.register(tracker, select.POLLIN)
        for fd, event in poll.poll(self._patience()):
            if fd == bell:
                self._bell_out.recv(4096)
            elif fd == tracker:
                self._run.tracker.launch()
            elif fd in links:
                self._check_link(links[fd])
            elif sidecar is not None and not self._is_over:
                if event & select.POLLOUT:
                    self.sidecar.flush()
                if event & ~select.POLLOUT:
                    self._hear(sidecar)
        self.sidecar.retry()

    def _may_leave(self) -> bool:
        """Is there nothing to watch, and was there nothing for a while?"""
        with self._lock:
            if self._links or self._lost or not self.sidecar.is_watched:
                self._leaves_at = None
                return False
            now = time.monotonic()
            if self._leaves_at is None:
                self._leaves_at = now + _LINGER
            if now < self._leaves_at:
                return False
            # In here: a thread that is started next is not taken for this one.
            self._has_begun = False
            self._thread_done.set()
            return True

    def _patience(self) -> float | None:
        """Milliseconds until something is to be done; None: only when something comes."""
        leaves_at = self._leaves_at
        if leaves_at is None:
            return self.sidecar.patience()
        return max(0.0, leaves_at - time.monotonic()) * 1000 + 1

    def _check_link(self, link: LauncherLink) -> None:
        """Hear a launcher's farewell, or the end of one that said none: it was killed."""
        try:
            data = link.control.recv(MAX_MESSAGE, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            link.numbers.clear()
        else:
            self._launcher_ended(link)

    def _hear(self, sidecar: SidecarLink) -> None:
        try:
            data = sidecar.control.recv(MAX_MESSAGE, socket.MSG_DONTWAIT)
            message = decode(data) if data else None
        except BlockingIOError:
            return
        except (OSError, WireError):
            message = None
        if message is None:
            self.sidecar.note_end(sidecar)
            return
        word, *fields = message
        if word == "armed":
            self.sidecar.note_armed(sidecar)
            if fields[2]:
                self._voice.say("warning", f"the registry does not name the sidecar: {fields[2]}")
        elif word == "launched":
            self._launched(*fields)
        elif word == "swept":
            self._swept(*fields)
        elif word == "log":
            self._voice.say(*fields)

    def _launched(self, launcher_id: int, pid: int, start: int) -> None:
        with self._lock:
            link = self._links.get(launcher_id)
        if link is None:
            return
        if pid:
            link.incarnation = Incarnation(pid, start)
        else:
            self._voice.say("error", f"the sidecar cannot fork a launcher: {os.strerror(start)}")
            self.release(link)

    def _swept(self, launcher_id: int) -> None:
        with self._lock:
            link = self._lost.pop(launcher_id, None)
        if link is not None:
            link.swept.set()

    # -- the end -------------------------------------------------------------------------

    def shut_down(self, timeout: float) -> None:
        """Close all launchers, dismiss the sidecar and wait for it, ``timeout`` seconds at most."""
        with self._lock:
            links = list(self._links.values())
        for link in links:
            self.release(link)
        self._is_over = True
        self.ring()
        self._thread_done.wait(timeout)
        self.sidecar.dismiss(timeout)
        self._voice.wait(_LAST_WORDS)
        for link in links:
            link.drop()
        self._close_bell()

    def forget(self) -> None:
        """In a forked child: close what is the owner's. No lock: its holder may not exist here."""
        self._is_over = True
        for link in [*self._links.values(), *self._lost.values()]:
            link.drop()
        self.sidecar.drop()
        self._close_bell()

    def _close_bell(self) -> None:
        self._bell_in.close()
        self._bell_out.close()

    # -- small things --------------------------------------------------------------------

    def ring(self) -> None:
        """Have the thread look again at what it watches."""
        # Full: it is ringing already. Closed: the run is over.
        with suppress(OSError):
            self._bell_in.send(b"w", socket.MSG_DONTWAIT)
