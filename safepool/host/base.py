"""What safepool asks of an operating system, and what each answer promises.

A host does and decides nothing. It reads the process table, opens handles that
stay with one incarnation, and sends signals through them; ``send`` is the one
function of the whole project through which a signal goes. The contract tests in
``tests/contract`` say the same as the docstrings here and run against every host.

Rules for every host: a process that vanishes while it is read is no error; one
that may not be read is left out; only a lack of resources (EMFILE, ENOMEM) is
raised, as OSError, since a look that is cut short must not pass for a whole one.

Called by: the sweeper, the launcher, the sidecar, the owner's side of a run.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from safepool.core.containment import Listing
from safepool.core.identity import Incarnation, ProcessRow, Snapshot
from safepool.core.planner import Sig


class NoHandle(Enum):
    """Why ``Host.open`` gave no handle."""

    GONE = "gone"
    """The process is dead (a zombie is), or its pid names another one now."""

    UNKNOWN = "unknown"
    """It could not be told or no descriptor was free: signal nothing, ask again."""


class Sending(Enum):
    """What became of a signal."""

    SENT = "sent"
    GONE = "gone"
    DENIED = "denied"


class Handle(Protocol):
    """A hold on one incarnation: whatever becomes of the pid, it never means another."""

    @property
    def incarnation(self) -> Incarnation:
        """The process that this handle means."""

    @property
    def fd(self) -> int:
        """A descriptor that polls as readable as soon as the process is dead.

        -1 where the host has none: then only another look can tell.
        """

    def close(self) -> None:
        """Let go. Closing twice does nothing."""


class Container(Protocol):
    """The cgroup of a run as a whole. What the kernel refuses is no error: see each answer."""

    def close(self) -> None:
        """Let go of the descriptor, and change nothing. Closing twice does nothing."""

    def listing(self) -> Listing | None:
        """Return everybody in it and below; None when that cannot be told for sure."""

    def freeze(self) -> bool:
        """Stop everybody inside, and whoever is born there; False when it is refused."""

    def thaw(self) -> bool:
        """Let everybody inside go on; False when it is refused."""

    def kill(self) -> bool:
        """End everybody inside, the frozen and the just born too; False when it is refused."""


class Host(Protocol):
    """The process table of one machine, as far as this process can see it."""

    def look_subtree(self, pid: int, run_id: str | None = None) -> Snapshot:
        """Return the row of ``pid`` and the rows of all its descendants.

        All descendants carry their tag. The children of ``pid`` itself carry their
        mark, too, when they have no tag or, if ``run_id`` is given, another run's.
        Empty when ``pid`` is not there.
        """

    def look_all(self, *, tags: bool, since: int = 0) -> Snapshot:
        """Return the rows of all visible processes, with tag and mark if ``tags``.

        ``since``: leave the witnesses of those unread that started before that tick.
        """

    def row(self, pid: int) -> ProcessRow | None:
        """Return the row of ``pid``, without tag and mark; None when it is not there."""

    def incarnation(self, pid: int) -> Incarnation | None:
        """Return the name of ``pid`` for ever (also of a zombie); None when it is not there."""

    def open(self, incarnation: Incarnation) -> Handle | NoHandle:
        """Return a handle that was verified to mean ``incarnation``; the caller closes it.

        Raises ValueError for this process itself and for pid 1 and below.
        """

    def send(self, handle: Handle, sig: Sig) -> Sending:
        """Send ``sig`` to the process of ``handle`` and say what became of it.

        Raises ValueError for this process itself and for pid 1 and below.
        """

    def now(self) -> float:
        """Return the monotonic clock in seconds."""

    def command_line(self, pid: int) -> str:
        """Return the command line for people: printable, quoted as in a shell, cut when long.

        The bracketed name when there is none; empty when ``pid`` is not there.
        """

    def read_tag(self, pid: int) -> int | None:
        """Return the lineage tag of ``pid``, of whichever run; None without one."""

    def read_mark(self, pid: int) -> str | None:
        """Return the lineage mark in the environment of ``pid``; None without one."""

    def boot_id(self) -> str:
        """Return the name of this boot: start times of two boots do not compare."""

    def pid_namespace(self) -> int:
        """Return the number of the pid namespace in which this process reads pids."""
