"""Keeps a sidecar in place: started at first need, replaced when it is killed.

A sidecar that was killed gets a successor at once; where the system refuses one (no
descriptor, no process) it is tried again for a while. One that ends by itself before it
was armed is broken, and so would the next be: then the run has failed.

Safe in threads. Whoever starts a sidecar takes the gate of the descriptors before any lock of
a run: a thread that hands one over to the sidecar holds the gate and comes here with it.

Called by: the monitor, in its thread and in those of the program.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from safepool import in_flight
from safepool.core.wire import MAX_MESSAGE, decode, encode
from safepool.errors import ProtectionError
from safepool.latch import Latch
from safepool.sidecar_link import SidecarLink, executable, start_sidecar
from safepool.surroundings import credentials

if TYPE_CHECKING:
    from safepool.run import Run

PROTECTION_VARIABLE = "SAFEPOOL_PROTECTION"
"""Set to "warn", a sidecar that cannot start is a warning instead of an error."""

_FAST_DEATHS = 4
"""Sidecars in a row that may be killed before they are armed; then the run has failed."""

_RETRY_AFTER = 0.2
_RETRY_FOR = 20.0
"""Seconds between attempts, and in all, to replace a sidecar when the system refuses it."""


def tolerates_degraded() -> bool:
    """Did the user ask for a warning instead of an error?"""
    return os.environ.get(PROTECTION_VARIABLE, "require") == "warn"


class SidecarKeeper:
    """``renewed`` is called for each new sidecar, to tell it what there is to watch;
    ``failed`` once, with the reason; ``say`` takes (level, text) for the log.

    ``armed`` is set while there is a sidecar that has said that it watches.
    """

    def __init__(
        self,
        run: Run,
        renewed: Callable[[], None],
        failed: Callable[[], None],
        say: Callable[[str, str], None],
    ) -> None:
        self._run = run
        self._renewed = renewed
        self._failed = failed
        self._say = say
        self._lock = threading.RLock()
        self._early_deaths = 0
        self._was_armed = False
        self._is_over = False
        self._retry_at: float | None = None
        self._retry_until = 0.0
        self.link: SidecarLink | None = None
        self.armed = Latch()
        self.failure = ""

    @property
    def is_watched(self) -> bool:
        """Is there a sidecar that has said that it watches?"""
        return self.link is not None and self.link.is_armed

    def ensure(self) -> None:
        """Start a sidecar if there is none. Raises ProtectionError; the next call tries again."""
        with in_flight.gate.lock, self._lock:
            if self.link is not None or self._retry_at is not None or self.failure:
                return
            try:
                self.link = start_sidecar(self._run)
            except ProtectionError as error:
                if not tolerates_degraded():
                    raise
                self.fail(str(error))
            else:
                self._renewed()

    def check(self) -> None:
        """Before something depends on the sidecar: is it alive, and still of our user?

        If not, ``armed`` is off until its successor is there.
        """
        with self._lock:
            if self.link is None:
                return
            if self.link.credentials != credentials():
                # The process has changed its user: what the old sidecar starts has the old one.
                self.link.say(encode("yield"), [])
            elif not self.link.has_ended():
                return
            self.armed.clear()

    def tell(self, message: bytes, fds: list[int]) -> None:
        """Send a message; if the sidecar is gone its successor is told what it needs."""
        with self._lock:
            if self.link is not None:
                self.link.say(message, fds)

    def flush(self) -> None:
        """Send what waited for the sidecar to read."""
        with self._lock:
            if self.link is not None:
                self.link.flush()

    def note_armed(self, link: SidecarLink) -> None:
        """It has said that it watches."""
        link.is_armed = self._was_armed = True
        self._early_deaths = 0
        self.armed.set()

    def note_end(self, link: SidecarLink) -> None:
        """Reap it and put a new one in its place, unless that is hopeless."""
        with self._lock:
            if self._is_over or self.link is not link:
                return
            self.link = None
            self.armed.clear()
        code = link.reap()
        how = f"signal {-code}" if code is not None and code < 0 else f"exit status {code}"
        if not link.is_armed:
            self._early_deaths += 1
            was_killed = code is None or code < 0
            if self._early_deaths >= _FAST_DEATHS or not (was_killed or self._was_armed):
                self.fail(
                    f"the sidecar ended before it could watch ({how}); it was started with "
                    f"{executable()!r} and wrote to stderr what it knows"
                )
                return
        self._say("warning", f"sidecar {link.pid} ended ({how}); a new one takes its place")
        self._retry_until = time.monotonic() + _RETRY_FOR
        self._replace()

    def patience(self) -> float | None:
        """Milliseconds until a sidecar is to be tried for again; None: for ever."""
        if self._retry_at is None:
            return None
        return max(0.0, self._retry_at - time.monotonic()) * 1000

    def retry(self) -> None:
        """Try again, if it is time."""
        if self._retry_at is not None and time.monotonic() >= self._retry_at:
            self._replace()

    def fail(self, reason: str) -> None:
        """The run cannot be protected: say so, once, and let go of everything."""
        with self._lock:
            if self.failure:
                return
            self.failure = reason
        self.armed.set()
        if tolerates_degraded():
            self._say("warning", f"{reason}; going on with degraded protection, as asked")
        else:
            self._say("error", f"{reason}; ending what was started")
            self._failed()

    def dismiss(self, timeout: float) -> None:
        """Say goodbye, log its last words, reap it; if it takes too long it ends by itself."""
        with self._lock:
            self._is_over = True
            link, self.link = self.link, None
        if link is None:
            return
        if link.say(encode("retire"), []):
            self._hear_last_words(link, time.monotonic() + timeout)
        link.reap()

    def drop(self) -> None:
        """In a forked child: close our end, and say nothing."""
        self._is_over = True
        if self.link is not None:
            self.link.control.close()

    def _replace(self) -> None:
        """Start a new sidecar; where that fails for now, try again soon."""
        with in_flight.gate.lock, self._lock:
            self._retry_at = None
            if self.link is not None or self._is_over:
                return  # whoever needed one meanwhile has started it
            try:
                self.link = start_sidecar(self._run)
            except ProtectionError as error:
                now = time.monotonic()
                if now < self._retry_until:
                    self._retry_at = now + _RETRY_AFTER
                    return
                reason = str(error)
            else:
                self._renewed()
                return
        self.fail(reason)

    def _hear_last_words(self, link: SidecarLink, deadline: float) -> None:
        poll = select.poll()
        poll.register(link.control, select.POLLIN)
        while poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            try:
                data = link.control.recv(MAX_MESSAGE, socket.MSG_DONTWAIT)
            except OSError:
                return
            if not data:
                return
            word, *fields = decode(data)
            if word == "log":
                self._say(*fields)
