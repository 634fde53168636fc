"""How much memory a process and its descendants use.

Resident pages are quick to read, but count what is shared (after a fork, nearly all) once
for each process. The proportional set size divides them by the number of those who share
them, so the sum over a tree is what the tree costs; the kernel takes milliseconds for it.

Called by: the memory watch of a pool.
"""

from __future__ import annotations

import os

from safepool.host import vitals


def tree_of(pid: int) -> list[int]:
    """The process and its descendants, as far as they can be seen."""
    found = [pid]
    for each in found:
        try:
            threads = os.listdir(f"/proc/{each}/task")
        except OSError:
            continue
        for thread in threads:
            found += _children(each, thread)
    return found


def _children(pid: int, thread: str) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{thread}/children", "rb", buffering=0) as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


def resident(pids: list[int]) -> int:
    """Their resident bytes; what is shared is counted for each."""
    return sum(vitals.memory(pid) or 0 for pid in pids)


def proportional(pids: list[int]) -> int:
    """Their bytes, shared ones by part; resident bytes of those that tell nothing else."""
    return sum(_proportional(pid) for pid in pids)


def _proportional(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb", buffering=0) as file:
            for line in file.read().splitlines():
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return vitals.memory(pid) or 0
    return 0
