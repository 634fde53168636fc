"""The Linux host: /proc for looking, pidfds for waiting and signalling.

Does, decides nothing; the promises are in :mod:`safepool.host.base`, the files are
read in :mod:`safepool.host.procfs`.

* Everything is read anew in every look, the tag of a known process as well: a limit can
  be set at any time, and asking costs half a microsecond.
* Reading a command line or an environment waits for the memory map of the process.
  One in uninterruptible sleep may hold that for ever, so it is not asked.

Called by: whoever needs a :class:`~safepool.host.base.Host` on Linux.
"""

from __future__ import annotations

import errno
import os
import resource
import shlex
import signal
import time

from safepool.core.identity import Incarnation, ProcessRow, Snapshot
from safepool.core.lineage import MARK_VARIABLE, is_tag, is_tag_of_run
from safepool.core.planner import Sig
from safepool.host.base import Handle, NoHandle, Sending
from safepool.host.procfs import (
    CHUNK,
    Stat,
    read,
    read_everybody,
    read_stat,
    walk_children,
    walk_parents,
)

_NUMBERS = {
    Sig.TERM: signal.SIGTERM,
    Sig.CONT: signal.SIGCONT,
    Sig.STOP: signal.SIGSTOP,
    Sig.KILL: signal.SIGKILL,
}

_LONGEST_ENVIRONMENT = 1 << 22
_LONGEST_COMMAND_LINE = 4096
_TAG_LABEL = b"Max realtime timeout"


class Pidfd:
    """A handle made of a pidfd: the kernel ties it to one incarnation."""

    def __init__(self, incarnation: Incarnation, fd: int) -> None:
        self._incarnation = incarnation
        self._fd = fd

    @property
    def incarnation(self) -> Incarnation:
        """The process that this handle means."""
        return self._incarnation

    @property
    def fd(self) -> int:
        """The pidfd; -1 once closed."""
        return self._fd

    def close(self) -> None:
        """Let go of the descriptor. Closing twice does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class LinuxHost:
    """The process table of this machine, as far as this pid namespace shows it."""

    def __init__(self) -> None:
        own = os.getpid()
        self._has_children_files = os.access(f"/proc/{own}/task/{own}/children", os.R_OK)

    def sees_own_namespace(self) -> bool:
        """Is the mounted /proc that of the pid namespace of this process?

        After ``unshare --pid`` without a fresh mount it is not: then every number that
        is read there means somebody else here.
        """
        try:
            return os.readlink("/proc/self") == str(os.getpid())
        except OSError:
            return False

    def look_subtree(self, pid: int, run_id: str | None = None) -> Snapshot:
        """Return ``pid`` and its descendants; see the contract in the base module."""
        taken = self.now()
        walk = walk_children if self._has_children_files else walk_parents
        rows = {}
        for found, stat in walk(pid):
            tag, mark = None, None
            if found != pid and stat.is_alive:
                tag = self.read_tag(found)
                if stat.ppid == pid and not _is_answer(tag, run_id):
                    mark = self._mark_of(found, stat)
            rows[found] = stat.row(found, tag, mark)
        return Snapshot(rows, taken)

    def look_all(self, *, tags: bool, since: int = 0) -> Snapshot:
        """Return all visible processes; see the contract in the base module."""
        taken = self.now()
        rows = {}
        for pid, stat in read_everybody():
            if tags and stat.is_alive and stat.start >= since:
                rows[pid] = stat.row(pid, self.read_tag(pid), self._mark_of(pid, stat))
            else:
                rows[pid] = stat.row(pid)
        return Snapshot(rows, taken)

    def row(self, pid: int) -> ProcessRow | None:
        """Return the row of ``pid``, or None."""
        stat = read_stat(pid)
        return None if stat is None else stat.row(pid)

    def incarnation(self, pid: int) -> Incarnation | None:
        """Return the incarnation of ``pid``, or None."""
        row = self.row(pid)
        return None if row is None else row.incarnation

    def open(self, incarnation: Incarnation) -> Handle | NoHandle:
        """Open a pidfd and verify afterwards that it means ``incarnation``.

        In this order there is no gap: had the pid been handed out again before the
        pidfd was made, the start time that is read after it would differ.
        """
        _refuse(incarnation.pid)
        if not incarnation.start:
            return NoHandle.UNKNOWN
        try:
            fd = os.pidfd_open(incarnation.pid)
        except OSError as error:
            return NoHandle.GONE if error.errno == errno.ESRCH else NoHandle.UNKNOWN
        handle = Pidfd(incarnation, fd)
        verdict = self._verify(incarnation, fd)
        if verdict is None:
            return handle
        handle.close()
        return verdict

    def send(self, handle: Handle, sig: Sig | int) -> Sending:
        """Send through the pidfd; see the contract in the base module.

        Besides the signals of a sweep it takes a number: one that is handed on.
        """
        _refuse(handle.incarnation.pid)
        try:
            number = _NUMBERS[sig] if isinstance(sig, Sig) else sig
            signal.pidfd_send_signal(handle.fd, number)
        except ProcessLookupError:
            return Sending.GONE
        except PermissionError:
            return Sending.DENIED
        return Sending.SENT

    def now(self) -> float:
        """Return CLOCK_MONOTONIC in seconds."""
        return time.monotonic()

    def command_line(self, pid: int) -> str:
        """Return the command line for people; see the contract in the base module."""
        row = self.row(pid)
        if row is None:
            return ""
        raw = b"" if row.state == "D" else read(f"/proc/{pid}/cmdline", _LONGEST_COMMAND_LINE)
        if not raw:
            name = (read(f"/proc/{pid}/comm", _LONGEST_COMMAND_LINE) or b"").rstrip(b"\n")
            return f"[{_printable(name)}]" if name else ""
        words = raw.rstrip(b"\0").split(b"\0")
        cut = "..." if len(raw) >= _LONGEST_COMMAND_LINE else ""
        return shlex.join(_printable(word) for word in words) + cut

    def read_tag(self, pid: int) -> int | None:
        """Return the tag of ``pid``: its soft RLIMIT_RTTIME, if that is one."""
        try:
            limit = resource.prlimit(pid, resource.RLIMIT_RTTIME)[0]
        except ProcessLookupError:
            return None
        except PermissionError:
            # A set-user-ID process. Its limits file shows the same to everybody.
            limit = _limit_in_file(pid)
        return limit if is_tag(limit) else None

    def read_mark(self, pid: int) -> str | None:
        """Return the mark of ``pid``, from the environment that it was exec'd with."""
        raw = read(f"/proc/{pid}/environ", _LONGEST_ENVIRONMENT)
        prefix = f"{MARK_VARIABLE}=".encode()
        for entry in raw.split(b"\0") if raw and prefix in raw else ():
            if entry.startswith(prefix):
                return os.fsdecode(entry[len(prefix) :])
        return None

    def boot_id(self) -> str:
        """Return the kernel's random name of this boot."""
        return (read("/proc/sys/kernel/random/boot_id", 64) or b"").decode().strip()

    def pid_namespace(self) -> int:
        """Return the inode number of this process's pid namespace."""
        return os.stat("/proc/self/ns/pid").st_ino

    def _verify(self, incarnation: Incarnation, fd: int) -> NoHandle | None:
        """None when the pid names ``incarnation`` now, it is alive, and the pidfd means it.

        The last is asked of the same /proc (proc(5), fdinfo): where that shows another
        pid namespace, the number in it is another than the one that the pidfd was made of.
        """
        try:
            info = read(f"/proc/self/fdinfo/{fd}", 4096)
            row = self.row(incarnation.pid)
        except OSError:
            return NoHandle.UNKNOWN
        if info is None or b"Pid:\t%d\n" % incarnation.pid not in info:
            # -1: it is dead and reaped.
            return NoHandle.GONE if info and b"Pid:\t-1\n" in info else NoHandle.UNKNOWN
        if row is None or not row.is_alive or row.start != incarnation.start:
            return NoHandle.GONE
        return None

    def _mark_of(self, pid: int, stat: Stat) -> str | None:
        return None if stat.state == "D" else self.read_mark(pid)


def _refuse(pid: int) -> None:
    """Guard of everything that can signal: pid 1 and below and ourselves are never meant."""
    if pid <= 1 or pid == os.getpid():
        raise ValueError(f"refusing to signal process {pid}")


def _is_answer(tag: int | None, run_id: str | None) -> bool:
    """Does the tag alone say whose a process is, so that its mark need not be read?"""
    return tag is not None and (run_id is None or is_tag_of_run(tag, run_id))


def _limit_in_file(pid: int) -> int:
    """The soft RLIMIT_RTTIME as /proc/PID/limits prints it; -1 for unlimited or unknown."""
    for line in (read(f"/proc/{pid}/limits", CHUNK) or b"").splitlines():
        if line.startswith(_TAG_LABEL):
            soft = line[len(_TAG_LABEL) :].split()[0]
            return int(soft) if soft.isdigit() else -1
    return -1


def _printable(raw: bytes) -> str:
    """Text that cannot move the cursor or end the line of a log."""
    text = raw.decode("utf-8", "backslashreplace")
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )
