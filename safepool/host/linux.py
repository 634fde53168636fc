"""The Linux host: /proc for looking, pidfds for waiting and signalling.

Does, decides nothing; the promises are in :mod:`safepool.host.base`. Plain
``os.open`` and ``os.read``, since a look is taken several times per sweep and has
to be cheap also with a thousand processes.

* Rows come from /proc/PID/stat, split after the *last* ``)``: a process may name
  itself anything.
* The subtree comes from /proc/PID/task/TID/children. proc(5): what it lists is
  only sure while no child ends. So a list is read again when one of its children
  has vanished, and that of the top once more at the end, since orphans arrive there
  during the walk. A kernel without these files gets a walk over all of /proc.
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
from typing import NamedTuple

from safepool.core.identity import DEAD_STATES, Incarnation, ProcessRow, Snapshot
from safepool.core.lineage import MARK_VARIABLE, is_tag, is_tag_of_run
from safepool.core.planner import Sig
from safepool.host.base import Handle, NoHandle, Sending

_VANISHED = frozenset({errno.ENOENT, errno.ESRCH, errno.ENOTDIR})
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM})
_STARVED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})

_NUMBERS = {
    Sig.TERM: signal.SIGTERM,
    Sig.CONT: signal.SIGCONT,
    Sig.STOP: signal.SIGSTOP,
    Sig.KILL: signal.SIGKILL,
}

# Positions in /proc/PID/stat, counted from the state letter (proc(5), field 3).
_STATE, _PPID, _GROUP, _SESSION, _THREADS, _START = 0, 1, 2, 3, 17, 19

_CHUNK = 1 << 16
_LONGEST_ENVIRONMENT = 1 << 22
_LONGEST_COMMAND_LINE = 4096
_REREADS = 3
_TAG_LABEL = b"Max realtime timeout"


def ticks() -> int:
    """Now, in the unit of process start times: clock ticks since boot (proc(5))."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


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
        stats = _walk_children(pid) if self._has_children_files else _walk_parents(pid)
        rows = {}
        for found, stat in stats.items():
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
        for pid, stat in _read_everybody().items():
            if tags and stat.is_alive and stat.start >= since:
                rows[pid] = stat.row(pid, self.read_tag(pid), self._mark_of(pid, stat))
            else:
                rows[pid] = stat.row(pid)
        return Snapshot(rows, taken)

    def row(self, pid: int) -> ProcessRow | None:
        """Return the row of ``pid``, or None."""
        stat = _read_stat(pid)
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

    def send(self, handle: Handle, sig: Sig) -> Sending:
        """Send through the pidfd; see the contract in the base module."""
        _refuse(handle.incarnation.pid)
        try:
            signal.pidfd_send_signal(handle.fd, _NUMBERS[sig])
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
        raw = b"" if row.state == "D" else _read(f"/proc/{pid}/cmdline", _LONGEST_COMMAND_LINE)
        if not raw:
            name = (_read(f"/proc/{pid}/comm", _LONGEST_COMMAND_LINE) or b"").rstrip(b"\n")
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
        raw = _read(f"/proc/{pid}/environ", _LONGEST_ENVIRONMENT)
        prefix = f"{MARK_VARIABLE}=".encode()
        for entry in raw.split(b"\0") if raw and prefix in raw else ():
            if entry.startswith(prefix):
                return os.fsdecode(entry[len(prefix) :])
        return None

    def boot_id(self) -> str:
        """Return the kernel's random name of this boot."""
        return (_read("/proc/sys/kernel/random/boot_id", 64) or b"").decode().strip()

    def pid_namespace(self) -> int:
        """Return the inode number of this process's pid namespace."""
        return os.stat("/proc/self/ns/pid").st_ino

    def _verify(self, incarnation: Incarnation, fd: int) -> NoHandle | None:
        """None when the pid names ``incarnation`` now, it is alive, and the pidfd means it.

        The last is asked of the same /proc (proc(5), fdinfo): where that shows another
        pid namespace, the number in it is another than the one that the pidfd was made of.
        """
        try:
            info = _read(f"/proc/self/fdinfo/{fd}", 4096)
            row = self.row(incarnation.pid)
        except OSError:
            return NoHandle.UNKNOWN
        if info is None or b"Pid:\t%d\n" % incarnation.pid not in info:
            # -1: it is dead and reaped.
            return NoHandle.GONE if info and b"Pid:\t-1\n" in info else NoHandle.UNKNOWN
        if row is None or not row.is_alive or row.start != incarnation.start:
            return NoHandle.GONE
        return None

    def _mark_of(self, pid: int, stat: _Stat) -> str | None:
        return None if stat.state == "D" else self.read_mark(pid)


class _Stat(NamedTuple):
    """What /proc/PID/stat tells, less the pid."""

    start: int
    ppid: int
    state: str
    group: int
    session: int
    threads: int

    @property
    def is_alive(self) -> bool:
        return self.state not in DEAD_STATES

    def row(self, pid: int, tag: int | None = None, mark: str | None = None) -> ProcessRow:
        return ProcessRow(
            pid, self.start, self.ppid, self.state, self.group, self.session, tag, mark
        )


def _refuse(pid: int) -> None:
    """Guard of everything that can signal: pid 1 and below and ourselves are never meant."""
    if pid <= 1 or pid == os.getpid():
        raise ValueError(f"refusing to signal process {pid}")


def _is_answer(tag: int | None, run_id: str | None) -> bool:
    """Does the tag alone say whose a process is, so that its mark need not be read?"""
    return tag is not None and (run_id is None or is_tag_of_run(tag, run_id))


def _read(path: str, most: int) -> bytes | None:
    """The first ``most`` bytes; None when the file is gone or may not be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _STARVED:
            raise
        return None
    try:
        # A short read is not the end: the kernel hands out lists a page at a time.
        parts = []
        while most > 0 and (data := os.read(fd, min(most, _CHUNK))):
            parts.append(data)
            most -= len(data)
        return b"".join(parts)
    except OSError as error:
        if error.errno in _VANISHED | _FORBIDDEN:
            return None
        raise
    finally:
        os.close(fd)


def _read_stat(pid: int) -> _Stat | None:
    """What the kernel says of ``pid`` now; None when it is not there."""
    data = _read(f"/proc/{pid}/stat", _CHUNK)
    if not data:
        return None
    fields = data[data.rindex(b")") + 2 :].split(None, _START + 1)
    state, threads = fields[_STATE].decode(), int(fields[_THREADS])
    if state == "Z" and threads > 1:
        # Only its first thread has ended (pthread_exit); the process lives.
        state = "S"
    return _Stat(
        int(fields[_START]),
        int(fields[_PPID]),
        state,
        int(fields[_GROUP]),
        int(fields[_SESSION]),
        threads,
    )


def _read_everybody() -> dict[int, _Stat]:
    """Every process that is visible."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return {pid: stat for pid in pids if (stat := _read_stat(pid)) is not None}


def _walk_children(top: int) -> dict[int, _Stat]:
    """``top`` and all its descendants, from the kernel's lists of children."""
    own = _read_stat(top)
    if own is None:
        return {}
    stats = {top: own}
    waiting = [(top, own)]
    for _ in range(_REREADS):
        while waiting:
            waiting.extend(_read_children(*waiting.pop(), stats))
        waiting = _read_children(top, own, stats)
        if not waiting:
            break
    return stats


def _read_children(pid: int, parent: _Stat, stats: dict[int, _Stat]) -> list[tuple[int, _Stat]]:
    """Add the children of ``pid`` that are not in ``stats``; return those that may have some.

    The dead have none: the kernel gives them away before it calls the parent dead.
    """
    new = []
    for _ in range(_REREADS):
        is_sure = True
        for child in _list_children(pid, parent.threads):
            if child in stats:
                continue
            stat = _read_stat(child)
            if stat is None:
                is_sure = False
                continue
            stats[child] = stat
            if stat.is_alive:
                new.append((child, stat))
        if is_sure:
            break
    return new


def _list_children(pid: int, threads: int) -> list[int]:
    """The pids of the children of all threads of ``pid``."""
    tids = [str(pid)]
    if threads > 1:
        try:
            tids = os.listdir(f"/proc/{pid}/task")
        except OSError as error:
            if error.errno in _STARVED:
                raise
    children = []
    for tid in tids:
        listed = _read(f"/proc/{pid}/task/{tid}/children", 1 << 24)
        children += [int(word) for word in listed.split()] if listed else []
    return children


def _walk_parents(top: int) -> dict[int, _Stat]:
    """The same as ``_walk_children`` by the parent of every process there is."""
    everybody = _read_everybody()
    stats = {top: everybody[top]} if top in everybody else {}
    size = 0
    while len(stats) > size:
        size = len(stats)
        stats.update((pid, stat) for pid, stat in everybody.items() if stat.ppid in stats)
    return stats


def _limit_in_file(pid: int) -> int:
    """The soft RLIMIT_RTTIME as /proc/PID/limits prints it; -1 for unlimited or unknown."""
    for line in (_read(f"/proc/{pid}/limits", _CHUNK) or b"").splitlines():
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
