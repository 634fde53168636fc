"""How a launcher and the sidecar wait: one poll, deaf to all signals but SIGCHLD.

Both are single-threaded, start processes by fork, and must go on whatever a
terminal or a stranger sends them. So every signal that can be blocked is blocked;
SIGCHLD alone gets through, as a byte in the wake-up pipe. Nothing is changed that a
worker could not get back: :meth:`ChildLoop.leave_in_child` restores handler, mask
and wake-up descriptor in a freshly forked child.

Called by: the launcher and the sidecar, once each.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import NoReturn

from safepool.core.identity import Incarnation
from safepool.core.wire import MAX_DESCRIPTORS, MAX_MESSAGE
from safepool.errors import ProtectionError
from safepool.host.base import Host

_MAX_WAIT = 3600.0
_NO_SUCH_SOCKETS = frozenset({errno.EPROTONOSUPPORT, errno.EPROTOTYPE, errno.EOPNOTSUPP})


def _nothing(signum: int, frame: FrameType | None) -> None:
    """Let SIGCHLD reach the wake-up pipe; a handler must exist for that."""


class ChildLoop:
    """Waits for descriptors, deadlines and children; made in the process that waits."""

    def __init__(self, worker_mask: Iterable[int] | None = None) -> None:
        """Block signals and arm SIGCHLD.

        ``worker_mask`` is the signal mask that children get back; None: the one in
        force now. Needs the main thread (after fork, the only thread is that).
        """
        everything = set(signal.valid_signals())
        before = signal.pthread_sigmask(signal.SIG_BLOCK, everything)
        self._worker_mask = set(before if worker_mask is None else worker_mask)
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self._old_handler = signal.signal(signal.SIGCHLD, _nothing)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._listening = everything - {signal.SIGCHLD}
        signal.pthread_sigmask(signal.SIG_SETMASK, self._listening)

    def wait(self, fds: Iterable[int], until: float | None) -> set[int]:
        """Return the descriptors that are ready, at the latest at ``until`` (monotonic)."""
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        for fd in fds:
            poll.register(fd, select.POLLIN)
        timeout = _MAX_WAIT if until is None else min(until - time.monotonic(), _MAX_WAIT)
        ready = {fd for fd, _ in poll.poll(max(0.0, timeout) * 1000)}
        if self._reader in ready:
            ready.discard(self._reader)
            with contextlib.suppress(BlockingIOError):
                while os.read(self._reader, 4096):
                    pass
        return ready

    def fork(self) -> int:
        """Fork with every signal blocked in the child until it has left the loop."""
        signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
        pid = os.fork()
        if pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._listening)
        return pid

    def discard_pending(self, number: int) -> None:
        """Forget a blocked signal that has come; until then /proc shows it as pending."""
        while signal.sigtimedwait(self._listening & {number}, 0) is not None:
            pass

    def leave_in_child(self) -> None:
        """Give a forked child back the handler, wake-up descriptor and mask of before."""
        signal.set_wakeup_fd(-1)
        old = self._old_handler
        signal.signal(signal.SIGCHLD, signal.SIG_DFL if old is None else old)
        os.close(self._reader)
        os.close(self._writer)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._worker_mask)


def packet_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets that keep packets apart and tell when the other end is gone.

    Raises ProtectionError where the system has none: a stream would cut messages in pieces,
    datagrams do not tell of an end. OSError when no descriptor is free.
    """
    try:
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as error:
        if error.errno not in _NO_SUCH_SOCKETS:
            raise
        raise ProtectionError(
            f"{sys.platform} has no packet sockets (AF_UNIX, SOCK_SEQPACKET), over which owner, "
            "sidecar and launchers speak; safepool cannot run here so far"
        ) from error


def send(sock: socket.socket, data: bytes, fds: Sequence[int]) -> None:
    """Send one packet with descriptors if that can be done at once, else BlockingIOError.

    Not ``socket.send_fds``: like its sister below it ignores its flags.
    """
    rights = array.array("i", fds)
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if fds else []
    # Where a flag is missing, Python's ignored SIGPIPE does the same.
    quiet = getattr(socket, "MSG_NOSIGNAL", 0)
    sock.sendmsg([data], ancillary, socket.MSG_DONTWAIT | quiet)


def receive(sock: socket.socket) -> tuple[bytes, list[int]] | None:
    """Read one packet and its descriptors, close-on-exec; None when there is none now.

    No data means that the other end is gone. Not ``socket.recv_fds``: up to
    CPython 3.13 it ignores its flags, so it would block, and hand every
    descriptor to whatever is exec'd next.
    """
    numbers = array.array("i")
    room = socket.CMSG_LEN(MAX_DESCRIPTORS * numbers.itemsize)
    closing = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
    flags = socket.MSG_DONTWAIT | closing
    try:
        data, ancillary, _, _ = sock.recvmsg(MAX_MESSAGE, room, flags)
    except BlockingIOError:
        return None
    except OSError:
        return b"", []
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
    for fd in numbers if not closing else ():
        os.set_inheritable(fd, False)
    return data, list(numbers)


def name_of(host: Host, pid: int) -> Incarnation:
    """The incarnation of a child just forked; without start time if no descriptor is free.

    Its tag still tells whose it is.
    """
    try:
        return host.incarnation(pid) or Incarnation(pid, 0)
    except OSError:
        return Incarnation(pid, 0)


def let_go_of_stdio() -> None:
    """Put /dev/null in the place of standard input and output.

    Whoever waits for the end of such a pipe must not wait for a process that does not use it.
    """
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in (0, 1):
        os.dup2(null, number)
    os.close(null)


def close_all(fds: Iterable[int]) -> None:
    """Close raw descriptors."""
    for fd in fds:
        os.close(fd)


@contextlib.contextmanager
def signals_blocked() -> Iterator[set[int]]:
    """Start threads and forks in here that must not take the program's signals.

    Yields the mask of before, which is back afterwards.
    """
    # Each of these calls runs Python's pending handlers, which may raise, after it has
    # changed the mask. So the old one is known before, and set back last.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        yield set(before)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def is_dead(pidfd: int) -> bool:
    """Tell whether the process of a pidfd has ended."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def has_hung_up(sock: socket.socket) -> bool:
    """Has the other end closed the socket altogether, and not only ended its own sending?"""
    poll = select.poll()
    poll.register(sock, 0)
    return bool(poll.poll(0))


def reap() -> list[tuple[int, int]]:
    """Reap every dead child; return (pid, exit code) of each, negative for a signal."""
    dead: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return dead
        if pid == 0:
            return dead
        dead.append((pid, os.waitstatus_to_exitcode(status)))


def end_with(main: Callable[[], object]) -> NoReturn:
    """Run ``main`` and end this process at once, 0 for a return, 1 for an error.

    A forked process must never go on in its parent's code. An error is a defect of
    ours: it is written to stderr, past the locks of Python's own file objects.
    """
    code = 1
    try:
        main()
        code = 0
    except BaseException:
        with contextlib.suppress(OSError):
            os.write(2, traceback.format_exc().encode("utf-8", "backslashreplace"))
    finally:
        os._exit(code)
