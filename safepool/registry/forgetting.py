"""Forgetting: how a record goes that no start will ever act upon.

Records of earlier boots are kept, since nothing that is not proven is dropped by
itself. Somebody may ask for their removal; then the proof is made here, and without
one the record stays.

Called by: the command line.
"""

from __future__ import annotations

import os

from safepool.core.record import Here, is_run_id, why_kept
from safepool.registry import lock, place
from safepool.registry.files import RunFiles
from safepool.registry.look import read_record

_LOCAL = frozenset(
    {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"}
)
"""File systems that one kernel at a time has mounted. All others may be shared."""


def forget(directory: str, run_id: str, here: Here) -> str:
    """Remove the record of a run of which no process can be alive any more.

    That is proven for a run of an earlier boot of this very host, whose lock is free
    and whose record lies on a local disk. A log that says something stays, as when a
    run is retired. Not for use by two threads at once.

    Args:
        directory: the registry, as :func:`safepool.registry.directory` returns it.
        run_id: which run; 32 hexadecimal digits.
        here: where this process stands: :func:`safepool.registry.here`.

    Returns:
        "" when the run is no longer on record; otherwise why it still is, as a sentence
        for people. Nothing has been changed then.

    Raises:
        ValueError: ``run_id`` is none.
        ProtectionError: the directory is not private to this user.
        OSError: the directory cannot be read.

    Example::

        why = forget(directory(), "0123456789abcdef0123456789abcdef", here(host))
        print(why or "forgotten")
    """
    if not is_run_id(run_id):
        raise ValueError(f"a run ID is 32 hexadecimal digits, not {run_id!r}")
    with place.verified(directory) as fd:
        record = read_record(fd, f"{run_id}.run", run_id)
        if record is None:
            return "there is no record of such a run"
        is_free = lock.is_unlocked(fd, f"{run_id}.lock", run_id)
        why = why_kept(
            record,
            here,
            lock_held=None if is_free is None else not is_free,
            is_local_disk=_file_system(fd) in _LOCAL,
        )
    if why:
        return f"{why}. If you know better, remove {os.path.join(directory, run_id)}.*"
    error = RunFiles.attach(directory, run_id).retire()
    return "" if error is None else f"it could not be removed: {error.strerror}"


def _file_system(fd: int) -> str:
    """The kind of file system that a descriptor lies in, as the kernel names it; "" if unknown.

    By the number of the mount (proc(5): fdinfo, mountinfo): a path can be mounted over.
    """
    try:
        with open(f"/proc/self/fdinfo/{fd}") as info:
            mount = next((line.split()[1] for line in info if line.startswith("mnt_id:")), "")
        with open("/proc/self/mountinfo") as mounts:
            for line in mounts:
                before, _, after = line.partition(" - ")
                if before.split()[0] == mount:
                    return after.split()[0]
    except OSError:
        return ""  # without /proc nothing is proven
    return ""
