"""What is known of a process, and whether two sightings are of the same one.

Decides: nothing but sameness. A pid alone names nobody: numbers are handed out
again. An *incarnation* (pid and start time in clock ticks since boot, within one
boot and one pid namespace) names one process for ever. Comparison is
three-valued: what cannot be told apart is UNKNOWN, and unknown is never signalled.

Called by: the planner, the hosts, the registry.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import NamedTuple

from safepool.core.values import dataclass, field

DEAD_STATES = "ZXx"
"""State letters of processes that are dead: a zombie exists, but it is."""


class Sameness(Enum):
    """Answer to "is this the process that we mean?"."""

    SAME = "same"
    OTHER = "other"
    UNKNOWN = "unknown"


class Incarnation(NamedTuple):
    """One process for ever: ``pid`` and ``start`` (ticks since boot; 0: not known)."""

    # A tuple, since a look at a thousand processes makes and compares thousands of these.

    pid: int
    start: int

    def compare(self, other: Incarnation) -> Sameness:
        """Tell whether ``other`` is this process; an unknown start time is UNKNOWN."""
        if self.pid != other.pid:
            return Sameness.OTHER
        if not self.start or not other.start:
            return Sameness.UNKNOWN
        return Sameness.SAME if self.start == other.start else Sameness.OTHER


class CgroupName(NamedTuple):
    """One cgroup for ever, within one boot: where its directory is, and the inode of that.

    Without inode it was about to be made: it may be removed when empty, and nothing else.
    """

    path: str = ""
    inode: int = 0


@dataclass(frozen=True)
class ProcessRow:
    """One process in one look.

    ``state`` is the letter of ``/proc/PID/stat``; ``tag`` is the lineage tag
    (see :mod:`safepool.core.lineage`) and ``mark`` the lineage in the environment,
    each None when the process has none or the look did not read it.
    """

    pid: int
    start: int
    ppid: int
    state: str = "S"
    group: int = 0
    session: int = 0
    tag: int | None = None
    mark: str | None = None

    @property
    def incarnation(self) -> Incarnation:
        """The name of this process for ever."""
        return Incarnation(self.pid, self.start)

    @property
    def is_alive(self) -> bool:
        """True unless it is a zombie or gone."""
        return self.state not in DEAD_STATES


@dataclass(frozen=True)
class Snapshot:
    """The result of one look: the rows by pid, and when they were read (monotonic).

    ``inside``: who was in the sweep's cgroup; None: there is none, or it could not be read.
    ``hides_others``: somebody who is no member may be there whom no row shows.
    """

    rows: Mapping[int, ProcessRow] = field(default_factory=dict)
    taken: float = 0.0
    inside: frozenset[Incarnation] | None = None
    hides_others: bool = False

    def alive(self) -> Iterator[ProcessRow]:
        """All rows of living processes."""
        return (row for row in self.rows.values() if row.is_alive)

    def find(self, incarnation: Incarnation) -> ProcessRow | None:
        """The living row of just this incarnation, else None."""
        row = self.rows.get(incarnation.pid)
        if row is None or not row.is_alive:
            return None
        return row if row.incarnation == incarnation else None
