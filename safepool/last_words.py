"""Has a worker that dies of a fault leave the traceback where its owner finds it.

``faulthandler`` writes it at SIGSEGV, SIGABRT, SIGFPE, SIGBUS and SIGILL into a file that
worker and owner share: behind the page (see core.frames). A program that has enabled
faulthandler for itself keeps what it has chosen.

A fork of the worker writes nothing there: it is not the worker.

Called by: the task loop, before the user's code.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
from contextlib import suppress

from safepool.core import frames

_HIGH = 512
"""The descriptor gets a number from here on: who closes all of them and opens files again
gets low ones, so no file of the user's comes to stand where a traceback would be written."""

_kept: tuple[int, int, int] | None = None
"""The descriptor in use, with device and inode of its file."""


def leave_in(fd: int) -> None:
    """Write the traceback of a fault into this file, behind the page; takes ``fd`` over."""
    global _kept
    if faulthandler.is_enabled() and _kept is None:
        os.close(fd)
        return
    # Under a limit that is lower than that, the number stays as it is.
    with suppress(OSError):
        high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH)
        os.close(fd)
        fd = high
    os.lseek(fd, frames.PAGE_BYTES, os.SEEK_SET)
    faulthandler.enable(fd)
    found = os.fstat(fd)
    _kept = fd, found.st_dev, found.st_ino


def _keep_silent() -> None:
    """In a fork of a worker: nothing reaches the worker's file from here."""
    if _kept is None:
        return
    fd, device, inode = _kept
    with suppress(OSError):
        found = os.fstat(fd)
        if (found.st_dev, found.st_ino) == (device, inode):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, fd, inheritable=False)
            os.close(null)


os.register_at_fork(after_in_child=_keep_silent)
