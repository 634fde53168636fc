"""Reads how many processes the kernel has ended for lack of memory.

cgroups(7); Linux's Documentation/admin-guide/cgroup-v2.rst (memory.events: oom_kill, with
all cgroups below) and cgroup-v1/memory.rst (memory.oom_control); oom_kill in /proc/vmstat
since Linux 4.13.

Does, decides nothing; raises no OSError. Called by: :mod:`safepool.losses`.
"""

from __future__ import annotations

from safepool.core.oom import OomKills, parse_oom_kills
from safepool.host.quota import cgroup_folders, read_text


def oom_kills(proc: str = "/proc") -> OomKills:
    """Return the counts of now, for this process's cgroup and the machine."""
    in_cgroup = None
    for folder, is_v2 in cgroup_folders(f"{proc}/self", "memory"):
        file = "memory.events" if is_v2 else "memory.oom_control"
        in_cgroup = parse_oom_kills(read_text(f"{folder}/{file}"))
        if in_cgroup is not None:
            break
    return OomKills(in_cgroup, parse_oom_kills(read_text(f"{proc}/vmstat")))
