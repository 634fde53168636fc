"""The few calls of prctl(2) that safepool needs, for the calling thread or process.

ctypes is imported and libc looked up on first use, so that importing this module
costs nothing. After a fork from a process with threads that is too late to be safe:
call ``load()`` before the fork. Every function raises OSError with the errno of
the system.

Called by: launchers, sidecar and workers, on themselves.
"""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_SET_PDEATHSIG = 1
_SET_NAME = 15
_GET_NAME = 16
_SET_CHILD_SUBREAPER = 36
_NAME_SIZE = 16  # with the closing NUL


@cache
def load() -> Callable[[int, int], None]:
    """Return prctl(option, argument). Call it once before a fork: see above."""
    import ctypes

    call = ctypes.CDLL(None, use_errno=True).prctl
    call.restype = ctypes.c_int
    # prctl is variadic: without the types, 64-bit arguments would be cut.
    call.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]

    def prctl(option: int, argument: int) -> None:
        if call(option, argument, 0, 0, 0) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"prctl({option}): {os.strerror(number)}")

    return prctl


def set_parent_death_signal(sig: int) -> None:
    """Have the kernel send ``sig`` to this process when the thread that forked it ends; 0: none.

    A parent that is dead already sends nothing: verify it afterwards. Not inherited
    by fork; lost on exec of a set-user-ID program.
    """
    load()(_SET_PDEATHSIG, sig)


def set_child_subreaper() -> None:
    """Make this process the parent of every orphan among its descendants, until it ends.

    Not inherited by fork, kept on exec.
    """
    load()(_SET_CHILD_SUBREAPER, 1)


def set_name(name: str) -> None:
    """Name the calling thread as ps and top show it; what exceeds 15 bytes is cut."""
    import ctypes

    buffer = ctypes.create_string_buffer(os.fsencode(name)[: _NAME_SIZE - 1], _NAME_SIZE)
    load()(_SET_NAME, ctypes.addressof(buffer))


def get_name() -> str:
    """Return the name of the calling thread."""
    import ctypes

    buffer = ctypes.create_string_buffer(_NAME_SIZE)
    load()(_GET_NAME, ctypes.addressof(buffer))
    return os.fsdecode(buffer.value)
