"""The owner's end of the sidecar: start it, talk to it, reap it.

The sidecar is exec'd with posix_spawn: no code of ours runs between fork and exec,
however many threads the owner has. It begins with every signal blocked.

Called by: :mod:`safepool.monitor`.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections import deque
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from safepool import in_flight
from safepool.core.policy import DEFAULT_GRACE
from safepool.core.values import dataclass, field
from safepool.core.wire import CONTROL, OWNER, REPORTERS, REPORTS, encode
from safepool.errors import ProtectionError
from safepool.host import choose, own
from safepool.launcher_link import REAP_TIMEOUT
from safepool.loop import close_all, packet_pair, send
from safepool.surroundings import credentials

if TYPE_CHECKING:
    from safepool.run import Run

_FIRST_FREE_FD = 16


@dataclass
class SidecarLink:
    """The sidecar as its owner sees it: a child, and a socket to talk to it."""

    pid: int
    control: socket.socket
    credentials: tuple[Any, ...]
    is_armed: bool = False
    waiting: deque[tuple[bytes, list[int]]] = field(default_factory=deque)

    def say(self, message: bytes, fds: list[int]) -> bool:
        """Send a message, now or when the sidecar reads again; False when it is gone."""
        self.waiting.append((message, [os.dup(fd) for fd in fds]))
        return self.flush()

    def flush(self) -> bool:
        """Send what waits, as far as it goes without blocking; False when the sidecar is gone."""
        while self.waiting:
            # Out first: whatever comes in between, nothing is sent twice.
            message, fds = self.waiting.popleft()
            try:
                send(self.control, message, fds)
            except BlockingIOError:
                self.waiting.appendleft((message, fds))
                return True
            except OSError:
                close_all(fds)
                self.drop_waiting()
                return False
            close_all(fds)
        return True

    def drop_waiting(self) -> None:
        """Give up what could not be sent; a successor is told all it needs."""
        while self.waiting:
            close_all(self.waiting.popleft()[1])

    def has_ended(self) -> bool:
        """Has it closed its end? Does not take anything out of the socket."""
        try:
            return not self.control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def reap(self) -> int | None:
        """Close the socket and wait for the end, within bounds; return the exit code."""
        self.drop_waiting()
        self.control.close()
        return own.reap_child(self.pid, REAP_TIMEOUT)


def start_sidecar(run: Run) -> SidecarLink:
    """Exec a sidecar and tell it what the run is; raises ProtectionError."""
    hello = encode(
        "hello",
        run.run_id,
        run.mark,
        run.owner.pid,
        run.owner.start,
        run.files.directory,
        DEFAULT_GRACE,
        run.began,
        *run.cgroup,
    )
    if not executable():
        raise ProtectionError(
            "the sidecar needs a Python interpreter, and sys.executable is not set; "
            "call multiprocessing.set_executable(path) first"
        )
    with in_flight.gate.lock, ExitStack() as undo:
        try:
            ours, theirs = packet_pair()
            undo.enter_context(ours)
            with theirs:
                ours.send(hello)
                pid = _spawn(run, theirs.fileno())
        except OSError as error:
            raise ProtectionError(
                f"the sidecar cannot be started with {executable()!r}: {error.strerror or error}; "
                "safepool starts nothing that it could not protect"
            ) from error
        undo.pop_all()
    return SidecarLink(pid, ours, credentials())


def executable() -> str:
    """The interpreter that sidecars are started with."""
    from multiprocessing import spawn

    return os.fsdecode(spawn.get_executable() or sys.executable or "")


def _spawn(run: Run, control: int) -> int:
    """posix_spawn the interpreter: no code of ours runs between fork and exec."""
    from multiprocessing import util

    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    program = (
        "import sys; sys.path[:] = [p for p in sys.path if p]; "
        f"{folder!r} in sys.path or sys.path.append({folder!r}); "
        f"from safepool.sidecar import main; main({choose.name()!r})"
    )
    arguments = [
        executable(),
        *util._args_from_interpreter_flags(),  # type: ignore[attr-defined]
        "-c",
        program,
        "safepool-sidecar",
        f"run={run.run_id}",
        f"owner={run.owner.pid}",
    ]
    wanted = {
        CONTROL: control,
        OWNER: run.end_fd,
        REPORTS: run.reports.fileno(),
        REPORTERS: run.reporters.fileno(),
    }
    moved: dict[int, int] = {}
    try:
        for target, fd in wanted.items():
            moved[target] = _move_up(fd)
        actions: list[Any] = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDWR, 0),
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_RDWR, 0),
        ]
        if not in_flight.is_open(2):
            # Else a pipe of the sidecar's own would become its stderr.
            actions.append((os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_RDWR, 0))
        actions += [(os.POSIX_SPAWN_DUP2, fd, target) for target, fd in moved.items()]
        return os.posix_spawn(
            arguments[0],
            arguments,
            os.environ,
            file_actions=actions,
            setpgroup=0,
            setsigmask=signal.valid_signals(),
        )
    finally:
        for fd in moved.values():
            os.close(fd)


def _move_up(fd: int) -> int:
    """Duplicate a descriptor above those that the sidecar is born with."""
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE_FD)
