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
        if self._has_children_files:
            rows = _walk_children(pid)
        else:
            rows = _walk_parents(pid, self.look_all(tags=False))
        for row in list(rows.values()):
            if row.pid == pid or not row.is_alive:
                continue
            if row.ppid == pid:
                rows[row.pid] = self._with_lineage(row, run_id)
            else:
                rows[row.pid] = _marked(row, self.read_tag(row.pid), None)
        return Snapshot(rows, taken)

    def look_all(self, *, tags: bool) -> Snapshot:
        """Return all visible processes; see the contract in the base module."""
        taken = self.now()
        rows = {}
        for name in os.listdir("/proc"):
            if name.isdecimal():
                row = self.row(int(name))
                if row is not None:
                    rows[row.pid] = self._with_witnesses(row) if tags and row.is_alive else row
        return Snapshot(rows, taken)

    def row(self, pid: int) -> ProcessRow | None:
        """Return the row of ``pid``, or None."""
        read = _read_row(pid)
        return None if read is None else read[0]

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

    def _with_lineage(self, row: ProcessRow, run_id: str | None) -> ProcessRow:
        """Add the tag, and the mark where the tag does not answer the question."""
        tag = self.read_tag(row.pid)
        is_enough = tag is not None and (run_id is None or is_tag_of_run(tag, run_id))
        return _marked(row, tag, None if is_enough else self._mark_of(row))

    def _with_witnesses(self, row: ProcessRow) -> ProcessRow:
        return _marked(row, self.read_tag(row.pid), self._mark_of(row))

    def _mark_of(self, row: ProcessRow) -> str | None:
        return None if row.state == "D" else self.read_mark(row.pid)


def _refuse(pid: int) -> None:
    """Guard of everything that can signal: pid 1 and below and ourselves are never meant."""
    if pid <= 1 or pid == os.getpid():
        raise ValueError(f"refusing to signal process {pid}")


def _marked(row: ProcessRow, tag: int | None, mark: str | None) -> ProcessRow:
    return ProcessRow(row.pid, row.start, row.ppid, row.state, row.group, row.session, tag, mark)


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


def _read_row(pid: int) -> tuple[ProcessRow, int] | None:
    """The row of ``pid`` and how many threads it has."""
    data = _read(f"/proc/{pid}/stat", _CHUNK)
    if not data:
        return None
    fields = data[data.rindex(b")") + 2 :].split(None, _START + 1)
    state, threads = fields[_STATE].decode(), int(fields[_THREADS])
    if state == "Z" and threads > 1:
        # Only its first thread has ended (pthread_exit); the process lives.
        state = "S"
    row = ProcessRow(
        pid,
        int(fields[_START]),
        int(fields[_PPID]),
        state,
        int(fields[_GROUP]),
        int(fields[_SESSION]),
    )
    return row, threads


def _walk_children(top: int) -> dict[int, ProcessRow]:
    """The row of ``top`` and of all its descendants, from the kernel's lists of children."""
    read = _read_row(top)
    if read is None:
        return {}
    rows = {top: read[0]}
    waiting = [(top, read[1])]
    for _ in range(_REREADS):
        while waiting:
            waiting.extend(_read_children(*waiting.pop(), rows))
        waiting = _read_children(top, read[1], rows)
        if not waiting:
            break
    return rows


def _read_children(pid: int, threads: int, rows: dict[int, ProcessRow]) -> list[tuple[int, int]]:
    """Add the children of ``pid`` that are not in ``rows``; return them with their threads."""
    new = []
    for _ in range(_REREADS):
        is_sure = True
        for child in _list_children(pid, threads):
            if child in rows:
                continue
            read = _read_row(child)
            if read is None:
                is_sure = False
            else:
                rows[child] = read[0]
                new.append((child, read[1]))
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


def _walk_parents(top: int, snapshot: Snapshot) -> dict[int, ProcessRow]:
    """The same as ``_walk_children`` by the parent of every process there is."""
    rows = {top: snapshot.rows[top]} if top in snapshot.rows else {}
    size = 0
    while len(rows) > size:
        size = len(rows)
        rows.update((pid, row) for pid, row in snapshot.rows.items() if row.ppid in rows)
    return rows


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
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )
