"""What SIGINT and SIGTERM do to a pool's worker.

Ctrl-C goes to the whole foreground group. Workers ignore it except inside a task,
where it raises KeyboardInterrupt as in any program; nothing is printed. SIGTERM ends a
worker as it ends any process, unless the pool has a finalizer: then it is an
exception where the worker stands, so that the finalizer runs.

The handlers are Python ones, so that programs started by a task get the default action.

Called by: the task loop.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any


class Interrupts:
    """SIGINT's handler: raises only while a task runs, and once per task."""

    def __init__(self) -> None:
        self.in_task = False
        self.hit = False

    def __call__(self, _signal: int, _frame: object) -> None:
        """SIGINT has come."""
        if self.in_task:
            self.in_task = False
            self.hit = True
            raise KeyboardInterrupt


class WorkerEndedError(SystemExit):
    """This worker was asked to end (SIGTERM); its finalizer is still to run."""


class Terminations:
    """SIGTERM's handler, for a worker that has something to do before it ends.

    Raises while the worker waits or runs a task. ``is_asked`` says it to a worker that
    is at neither, or whose task has caught the exception.
    """

    def __init__(self, interrupts: Interrupts) -> None:
        self.is_asked = False
        self.is_waiting = False
        self._interrupts = interrupts

    def __call__(self, _signal: int, _frame: object) -> None:
        """SIGTERM has come."""
        may_raise = self.is_waiting or self._interrupts.in_task
        self.is_asked = True
        if may_raise:
            self.is_waiting = self._interrupts.in_task = False
            raise WorkerEndedError("the worker was asked to end by SIGTERM")

    def arm(self) -> None:
        """Be the handler from now on, unless SIGTERM is ignored, or a task's own."""
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self)

    def check(self) -> None:
        """Raise what was asked for meanwhile."""
        if self.is_asked:
            raise WorkerEndedError("the worker was asked to end by SIGTERM")


def reset_signals(interrupts: Callable[[int, Any], None]) -> None:
    """Take away what the owner's own handlers would do here, and let signals in again.

    What the owner ignores stays ignored, as it does in any program that it starts.
    """
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, interrupts)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
