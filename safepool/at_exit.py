"""What a process does at its end, after all that multiprocessing does for its pools and queues.

Registered once in a process, when the run's module is imported: a finalizer that appeared at a
first pool would be one that the program, or a test, does not know of. A forked child, whose
finalizers multiprocessing drops, registers anew.

Called by: the run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing import util

_LAST = -100
_registered_in = 0


def register(callback: Callable[[], None]) -> None:
    """Have this called as the last of all finalizers of this process, unless it is already."""
    global _registered_in
    if _registered_in != os.getpid():
        _registered_in = os.getpid()
        util.Finalize(None, callback, exitpriority=_LAST)
