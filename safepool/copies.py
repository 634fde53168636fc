"""Ends a fork of a worker that came back from its task: it is not the worker.

The kernel empties a page of ours in every fork, however that was made; so a look costs
no system call. Where it cannot, the pid is asked for.

Called by: the task loop.
"""

from __future__ import annotations

import mmap
import os
import sys
import traceback

_WIPE_ON_FORK = 18
"""MADV_WIPEONFORK (madvise(2), Linux 4.14), which the mmap module does not name."""


class Copies:
    """Knows the process that made it from its forks. ``own[0]`` is never set in a fork."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self.own = mmap.mmap(-1, mmap.PAGESIZE)
        if sys.platform == "linux":
            self.own = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            try:
                self.own.madvise(_WIPE_ON_FORK)
            except OSError:
                return
            self.own[0] = 1

    def end_if_one(self) -> None:
        """End this process if it is a fork; its exit status is that of what is being raised."""
        if self.own[0] or os.getpid() == self._pid:
            return
        error = sys.exc_info()[1]
        status = 0 if error is None else 1
        if isinstance(error, SystemExit):
            status = error.code if isinstance(error.code, int) else int(error.code is not None)
        elif error is not None:
            traceback.print_exc()
        os._exit(status & 0xFF)
