"""Was it the kernel's OOM killer that ended a worker? What its counters allow to say.

The kernel counts the processes that it has ended for lack of memory: for each cgroup
(v2: memory.events, with all cgroups below; v1: memory.oom_control, for itself alone) and
for the whole machine (/proc/vmstat). It does not say which processes. So each count above
the first reading is put down to one SIGKILL, and what is said is likely, not certain.

Pure. Called by: :mod:`safepool.losses`, with what :mod:`safepool.host.oom` has read.
"""

from __future__ import annotations

from safepool.core.values import dataclass


@dataclass(frozen=True)
class OomKills:
    """The counts at one moment, in the cgroup and on the machine; None where there is none."""

    in_cgroup: int | None = None
    on_machine: int | None = None


def parse_oom_kills(text: str) -> int | None:
    """Find the count in any of the three files; None without one."""
    for line in text.splitlines():
        name, _, number = line.partition(" ")
        if name == "oom_kill" and number.strip().isdigit():
            return int(number)
    return None


class OomSuspicion:
    """Puts each kill that was counted since ``first`` down to one death."""

    def __init__(self, first: OomKills) -> None:
        self._explained = first

    def hint(self, now: OomKills) -> str:
        """What to say of a worker that died of SIGKILL just now; "" if it was somebody else."""
        before = self._explained
        if now.in_cgroup is None and now.on_machine is None:
            return " (the system does that when memory runs out)"
        in_cgroup = _is_more(now.in_cgroup, before.in_cgroup)
        on_machine = _is_more(now.on_machine, before.on_machine)
        self._explained = OomKills(
            _one_on(before.in_cgroup, now.in_cgroup), _one_on(before.on_machine, now.on_machine)
        )
        if in_cgroup:
            return (
                ", probably since memory ran out: the kernel's OOM killer "
                "has ended a process of this cgroup meanwhile"
            )
        if on_machine:
            return (
                ", perhaps since memory ran out: the kernel's OOM killer "
                "has ended a process of this machine meanwhile"
            )
        return ""


def _is_more(now: int | None, before: int | None) -> bool:
    return now is not None and before is not None and now > before


def _one_on(before: int | None, now: int | None) -> int | None:
    """Explain one kill. A count that went back (another cgroup now) is taken as it is."""
    if now is None or before is None:
        return now
    return min(before + 1, now)
