"""Reading: what the registry says about all runs of this user.

For each record both witnesses of its owner's life are gathered (its incarnation, from
the process table; its lock) and :func:`safepool.core.record.judge` decides. Looking
changes nothing, and nothing that lies in the directory can make it raise.

Called by: the sidecar at the start of a run, the command line.
"""

from __future__ import annotations

import os
import stat
from typing import Protocol

from safepool.core.identity import Incarnation, ProcessRow, Sameness
from safepool.core.record import (
    Here,
    Judgement,
    Member,
    RunRecord,
    Unreadable,
    Verdict,
    is_run_id,
    judge,
    parse_record,
)
from safepool.core.values import dataclass
from safepool.registry import lock, place
from safepool.registry.files import members_by_run

_RECORD_LIMIT = 1 << 18
_MISNAMED = Unreadable("its file is not named after a run: 32 digits, 0 to 9 and a to f")


class ProcessSource(Protocol):
    """The part of a host that the registry asks."""

    def row(self, pid: int) -> ProcessRow | None:
        """The process that has this pid now, a zombie too; None if there is none."""

    def boot_id(self) -> str:
        """Names the boot; "" if it cannot be told."""

    def pid_namespace(self) -> int:
        """Names the pid namespace; 0 where there is none."""


@dataclass(frozen=True)
class FoundRun:
    """A run that lies in the registry, and what is to be thought of it."""

    run_id: str
    path: str
    judgement: Judgement
    record: RunRecord | Unreadable
    members: tuple[Member, ...]


@dataclass(frozen=True)
class DeadRun:
    """A run whose owner is proven dead, with the processes that safepool made for it."""

    record: RunRecord
    members: tuple[Member, ...]


def here(host: ProcessSource) -> Here:
    """Say where this process stands, for records and for :func:`scan`."""
    return Here(os.uname().nodename, host.boot_id(), host.pid_namespace(), os.geteuid())


def scan(directory: str, here: Here, host: ProcessSource) -> list[FoundRun]:
    """Look at every run in the registry, in the order of their IDs; act upon none.

    Whatever ends in ``.run`` is reported: a file whose name is no run ID as UNKNOWN,
    under the name that it has. Runs that are retired while this looks are left out.

    Raises:
        ProtectionError: the directory is not private to this user.
        OSError: the directory cannot be read.
    """
    found = []
    with place.verified(directory) as fd:
        names = os.listdir(fd)
        members = members_by_run(names)
        for name in sorted(names):
            run_id, dot, suffix = name.rpartition(".")
            if not dot or suffix != "run":
                continue
            record = read_record(fd, name, run_id) if is_run_id(run_id) else _MISNAMED
            if record is not None:
                judgement = _judge(fd, run_id, record, here, host)
                path = os.path.join(directory, name)
                found.append(FoundRun(run_id, path, judgement, record, members.get(run_id, ())))
    return found


def dead_runs(directory: str, here: Here, host: ProcessSource) -> list[DeadRun]:
    """The runs whose owners are proven dead. Claim each before acting upon it.

    Raises:
        ProtectionError: the directory is not private to this user.
        OSError: the directory cannot be read.
    """
    return [
        DeadRun(run.record, run.members)
        for run in scan(directory, here, host)
        if run.judgement.verdict is Verdict.DEAD and isinstance(run.record, RunRecord)
    ]


def _judge(
    fd: int, run_id: str, record: RunRecord | Unreadable, here: Here, host: ProcessSource
) -> Judgement:
    """Gather both witnesses of the owner's life, and judge."""
    if isinstance(record, Unreadable):
        return Judgement(Verdict.UNKNOWN, f"its record cannot be used: {record.reason}")
    owner = is_alive(record.owner, host)
    held = lock.is_held(fd, f"{run_id}.lock", run_id)
    return judge(record, here, owner, lock_held=held)


def is_alive(owner: Incarnation, host: ProcessSource) -> Sameness:
    """Tell whether this incarnation lives: SAME, OTHER (it does not) or UNKNOWN."""
    try:
        row = host.row(owner.pid)
        if row is None:
            # A table that does not even show us (no /proc, no descriptors left) proves nothing.
            return Sameness.UNKNOWN if host.row(os.getpid()) is None else Sameness.OTHER
    except OSError:
        return Sameness.UNKNOWN
    same = owner.compare(row.incarnation)
    return Sameness.OTHER if same is Sameness.SAME and not row.is_alive else same


def read_record(fd: int, name: str, run_id: str) -> RunRecord | Unreadable | None:
    """Read one record in the directory ``fd``; None if there is none (any more)."""
    data = read_whole(fd, name)
    return parse_record(data, run_id) if isinstance(data, bytes) else data


def read_whole(fd: int, name: str) -> bytes | Unreadable | None:
    """Read a small file in the directory ``fd``; None if there is none (any more)."""
    try:
        # Non-blocking, so that a named pipe in its place cannot hold us up.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        file = os.open(name, flags, dir_fd=fd)
    except FileNotFoundError:
        return None
    except OSError as error:
        return Unreadable(f"it cannot be opened: {error.strerror}")
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            return Unreadable("it is not a plain file of this user")
        data = b""
        while len(data) <= _RECORD_LIMIT and (piece := os.read(file, 1 << 16)):
            data += piece
    except OSError as error:
        return Unreadable(f"it cannot be read: {error.strerror}")
    finally:
        os.close(file)
    if len(data) > _RECORD_LIMIT:
        return Unreadable("it is far too long for a record")
    return data
