"""A memory barrier that reaches another process: membarrier(2).

A worker reads a cell of its page before each item, and pays nothing else for it. The price
is the owner's, when it wants something back: it has every processor that runs a
registered process carry out a full barrier (MEMBARRIER_CMD_GLOBAL_EXPEDITED, Linux 4.16).

Where there is none the owner waits a millisecond. No processor keeps a store to itself
for so long; but that is experience, not a promise of anybody's.

Called by: the task loop (registers), channels (barrier).
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable
from functools import cache

_NUMBERS = {"x86_64": 324, "aarch64": 283, "riscv64": 283, "ppc64le": 365, "s390x": 356}
_BARRIER, _REGISTER = 1 << 1, 1 << 2
_PAUSE_MS = 1


@cache
def _membarrier() -> Callable[[int], bool]:
    """Return membarrier(command), which tells whether the system has done it."""
    number = _NUMBERS.get(os.uname().machine) if sys.platform == "linux" else None
    if number is None:
        return lambda _command: False
    import ctypes

    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    call.argtypes = [ctypes.c_long] * 4

    def membarrier(command: int) -> bool:
        return bool(call(number, command, 0, 0) == 0)

    return membarrier


def register() -> bool:
    """Have barriers of other processes reach this one; False where the system has none."""
    return _membarrier()(_REGISTER)


def everywhere() -> None:
    """Return when every registered process has carried out a barrier."""
    if not _membarrier()(_BARRIER):
        pause()


def pause() -> None:
    """The same for processes that could not be registered."""
    select.poll().poll(_PAUSE_MS)
