"""The owner's watch over its sidecar and launchers: one thread, one poll.

It hears what the sidecar says and logs it, sees a launcher's end and asks for the
sweep of what that left, and starts a new sidecar when the old one was killed.

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
from typing import TYPE_CHECKING

from safepool.core.identity import Incarnation
from safepool.core.wire import MAX_MESSAGE, WireError, decode, encode
from safepool.errors import ProtectionError
from safepool.launcher_link import LauncherLink
from safepool.loop import signals_blocked
from safepool.sidecar_link import SidecarLink, executable, start_sidecar
from safepool.surroundings import credentials
from safepool.voice import Voice

if TYPE_CHECKING:
    from safepool.run import Run

PROTECTION_VARIABLE = "SAFEPOOL_PROTECTION"
"""Set to "warn", a sidecar that cannot start is a warning instead of an error."""

_FAST_DEATHS = 4
"""Sidecars in a row that may be killed before they are armed; then the run is unprotected.
One that ends by itself is broken, and so would the next be."""


def tolerates_degraded() -> bool:
    """Did the user ask for a warning instead of an error?"""
    return os.environ.get(PROTECTION_VARIABLE, "require") == "warn"


_RETRY_AFTER = 0.2
_RETRY_FOR = 20.0
"""Seconds between attempts, and in all, to replace a sidecar when the system refuses it."""

_MOST_FAILURES = 10

_LAST_WORDS = 1.0
"""Seconds that the program's exit waits for a logging handler."""


class Monitor:
    """Watches for one run. Methods without a thread of their own are safe in threads."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._sidecar: SidecarLink | None = None
        self._links: dict[int, LauncherLink] = {}
        self._lost: dict[int, LauncherLink] = {}
        self._lock = threading.RLock()
        self._bell_out, self._bell_in = socket.socketpair()
        self._early_deaths = 0
        self._has_begun = False
        self._was_armed = False
        self._is_over = False
        self._thread_done = threading.Event()
        self._thread_done.set()
        self._retry_at: float | None = None
        self._retry_until = 0.0
        self._voice = Voice()
        self.quiet = self._voice.quiet
        self.armed = threading.Event()
        self.failure = ""

    # -- the sidecar ---------------------------------------------------------------------

    def ensure_sidecar(self) -> None:
        """Start the sidecar and the thread, once. Raises ProtectionError."""
        with self._lock:
            if not self._has_begun:
                self._start_thread()
            if self._sidecar is not None or self._retry_at is not None or self.failure:
                return
            try:
                self._sidecar = start_sidecar(self._run)
            except ProtectionError as error:
                if not tolerates_degraded():
                    raise
                self.fail(str(error))
            self.ring()

    def _start_thread(self) -> None:
        self._thread_done.clear()
        try:
            # Signals are for the program's own threads.
            with signals_blocked():
                _thread.start_new_thread(self._serve, ())
        except RuntimeError as error:
            self._thread_done.set()
            raise ProtectionError(f"the run cannot be watched: {error}") from error
        self._has_begun = True

    @property
    def is_watched(self) -> bool:
        """Is there a sidecar that has said that it watches?"""
        return self._sidecar is not None and self._sidecar.is_armed

    def fail(self, reason: str) -> None:
        """The run cannot be protected: say so, once, and let go of everything."""
        with self._lock:
            if self.failure:
                return
            self.failure = reason
            links = list(self._links.values())
        self.armed.set()
        if tolerates_degraded():
            self._voice.say("warning", f"{reason}; going on with degraded protection, as asked")
            return
        self._voice.say("error", f"{reason}; ending what was started")
        for link in links:
            self.release(link)

    def check_sidecar(self) -> None:
        """Before something depends on the sidecar: is it alive, and still of our user?

        If not, ``armed`` is off until its successor is there.
        """
        with self._lock:
            sidecar = self._sidecar
            if sidecar is None:
                return
            if sidecar.credentials != credentials():
                # The process has changed its user: what the old sidecar starts has the old one.
                sidecar.say(encode("yield"), [])
            elif not sidecar.has_ended():
                return
            self.armed.clear()
            self.ring()

    def attach(self, link: LauncherLink) -> None:
        """Have the sidecar watch a launcher."""
        name = link.incarnation
        if name is not None:
            self._say(encode("attach", link.launcher_id, name.pid, name.start, link.grace), [])

    def launch(self, link: LauncherLink, method: str, control_fd: int, blob: int) -> None:
        """Have the sidecar fork a launcher. If it is killed just now, the link is lost."""
        message = encode("launch", link.launcher_id, method, link.grace)
        self._say(message, [control_fd, blob])

    def _say(self, message: bytes, fds: list[int]) -> None:
        """Tell the sidecar; if it is gone its successor is told what it needs."""
        with self._lock:
            if self._sidecar is not None:
                self._sidecar.say(message, fds)
                if self._sidecar.waiting:
                    self.ring()

    # -- launchers -----------------------------------------------------------------------

    def watch(self, link: LauncherLink) -> None:
        """Notice when this launcher ends."""
        with self._lock:
            self._links[link.launcher_id] = link
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
            self._say(encode("lost", link.launcher_id, sorted([*link.numbers])), [])

    # -- the thread ----------------------------------------------------------------------

    def _serve(self) -> None:
        failures = 0
        try:
            while not self._is_over:
                try:
                    self._serve_once()
                    failures = 0
                except Exception:
                    # A defect of ours, or of a logging handler of the program. The watch goes on.
                    sys.excepthook(*sys.exc_info())
                    failures += 1
                    if failures >= _MOST_FAILURES:
                        self.fail("the monitor of the run fails again and again, see stderr")
                        return
        finally:
            self._thread_done.set()

    def _serve_once(self) -> None:
        with self._lock:
            sidecar = self._sidecar
            links = {
                link.control.fileno(): link
                for link in self._links.values()
                if link.control.fileno() >= 0
            }
        poll = select.poll()
        bell = self._bell_out.fileno()
        poll.register(bell, select.POLLIN)
        if sidecar is not None:
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
                    with self._lock:
                        sidecar.flush()
                if event & ~select.POLLOUT:
                    self._hear(sidecar)

        if self._retry_at is not None and time.monotonic() >= self._retry_at:
            self._replace_sidecar()

    def _patience(self) -> float | None:
        """Milliseconds until a sidecar is to be tried for again; None: for ever."""
        if self._retry_at is None:
            return None
        return max(0.0, self._retry_at - time.monotonic()) * 1000

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
            self._sidecar_ended(sidecar)
            return
        word, *fields = message
        if word == "armed":
            sidecar.is_armed = self._was_armed = True
            self._early_deaths = 0
            self.armed.set()
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

    def _sidecar_ended(self, sidecar: SidecarLink) -> None:
        """Reap it and put a new one in its place, unless that is hopeless."""
        with self._lock:
            if self._is_over:
                return
            self._sidecar = None
            self.armed.clear()
        code = sidecar.reap()
        how = f"signal {-code}" if code is not None and code < 0 else f"exit status {code}"
        if not sidecar.is_armed:
            self._early_deaths += 1
            was_killed = code is None or code < 0
            if self._early_deaths >= _FAST_DEATHS or not (was_killed or self._was_armed):
                self.fail(
                    f"the sidecar ended before it could watch ({how}); it was started with "
                    f"{executable()!r} and wrote to stderr what it knows"
                )
                return
        self._voice.say(
            "warning", f"sidecar {sidecar.pid} ended ({how}); a new one takes its place"
        )
        self._retry_until = time.monotonic() + _RETRY_FOR
        self._replace_sidecar()

    def _replace_sidecar(self) -> None:
        """Start a new sidecar and tell it all; where that fails for now, try again soon."""
        self._retry_at = None
        with self._lock:
            if self._sidecar is not None:
                return  # whoever needed one meanwhile has started it
        try:
            replacement = start_sidecar(self._run)
        except ProtectionError as error:
            now = time.monotonic()
            if now >= self._retry_until:
                self.fail(str(error))
            else:
                self._retry_at = now + _RETRY_AFTER
            return
        with self._lock:
            self._sidecar = replacement
            for link in self._links.values():
                self.attach(link)
            for launcher_id, link in self._lost.items():
                self._say(encode("lost", launcher_id, sorted(link.numbers)), [])

    # -- the end -------------------------------------------------------------------------

    def shut_down(self, timeout: float) -> None:
        """Close all launchers, dismiss the sidecar and wait for it, ``timeout`` seconds at most."""
        with self._lock:
            links = list(self._links.values())
        for link in links:
            self.release(link)
        with self._lock:
            self._is_over = True
            sidecar, self._sidecar = self._sidecar, None
        self.ring()
        if self._has_begun:
            self._thread_done.wait(timeout)
        if sidecar is not None:
            self._dismiss(sidecar, timeout)
        for link in links:
            link.drop()
        self._close_bell()

    def _dismiss(self, sidecar: SidecarLink, timeout: float) -> None:
        """Say goodbye, log its last words, reap it; if it takes too long it ends by itself."""
        deadline = time.monotonic() + timeout
        if not sidecar.say(encode("retire"), []):
            sidecar.reap()
            return
        poll = select.poll()
        poll.register(sidecar.control, select.POLLIN)
        while poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            try:
                data = sidecar.control.recv(MAX_MESSAGE, socket.MSG_DONTWAIT)
            except OSError:
                break
            if not data:
                break
            word, *fields = decode(data)
            if word == "log":
                self._voice.say(*fields)
        sidecar.reap()
        self._voice.wait(_LAST_WORDS)

    def forget(self) -> None:
        """In a forked child: close what is the owner's. No lock: its holder may not exist here."""
        self._is_over = True
        for link in [*self._links.values(), *self._lost.values()]:
            link.drop()
        if self._sidecar is not None:
            self._sidecar.control.close()
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
