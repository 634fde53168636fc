"""The methods by which a pool is given tasks, for the pool itself and for views of it.

Called by: users.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from safepool import payload
from safepool.arguments import all_of, checked_chunksize
from safepool.core import frames
from safepool.core.options import OnWorkerLost, TaskOptions, checked_options
from safepool.feeder import feed_in_background, fill
from safepool.jobs import Job
from safepool.results import AsyncResult, MapResult, Sink
from safepool.serial import SerialFeed
from safepool.streams import IMapIterator, IMapUnorderedIterator, Stream

if TYPE_CHECKING:
    from safepool.pool import SafePool

_Callback = Callable[[Any], object] | None

KEEP: Any = object()
"""Stands for an option that is left as it is."""

_LEAST_WINDOW = 256
"""Items of an imap that may be read ahead of the consumer, if not more are needed to keep
all workers at work."""
_WIDEST_WINDOW = 8192
"""The same while thousands of results a second are consumed."""


class Calls:
    """``_pool_of_calls`` runs the tasks, with ``_options``."""

    _options: TaskOptions

    @property
    def _pool_of_calls(self) -> SafePool:
        raise NotImplementedError

    def options(
        self,
        *,
        timeout: float | None = KEEP,
        deadline: float | None = KEEP,
        retries: int = KEEP,
        retry_on: type[BaseException] | tuple[type[BaseException], ...] = KEEP,
        retry_delay: float = KEEP,
        on_worker_lost: OnWorkerLost = KEEP,
        max_pending: int | None = KEEP,
        priority: int = KEEP,
        soft_timeout: float | None = KEEP,
        progress: bool | str = KEEP,
    ) -> PoolView:
        """Return a view of the pool whose calls have these options; the pool stays as it is.

        What is not named stays as it is.

        Args:
            timeout: seconds that a task may run (each item of a map). One that runs longer
                is ended with its worker and that worker's whole tree, and then fails with
                TaskTimeoutError. The time counts from when it is sent to its worker.
            deadline: seconds from the call after which all of it must be done, also what
                waits for a worker; then the whole call fails with TaskTimeoutError.
            retries: further attempts of a task whose worker died; at most two, since what
                kills three workers kills the next. And of one that raised ``retry_on``.
            retry_on: an exception class, or a tuple of them; none by default.
            retry_delay: seconds before the second attempt; doubled each time, 60 at most.
            on_worker_lost: "fail", only the task that the lost worker ran fails; "abort",
                the pool ends and all its tasks fail.
            max_pending: items that an imap may have read from its input and not yet handed
                out; None: 256, or more if that is needed to keep all workers at work, up to
                8192 while results are consumed by the thousands a second.

            priority: of what waits for a worker, the higher goes first; 0 by default. Within
                one priority, and for what a worker has got already, the order is that of the calls.
            soft_timeout: seconds after which SoftTimeoutError is raised inside the task, which
                may catch it, clean up and return. Uses SIGALRM and the worker's interval timer.

            progress: True, or a text to stand before it: a bar on stderr for each map and imap,
                with what is done, failed and tried again, and the time it will take. Needs
                tqdm (``pip install 'safepool[progress]'``).

        With ``timeout``, ``soft_timeout`` or ``retries`` the items of a map travel one by one,
        whatever ``chunksize`` says. A view of a view has the options of both.

        Raises:
            TypeError, ValueError: an option makes no sense.

        Example::

            pool.options(timeout=10, retries=1).map(download, addresses)
        """
        named = {
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
        changes = {name: value for name, value in named.items() if value is not KEEP}
        return PoolView(self._pool_of_calls, checked_options(self._options, changes))

    def apply(
        self, func: Callable[..., Any], args: Iterable[Any] = (), kwds: Mapping[str, Any] = {}
    ) -> Any:
        """Run ``func(*args, **kwds)`` in a worker and return what it returns."""
        return self.apply_async(func, args, kwds).get()

    def apply_async(
        self,
        func: Callable[..., Any],
        args: Iterable[Any] = (),
        kwds: Mapping[str, Any] = {},
        callback: _Callback = None,
        error_callback: _Callback = None,
    ) -> AsyncResult:
        """Begin ``func(*args, **kwds)`` in a worker; one of the callbacks gets the outcome.

        Callbacks run in the pool's thread: make them short. What cannot be pickled
        is an error of the result (TaskNotPicklableError).
        """
        pool = self._pool_of_calls
        result = AsyncResult(pool, callback, error_callback)
        result._job = pool._submit(result, func, args, kwds, self._options)
        return result

    def map(
        self,
        func: Callable[[Any], Any],
        iterable: Iterable[Any],
        chunksize: int | None = None,
    ) -> list[Any]:
        """Run ``func(item)`` for every item and return the results in order."""
        result: list[Any] = self._map_async(frames.MAP, func, iterable, chunksize, None, None).get()
        return result

    def starmap(
        self,
        func: Callable[..., Any],
        iterable: Iterable[Iterable[Any]],
        chunksize: int | None = None,
    ) -> list[Any]:
        """Run ``func(*item)`` for every item and return the results in order."""
        result: list[Any] = self._map_async(
            frames.STARMAP, func, iterable, chunksize, None, None
        ).get()
        return result

    def map_async(
        self,
        func: Callable[[Any], Any],
        iterable: Iterable[Any],
        chunksize: int | None = None,
        callback: _Callback = None,
        error_callback: _Callback = None,
    ) -> MapResult:
        """Begin a ``map``; one of the callbacks gets the list or the first error."""
        return self._map_async(frames.MAP, func, iterable, chunksize, callback, error_callback)

    def starmap_async(
        self,
        func: Callable[..., Any],
        iterable: Iterable[Iterable[Any]],
        chunksize: int | None = None,
        callback: _Callback = None,
        error_callback: _Callback = None,
    ) -> MapResult:
        """Begin a ``starmap``; one of the callbacks gets the list or the first error."""
        return self._map_async(frames.STARMAP, func, iterable, chunksize, callback, error_callback)

    def imap(
        self, func: Callable[[Any], Any], iterable: Iterable[Any], chunksize: int = 1
    ) -> IMapIterator:
        """Iterate over ``func(item)`` in order, while the input is read little by little.

        The input is read in a thread of the pool, up to 256 items ahead of the consumer
        (more if chunks need it; see ``max_pending``), and to its end once the pool is closed.
        """
        stream = self._stream(func, iterable, chunksize, ordered=True)
        return IMapIterator(self._pool_of_calls, stream)

    def imap_unordered(
        self, func: Callable[[Any], Any], iterable: Iterable[Any], chunksize: int = 1
    ) -> IMapUnorderedIterator:
        """Like ``imap``, with each result as soon as it is there."""
        stream = self._stream(func, iterable, chunksize, ordered=False)
        return IMapUnorderedIterator(self._pool_of_calls, stream)

    def _map_async(
        self,
        kind: int,
        func: Callable[..., Any],
        iterable: Iterable[Any],
        chunksize: int | None,
        callback: _Callback,
        error_callback: _Callback,
    ) -> MapResult:
        pool = self._pool_of_calls
        pool._check_running()
        if chunksize is not None:
            checked_chunksize(chunksize)
        items, problem = all_of(iterable)
        length = len(items)
        if self._options.is_for_items:
            chunksize = 1
        elif chunksize is None:
            chunksize = max(1, -(-length // (pool._processes * 4)))
        result = MapResult(pool, chunksize, length or bool(problem), callback, error_callback)
        if problem is not None:
            pool._engine.refuse(result, problem)
            return result
        if not length:
            return result
        try:
            body = payload.dumps_function(func, by_value=pool._by_value)
            iterator = iter(items)
        except Exception as error:
            pool._engine.refuse(result, error)
            return result
        sink = self._with_bar(result, length)
        result._job = job = Job(sink, kind, func, body, self._options)
        engine = pool._engine
        engine.open(job)
        if engine.is_serial:
            SerialFeed(engine, job, iterator, chunksize).run_all()
        else:
            fill(engine, job, iterator, chunksize, by_value=pool._by_value)
        return result

    def _stream(
        self, func: Callable[..., Any], iterable: Iterable[Any], chunksize: int, *, ordered: bool
    ) -> Stream:
        pool = self._pool_of_calls
        pool._check_running()
        checked_chunksize(chunksize)
        if self._options.is_for_items:
            chunksize = 1
        window = widest = self._options.max_pending
        if window is None:
            window = max(_LEAST_WINDOW, 4 * pool._processes * chunksize)
            widest = max(window, _WIDEST_WINDOW)
        stream = Stream(window, widest or window, ordered=ordered)
        try:
            body = payload.dumps_function(func, by_value=pool._by_value)
            iterator = iter(iterable)
        except Exception as error:
            stream.fail(error, tell=True)
            return stream
        total = operator.length_hint(iterable, -1)
        sink = self._with_bar(stream, None if total < 0 else total)
        job = Job(sink, frames.MAP, func, body, self._options)
        engine = pool._engine
        engine.open(job)
        if engine.is_serial:
            stream.run_some = SerialFeed(engine, job, iterator, chunksize).run_some
        else:
            feed_in_background(engine, job, stream, iterator, chunksize, by_value=pool._by_value)
        return stream

    def _with_bar(self, sink: Sink, total: int | None) -> Sink:
        """The sink, with a progress bar around it if one is wanted."""
        wanted = self._options.progress
        if wanted is False:
            return sink
        from safepool.progress import ProgressSink

        text = wanted if isinstance(wanted, str) else ""
        return ProgressSink(sink, text, total, self._pool_of_calls._processes)


class PoolView(Calls):
    """A pool as ``SafePool.options`` returns it: its methods for tasks, with other options."""

    def __init__(self, pool: SafePool, options: TaskOptions) -> None:
        self._pool = pool
        self._options = options

    @property
    def _pool_of_calls(self) -> SafePool:
        return self._pool

    def __repr__(self) -> str:
        return f"<view of {self._pool!r} with {self._options}>"
