"""Runs tasks in the caller's own thread, at once: for debuggers, profilers and coverage.

It takes the engine's place in a pool that was made with ``serial=True``. There are no
processes, so nothing can be lost, cancelled or timed out, and what a task changes is changed
for all; else the pool behaves as ever. Ctrl-C and a debugger's quit go to the caller.

Called by: the pool, in its users' threads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from safepool.channel import WorkerProcess
from safepool.core import frames
from safepool.groups import Call, Pile
from safepool.jobs import Chunk, Job
from safepool.results import Sink
from safepool.stats import PoolStats
from safepool.worker_life import WorkerLife


class SerialEngine:
    """See :class:`safepool.engine.Engine` for what each method is there for."""

    is_serial = True

    def __init__(self, life: WorkerLife) -> None:
        self.processes: list[WorkerProcess] = []
        self._life = life
        self._is_over = False
        self._done = self._failed = 0

    def start(self) -> None:
        """Call the initializer."""
        if self._life.initializer is not None:
            self._life.initializer(*self._life.initargs)

    def is_own_thread(self) -> bool:
        """Every thread is."""
        return True

    def call(self, call: Call) -> None:
        """Run a call."""
        self._deliver(call, 0, [self._run(call.function, call.args, call.kwds)])

    def submit(self, job: Job, chunk: Chunk) -> None:
        """Run a call that has options."""
        function, args, kwds = chunk.load()
        self._deliver(job, 0, [self._run(function, args, kwds)])

    def open(self, job: Job) -> None:
        """Nothing to do: its chunks follow."""

    def add(self, chunk: Chunk) -> None:
        """Not for this engine: the job is needed as well."""
        raise TypeError("a serial pool runs chunks by run_chunk")

    def notice(self, pile: Pile) -> None:
        """Not for this engine, which has no feeders."""
        raise TypeError("a serial pool has no piles")

    def run_chunk(self, job: Job, items: tuple[Any, ...], first: int) -> None:
        """Run some items of a map, up to the first error."""
        outcomes = []
        for item in items:
            args = item if job.kind == frames.STARMAP else (item,)
            outcomes.append(self._run(job.function, args, {}))
            if not outcomes[-1][0]:
                break
        self._deliver(job, first, outcomes, len(items))

    def add_failed(self, job: Job, first: int, size: int, error: BaseException) -> None:
        """Items that cannot be run."""
        self._deliver(job, first, [(False, error)], size)

    def input_ended(self, job: Job, items: int, error: BaseException | None) -> None:
        """That was all."""
        job.sink.input_ended(items, error)
        job.sink.wake()

    def refuse(self, sink: Sink, error: BaseException) -> None:
        """A job that cannot be run."""
        sink.fail(error, tell=True)

    def cancel(self, job: Job, *, kill: bool) -> bool:
        """Too late: whatever was submitted has run."""
        return False

    def cancel_soon(self, job: Job) -> None:
        """The same."""

    def stats(self) -> PoolStats:
        """What has been done."""
        return PoolStats(0, 0, self._done, self._failed, 0, 0, ())

    def resize(self, size: int) -> None:
        """There are no workers."""

    def close(self) -> None:
        """Call the finalizer, once."""
        if not self._is_over:
            self._is_over = True
            self._life.finish()

    def stop(self, *, force: bool = False) -> None:
        """The same, however it ends."""
        self.close()

    def terminate(self) -> None:
        """The same."""
        self.close()

    def join(self) -> None:
        """Nothing is left to wait for."""

    def check(self) -> None:
        """It cannot break."""

    def _run(self, function: Callable[..., Any], args: Any, kwds: Any) -> tuple[bool, Any]:
        try:
            return True, function(*args, **kwds)
        except (Exception, SystemExit) as error:
            return False, error

    def _deliver(
        self, job: Job, first: int, outcomes: list[tuple[bool, Any]], size: int | None = None
    ) -> None:
        values = [value if is_good else None for is_good, value in outcomes]
        errors = {place: value for place, (is_good, value) in enumerate(outcomes) if not is_good}
        self._failed += len(errors)
        self._done += len(values) - len(errors)
        if job.sink.begin():
            job.sink.put(first, len(values) if size is None else size, values, errors or None)
            job.sink.wake()


class SerialFeed:
    """Runs the items of a map: all at once, or of an imap, when they are wanted."""

    def __init__(
        self, engine: SerialEngine, job: Job, items: Iterator[Any], chunksize: int
    ) -> None:
        self._engine = engine
        self._job = job
        self._items = items
        self._chunksize = chunksize
        self._first = 0

    def run_some(self) -> bool:
        """Run one chunk; False when the input has ended."""
        try:
            piece = tuple(itertools.islice(self._items, self._chunksize))
        except Exception as error:
            self._engine.input_ended(self._job, self._first, error)
            return False
        if not piece:
            self._engine.input_ended(self._job, self._first, None)
            return False
        first = self._first
        self._first += len(piece)
        self._engine.run_chunk(self._job, piece, first)
        return True

    def run_all(self) -> None:
        """Run all of them."""
        while self.run_some():
            pass
