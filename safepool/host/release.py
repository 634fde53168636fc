"""What it takes to let another process go: a tag, a cgroup, and a look where it works.

Does, decides nothing. A tag is a soft limit (see :mod:`safepool.core.lineage`), and
prlimit(2) sets that of another process of the same user. It goes by pid, so the
incarnation is verified before and after: should the pid have been handed out again in
between, that process gets back what it had.

Called by: :mod:`safepool.sparing`.
"""

from __future__ import annotations

import os
import resource
from contextlib import suppress

from safepool.core.identity import Incarnation
from safepool.host import cgroup
from safepool.host.base import Host


def put_tag(host: Host, process: Incarnation, tag: int) -> bool:
    """Have ``process``, and all that it starts from now on, bear ``tag``; False if it does not.

    Reasons for False: it is gone, it is another user's or a set-user-ID program, its
    hard limit is lower than the tag, the system has no such call. Raises nothing.
    """
    if not hasattr(resource, "prlimit"):
        return False
    pid = process.pid
    try:
        if host.incarnation(pid) != process:
            return False
        _, hard = resource.prlimit(pid, resource.RLIMIT_RTTIME)
        if hard != resource.RLIM_INFINITY and hard < tag:
            return False
        before = resource.prlimit(pid, resource.RLIMIT_RTTIME, (tag, hard))
        if host.incarnation(pid) == process:
            return True
        with suppress(OSError, ValueError):
            resource.prlimit(pid, resource.RLIMIT_RTTIME, before)
    except (OSError, ValueError):
        return False
    return False


def put_outside(host: Host, process: Incarnation) -> bool:
    """Take ``process`` out of every run's cgroup; False if it is still in one, or gone.

    By pid: should it have been handed out again since the verification, a process of
    some run is moved to where that run's owner is, which ends nobody.
    """
    door = cgroup.way_out(process.pid)
    if door is None:
        return True
    try:
        if host.incarnation(process.pid) != process:
            return False
    except OSError:
        return False
    return cgroup.write(door, str(process.pid).encode()) is None


def working_directory(pid: int) -> str:
    """Where the process works, for people; "" if that cannot be seen."""
    try:
        return os.readlink(f"/proc/{pid}/cwd")
    except OSError:
        return ""
