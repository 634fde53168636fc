"""What a process asks of its system about itself and its own children, under either backend.

With the linux backend that is prctl(2), pidfds and memory files; with the portable one
what any Unix has, or nothing where only the kernel could do it:

* ``keeps_orphans`` says whether orphans arrive at a subreaper and workers die with their
  launcher. Where not, safepool looks and remembers (:mod:`safepool.census`) and
  workers hold a lifeline (:func:`safepool.bootstrap.hold_lifeline`).
* ``OwnEnd`` is what tells others of this process's end.

Called by: all that start processes or are started.
"""

from __future__ import annotations

import os
import select
import signal
import time

from safepool.host import choose, prctl

_SHORTEST_PAUSE = 0.001
_LONGEST_PAUSE = 0.01


def prepare() -> None:
    """Load what is needed after a fork: a fork of a threaded owner had better not import."""
    choose.host()
    if not choose.is_portable():
        prctl.load()


def keeps_orphans() -> bool:
    """Does the kernel tie processes together: subreaper, parent death signal, tag?"""
    return not choose.is_portable()


def adopt_orphans() -> None:
    """Become the parent of all orphans below, where the kernel can do that."""
    if keeps_orphans():
        prctl.set_child_subreaper()


def follow_parent(sig: int = signal.SIGKILL) -> None:
    """Get ``sig`` when the parent ends, 0 for none, where the kernel can do that.

    Verify the parent afterwards: one that is dead already sends nothing.
    """
    if keeps_orphans():
        prctl.set_parent_death_signal(sig)


def set_name(name: str) -> None:
    """Be shown under ``name`` by ps, where the kernel can do that."""
    if keeps_orphans():
        prctl.set_name(name)


def ticks() -> int:
    """Now, in the unit of process start times; see the hosts for what they count from."""
    has_boot_clock = hasattr(time, "CLOCK_BOOTTIME")
    now = time.clock_gettime(time.CLOCK_BOOTTIME) if has_boot_clock else time.time()
    return int(now * os.sysconf("SC_CLK_TCK"))


# -- the end of this process, and of children ------------------------------------------------


class OwnEnd:
    """``fd`` polls as readable in every process that has a copy once this process is gone.

    A pidfd; or the reading end of a pipe whose other end this process alone keeps: a fork
    lets go of it, an exec closes it. ``close`` it in the process that made it.
    """

    def __init__(self) -> None:
        self._kept = -1
        if choose.is_portable():
            self.fd, self._kept = os.pipe()
            _ends.add(self)
        else:
            self.fd = os.pidfd_open(os.getpid())

    def close(self) -> None:
        """Close both descriptors; in a fork, the copies of them. Twice does nothing."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
        self.let_go()

    def let_go(self) -> None:
        """In a fork: the end of this process is not that of the one that it was forked from."""
        _ends.discard(self)
        kept, self._kept = self._kept, -1
        if kept >= 0:
            os.close(kept)


_ends: set[OwnEnd] = set()


def _let_go_in_child() -> None:
    for end in list(_ends):
        end.let_go()


os.register_at_fork(after_in_child=_let_go_in_child)


def reap_child(pid: int, timeout: float) -> int | None:
    """Wait for a child of ours and return its exit code; None when it does not end in time.

    One that somebody else has reaped, or the system (SIGCHLD ignored), counts as killed.
    """
    wait = _look_again if choose.is_portable() else _wait_for_pidfd
    try:
        return wait(pid, timeout)
    except ChildProcessError:
        return -signal.SIGKILL


def _wait_for_pidfd(pid: int, timeout: float) -> int | None:
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        # Reaped by somebody else, or no descriptor is free: look without waiting.
        return _reaped(pid)
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.poll(timeout * 1000)
    finally:
        os.close(pidfd)
    return _reaped(pid)


def _look_again(pid: int, timeout: float) -> int | None:
    until, pause = time.monotonic() + timeout, _SHORTEST_PAUSE
    while True:
        code, left = _reaped(pid), until - time.monotonic()
        if code is not None or left <= 0:
            return code
        select.select([], [], [], min(pause, left))
        pause = min(2 * pause, _LONGEST_PAUSE)


def _reaped(pid: int) -> int | None:
    reaped, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if reaped else None


# -- small things ------------------------------------------------------------------------


def unnamed_file(name: str) -> int:
    """Return a descriptor, close-on-exec, of an empty file that vanishes with its last one.

    In memory, where it cannot fill a disk, or else in the folder for temporary files.
    """
    if not choose.is_portable():
        return os.memfd_create(name, os.MFD_CLOEXEC)
    import tempfile

    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def umask() -> int | None:
    """The file mode mask; read, not set and set back: other threads make files in between."""
    if choose.is_portable():
        return _umask_of_a_file()
    fd = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.read(fd, 8192)
    finally:
        os.close(fd)
    for line in status.splitlines():
        if line.startswith(b"Umask:"):
            return int(line.split()[1], 8)
    return None  # before Linux 4.7


def _umask_of_a_file() -> int | None:
    """What a new file of ours lacks."""
    import tempfile

    try:
        path = os.path.join(tempfile.gettempdir(), f"safepool-{os.urandom(16).hex()}")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o777)
    except OSError:
        return None  # no place for a file: the child keeps the mask of its launcher
    try:
        os.unlink(path)
        return 0o777 & ~os.fstat(fd).st_mode
    finally:
        os.close(fd)
