"""The host of a process in the simulated kernel: what the sweeper looks and signals through.

It reads as the Linux host does, in the same order and as often: lists of children or of
pids first, then each row, with its tag and mark. Every single reading is a *call*: it takes
time, in which the world moves on, so looks are torn in all the ways that real ones are.

``meanwhile`` is asked before every call, ``before_row`` before a row is read; through them a
test moves the world at a chosen instant. ``on_send`` hears of every signal before it is delivered.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator

from safepool.core.containment import Listing
from safepool.core.identity import Incarnation, ProcessRow, Snapshot
from safepool.core.lineage import is_tag_of_run
from safepool.core.planner import Sig
from safepool.core.values import replace
from safepool.host.base import Handle, NoHandle, Sending
from tests.sim.kernel import Kernel, Process

CALL = 0.00003
"""Seconds that one reading takes; a row takes about this on Linux."""

TAG_CALL = 0.000001
"""The same for a tag, which is no file."""

REREADS = 3


class SimHandle:
    """A pidfd: bound to one process for ever, readable when that is dead."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        process.on_death.append(self._tell)

    @property
    def incarnation(self) -> Incarnation:
        return Incarnation(self.process.pid, self.process.start)

    @property
    def fd(self) -> int:
        return self._fd

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _tell(self) -> None:
        if self._fd >= 0:
            os.eventfd_write(self._fd, 1)


class SimContainer:
    """A cgroup as a whole; ``judge`` hears of "freeze" and "kill" before they are done.

    ``is_refused``: the kernel is one that knows neither.
    """

    def __init__(self, host: SimHost, cgroup: str, judge: Callable[[str, str], None]) -> None:
        self.host = host
        self.cgroup = cgroup
        self.is_refused = False
        self._judge = judge

    def close(self) -> None:
        """Nothing is held open."""

    def listing(self) -> Listing | None:
        begun_at = self.host.kernel.ticks()
        try:
            self.host.spend_call()
        except OSError:
            return None
        inside = (one.pid for one in self.host.kernel.living() if one.cgroup == self.cgroup)
        return Listing(frozenset(inside), begun_at)

    def freeze(self) -> bool:
        return self._act("freeze", self.host.kernel.freeze)

    def kill(self) -> bool:
        return self._act("kill", self.host.kernel.kill_cgroup)

    def thaw(self) -> bool:
        self.host.kernel.thaw(self.cgroup)
        return True

    def _act(self, action: str, act: Callable[[str], None]) -> bool:
        try:
            self.host.spend_call()
        except OSError:
            return False
        if self.is_refused:
            return False
        self._judge(self.cgroup, action)
        act(self.cgroup)
        return True


class SimHost:
    """Implements :class:`safepool.host.base.Host` for the process ``me``."""

    def __init__(self, kernel: Kernel, me: Process) -> None:
        self.kernel = kernel
        self.me = me
        self.is_starved = False
        self.handles: list[SimHandle] = []
        self.has_children_files = True
        self.meanwhile: Callable[[], None] = lambda: None
        self.before_row: Callable[[int], None] = lambda pid: None
        self.on_send: Callable[[Process, str], None] = lambda process, sig: None
        self.on_sent: Callable[[Process, str, str], None] = lambda process, sig, outcome: None

    # -- looking -------------------------------------------------------------------------

    def look_subtree(self, pid: int, run_id: str | None = None) -> Snapshot:
        taken = self.now()
        rows = {}
        walk = self._walk_children if self.has_children_files else self._walk_parents
        for row in walk(pid):
            rows[row.pid] = row
            if row.pid == pid or not row.is_alive:
                continue
            tag = self.read_tag(row.pid)
            is_enough = tag is not None and (run_id is None or is_tag_of_run(tag, run_id))
            is_marked = row.ppid == pid and not is_enough
            mark = self._mark_of(row) if is_marked else None
            rows[row.pid] = replace(row, tag=tag, mark=mark)
        return Snapshot(rows, taken)

    def look_all(self, *, tags: bool, since: int = 0) -> Snapshot:
        taken = self.now()
        rows = {}
        for row in self._read_everybody():
            rows[row.pid] = row
            if tags and row.is_alive and row.start >= since:
                rows[row.pid] = replace(row, tag=self.read_tag(row.pid), mark=self._mark_of(row))
        return Snapshot(rows, taken)

    def row(self, pid: int) -> ProcessRow | None:
        self.before_row(pid)
        self.spend_call()
        process = self.kernel.table.get(pid)
        if process is None:
            return None
        ppid = process.parent.pid if process.parent is not None else 0
        facts = (process.state, process.group, process.session)
        return ProcessRow(pid, process.start, ppid, *facts)

    def incarnation(self, pid: int) -> Incarnation | None:
        row = self.row(pid)
        return None if row is None else row.incarnation

    def read_tag(self, pid: int) -> int | None:
        self.spend_call(TAG_CALL, needs_descriptor=False)
        process = self.kernel.table.get(pid)
        return None if process is None else process.tag

    def read_mark(self, pid: int) -> str | None:
        self.spend_call()
        process = self.kernel.table.get(pid)
        return None if process is None or process.is_dead else process.mark

    def command_line(self, pid: int) -> str:
        self.spend_call()
        return f"program {pid}" if pid in self.kernel.table else ""

    def now(self) -> float:
        return self.kernel.clock

    def boot_id(self) -> str:
        return "simulated"

    def pid_namespace(self) -> int:
        return 1

    def _mark_of(self, row: ProcessRow) -> str | None:
        return None if row.state == "D" else self.read_mark(row.pid)

    def _list_pids(self) -> set[int]:
        self.spend_call()
        return set(self.kernel.table)

    def _list_children(self, pid: int) -> list[int]:
        self.spend_call()
        parent = self.kernel.table.get(pid)
        return [] if parent is None else [child.pid for child in self.kernel.children(parent)]

    def _read_everybody(self) -> Iterator[ProcessRow]:
        """Every row, as it is read; the list of pids is read again until nobody new is in it."""
        listed: set[int] = set()
        for _ in range(REREADS):
            new = self._list_pids() - listed
            if not new:
                break
            listed |= new
            for pid in sorted(new):
                row = self.row(pid)
                if row is not None:
                    yield row

    def _walk_parents(self, top: int) -> Iterator[ProcessRow]:
        rows = {row.pid: row for row in self._read_everybody()}
        yield from below(top, Snapshot(rows)).values()

    def _walk_children(self, top: int) -> Iterator[ProcessRow]:
        """The row of ``top`` and of its descendants; its own list is read again at the end."""
        row = self.row(top)
        if row is None:
            return
        yield row
        known, waiting = {top}, [top]
        for _ in range(REREADS):
            while waiting:
                for row in self._read_children(waiting.pop(), known):
                    yield row
                    waiting += [row.pid] if row.is_alive else []
            is_quiet = True
            for row in self._read_children(top, known):
                yield row
                is_quiet = False
                waiting += [row.pid] if row.is_alive else []
            if is_quiet:
                break

    def _read_children(self, pid: int, known: set[int]) -> Iterator[ProcessRow]:
        """The children of ``pid``; the list is read again when one of them has vanished."""
        for _ in range(REREADS):
            is_sure = True
            for child in self._list_children(pid):
                if child not in known:
                    row = self.row(child)
                    if row is None:
                        is_sure = False
                    else:
                        known.add(child)
                        yield row
            if is_sure:
                break

    # -- signalling ----------------------------------------------------------------------

    def open(self, incarnation: Incarnation) -> Handle | NoHandle:
        self._refuse(incarnation.pid)
        if not incarnation.start:
            return NoHandle.UNKNOWN
        try:
            self.spend_call()
        except OSError:
            return NoHandle.UNKNOWN
        process = self.kernel.table.get(incarnation.pid)
        if process is None or process.is_dead or process.start != incarnation.start:
            return NoHandle.GONE
        self.handles.append(SimHandle(process))
        return self.handles[-1]

    def send(self, handle: Handle, sig: Sig) -> Sending:
        assert isinstance(handle, SimHandle)
        assert handle.fd >= 0, "the handle is closed"
        self._refuse(handle.incarnation.pid)
        self.spend_call(needs_descriptor=False)
        self.on_send(handle.process, sig.value)
        outcome = self.kernel.signal(handle.process, sig.value)
        self.on_sent(handle.process, sig.value, outcome)
        return Sending(outcome)

    def _refuse(self, pid: int) -> None:
        if pid <= 1 or pid == self.me.pid:
            raise ValueError(f"refusing to signal process {pid}")

    def spend_call(self, seconds: float = CALL, *, needs_descriptor: bool = True) -> None:
        """Take the time of one system call, in which others move; EMFILE when starved."""
        self.kernel.caller = self.me
        self.meanwhile()
        self.kernel.spend(seconds)
        self.kernel.caller = None
        if needs_descriptor and self.is_starved:
            raise OSError(errno.EMFILE, "no descriptor is free")


def below(top: int, snapshot: Snapshot) -> dict[int, ProcessRow]:
    """The row of ``top`` and what descends from it, by the parents that a look shows."""
    rows = {top: snapshot.rows[top]} if top in snapshot.rows else {}
    size = 0
    while len(rows) > size:
        size = len(rows)
        rows.update((pid, row) for pid, row in snapshot.rows.items() if row.ppid in rows)
    return rows
