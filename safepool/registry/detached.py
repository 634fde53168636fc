"""Detached processes on record: written when one is let go, struck off when it is gone.

One file for each, named after the process and not after a run, since it has to stay
when the run is retired::

    detached.PID.START.json

It is for people, who want to know what they have let go, and a second witness for
sweeps: the first is the tag of the process itself, which cannot always be set or read.
A record of another host, boot, pid namespace or user, and one that cannot be read, is
left where it is.

Called by: :mod:`safepool.detachment`, :mod:`safepool.sparing`, the sidecar, the
command line.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from safepool.core.detached_record import (
    DetachedRecord,
    detached_name,
    format_detached,
    parse_detached,
    parse_detached_name,
)
from safepool.core.identity import Incarnation, Sameness
from safepool.core.record import Here, Unreadable, foreignness
from safepool.errors import ProtectionError
from safepool.registry import place
from safepool.registry.files import DEBRIS_AGE, unlink, write_whole
from safepool.registry.look import ProcessSource, is_alive, read_whole
from safepool.registry.look import here as here_of


def note_detached(
    directory: str,
    host: ProcessSource,
    process: Incarnation,
    run_id: str,
    argv: Sequence[str],
    cwd: str,
    *,
    is_stray: bool = False,
) -> OSError | ProtectionError | None:
    """Write a process down as detached; return what went wrong, if anything did."""
    try:
        here = here_of(host)
        record = DetachedRecord(
            process,
            run_id,
            here.host,
            here.boot_id,
            here.pid_namespace,
            here.uid,
            tuple(argv),
            cwd,
            _started_at(process),
            is_stray,
        )
        path = os.path.join(directory, detached_name(process))
        with place.verified(directory):
            if not os.path.lexists(path):
                write_whole(path, format_detached(record))
    except (OSError, ProtectionError) as error:
        return error
    return None


def strike_off_detached(directory: str, process: Incarnation) -> OSError | None:
    """Remove the record of a process that is known to be gone; return what went wrong."""
    return unlink(os.path.join(directory, detached_name(process)))


def detached_processes(
    directory: str, host: ProcessSource, *, tidy: bool = True
) -> list[DetachedRecord]:
    """The detached processes of this user that are alive, each verified by its incarnation.

    ``tidy`` removes the records of those that are proven to be gone. No processes if
    the directory is missing.

    Raises:
        ProtectionError: the directory is not private to this user.
        OSError: the directory cannot be read.
    """
    living = []
    for record in _on_record(directory, host):
        alive = is_alive(record.process, host)
        if alive is Sameness.SAME:
            living.append(record)
        elif alive is Sameness.OTHER and tidy:
            strike_off_detached(directory, record.process)
    if tidy:
        _remove_debris(directory)
    return living


def detached_incarnations(directory: str, host: ProcessSource) -> frozenset[Incarnation]:
    """The names of all detached processes on record, for a sweep to spare. Raises nothing.

    Whether they live is not asked: to spare one that is gone spares nobody.
    """
    try:
        return frozenset(record.process for record in _on_record(directory, host))
    except (OSError, ProtectionError):
        return frozenset()


def _on_record(directory: str, host: ProcessSource) -> list[DetachedRecord]:
    """The records that were written in this place, in the order of their names."""
    found: list[DetachedRecord] = []
    try:
        with place.verified(directory) as fd:
            here: Here | None = None
            for name in sorted(os.listdir(fd)):
                process = parse_detached_name(name)
                if process is None:
                    continue
                data = read_whole(fd, name)
                record = parse_detached(data, process) if isinstance(data, bytes) else data
                if record is None or isinstance(record, Unreadable):
                    continue
                here = here or here_of(host)
                written = Here(record.host, record.boot_id, record.pid_namespace, record.uid)
                if not foreignness(written, here):
                    found.append(record)
    except FileNotFoundError:
        return []
    return found


def _remove_debris(directory: str) -> None:
    """Remove what a writer that was killed has left half done."""
    try:
        for name in os.listdir(directory):
            if name.startswith(".detached.") and name.endswith(".part"):
                path = os.path.join(directory, name)
                if time.time() - os.lstat(path).st_mtime > DEBRIS_AGE:
                    unlink(path)
    except OSError:
        return  # tidying is never worth a failure


def _started_at(process: Incarnation) -> float:
    """The start of a process in seconds since 1970."""
    now = time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
    return max(0.0, time.time() - now + process.start / os.sysconf("SC_CLK_TCK"))
