"""The owner's end of a launcher: start a worker, end one, close.

Each call is one packet; a worker's answers come through a pipe of its own, so no
thread of the owner stands between a worker and whoever waits for it. Safe in
threads: a packet goes out whole, and nothing else is shared.

Called by: :mod:`safepool.run`, which makes links; :mod:`safepool.process`, which uses them.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from contextlib import suppress

from safepool import in_flight, surroundings
from safepool.core.identity import Incarnation
from safepool.core.policy import EndPolicy
from safepool.core.values import dataclass
from safepool.core.wire import (
    MAX_DESCRIPTORS,
    STATUS_SIZE,
    Failed,
    Started,
    Status,
    decode_status,
    encode,
)
from safepool.errors import ProtectionError
from safepool.host import own
from safepool.latch import Latch

START_TIMEOUT = 300.0
"""Seconds that a start may take: a forkserver launcher imports the user's main module first."""

REAP_TIMEOUT = 2.0
"""Seconds that the owner waits for a helper that is about to leave."""

_SEND_TIMEOUT = 30.0
_LONGEST_NAME = 200


class LauncherLostError(ProtectionError):
    """The launcher has died; a new one is needed."""


@dataclass(frozen=True)
class StartedWorker:
    """A worker that exists: its name for ever, and the pipe that tells of its end."""

    number: int
    incarnation: Incarnation
    status_fd: int


class LauncherLink:
    """One launcher, seen from the owner.

    ``child_pid`` is set when the launcher is a child of the owner (fork).
    ``swept`` is set when what a killed launcher left has been ended.
    """

    def __init__(
        self, launcher_id: int, control: socket.socket, policy: EndPolicy, child_pid: int | None
    ) -> None:
        control.settimeout(_SEND_TIMEOUT)
        self.launcher_id = launcher_id
        self.control = control
        self.policy = policy
        self.child_pid = child_pid
        self.incarnation: Incarnation | None = None
        self.credentials = surroundings.credentials()
        self.numbers: set[int] = set()
        self.swept = Latch()
        self._reaping = threading.Lock()
        self.is_closed = False
        self.is_lost = False

    def is_usable(self) -> bool:
        """Is it there, with the user and the groups that this process has now?"""
        gone = self.is_lost or self.is_closed
        return not gone and self.credentials == surroundings.credentials()

    def start(
        self,
        number: int,
        name: str,
        *,
        stdio: bool = False,
        blob: int | None = None,
        tracker: int | None = None,
        inherited: tuple[int, ...] = (),
    ) -> StartedWorker:
        """Start a worker; the caller keeps its descriptors.

        Raises LauncherLostError when the launcher is gone, OSError when the system
        refused the fork, ValueError for too many descriptors.
        """
        numbers = [n for n in (0, 1, 2) if in_flight.is_open(n)] if stdio else []
        optional = [fd for fd in (blob, tracker) if fd is not None]
        if len(inherited) + 6 > MAX_DESCRIPTORS:
            raise ValueError(
                f"{len(inherited)} descriptors in the arguments of one process; "
                f"at most {MAX_DESCRIPTORS - 6} can be handed over"
            )
        has = blob is not None, tracker is not None, len(inherited)
        # Before it exists: a short one's launcher may say farewell before we have read on.
        self.numbers.add(number)
        message = encode("start", number, name[:_LONGEST_NAME], numbers, *has)
        with in_flight.gate.lock:
            reader, writer = os.pipe()
            try:
                self._send(message, [writer, *numbers, *optional, *inherited])
            except BaseException:
                self.numbers.discard(number)
                os.close(reader)
                raise
            finally:
                os.close(writer)
        try:
            status = read_status(reader, START_TIMEOUT)
            if isinstance(status, Failed):
                self.numbers.discard(number)
                reason = os.strerror(status.number)
                raise OSError(status.number, f"a worker cannot be started: {reason}")
            if not isinstance(status, Started):
                raise LauncherLostError(
                    "the launcher died while it started a worker; see the log for what killed it"
                )
        except BaseException:
            # Ctrl-C, say: nobody will know of the worker, so nobody needs it.
            os.close(reader)
            with suppress(OSError, LauncherLostError):
                self.end(number, 0.0)
            raise
        return StartedWorker(number, Incarnation(status.pid, status.start), reader)

    def end(self, number: int, grace: float) -> None:
        """Have a worker's whole tree ended; one that has ended already needs nothing."""
        try:
            self._send(encode("end", number, grace), [])
        except LauncherLostError:
            return  # its workers died with it, and their strays are swept

    def note_retiring(self, number: int) -> None:
        """Say that this worker is about to be told to leave: what it leaves may be spared."""
        with suppress(OSError, LauncherLostError):  # then nothing of it is spared
            self._send(encode("retiring", number), [])

    def forget_signal(self, number: int) -> None:
        """Have the launcher forget a signal that it got, and that is pending there since."""
        with suppress(LauncherLostError):
            self._send(encode("flush", number), [])

    def close(self) -> None:
        """Let the launcher end all that is left, and leave. May be called again.

        The socket stays open, so that the monitor sees when it has left.
        """
        self.is_closed = True
        with suppress(OSError):
            self.control.shutdown(socket.SHUT_WR)

    def drop(self) -> None:
        """Close this process's end and say nothing: other copies of it stay as they are."""
        self.is_closed = True
        self.control.close()

    def reap(self) -> None:
        """Reap a launcher that is the owner's child and about to leave; bounded."""
        with self._reaping:
            if (
                self.child_pid is not None
                and own.reap_child(self.child_pid, REAP_TIMEOUT) is not None
            ):
                self.child_pid = None

    def _send(self, message: bytes, fds: list[int]) -> None:
        try:
            socket.send_fds(self.control, [message], fds)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise LauncherLostError(f"the launcher is gone: {error}") from error
        except OSError as error:
            if self.is_closed:
                raise LauncherLostError("the launcher was closed") from error
            raise


def read_status(fd: int, timeout: float | None) -> Status | None:
    """Read one status record; None when none came in ``timeout`` seconds, or never will."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    if not poll.poll(None if timeout is None else max(0.0, timeout) * 1000):
        return None
    data = os.read(fd, STATUS_SIZE)
    return decode_status(data) if data else None
