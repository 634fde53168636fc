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
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from safepool.core.identity import Incarnation
from safepool.core.policy import DEFAULT_GRACE
from safepool.core.wire import MAX_MESSAGE, WireError, decode, encode
from safepool.errors import ProtectionError
from safepool.link import LauncherLink

if TYPE_CHECKING:
    from safepool.run import Run

logger = logging.getLogger("safepool")

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}

_FAST_DEATHS = 3
"""Sidecars in a row that may die before they are armed; then the run is unprotected."""

_FIRST_FREE_FD = 16


@dataclass
class Sidecar:
    """The sidecar as its owner sees it."""

    pid: int
    pidfd: int
    control: socket.socket
    is_armed: bool = False


def start_sidecar(run: Run) -> Sidecar:
    """Exec a sidecar and tell it what the run is; raises ProtectionError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    hello = encode(
        "hello",
        run.run_id,
        run.mark,
        run.owner.pid,
        run.owner.start,
        run.files.directory,
        DEFAULT_GRACE,
        run.began,
    )
    try:
        ours.send(hello)
        pid = _spawn(run, theirs.fileno())
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        ours.close()
        raise ProtectionError(
            f"the sidecar cannot be started with {_executable()!r}: {error.strerror or error}; "
            "safepool starts nothing that it could not protect"
        ) from error
    finally:
        theirs.close()
    return Sidecar(pid, pidfd, ours)


def _executable() -> str:
    from multiprocessing import spawn

    return os.fsdecode(spawn.get_executable() or sys.executable or "")


def _spawn(run: Run, control: int) -> int:
    """posix_spawn the interpreter: no code of ours runs between fork and exec."""
    from multiprocessing import util

    from safepool import sidecar

    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    program = (
        "import sys; sys.path[:] = [p for p in sys.path if p]; "
        f"{folder!r} in sys.path or sys.path.append({folder!r}); "
        "from safepool.sidecar import main; main()"
    )
    arguments = [
        _executable(),
        *util._args_from_interpreter_flags(),  # type: ignore[attr-defined]
        "-c",
        program,
        "safepool-sidecar",
        f"run={run.run_id}",
        f"owner={run.owner.pid}",
    ]
    wanted = {
        sidecar.CONTROL: control,
        sidecar.OWNER: run.pidfd,
        sidecar.REPORTS: run.reports.fileno(),
        sidecar.REPORTERS: run.reporters.fileno(),
    }
    moved: dict[int, int] = {}
    try:
        for target, fd in wanted.items():
            moved[target] = _move_up(fd)
        actions: list[Any] = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDWR, 0),
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_RDWR, 0),
        ]
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


class Monitor:
    """Watches for one run. Methods without a thread of their own are safe in threads."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._sidecar: Sidecar | None = None
        self._links: dict[int, LauncherLink] = {}
        self._lost: dict[int, LauncherLink] = {}
        self._lock = threading.RLock()
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_w, False)
        self._early_deaths = 0
        self._is_over = False
        self._thread_done = threading.Event()
        self.quiet = threading.Lock()
        self.armed = threading.Event()
        self.failure = ""

    # -- the sidecar ---------------------------------------------------------------------

    def ensure_sidecar(self) -> None:
        """Start the sidecar and the thread, once. Raises ProtectionError."""
        if self._sidecar is not None or self.failure:
            return
        sidecar = start_sidecar(self._run)
        with self._lock:
            self._sidecar = sidecar
        _thread.start_new_thread(self._serve, ())

    def fail(self, reason: str) -> None:
        """The run cannot be protected: say so, once, and let go of everything."""
        from safepool.run import tolerates_degraded

        with self._lock:
            if self.failure:
                return
            self.failure = reason
            links = list(self._links.values())
        self.armed.set()
        if tolerates_degraded():
            self._log("warning", f"{reason}; going on with degraded protection, as asked")
            return
        self._log("error", f"{reason}; ending what was started")
        for link in links:
            self.release(link)

    def attach(self, link: LauncherLink) -> None:
        """Have the sidecar watch a launcher."""
        name = link.incarnation
        if name is not None:
            self._say(encode("attach", link.launcher_id, name.pid, name.start, link.grace), [])

    def launch(self, link: LauncherLink, method: str, control_fd: int, blob: int) -> None:
        """Have the sidecar fork a launcher."""
        message = encode("launch", link.launcher_id, method, link.grace)
        if not self._say(message, [control_fd, blob]):
            self.release(link)
            raise ProtectionError("the sidecar was killed just now; try again")

    def _say(self, message: bytes, fds: list[int]) -> bool:
        with self._lock:
            if self._sidecar is None:
                return False
            try:
                socket.send_fds(self._sidecar.control, [message], fds)
            except OSError:
                return False  # it is gone, and the thread is about to see that
        return True

    # -- launchers -----------------------------------------------------------------------

    def watch(self, link: LauncherLink) -> None:
        """Notice when this launcher ends."""
        with self._lock:
            self._links[link.launcher_id] = link
        self._wake()

    def release(self, link: LauncherLink) -> None:
        """Close a launcher that is not needed any more, and reap it if it is our child."""
        with self._lock:
            self._links.pop(link.launcher_id, None)
            link.close()
        self._wake()
        reap_child(link)

    def _launcher_ended(self, link: LauncherLink) -> None:
        with self._lock:
            if self._links.pop(link.launcher_id, None) is None:
                return
            link.is_lost = True
            link.close()
        reap_child(link)
        if not link.numbers:
            link.swept.set()
            return
        who = f" {link.incarnation.pid}" if link.incarnation is not None else ""
        self._log(
            "warning",
            f"launcher{who} was killed: its {len(link.numbers)} workers died with it, "
            "what they had started is being ended",
        )
        with self._lock:
            self._lost[link.launcher_id] = link
            self._say(encode("lost", link.launcher_id, sorted(link.numbers)), [])

    # -- the thread ----------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._is_over:
                self._serve_once()
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
        poll.register(self._wake_r, select.POLLIN)
        if sidecar is not None:
            poll.register(sidecar.control, select.POLLIN)
        for fd in links:
            poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll():
            if fd == self._wake_r:
                os.read(fd, 4096)
            elif fd in links:
                self._check_link(links[fd])
            elif sidecar is not None and not self._is_over:
                self._hear(sidecar)

    def _check_link(self, link: LauncherLink) -> None:
        """A launcher never speaks on its control socket: what is readable is its end."""
        try:
            data = link.control.recv(1, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._launcher_ended(link)

    def _hear(self, sidecar: Sidecar) -> None:
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
            sidecar.is_armed = True
            self._early_deaths = 0
            self.armed.set()
            if fields[2]:
                self._log("warning", f"the registry does not name the sidecar: {fields[2]}")
        elif word == "launched":
            self._launched(*fields)
        elif word == "swept":
            self._swept(*fields)
        elif word == "log":
            self._log(*fields)

    def _launched(self, launcher_id: int, pid: int, start: int) -> None:
        with self._lock:
            link = self._links.get(launcher_id)
        if link is None:
            return
        if pid:
            link.incarnation = Incarnation(pid, start)
        else:
            self._log("error", f"the sidecar cannot fork a launcher: {os.strerror(start)}")
            self.release(link)

    def _swept(self, launcher_id: int) -> None:
        with self._lock:
            link = self._lost.pop(launcher_id, None)
        if link is not None:
            link.swept.set()

    def _sidecar_ended(self, sidecar: Sidecar) -> None:
        """Reap it and put a new one in its place, unless that is hopeless."""
        code = _reap_sidecar(sidecar)
        how = f"signal {-code}" if code is not None and code < 0 else f"exit status {code}"
        with self._lock:
            self._sidecar = None
            if self._is_over:
                return
        if not sidecar.is_armed:
            self._early_deaths += 1
            if not self.armed.is_set() or self._early_deaths >= _FAST_DEATHS:
                self.fail(f"the sidecar ended before it could watch: {how}, {_executable()}")
                return
        else:
            self._log("warning", f"sidecar {sidecar.pid} ended ({how}); a new one takes its place")
        try:
            replacement = start_sidecar(self._run)
        except ProtectionError as error:
            self.fail(str(error))
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
        self._wake()
        if sidecar is None:
            self._close_pipes()
            return
        self._thread_done.wait(timeout)
        self._dismiss(sidecar, timeout)
        self._close_pipes()

    def _dismiss(self, sidecar: Sidecar, timeout: float) -> None:
        """Say goodbye, log its last words, reap it; if it takes too long it ends by itself."""
        deadline = time.monotonic() + timeout
        with suppress(OSError):
            socket.send_fds(sidecar.control, [encode("retire")], [])
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
                self._log(*fields)
        _reap_sidecar(sidecar)

    def forget(self) -> None:
        """In a forked child: close what is the owner's. No lock: its holder may not exist here."""
        self._is_over = True
        for link in [*self._links.values(), *self._lost.values()]:
            link.close()
        if self._sidecar is not None:
            self._sidecar.control.close()
            os.close(self._sidecar.pidfd)
        self._close_pipes()

    def _close_pipes(self) -> None:
        os.close(self._wake_r)
        os.close(self._wake_w)

    # -- small things --------------------------------------------------------------------

    def _wake(self) -> None:
        with suppress(BlockingIOError):
            os.write(self._wake_w, b"w")

    def _log(self, level: str, text: str) -> None:
        with self.quiet:
            logger.log(_LEVELS.get(level, logging.WARNING), "%s", text)


_REAP_TIMEOUT = 2.0


def reap_child(link: LauncherLink) -> None:
    """Reap a launcher that is the owner's child and about to leave; bounded."""
    if link.child_pid is None:
        return
    pid, link.child_pid = link.child_pid, None
    _reap(pid, _REAP_TIMEOUT)


def _reap_sidecar(sidecar: Sidecar) -> int | None:
    sidecar.control.close()
    code = _reap(sidecar.pid, _REAP_TIMEOUT)
    os.close(sidecar.pidfd)
    return code


def _reap(pid: int, timeout: float) -> int | None:
    """Wait for a child of ours; None when it does not end in time or somebody else reaped it."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return None
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.poll(timeout * 1000)
        reaped, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    finally:
        os.close(pidfd)
    return os.waitstatus_to_exitcode(status) if reaped else None
