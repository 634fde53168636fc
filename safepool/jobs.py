"""The jobs of a pool as its engine keeps them: what to send, and where answers go.

A job is one call of a pool method. Its chunks travel, or its items in groups (see groups);
its sink (see results) collects what comes back. Also here: making exceptions of what workers sent.

Called by: the engine and its crew, in the engine's thread; jobs and chunks are made
by the pool and the feeder.
"""

from __future__ import annotations

import copy
import itertools
import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any

from safepool import payload
from safepool.core import frames
from safepool.core.commands import Unit
from safepool.core.dealing import ALONE
from safepool.core.options import TaskOptions
from safepool.parcels import Packed, Parcel, opened
from safepool.results import Sink
from safepool.segments import Segment

PLAIN = TaskOptions()
"""The options of a job that has none."""

_numbers = itertools.count(1)


def new_number() -> int:
    """A number that no other job has."""
    return next(_numbers)


class Job:
    """One call of a pool method; ``body`` is its pickled function, empty for a single call.

    ``is_over``: nobody waits for it any more.
    """

    __slots__ = (
        "body", "by_value", "function", "is_over", "kind", "number", "options", "sink",
        "submitted_at",
    )  # fmt: skip

    def __init__(
        self, sink: Sink, kind: int, function: Any, body: bytes, options: TaskOptions = PLAIN
    ) -> None:
        self.number = new_number()
        self.is_over = False
        self.sink = sink
        self.kind = kind
        self.function = function
        self.body = body
        self.by_value = False
        self.options = options
        self.submitted_at = 0.0 if options is PLAIN else time.monotonic()

    def name(self) -> str:
        """The function's name, for messages."""
        return str(getattr(self.function, "__qualname__", None) or type(self.function).__name__)


class Chunk(Unit):
    """A call, or some items of a map whose bytes are one pickle, and what came back.

    ``base``: the position of its first item in ``body``, of which parts that were cut off
    have the rest. ``segment``: large buffers of the pickle, beside it. ``originals``: to
    pickle it again by value.
    """

    __slots__ = (
        "again", "attempts", "base", "body", "errors", "originals", "segment", "strikes", "values"
    )  # fmt: skip

    def __init__(
        self,
        job: Job,
        first: int,
        size: int,
        packed: Packed,
        originals: Any,
        *,
        may_split: bool = False,
    ) -> None:
        is_alone = job.options.timeout is not None or job.options.is_alone
        nbytes = max(ALONE, len(packed)) if is_alone else len(packed)
        super().__init__(job.number, first, size, nbytes, may_split=may_split)
        if isinstance(packed, Parcel):
            self._begin(packed.head, packed.segment, originals)
        else:
            self._begin(packed, None, originals)

    def _begin(self, body: bytes, segment: Segment | None, originals: Any) -> None:
        self.attempts = self.strikes = 0
        self.base = 0
        self.body = body
        self.segment = segment
        self.again = 0
        self.originals = originals
        self.values: list[Any] = []
        self.errors: dict[int, BaseException] | None = None

    def split(self, at: int) -> Chunk:
        """Cut it; both parts have all of the bytes."""
        rest = Chunk.__new__(Chunk)
        Unit.__init__(rest, self.job, self.first + at, self.size - at, self.nbytes, may_split=True)
        rest._begin(self.body, self.segment, self.originals)
        rest.base = self.base + at
        rest.again = self.again
        rest.is_rest = self.is_rest
        self.size = at
        return rest

    def fail(self, item: int, error: BaseException) -> None:
        """Note the error of an item in the place of its value."""
        if self.errors is None:
            self.errors = {}
        self.errors[item] = error
        self.values.append(None)

    def load(self) -> Any:
        """What was pickled; for who has no worker."""
        if self.segment is None:
            return payload.loads(self.body)
        return opened(self.body, self.segment, private=True)

    def pickle_by_value(self, job: Job) -> bool:
        """Make bytes that need no names of the main module; False if it cannot be done (again)."""
        if self.originals is None:
            return False
        try:
            if job.kind != frames.CALL and not job.by_value:
                job.body = payload.dumps_by_value(job.function)
                job.by_value = True
            self.body = payload.dumps_by_value(self.originals)
            self.segment = None
        except Exception:
            # The worker's own error says better what is wrong.
            return False
        self.originals = None
        self.again = frames.AGAIN
        return True


class Jobs:
    """All jobs that are not complete. ``forgotten`` is called with each that completes."""

    def __init__(self, forgotten: Callable[[Job], None]) -> None:
        self._jobs: dict[int, Job] = {}
        self._touched: set[Sink] = set()
        self._forgotten = forgotten

    def __len__(self) -> int:
        return len(self._jobs)

    def find(self, number: int) -> Job | None:
        """The job of this number; None: it is complete, or has failed."""
        return self._jobs.get(number)

    def add(self, job: Job) -> None:
        """Take in a job."""
        self._jobs[job.number] = job

    def deliver(
        self,
        number: int,
        first: int,
        size: int,
        values: list[Any],
        errors: dict[int, BaseException] | None,
        step: int = 1,
    ) -> None:
        """Give the outcomes of items to their job, if that still waits for them."""
        job = self._jobs.get(number)
        if job is not None:
            self._touched.add(job.sink)
            if job.sink.put(first, size, values, errors, step):
                self.forget(job)

    def input_ended(self, job: Job, items: int, error: BaseException | None) -> None:
        """The job has so many items and no more."""
        self._touched.add(job.sink)
        if job.sink.input_ended(items, error):
            self.forget(job)

    def wake_sinks(self) -> None:
        """Wake those who wait for what has been delivered since the last time."""
        if self._touched:
            for sink in self._touched:
                sink.wake()
            self._touched.clear()

    def lift_limits(self) -> None:
        """All jobs are to read their input to the end."""
        for job in self._jobs.values():
            job.sink.lift_limit()

    def fail_all(self, error: Callable[[], BaseException], *, tell: bool) -> None:
        """End all jobs, each with an error of its own."""
        jobs = list(self._jobs.values())
        self._jobs.clear()
        for job in jobs:
            job.is_over = True
            job.sink.fail(error(), tell=tell)

    @staticmethod
    def fail_calls(calls: Sequence[Job], error: Callable[[], BaseException], *, tell: bool) -> None:
        """End calls of groups, which are not in this book."""
        for call in calls:
            call.is_over = True
            call.sink.fail(error(), tell=tell)

    def forget(self, job: Job) -> None:
        """Nobody waits for this job any more."""
        job.is_over = True
        if self._jobs.pop(job.number, None) is not None:
            self._forgotten(job)


def fresh(error: BaseException) -> BaseException:
    """A copy to raise, so that tracebacks do not pile up on one object."""
    try:
        new = copy.copy(error)
    except Exception:
        return error  # an exception class of the user's that cannot be copied
    new.__cause__ = error.__cause__
    return new


def unpack_error(body: bytes) -> BaseException:
    """The exception that a worker sent, or multiprocessing's stand-in with its text."""
    data, shown, text = pickle.loads(body)
    try:
        error = payload.loads(data)
    except BaseException as reason:
        return unreadable(reason, shown, text)
    if isinstance(error, BaseException):
        return error
    return unreadable(TypeError("it turned into something else"), shown, text)


_UNREADABLE = "_safepool_unreadable"


def note_unreadable(error: BaseException) -> BaseException:
    """Remember that this error came from unpickling a task or its outcome."""
    vars(error)[_UNREADABLE] = True
    return error


def is_unreadable_here(error: BaseException) -> bool:
    """Is it an error of ours, or of the user's classes, from unpickling?"""
    return _UNREADABLE in vars(error)


def unreadable(reason: BaseException, shown: str, text: str) -> BaseException:
    """What arrived cannot be unpickled here, for ``reason``."""
    from multiprocessing import pool

    mp_pool: Any = pool
    error: BaseException = mp_pool.MaybeEncodingError(reason, shown)
    error.__cause__ = mp_pool.RemoteTraceback(text) if text else reason
    return note_unreadable(error)
