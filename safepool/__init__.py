"""safepool: multiprocessing with the promise that nothing outlives its owner.

Swap the import: ``import safepool as mp``. The module offers the public names of
``multiprocessing``; ``Process`` and ``Pool`` are the safe ones. Everything is
imported at first use, so a worker that imports the package pays for nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from safepool.cancellation import TaskCancelledError as TaskCancelledError
    from safepool.context import get_context as get_context
    from safepool.current import current_worker as current_worker
    from safepool.detachment import detached as detached
    from safepool.errors import ForeignPoolError as ForeignPoolError
    from safepool.errors import InitializerError as InitializerError
    from safepool.errors import MemoryLimitError as MemoryLimitError
    from safepool.errors import PoolClosedError as PoolClosedError
    from safepool.errors import PoolFullError as PoolFullError
    from safepool.errors import PoolTerminatedError as PoolTerminatedError
    from safepool.errors import ProtectionError as ProtectionError
    from safepool.errors import SafePoolError as SafePoolError
    from safepool.errors import SoftTimeoutError as SoftTimeoutError
    from safepool.errors import TaskNotPicklableError as TaskNotPicklableError
    from safepool.errors import TaskTimeoutError as TaskTimeoutError
    from safepool.errors import WorkerLostError as WorkerLostError
    from safepool.executor import SafePoolExecutor as SafePoolExecutor
    from safepool.pool import SafePool as SafePool
    from safepool.process import SafeProcess as SafeProcess
    from safepool.stats import PoolStats as PoolStats
    from safepool.stats import WorkerStats as WorkerStats
    from safepool.sweeping import SweepResult as SweepResult
    from safepool.sweeping import sweep as sweep

__version__ = "0.1.0"

_OWN = {
    "SafePool": "safepool.pool",
    "SafePoolExecutor": "safepool.executor",
    "SafeProcess": "safepool.process",
    "get_context": "safepool.context",
    "detached": "safepool.detachment",
    "PoolStats": "safepool.stats",
    "WorkerStats": "safepool.stats",
    "sweep": "safepool.sweeping",
    "SweepResult": "safepool.sweeping",
    "ForeignPoolError": "safepool.errors",
    "InitializerError": "safepool.errors",
    "PoolClosedError": "safepool.errors",
    "PoolTerminatedError": "safepool.errors",
    "ProtectionError": "safepool.errors",
    "SafePoolError": "safepool.errors",
    "TaskNotPicklableError": "safepool.errors",
    "TaskCancelledError": "safepool.cancellation",
    "current_worker": "safepool.current",
    "MemoryLimitError": "safepool.errors",
    "PoolFullError": "safepool.errors",
    "SoftTimeoutError": "safepool.errors",
    "TaskTimeoutError": "safepool.errors",
    "WorkerLostError": "safepool.errors",
}

_MODULES = {"connection", "managers", "queues", "shared_memory", "sharedctypes", "synchronize"}

# Fixed here, so that ``from safepool import *`` does not depend on what is loaded.
__all__ = [  # noqa: PLE0604 - the names below are resolved by __getattr__
    *_OWN,
    "Array", "AuthenticationError", "Barrier", "BoundedSemaphore", "BufferTooShort",
    "Condition", "Event", "JoinableQueue", "Lock", "Manager", "Pipe", "Pool", "Process",
    "ProcessError", "Queue", "RLock", "RawArray", "RawValue", "Semaphore", "SimpleQueue",
    "TimeoutError", "Value", "active_children", "allow_connection_pickling", "cpu_count",
    "current_process", "freeze_support", "get_all_start_methods", "get_logger",
    "get_start_method", "log_to_stderr", "parent_process", "reducer", "set_executable",
    "set_forkserver_preload", "set_start_method",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    import importlib

    if name in _OWN:
        value = getattr(importlib.import_module(_OWN[name]), name)
        globals()[name] = value
        return value
    if name == "Process":
        return __getattr__("SafeProcess")
    if name in ("pool", "process", "context"):
        return importlib.import_module(f"safepool.{name}")
    import multiprocessing

    if name in _MODULES:
        return importlib.import_module(f"multiprocessing.{name}")
    if name not in multiprocessing.__all__:
        raise AttributeError(f"module 'safepool' has no attribute {name!r}")
    if name[0].isupper() and not isinstance(getattr(multiprocessing, name), type):
        # Queue, Lock, Pool, Manager ...: methods of the context in force at the call.
        import functools

        @functools.wraps(getattr(multiprocessing, name))
        def make(*args: Any, **kwargs: Any) -> Any:
            return getattr(__getattr__("get_context")(), name)(*args, **kwargs)

        globals()[name] = make
        return make
    return getattr(multiprocessing, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
