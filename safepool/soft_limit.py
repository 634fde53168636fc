"""An exception inside a task that takes too long, before it is ended from outside.

It comes by SIGALRM and the interval timer of this process, which also end a sleep or a
read: so a task with a soft timeout cannot use these itself. Both are as before when
the task is over.

Called by: the task loop, in the main thread of a worker.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from safepool.errors import SoftTimeoutError
from safepool.worker_signals import Interrupts


@contextmanager
def soft_limit(seconds: float, interrupts: Interrupts) -> Iterator[None]:
    """Raise SoftTimeoutError in the task that runs in here, once, after so many seconds."""

    def raise_it(_signal: int, _frame: object) -> None:
        # Not into the code around it: the task may have ended just now.
        if interrupts.in_task:
            raise SoftTimeoutError(f"the task has run for {seconds:g} s", seconds)

    before = signal.signal(signal.SIGALRM, raise_it)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
