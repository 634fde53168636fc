"""Gives a run its cgroup, where one can be made, and has it on record.

The name is on record before the cgroup is there, and its inode before anybody is in it:
so a kill at any step leaves nothing that the next start could not find.

The first process to be moved into a cgroup waits for a grace period of the kernel's RCU,
some 10 ms; those that follow at once do not. So that wait is begun, by a thread, before
there is a worker that would have to sit it out.

Called by: the owner's side of a run.
"""

from __future__ import annotations

import _thread
import os
import threading
from contextlib import suppress

from safepool import registry
from safepool.bootstrap import nets
from safepool.core.identity import CgroupName
from safepool.core.record import RunRecord
from safepool.core.values import replace
from safepool.errors import ProtectionError
from safepool.host import cgroup, container, own
from safepool.in_flight import gate
from safepool.loop import signals_blocked

CGROUP_VARIABLE = "SAFEPOOL_CGROUP"
"""Whether runs make a cgroup of their own: "on", wherever one can be made; "off", nowhere;
"auto", where this user was given the right to (delegation)."""


def is_wanted() -> bool:
    """Is a run to have a cgroup, where one can be made? ProtectionError for a bad setting."""
    mode = os.environ.get(CGROUP_VARIABLE, "auto")
    if mode not in ("auto", "on", "off"):
        raise ProtectionError(f'{CGROUP_VARIABLE} must be "auto", "on" or "off", not {mode!r}')
    if mode == "off" or "cgroup" not in nets() or not own.keeps_orphans():
        return False
    return mode == "on" or cgroup.is_delegated()


def find(run_id: str) -> CgroupName:
    """Where the run can have its cgroup; an empty name: nowhere, or it is not to have one."""
    return cgroup.place(run_id) if is_wanted() else CgroupName()


def write_down(directory: str, record: RunRecord) -> tuple[registry.RunFiles, CgroupName]:
    """Write a new run down and make its cgroup; an empty name where there can be none.

    Raises ProtectionError when the run cannot be written down.
    """
    files = registry.RunFiles.create(directory, record)
    made = cgroup.make(record.cgroup)
    if made.inode and files.write_again(replace(record, cgroup=made)) is not None:
        # Without its inode on record nobody could act upon it after us.
        container.remove(made, 0.0)
        made = CgroupName()
    return files, made


_warming = -1
"""The descriptor through which a thread warms up now."""


def prepare(name: CgroupName, launcher_id: int) -> None:
    """Make the cgroup of a launcher, and begin at the side what its first worker waits for.

    In this order: who waits for the move holds the lock that is needed to make one. What
    is refused is found missing by the launcher. Safe in threads.
    """
    if name.inode:
        container.make_for_launcher(name, launcher_id)
        _begin_warming(name)


def _begin_warming(name: CgroupName) -> None:
    """Nothing is moved: the thread asks for itself to be where it is."""
    global _warming
    with gate.lock:
        if _warming >= 0:
            return
        # Refused, or no descriptor or thread is free: then the first worker waits itself.
        try:
            _warming = os.open(cgroup.threads_above(name), os.O_WRONLY | os.O_CLOEXEC)
            with signals_blocked():
                _thread.start_new_thread(_warm_up, ())
        except (OSError, RuntimeError):
            _stop_warming()


def _warm_up() -> None:
    with suppress(OSError):
        os.write(_warming, str(threading.get_native_id()).encode())
    with gate.lock:
        _stop_warming()


def _stop_warming() -> None:
    """After a fork in the child, too: the thread is the parent's."""
    global _warming
    fd, _warming = _warming, -1
    if fd >= 0:
        os.close(fd)


os.register_at_fork(after_in_child=_stop_warming)
