"""The errors of safepool: one family, picklable, with the facts as attributes.

Each class also derives from the standard exception that a program written for
``multiprocessing`` or ``concurrent.futures`` would catch, so existing ``except``
clauses keep working. Messages name the cause and the next step.
"""

from __future__ import annotations

import pickle
from typing import Any


class SafePoolError(Exception):
    """Root of all errors that safepool raises on its own account."""


class ProtectionError(SafePoolError, RuntimeError):
    """The run cannot be protected: its sidecar or a launcher could not start.

    Nothing of the user's code has run when this is raised from a constructor or
    from ``start()``. The message holds the reason that the system gave.
    """


class ForeignPoolError(SafePoolError, RuntimeError):
    """A pool or process object was used in a process that did not make it.

    A forked copy of the owner inherits the objects but not the workers. Make a
    new pool there.
    """


class PoolClosedError(SafePoolError, ValueError):
    """The pool takes no more tasks: it was closed or terminated."""


class PoolFullError(SafePoolError, RuntimeError):
    """The pool has as many calls that are not done as it may have (``max_queued``)."""


class PoolTerminatedError(SafePoolError, RuntimeError):
    """The result will never come: the pool was terminated before the task ended."""


class InitializerError(SafePoolError, RuntimeError):
    """The pool's initializer failed too often; the pool takes no more tasks.

    ``__cause__`` is the last exception of the initializer where it could be
    brought over; ``attempts`` is how many workers tried.
    """

    def __init__(self, message: str, attempts: int = 0) -> None:
        super().__init__(message)
        self.attempts = attempts

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.attempts)


class TaskNotPicklableError(SafePoolError, pickle.PicklingError):
    """The task cannot be brought to a worker: neither pickle nor cloudpickle can
    serialise its function or its arguments. The message names which, and why."""


class WorkerLostError(SafePoolError, RuntimeError):
    """A worker died while it ran this task; only this task is lost.

    Attributes: ``pid`` of the worker, ``exitcode`` as in
    ``multiprocessing.Process.exitcode`` (negative: the signal's number; None:
    unknown); ``task``, the name of the function; ``attempts``, how often it was tried;
    ``traceback``, where it was when it died of a fault (SIGSEGV, SIGABRT, SIGFPE, SIGBUS,
    SIGILL) as faulthandler tells it, "" otherwise or if the program uses faulthandler itself.

    After SIGKILL the message says whether the kernel has ended processes for lack of memory
    meanwhile, as its counters have it: it does not say which processes.
    """

    def __init__(
        self,
        message: str,
        pid: int = 0,
        exitcode: int | None = None,
        task: str = "",
        attempts: int = 1,
        traceback: str = "",
    ) -> None:
        super().__init__(message)
        self.pid = pid
        self.exitcode = exitcode
        self.task = task
        self.attempts = attempts
        self.traceback = traceback

    def __reduce__(self) -> tuple[Any, ...]:
        facts = self.pid, self.exitcode, self.task, self.attempts, self.traceback
        return type(self), (self.args[0], *facts)


class MemoryLimitError(SafePoolError, MemoryError):
    """The worker used more than ``max_rss`` during this task; it and its tree are gone.

    Attributes: ``limit`` and ``used`` in bytes; ``pid`` of the worker.
    """

    def __init__(self, message: str, limit: int = 0, used: int = 0, pid: int = 0) -> None:
        super().__init__(message)
        self.limit = limit
        self.used = used
        self.pid = pid

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.limit, self.used, self.pid)


class SoftTimeoutError(SafePoolError, TimeoutError):
    """Raised inside a task that has run for its ``soft_timeout``; the task may catch it.

    ``seconds``: the limit.
    """

    def __init__(self, message: str, seconds: float = 0.0) -> None:
        super().__init__(message)
        self.seconds = seconds

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.seconds)


class TaskTimeoutError(SafePoolError, TimeoutError):
    """The task took longer than it was given; its worker and all that it had started are gone.

    Attributes: ``limit``, "timeout" (run time) or "deadline" (since its submission);
    ``seconds``, how long that was; ``pid`` of the worker that was ended, 0 for none.
    """

    def __init__(
        self, message: str, limit: str = "timeout", seconds: float = 0.0, pid: int = 0
    ) -> None:
        super().__init__(message)
        self.limit = limit
        self.seconds = seconds
        self.pid = pid

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.limit, self.seconds, self.pid)
