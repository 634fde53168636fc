"""The portable host: what psutil can tell on any Unix, and nothing that needs a certain kernel.

No pidfd, so a handle has no descriptor: the incarnation is verified at each send, just
before it, and between that and the signal is a gap of microseconds in which the number
would have to be handed out again. No tag. The mark is read from the environment where
the system shows it. Whoever waits for a death has to look again.

A start time has to be the same for every reader. ``psutil.Process.create_time`` is the
boot time plus a count of ticks on Linux, and the boot time moves when the clock is set.
So it is taken out again: ``start`` is in clock ticks since boot there, as with the Linux
host, and each can read the other's records. Elsewhere it is what the kernel wrote down
when the process began, in hundredths of a second since 1970; where setting the clock
changes that, a process looks like another one and is spared.

Does, decides nothing; the promises are in :mod:`safepool.host.base`. Called by: whoever
asks :mod:`safepool.host.choose` for a host.
"""

from __future__ import annotations

import errno
import os
import shlex
import signal
import time
from contextlib import suppress

import psutil

from safepool.core.identity import Incarnation, ProcessRow, Snapshot
from safepool.core.lineage import MARK_VARIABLE
from safepool.core.planner import Sig
from safepool.host.base import Handle, NoHandle, Sending

_NUMBERS = {
    Sig.TERM: signal.SIGTERM,
    Sig.CONT: signal.SIGCONT,
    Sig.STOP: signal.SIGSTOP,
    Sig.KILL: signal.SIGKILL,
}

_LETTERS = {
    psutil.STATUS_RUNNING: "R",
    psutil.STATUS_DISK_SLEEP: "D",
    psutil.STATUS_STOPPED: "T",
    psutil.STATUS_TRACING_STOP: "t",
    psutil.STATUS_ZOMBIE: "Z",
    psutil.STATUS_DEAD: "X",
}

# Some of psutil's readings let the system's own errors through when a process is just gone.
_VANISHED = (psutil.Error, FileNotFoundError, ProcessLookupError)

_TICKS = os.sysconf("SC_CLK_TCK")
_LONGEST_COMMAND_LINE = 4096
_REREADS = 5


class PsutilHandle:
    """A name that is verified at each use; there is no descriptor behind it."""

    fd = -1

    def __init__(self, incarnation: Incarnation) -> None:
        self._incarnation = incarnation

    @property
    def incarnation(self) -> Incarnation:
        """The process that this handle means."""
        return self._incarnation

    def close(self) -> None:
        """There is nothing to let go of."""


class PortableHost:
    """The process table as psutil shows it."""

    def sees_own_namespace(self) -> bool:
        """Does psutil show this process under its own number?"""
        try:
            if os.path.lexists("/proc/self"):
                return os.readlink("/proc/self") == str(os.getpid())
            return bool(psutil.Process(os.getpid()).ppid() == os.getppid())
        except (OSError, psutil.Error):
            return False

    def look_subtree(self, pid: int, run_id: str | None = None) -> Snapshot:
        """Return ``pid`` and its descendants; the children of ``pid`` carry their marks."""
        everybody = self.look_all(tags=False)
        rows: dict[int, ProcessRow] = {}
        children: dict[int, list[ProcessRow]] = {}
        for row in everybody.rows.values():
            children.setdefault(row.ppid, []).append(row)
        waiting = [everybody.rows[pid]] if pid in everybody.rows else []
        while waiting:
            row = waiting.pop()
            if row.pid not in rows:
                rows[row.pid] = self._marked(row) if row.ppid == pid else row
                waiting += children.get(row.pid, ())
        return Snapshot(rows, everybody.taken)

    def look_all(self, *, tags: bool, since: int = 0) -> Snapshot:
        """Return all visible processes; ``tags`` asks for the marks of the younger ones."""
        taken = self.now()
        for _ in range(_REREADS):
            boot = _boot()
            rows = {}
            for pid in psutil.pids():
                with suppress(*_VANISHED):
                    row = _read(pid, boot)
                    rows[pid] = self._marked(row) if tags and row.start >= since else row
            if _boot() == boot:
                return Snapshot(rows, taken)
        raise _clock_is_moving()

    def row(self, pid: int) -> ProcessRow | None:
        """Return the row of ``pid``, or None."""
        try:
            return _read_surely(pid)[0]
        except _VANISHED:
            return None

    def incarnation(self, pid: int) -> Incarnation | None:
        """Return the incarnation of ``pid``, or None."""
        row = self.row(pid)
        return None if row is None else row.incarnation

    def open(self, incarnation: Incarnation) -> Handle | NoHandle:
        """Verify ``incarnation`` and return its name as a handle."""
        _refuse(incarnation.pid)
        verdict = _verify(incarnation)
        return verdict if isinstance(verdict, NoHandle) else PsutilHandle(incarnation)

    def send(self, handle: Handle, sig: Sig | int) -> Sending:
        """Verify and send; psutil compares the start time once more, just before the signal.

        Besides the signals of a sweep it takes a number: one that is handed on. Raises
        OSError when the process cannot be told from another just now.
        """
        _refuse(handle.incarnation.pid)
        verdict = _verify(handle.incarnation)
        if verdict is NoHandle.GONE:
            return Sending.GONE
        if isinstance(verdict, NoHandle):
            raise _clock_is_moving()
        try:
            verdict.send_signal(_NUMBERS[sig] if isinstance(sig, Sig) else sig)
        except psutil.NoSuchProcess:
            return Sending.GONE
        except psutil.AccessDenied:
            return Sending.DENIED
        return Sending.SENT

    def now(self) -> float:
        """Return the monotonic clock in seconds."""
        return time.monotonic()

    def command_line(self, pid: int) -> str:
        """Return the command line for people; see the contract in the base module."""
        try:
            process = psutil.Process(pid)
            # Reading it waits for the memory map, which one in state D may hold for ever.
            is_stuck = process.status() == psutil.STATUS_DISK_SLEEP
            words = [] if is_stuck else process.cmdline()
            if not words:
                return f"[{_printable(process.name())}]"
        except _VANISHED:
            return ""
        line = shlex.join(_printable(word) for word in words)
        cut = len(line) > _LONGEST_COMMAND_LINE
        return line[:_LONGEST_COMMAND_LINE] + "..." if cut else line

    def read_tag(self, pid: int) -> int | None:
        """None: a tag is a resource limit, which only Linux shows of others."""
        return None

    def read_mark(self, pid: int) -> str | None:
        """Return the mark of ``pid``, from the environment that it was exec'd with."""
        try:
            mark: str | None = psutil.Process(pid).environ().get(MARK_VARIABLE)
        except _VANISHED:
            return None
        return mark

    def boot_id(self) -> str:
        """Return the kernel's name of this boot, or its time where there is no name."""
        with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
        return f"boot-{int(psutil.boot_time())}"

    def pid_namespace(self) -> int:
        """Return the number of the pid namespace; 0 where the system has none."""
        with suppress(OSError):
            return os.stat("/proc/self/ns/pid").st_ino
        return 0

    def _marked(self, row: ProcessRow) -> ProcessRow:
        if not row.is_alive or row.state == "D":
            return row
        mark = self.read_mark(row.pid)
        return ProcessRow(
            row.pid, row.start, row.ppid, row.state, row.group, row.session, None, mark
        )


def _refuse(pid: int) -> None:
    """Guard of everything that can signal: pid 1 and below and ourselves are never meant."""
    if pid <= 1 or pid == os.getpid():
        raise ValueError(f"refusing to signal process {pid}")


def _verify(incarnation: Incarnation) -> psutil.Process | NoHandle:
    """The process if ``incarnation`` is alive now, by a fresh reading of all."""
    if not incarnation.start:
        return NoHandle.UNKNOWN
    try:
        row, process = _read_surely(incarnation.pid)
    except psutil.NoSuchProcess:
        return NoHandle.GONE
    except (psutil.Error, OSError):
        return NoHandle.UNKNOWN
    if not row.start:
        return NoHandle.UNKNOWN
    return process if row.is_alive and row.start == incarnation.start else NoHandle.GONE


def _read_surely(pid: int) -> tuple[ProcessRow, psutil.Process]:
    """A row and its process, read while the clock stood still."""
    for _ in range(_REREADS):
        boot = _boot()
        process = psutil.Process(pid)
        row = _row_of(process, boot)
        if _boot() == boot:
            return row, process
    raise _clock_is_moving()


def _read(pid: int, boot: float) -> ProcessRow:
    # A new object each time: one that is kept keeps the start time of its first reading.
    return _row_of(psutil.Process(pid), boot)


def _row_of(process: psutil.Process, boot: float) -> ProcessRow:
    with process.oneshot():
        start = _start_of(process, boot)
        try:
            ppid, state = process.ppid(), _LETTERS.get(process.status(), "S")
            if state == "Z" and psutil.LINUX and process.num_threads() > 1:
                # Only its first thread has ended (pthread_exit); the process lives.
                state = "S"
        except psutil.ZombieProcess:
            ppid, state = 0, "Z"
    group = session = 0
    with suppress(OSError):
        group, session = os.getpgid(process.pid), os.getsid(process.pid)
    return ProcessRow(process.pid, start, ppid, state, group, session)


def _stable_start(process: psutil.Process) -> float:
    return float(process._proc.create_time(monotonic=True))


def _knows_stable_starts() -> bool:
    """Can this psutil leave the boot time out? Its own identity checks do so since 7.1."""
    try:
        _stable_start(psutil.Process())
    except (AttributeError, TypeError, psutil.Error):
        return False
    return True


_STABLE = _knows_stable_starts()


def _start_of(process: psutil.Process, boot: float) -> int:
    """The start time in hundredths of a second; see the module's header for since when."""
    seconds: float = process.create_time() - boot if not _STABLE else _stable_start(process)
    return round(seconds * _TICKS)


def _boot() -> float:
    """What has to be taken out of a start time as psutil shows it; 0: nothing."""
    return float(psutil.boot_time()) if psutil.LINUX and not _STABLE else 0.0


def _clock_is_moving() -> OSError:
    return OSError(errno.EAGAIN, "the start times of processes cannot be read just now")


def _printable(text: str) -> str:
    """Text that cannot move the cursor or end the line of a log."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )
