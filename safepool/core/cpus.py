"""How many workers a pool has when nobody says.

More than the CPUs that this process may use, or than its share of them is worth, only
wait for each other. A container's share is often less than the machine.

Decides from numbers. Called by: whoever checks a pool's arguments.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple


class Size(NamedTuple):
    """A number of workers and the reason for it, for people."""

    workers: int
    reason: str


def default_size(cpus: int, quotas: Iterable[float]) -> Size:
    """Return the size for ``cpus`` usable CPUs and ``quotas``, in CPUs, each of which binds.

    A part of a CPU counts as one: 1.5 are worth two workers.
    """
    least = min(quotas, default=math.inf)
    of_quota = max(1, math.ceil(least)) if least < math.inf else cpus
    if of_quota < cpus:
        return Size(of_quota, f"a cgroup's quota of {least:g} CPUs, of {cpus} usable ones")
    return Size(max(1, cpus), f"{cpus} usable CPUs")


def parse_cpu_max(text: str) -> float | None:
    """The quota in a ``cpu.max`` of cgroup v2 ("max 100000", "150000 100000"); None: no limit."""
    words = text.split()
    if len(words) != 2 or words[0] == "max":
        return None
    return parse_cfs(words[0], words[1])


def parse_cfs(quota: str, period: str) -> float | None:
    """The quota in cgroup v1's ``cpu.cfs_quota_us`` and ``cpu.cfs_period_us``; -1: no limit."""
    try:
        used, whole = int(quota), int(period)
    except ValueError:
        return None
    return used / whole if used > 0 and whole > 0 else None
