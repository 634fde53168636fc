"""The registry: the files that tell later processes about the runs of one user.

Everything lies flat in one private directory (:mod:`~safepool.registry.place`);
a run owns the names that begin with its ID::

    ID.run    the record, written whole and renamed into place
    ID.lock   locked by the owner while it lives, afterwards by the run's sweeper
    ID.m.…    one empty file per sidecar, launcher and worker; the name says all
    ID.log    what was ended and why; it stays when the run is retired

    detached.PID.START.json    a process that was let go, of whichever run

The owner creates (:class:`RunFiles`) and gets a ProtectionError if it cannot; the
sidecar and launchers attach and get errors returned, since no I/O may stop a sweep.
A later process looks (:func:`scan`, :func:`dead_runs`), claims, and only then acts.
What cannot be read is left where it is and reported, never deleted; somebody may ask
for the removal of what is from an earlier boot (:func:`forget`).
"""

from __future__ import annotations

from safepool.registry.detached import (
    detached_incarnations,
    detached_processes,
    note_detached,
    strike_off_detached,
)
from safepool.registry.files import HEARTBEAT, RunFiles, prune
from safepool.registry.forgetting import forget
from safepool.registry.look import DeadRun, FoundRun, ProcessSource, dead_runs, here, scan
from safepool.registry.place import directory, existing_directory

__all__ = [
    "HEARTBEAT",
    "DeadRun",
    "FoundRun",
    "ProcessSource",
    "RunFiles",
    "dead_runs",
    "detached_incarnations",
    "detached_processes",
    "directory",
    "existing_directory",
    "forget",
    "here",
    "note_detached",
    "prune",
    "scan",
    "strike_off_detached",
]
