"""Maps a file into memory without holding a descriptor for it.

``mmap.mmap`` keeps a copy of the descriptor up to CPython 3.12 (``trackfd=False`` is new in
3.13), so every array that came by a file would cost one, of a thousand or so.

Called by: segments.
"""

from __future__ import annotations

import mmap
import sys
import weakref
from functools import cache
from typing import Any


def map_file(fd: int, size: int, *, private: bool) -> memoryview:
    """Return ``size`` bytes of the file, writable, mapped as long as anything refers to them.

    ``private``: what is written stays here. Raises OSError.
    """
    flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
    if sys.version_info >= (3, 13):
        return memoryview(mmap.mmap(fd, size, flags=flags, trackfd=False))
    return _map_by_libc(fd, size, flags)


@cache
def _libc() -> Any:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_ssize_t
    ]  # fmt: skip
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


def _map_by_libc(fd: int, size: int, flags: int) -> memoryview:
    import ctypes
    import os

    libc = _libc()
    address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, f"mmap of {size} bytes: {os.strerror(number)}")
    block = (ctypes.c_ubyte * size).from_address(address)
    # It is called when nothing refers to the bytes any more; at exit the kernel does it.
    weakref.finalize(block, libc.munmap, address, size).atexit = False
    return memoryview(block).cast("B")
