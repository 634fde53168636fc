"""SafePool: the face of the engine, with the methods of ``multiprocessing.Pool``.

Checks arguments, turns them into jobs, and hands back results. Everything that waits
or decides is elsewhere: the engine's thread moves tasks, the ledger knows where they
are, a launcher behind the context's worker source owns the processes.

Dropping a pool ends it, with the warning that multiprocessing gives; so does the
interpreter's exit. A forked copy of the owner gets ForeignPoolError from every method.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from multiprocessing import pool as mp_pool
from multiprocessing.context import BaseContext
from multiprocessing.pool import CLOSE, INIT, RUN, TERMINATE
from types import TracebackType
from typing import Any, NoReturn, TypeVar

from safepool import payload, run, service
from safepool.arguments import checked_size
from safepool.bounds import BoundedSink, WhenFull, checked_bound
from safepool.calls import Calls
from safepool.core.options import OnWorkerLost, TaskOptions, checked_options
from safepool.core.policy import DEFAULT_GRACE, EndPolicy, OnOwnerDeath, Strays, checked_policy
from safepool.engine import Engine
from safepool.errors import PoolClosedError
from safepool.groups import Functions
from safepool.jobs import PLAIN, Job
from safepool.layers import Protection
from safepool.results import Sink, check_owner
from safepool.serial import SerialEngine
from safepool.size_settings import IDLE_TIMEOUT, SizeSettings, checked_sizes
from safepool.stats import PoolStats
from safepool.submission import submit
from safepool.worker_life import WorkerLife, checked_life

_Callback = Callable[[Any], object] | None

_P = TypeVar("_P", bound="SafePool")


class SafePool(Calls):
    """A pool of worker processes that are gone when their owner is.

    Args:
        processes: number of workers, at least 1; by default the number of CPUs that
            this process may use, or that its cgroups' quotas are worth if that is less.
        initializer: called with ``initargs`` in each worker before its first task. If
            it keeps failing, the pool gives up with InitializerError.
        maxtasksperchild: tasks (calls or chunks) after which a worker is replaced.
        context: a context of safepool or multiprocessing; decides the start method.
        grace: seconds between the polite and the forced end of a worker's processes.
        on_owner_death: what the pool's processes get once the owner has ended, however:
            "terminate", SIGTERM and SIGKILL after the grace; "kill", SIGKILL at once.
        strays: what becomes of processes that a worker has started and leaves running
            when the pool sends it away in order, that is after ``close`` or after
            ``maxtasksperchild`` tasks: "kill" ends them with the worker (SIGTERM, the
            grace, SIGKILL); "spare" lets them go, as if they had been started with
            :class:`safepool.detached`, and logs which. After any other end of a worker
            (``terminate`` and so ``with``, a crash, the owner's end while it is still at
            work, a launcher that was killed) they are ended whatever is said here.
        timeout, deadline, retries, retry_on, retry_delay, on_worker_lost, max_pending, priority,
            soft_timeout: for all calls of this pool; see :meth:`options`.
        finalizer: called with ``finalargs`` in each worker that leaves: in order, or because of
            SIGTERM, which is then an exception (a SystemExit) in the task that runs. It has
            the grace for it. Not called when a worker is killed.
        init_timeout: seconds that the initializer may take. A worker that takes longer is ended
            with its tree, and counts as one whose initializer has failed.
        exit_timeout: seconds that a worker may take to leave when it was told to; then it is
            ended.
        env: variables that workers have otherwise than the owner; None removes one. Spawned
            workers have them before they import the main module.
        inner_threads: threads that OpenMP and BLAS libraries may use within a worker. It sets
            the variables that they read (unless ``env`` does), and limits those that are
            loaded already if threadpoolctl is installed. None: left as it is.
        log_to_owner: log records of workers go to the handlers of the owner, in the order of
            each worker and before the results of their tasks, and with the owner's levels of
            now; workers write none themselves. Handlers run in the pool's thread.
        lazy: start no worker before there is a task for it, and no more than have one.
        idle_timeout: seconds after which a worker that has had nothing to do leaves; the next
            task starts one again. Six hours by default; None: they stay.
        max_rss: bytes of memory that a worker may use together with its descendants; what
            several processes share counts by part. After a task that left it with more a
            worker is replaced; during one it is ended with its tree, and the task fails with
            MemoryLimitError. Tasks of such a pool travel one by one.
        max_queued: calls (of ``apply_async`` and the like) that may wait besides those that
            workers have; None: any number.
        when_full: what ``apply_async`` does when there are as many: "block", it waits until one
            is done (a callback, which would wait for ever, gets PoolFullError); "raise",
            PoolFullError.
        serial: run tasks in the caller's own thread, one by one, without processes: a debugger
            or profiler sees them as any other code. Limits do not apply then. None: if the
            variable SAFEPOOL_SERIAL is set, and is not 0.
        progress: a bar for each map of this pool; see :meth:`options`.

    Raises:
        ValueError, TypeError: an argument makes no sense.
        ProtectionError: the workers could not be protected; nothing was started.

    Example::

        with SafePool(4) as pool:
            print(pool.map(len, ["a", "bb"]))
    """

    # What __del__ asks for, should __init__ not even begin.
    _state = INIT
    _owner = 0

    def __init__(
        self,
        processes: int | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: Iterable[Any] = (),
        maxtasksperchild: int | None = None,
        context: Any = None,
        *,
        grace: float = DEFAULT_GRACE,
        on_owner_death: OnOwnerDeath = "terminate",
        strays: Strays = "kill",
        timeout: float | None = None,
        deadline: float | None = None,
        retries: int = 0,
        retry_on: type[BaseException] | tuple[type[BaseException], ...] = (),
        retry_delay: float = 0.0,
        on_worker_lost: OnWorkerLost = "fail",
        max_pending: int | None = None,
        priority: int = 0,
        soft_timeout: float | None = None,
        finalizer: Callable[..., object] | None = None,
        finalargs: Iterable[Any] = (),
        init_timeout: float | None = None,
        exit_timeout: float | None = None,
        env: Mapping[str, str | None] | None = None,
        inner_threads: int | None = None,
        log_to_owner: bool = False,
        lazy: bool = False,
        idle_timeout: float | None = IDLE_TIMEOUT,
        max_rss: int | None = None,
        max_queued: int | None = None,
        when_full: WhenFull = "block",
        progress: bool | str = False,
        serial: bool | None = None,
    ) -> None:
        self._owner = os.getpid()
        wanted = {
            "timeout": timeout,
            "deadline": deadline,
            "retries": retries,
            "retry_on": retry_on,
            "retry_delay": retry_delay,
            "on_worker_lost": on_worker_lost,
            "max_pending": max_pending,
            "priority": priority,
            "soft_timeout": soft_timeout,
            "progress": progress,
        }
        wanted["is_alone"] = max_rss is not None
        options = checked_options(PLAIN, wanted)
        self._options = PLAIN if options == PLAIN else options
        processes = checked_size(processes, initializer, maxtasksperchild)
        sizes = checked_sizes(processes, maxtasksperchild, lazy, idle_timeout, max_rss)
        self._bound = checked_bound(max_queued, when_full, processes)
        life = checked_life(
            initializer, initargs, finalizer, finalargs, init_timeout, exit_timeout, env,
            inner_threads, log_to_owner,
        )  # fmt: skip
        policy = checked_policy(grace, on_owner_death, strays)
        self._ctx = _safe_context(context)
        self._processes = processes
        self._by_value = not payload.main_is_importable(self._ctx.get_start_method())
        self._functions = Functions(by_value=self._by_value)
        if _is_serial(serial):
            self._engine: Any = SerialEngine(life)
            self._state = RUN
            self._engine.start()
        else:
            self._begin(sizes, policy, life)

    def _begin(self, sizes: SizeSettings, policy: EndPolicy, life: WorkerLife) -> None:
        """Start the workers and the engine."""
        source = self._ctx.worker_source(
            target=service.serve, args=(life, self._by_value), policy=policy
        )
        source.environment = life.environment
        try:
            engine = Engine(source, sizes, policy.grace, self._functions, life)
        except BaseException:
            source.close()
            raise
        self._engine = engine
        # Before the start: should it be interrupted at its very end, __del__ ends the workers.
        self._state = RUN
        try:
            engine.start()
        except BaseException:
            self._state = TERMINATE
            raise

    @property
    def _pool_of_calls(self) -> SafePool:
        return self

    @property
    def protection(self) -> Protection:
        """What protects the pool's processes at this moment, and why something is missing."""
        check_owner(self._owner)
        return run.current().protection

    def stats(self) -> PoolStats:
        """Return what the pool is doing at this moment; see :class:`safepool.PoolStats`.

        Safe in threads and callbacks. After the pool's end it has the counts alone.
        """
        check_owner(self._owner)
        picture: PoolStats = self._engine.stats()
        return picture

    def resize(self, processes: int) -> None:
        """Have so many workers from now on: at once where some are missing; where there are too
        many, idle ones leave, and busy ones when they are through with what they have begun.

        Raises ValueError for less than 1. Safe in threads and callbacks.
        """
        self._check_running()
        self._processes = checked_size(processes, None, None)
        self._engine.resize(self._processes)

    @property
    def _pool(self) -> list[Any]:
        """The workers' processes, as multiprocessing has it."""
        processes: list[Any] = self._engine.processes
        return processes

    def _repopulate_pool(self) -> None:
        """Nothing to do: the engine keeps the number of workers up."""

    def __repr__(self) -> str:
        cls = type(self)
        size = len(self._pool) if hasattr(self, "_engine") else 0
        return f"<{cls.__module__}.{cls.__qualname__} state={self._state} pool_size={size}>"

    def __reduce__(self) -> NoReturn:
        raise NotImplementedError(
            "pool objects cannot be passed between processes or pickled; "
            "a task can make a pool of its own"
        )

    def __del__(
        self,
        _warn: Callable[..., None] = warnings.warn,
        _pid: Callable[[], int] = os.getpid,
        _running: str = RUN,
    ) -> None:
        # The defaults are there because module globals may be gone at the interpreter's exit.
        if self._owner != _pid() or not hasattr(self, "_engine"):
            return
        if self._state == _running:
            _warn(
                f"unclosed running multiprocessing pool {self!r}",
                ResourceWarning,
                source=self,
            )
            self._engine.stop()

    def _submit(
        self,
        sink: Sink,
        func: Callable[..., Any],
        args: Iterable[Any],
        kwds: Mapping[str, Any],
        options: TaskOptions,
    ) -> Job:
        """Begin one call; its outcome goes to ``sink``."""
        if self._bound is not None:
            self._check_running()  # whoever waits, waits for nothing otherwise
            self._take_place()
        return self._submit_placed(sink, func, args, kwds, options)

    def _take_place(self) -> None:
        """Wait for room for one more call, where there is a bound, or raise PoolFullError."""
        if self._bound is not None:
            self._bound.take(may_wait=not self._engine.is_own_thread())

    def _leave_place(self) -> None:
        if self._bound is not None:
            self._bound.let_go()

    def _submit_placed(
        self,
        sink: Sink,
        func: Callable[..., Any],
        args: Iterable[Any],
        kwds: Mapping[str, Any],
        options: TaskOptions,
    ) -> Job:
        """The same for a call that has its place."""
        try:
            self._check_running()
        except BaseException:
            self._leave_place()
            raise
        if self._bound is not None:
            sink = BoundedSink(sink, self._bound)
        return submit(self._engine, self._functions, sink, func, args, kwds, options)

    def close(self) -> None:
        """Take no more tasks; workers leave when all tasks are done."""
        check_owner(self._owner)
        if self._state == RUN:
            self._state = CLOSE
            self._engine.close()

    def terminate(self) -> None:
        """End all workers and what they started, now; results that are not there never come.

        Waits for that, at most the grace and a few seconds. May be called from
        any thread, from a callback (then it does not wait), and again.
        """
        check_owner(self._owner)
        self._state = TERMINATE
        self._engine.terminate()

    def _end_workers(self, *, force: bool) -> None:
        """End all workers, and do not wait; for the executor."""
        check_owner(self._owner)
        self._state = TERMINATE
        self._engine.stop(force=force)

    def join(self) -> None:
        """Wait until all workers have left; ``close`` or ``terminate`` must come first."""
        check_owner(self._owner)
        if self._state == RUN:
            raise ValueError("Pool is still running")
        if self._state not in (CLOSE, TERMINATE):
            raise ValueError("In unknown state")
        self._engine.join()

    def __enter__(self: _P) -> _P:  # noqa: PYI019 - typing.Self needs Python 3.11
        self._check_running()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        self.terminate()

    def _check_running(self) -> None:
        check_owner(self._owner)
        self._engine.check()
        if self._state != RUN:
            raise PoolClosedError("Pool not running")


def _is_serial(serial: Any) -> bool:
    if serial is None:
        return os.environ.get("SAFEPOOL_SERIAL", "0") not in ("", "0")
    if not isinstance(serial, bool):
        raise TypeError(f"serial must be True, False or None, not {serial!r}")
    return serial


def _safe_context(context: Any) -> Any:
    """The context of safepool for what the user gave: one of ours, multiprocessing's, or None."""
    if hasattr(context, "worker_source"):
        return context
    from safepool.context import get_context

    if context is None or isinstance(context, str):
        return get_context(context)
    if not isinstance(context, BaseContext):
        raise TypeError(
            "context must be a context of safepool or multiprocessing, or the name of a start "
            f"method, not {type(context).__name__}"
        )
    return get_context(context.get_start_method())


def __getattr__(name: str) -> Any:
    """What else ``multiprocessing.pool`` has: ``mp.pool`` is one module for the user."""
    return getattr(mp_pool, name)
