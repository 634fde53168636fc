"""What runs this user has on this machine, and which processes belong to each.

Looks and decides nothing that could end a process: what a sweep takes for a member is
decided in :mod:`safepool.core.membership`, and more strictly. Here a process is put to
exactly one run, the innermost, by the first of these that answers:

1. its incarnation is on record (sidecar, launcher), or will be in a moment: it bears a
   helper's tag and is a child of the owner;
2. its tag (which also says the worker), 3. its mark; both only if it was born within the
   life of a run that is on record here;
4. its parent.

So nested runs can be told from each other. Only an owner may count twice: as the owner
of its run, and as a worker or stray of the run that this lies within.

Called by: the command line.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Literal

from safepool import registry
from safepool.core.identity import Incarnation, ProcessRow, Snapshot
from safepool.core.lineage import is_detached_tag, is_helper_tag, is_tag_of_run, worker_of_tag
from safepool.core.record import RunRecord, Verdict
from safepool.core.values import dataclass
from safepool.host import vitals
from safepool.host.base import Host
from safepool.host.own import ticks

Role = Literal["owner", "sidecar", "launcher", "worker", "stray", "detached"]


@dataclass(frozen=True)
class ListedProcess:
    """One living process of a run.

    ``worker`` is the number of the worker that it is or comes from, 0 if that is not
    known; ``age`` is in seconds; ``memory`` in bytes (resident, shared pages included;
    None: may not be read); ``command`` for people.
    """

    incarnation: Incarnation
    parent: int
    role: Role
    worker: int
    state: str
    age: float
    memory: int | None
    command: str


@dataclass(frozen=True)
class ListedRun:
    """One run on record, what is to be thought of it, and its living processes by age.

    ``record`` is None when the file cannot be used; ``reason`` then says why. ``inside``
    is the run whose worker is this run's owner, "" if none.
    """

    run_id: str
    verdict: Verdict
    reason: str
    path: str
    record: RunRecord | None
    inside: str
    processes: tuple[ListedProcess, ...]

    @property
    def age(self) -> float | None:
        """Seconds since it began; None for a run of another boot or without a record."""
        if self.record is None or self.verdict is Verdict.FOREIGN:
            return None
        return max(0.0, (ticks() - self.record.started_ticks) / _TICKS)

    @property
    def memory(self) -> int:
        """The sum of its processes' resident memory, in bytes."""
        return sum(process.memory or 0 for process in self.processes)

    def count(self, role: Role) -> int:
        """How many of its processes have this role."""
        return sum(process.role == role for process in self.processes)


_TICKS = os.sysconf("SC_CLK_TCK")


def take_inventory(directory: str, host: Host) -> list[ListedRun]:
    """Look once at registry and process table; the oldest run first, foreign ones last.

    Raises ProtectionError when the registry is not private to this user, OSError when it
    or the process table cannot be read. Changes nothing.
    """
    found = registry.scan(directory, registry.here(host), host)
    # After the records: whoever is on record by then can be seen.
    snapshot = host.look_all(tags=True)
    lives = [_Life(run, directory) for run in found]
    homes = _assign(snapshot, [life for life in lives if life.is_here])
    runs = [_list_run(life, snapshot, homes, host) for life in lives]
    return sorted(runs, key=lambda run: (run.age is None, -(run.age or 0.0), run.run_id))


def now() -> float:
    """Seconds since 1970, for people."""
    return time.time()


class _Life:
    """One run while its processes are looked for."""

    def __init__(self, found: registry.FoundRun, directory: str) -> None:
        self.found = found
        self.record = found.record if isinstance(found.record, RunRecord) else None
        self.is_here = self.record is not None and found.judgement.verdict is not Verdict.FOREIGN
        self.until: int | None = None
        self.roles: dict[Incarnation, Role] = {}
        if self.record is None:
            return
        if found.judgement.verdict is Verdict.DEAD:
            self.until = registry.RunFiles.attach(directory, found.run_id).last_sign_of_life(
                ticks()
            )
        for member in found.members:
            self.roles[member.incarnation] = member.kind

    def covers(self, row: ProcessRow) -> bool:
        """Was it born within the run's life?"""
        assert self.record is not None
        is_early = row.start < self.record.started_ticks
        return not is_early and (self.until is None or row.start <= self.until)


def _assign(snapshot: Snapshot, lives: list[_Life]) -> dict[int, _Life]:
    """The run of each living process that has one, by pid."""
    homes: dict[int, _Life] = {}
    by_owner = {life.record.owner: life for life in lives if life.record is not None}
    for row in snapshot.alive():
        home = _on_record(row, lives)
        parent = snapshot.rows.get(row.ppid)
        if home is None and parent is not None and is_helper_tag(row.tag):
            home = by_owner.get(parent.incarnation)
        if home is None:
            home = _by_witness(row, lives)
        if home is not None:
            homes[row.pid] = home
    # Parents are older than their children, so one pass in the order of birth is enough.
    for row in sorted(snapshot.alive(), key=lambda row: (row.start, row.pid)):
        parent = snapshot.rows.get(row.ppid)
        if row.pid in homes or parent is None or parent.start > row.start:
            continue
        above = homes.get(row.ppid)
        if above is not None and above.covers(row):
            homes[row.pid] = above
    return homes


def _on_record(row: ProcessRow, lives: list[_Life]) -> _Life | None:
    return next((life for life in lives if row.incarnation in life.roles), None)


def _by_witness(row: ProcessRow, lives: list[_Life]) -> _Life | None:
    by_id = {life.found.run_id: life for life in lives if life.covers(row)}
    for run_id, life in by_id.items():
        if is_tag_of_run(row.tag, run_id):
            return life
    for link in reversed((row.mark or "").split("/")):
        marked = by_id.get(link.partition(":")[0])
        if marked is not None:
            return marked
    return None


def _list_run(life: _Life, snapshot: Snapshot, homes: dict[int, _Life], host: Host) -> ListedRun:
    found, record = life.found, life.record
    rows = [row for row in snapshot.alive() if homes.get(row.pid) is life]
    rows.sort(key=lambda row: (row.start, row.pid))
    listed = [_list_process(*described, host) for described in _with_roles(rows, life)]
    owner = snapshot.find(record.owner) if record is not None and life.is_here else None
    if owner is not None:
        listed.insert(0, _list_process(owner, "owner", 0, host))
    return ListedRun(
        run_id=found.run_id,
        verdict=found.judgement.verdict,
        reason=found.judgement.reason,
        path=found.path,
        record=record,
        inside=_outer_run(record),
        processes=tuple(listed),
    )


def _outer_run(record: RunRecord | None) -> str:
    """The run in whose worker the owner was when it began."""
    return "" if record is None else record.lineage.rpartition("/")[2].partition(":")[0]


def _with_roles(rows: list[ProcessRow], life: _Life) -> Iterator[tuple[ProcessRow, Role, int]]:
    """Say what each is. A worker is the oldest of its number below a launcher: no record has it."""
    roles: dict[int, Role] = {}
    for row in rows:
        named = life.roles.get(row.incarnation)
        if named is not None:
            roles[row.pid] = named
        elif is_detached_tag(row.tag):
            roles[row.pid] = "detached"
        elif is_helper_tag(row.tag):
            roles[row.pid] = "launcher"  # its sidecar is not up yet, to put it on record
    numbers: set[int] = set()
    for row in rows:
        number = _worker_number(row, life)
        if row.pid not in roles:
            is_first = number > 0 and number not in numbers
            is_worker = is_first and roles.get(row.ppid) == "launcher"
            roles[row.pid] = "worker" if is_worker else "stray"
            numbers.add(number)
        yield row, roles[row.pid], number


def _worker_number(row: ProcessRow, life: _Life) -> int:
    """The number in its tag, if that is one of this run; 0 if not."""
    if row.tag is None or is_helper_tag(row.tag) or not is_tag_of_run(row.tag, life.found.run_id):
        return 0
    return worker_of_tag(row.tag)


def _list_process(row: ProcessRow, role: Role, number: int, host: Host) -> ListedProcess:
    return ListedProcess(
        incarnation=row.incarnation,
        parent=row.ppid,
        role=role,
        worker=number,
        state=row.state,
        age=max(0.0, (ticks() - row.start) / _TICKS),
        memory=vitals.memory(row.pid),
        command=host.command_line(row.pid),
    )
