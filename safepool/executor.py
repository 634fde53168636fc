"""SafePoolExecutor: the engine behind the face of ``concurrent.futures``.

A call is a job of one chunk, as ``apply_async`` has it; what fills up is a Future. Errors
that break a standard executor come as classes that are both: ours, with the facts, and
``BrokenProcessPool``, so that existing ``except`` clauses work. Only the futures that they hit
have them; the executor goes on, unless its workers cannot be brought up.

The executor's own promise, that work which was submitted is done before the interpreter
exits, is kept here: all executors are closed and joined before its threads are.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import _base
from concurrent.futures.process import BrokenProcessPool, _RemoteTraceback
from functools import partial
from multiprocessing import pool as mp_pool
from typing import Any, TypeVar

from safepool.arguments import default_size
from safepool.core.policy import DEFAULT_GRACE, OnOwnerDeath, Strays
from safepool.errors import (
    InitializerError,
    PoolClosedError,
    PoolTerminatedError,
    WorkerLostError,
)
from safepool.jobs import is_unreadable_here
from safepool.pool import SafePool

T = TypeVar("T")

_pools_module: Any = mp_pool


class FutureLostError(WorkerLostError, BrokenProcessPool):
    """A worker died while it ran this call. The executor goes on."""


class ExecutorTerminatedError(PoolTerminatedError, BrokenProcessPool):
    """The executor's workers were ended before this call was done."""


class ExecutorBrokenError(InitializerError, BrokenProcessPool):
    """The initializer failed too often; the executor takes no more calls."""


class CallUnreadableError(BrokenProcessPool):
    """The call, or its result, was pickled and could not be unpickled: ``__cause__`` says why."""


class SafePoolExecutor(concurrent.futures.Executor):
    """``ProcessPoolExecutor`` whose workers are gone when their owner is.

    Args:
        max_workers: number of workers, at least 1; by default the number of CPUs that
            this process may use, or that its cgroups' quotas are worth if that is less.
            They start with the first call.
        mp_context: a context of safepool or multiprocessing; decides the start method.
        initializer, initargs: called in each worker before its first call.
        max_tasks_per_child: calls after which a worker is replaced; with any start method.
        grace, on_owner_death, strays, and all other settings: as for
            :class:`safepool.SafePool`, which checks them when the workers start.

    Raises:
        ValueError, TypeError: an argument makes no sense.

    A lost worker fails the call that it ran, with an error that is a ``WorkerLostError`` and a
    ``BrokenProcessPool``; the other calls and the executor go on.

    Safe in threads, not for signal handlers. A forked copy of the owner gets
    ForeignPoolError.

    Example::

        with SafePoolExecutor(4) as executor:
            print(executor.submit(pow, 2, 10).result())
    """

    def __init__(
        self,
        max_workers: int | None = None,
        mp_context: Any = None,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        *,
        max_tasks_per_child: int | None = None,
        grace: float = DEFAULT_GRACE,
        on_owner_death: OnOwnerDeath = "terminate",
        strays: Strays = "kill",
        **settings: Any,
    ) -> None:
        if max_workers is None:
            max_workers = default_size()
        elif max_workers <= 0:
            raise ValueError("max_workers must be greater than 0")
        if initializer is not None and not callable(initializer):
            raise TypeError("initializer must be a callable")
        if max_tasks_per_child is not None:
            if not isinstance(max_tasks_per_child, int):
                raise TypeError("max_tasks_per_child must be an integer")
            if max_tasks_per_child <= 0:
                raise ValueError("max_tasks_per_child must be >= 1")
        self._make_pool = partial(
            SafePool,
            max_workers,
            initializer,
            initargs,
            max_tasks_per_child,
            mp_context,
            grace=grace,
            on_owner_death=on_owner_death,
            strays=strays,
            **settings,
        )
        self._max_workers = max_workers
        self._begun = 0
        self._lock = threading.Lock()
        self._pool: SafePool | None = None
        self._pending: weakref.WeakSet[_Future] = weakref.WeakSet()
        self._is_shut_down = False

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> _base.Future[T]:
        """Have ``fn(*args, **kwargs)`` called in a worker; its Future.

        Raises RuntimeError after ``shutdown``, ExecutorBrokenError when no worker comes up.
        """
        future = _Future()
        with self._lock:
            self._check_running()
            pool = self._started()
        # Not under the lock: somebody else's callback may want that while this one waits.
        pool._take_place()
        with self._lock:
            self._check_running(pool)
            sink = _FutureSink(future, pool)
            if self._begun < self._max_workers:
                # A worker starts for each of these, so they are as good as begun.
                self._begun += 1
                sink.begin()
            try:
                pool._submit_placed(sink, fn, args, kwargs, pool._options)
            except PoolClosedError:
                raise RuntimeError("cannot schedule new futures after shutdown") from None
            except InitializerError as error:
                raise _as_future_error(error) from error.__cause__
            self._pending.add(future)
        return future

    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        buffersize: int | None = None,
    ) -> Iterator[T]:
        """Iterate over ``fn(*items)`` in order, as ``concurrent.futures`` has it.

        Args:
            fn: called in a worker with one item of each of the ``iterables``.
            *iterables: read to the end of the shortest.
            timeout: seconds from now after which the iteration raises TimeoutError.
            chunksize: items that travel together.
            buffersize: chunks that are submitted ahead of the iteration, from an input that
                is read little by little; None: all, read at once.
        """
        if chunksize < 1:
            raise ValueError("chunksize must be >= 1.")
        if buffersize is not None and not isinstance(buffersize, int):
            raise TypeError("buffersize must be an integer or None")
        if buffersize is not None and buffersize < 1:
            raise ValueError("buffersize must be None or > 0")
        until = None if timeout is None else timeout + time.monotonic()
        rows = zip(*iterables, strict=False)
        chunks = iter(lambda: tuple(itertools.islice(rows, chunksize)), ())
        futures = deque(
            self.submit(_call_each, fn, chunk) for chunk in itertools.islice(chunks, buffersize)
        )
        rest = iter(()) if buffersize is None else chunks
        return _results(futures, rest, partial(self.submit, _call_each, fn), until)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls; workers leave when all calls are done.

        ``wait``: until then. ``cancel_futures``: those that have not begun are cancelled.
        """
        with self._lock:
            self._is_shut_down = True
            pool = self._pool
        if cancel_futures:
            self._cancel_pending()
        if pool is not None:
            _close(pool)
            if wait:
                pool.join()

    def terminate_workers(self) -> None:
        """End all workers with their trees, politely first; calls that are not done fail."""
        self._end_workers(force=False)

    def kill_workers(self) -> None:
        """End all workers with their trees by SIGKILL; calls that are not done fail."""
        self._end_workers(force=True)

    def _end_workers(self, *, force: bool) -> None:
        with self._lock:
            self._is_shut_down = True
            pool = self._pool
        self._cancel_pending()
        if pool is not None:
            pool._end_workers(force=force)

    def _check_running(self, pool: SafePool | None = None) -> None:
        """Raise RuntimeError if no more calls are taken; then ``pool`` gets its place back."""
        words = "shutdown" if self._is_shut_down else "interpreter shutdown" if _is_exiting else ""
        if words:
            if pool is not None:
                pool._leave_place()
            raise RuntimeError(f"cannot schedule new futures after {words}")

    def _cancel_pending(self) -> None:
        for future in list(self._pending):
            future.cancel()

    def _started(self) -> SafePool:
        if self._pool is None:
            self._pool = self._make_pool()
            # A dropped executor does what was submitted, and then its workers leave.
            finalizer = weakref.finalize(self, _close, self._pool)
            finalizer.atexit = False
            _pools.add(self._pool)
        return self._pool


class _Future(_base.Future[Any]):
    """A future that can be referred to weakly, as its base can."""


class _FutureSink:
    """Where the answer of a call goes; see :class:`safepool.results.Sink`.

    It holds its pool, so that one with work is not collected.
    """

    def __init__(self, future: _Future, pool: SafePool) -> None:
        self._future = future
        self._pool: SafePool | None = pool
        self._has_begun = False

    def begin(self) -> bool:
        """Engine: the call goes to a worker; False when it was cancelled before."""
        if not self._has_begun:
            self._has_begun = True
            if not self._future.set_running_or_notify_cancel():
                self._pool = None
                return False
        return True

    def put(
        self,
        first: int,
        size: int,
        values: list[Any],
        errors: dict[int, BaseException] | None,
        step: int = 1,
    ) -> bool:
        """Engine: the call is done."""
        if errors:
            self._set_error(errors[0])
        else:
            self._pool = None
            self._future.set_result(values[0])
        return True

    def fail(self, error: BaseException, *, tell: bool) -> None:
        """Engine: the call will never be done."""
        if self.begin():
            self._set_error(error)

    def _set_error(self, error: BaseException) -> None:
        self._pool = None
        self._future.set_exception(_as_future_error(error))

    def input_ended(self, items: int, error: BaseException | None) -> bool:
        """Engine: there is one unit, always."""
        return False

    def tried_again(self) -> None:
        """Engine: nothing to do."""

    def wake(self) -> None:
        """Engine: nothing to do, ``put`` wakes."""

    def lift_limit(self) -> None:
        """Engine: nothing to do, all input is there."""


def _as_future_error(error: BaseException) -> BaseException:
    """The error as users of ``concurrent.futures`` know it."""
    new: BaseException
    if isinstance(error, WorkerLostError):
        new = FutureLostError(*error.__reduce__()[1])
    elif isinstance(error, InitializerError):
        new = ExecutorBrokenError(*error.__reduce__()[1])
    elif isinstance(error, PoolTerminatedError):
        new = ExecutorTerminatedError(*error.args)
    elif is_unreadable_here(error):
        new = CallUnreadableError(str(error))
        # For what arrived here the stand-in has the reason; a task's own error is the reason.
        is_stand_in = isinstance(error, _pools_module.MaybeEncodingError)
        new.__cause__ = error.__cause__ if is_stand_in else error
        return new
    elif isinstance(error, _pools_module.MaybeEncodingError) and error.__cause__ is not None:
        new = error.__cause__
        return new
    else:
        if isinstance(error.__cause__, _pools_module.RemoteTraceback):
            error.__cause__ = _RemoteTraceback(error.__cause__.tb)
        return error
    new.__cause__ = error.__cause__
    return new


def _call_each(fn: Callable[..., T], rows: tuple[tuple[Any, ...], ...]) -> list[T]:
    return [fn(*row) for row in rows]


def _results(
    futures: deque[_base.Future[list[T]]],
    rest: Iterator[Any],
    submit: Callable[[Any], _base.Future[list[T]]],
    until: float | None,
) -> Iterator[T]:
    try:
        while futures:
            left = None if until is None else until - time.monotonic()
            done = futures.popleft()
            try:
                values = done.result(left)
            except BaseException:
                done.cancel()
                raise
            for chunk in itertools.islice(rest, 1):
                futures.append(submit(chunk))
            del done
            values.reverse()
            while values:
                yield values.pop()
    finally:
        for future in futures:
            future.cancel()


_pools: weakref.WeakSet[SafePool] = weakref.WeakSet()
_is_exiting = False


def _close(pool: SafePool) -> None:
    if pool._owner == os.getpid():
        pool.close()


def _finish_all() -> None:
    """At the interpreter's exit: what was submitted is done first."""
    global _is_exiting
    _is_exiting = True
    pools = [pool for pool in _pools if pool._owner == os.getpid()]
    for pool in pools:
        pool.close()
    for pool in pools:
        pool.join()


# As concurrent.futures has it: an atexit function would run when no thread can be started
# any more (https://github.com/python/cpython/issues/83281).
threading._register_atexit(_finish_all)  # type: ignore[attr-defined]
