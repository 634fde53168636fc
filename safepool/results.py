"""What the pool's methods hand back: results that fill up as answers come in.

The same objects, methods and errors as in ``multiprocessing.pool``, with two
differences that users asked for: a result whose pool was terminated raises
PoolTerminatedError instead of waiting for ever, and one chunk of ``imap`` that meets
an error still gives the items before it.

The engine's thread calls ``put`` and ``fail``; any thread of the owner waits. Each
``put`` carries one unit: its index, the values, and errors by position in the unit.
A handle holds its pool until it is complete, so that a pool with work is not
collected. What they wait on is made by the first who waits.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from safepool.errors import ForeignPoolError
from safepool.latch import Bell

_Callback = Callable[[Any], object]


class Sink(Protocol):
    """Where a job's answers go; called by the engine's thread only."""

    def begin(self) -> bool:
        """A unit goes to a worker; False: nobody wants it any more, and the job is over."""

    def put(
        self, index: int, size: int, values: list[Any], errors: dict[int, BaseException] | None
    ) -> bool:
        """Take the outcome of one unit of ``size`` items; True when the job is complete.

        ``values`` ends at an error that ended the unit.
        """

    def input_ended(self, units: int, error: BaseException | None) -> bool:
        """There were so many units, then ``error``; True when the job is complete."""

    def wake(self) -> None:
        """Called once after a batch of ``put``."""

    def lift_limit(self) -> None:
        """The pool was closed: take in all input, whoever consumes the results."""

    def fail(self, error: BaseException, *, tell: bool) -> None:
        """Nothing more comes; ``tell``: call the error callback."""


def run_callback(callback: _Callback | None, value: Any) -> None:
    """Call a user's callback; its own error goes to ``threading.excepthook``."""
    if callback is None:
        return
    try:
        callback(value)
    except BaseException:
        arguments = (*sys.exc_info(), threading.current_thread())
        threading.excepthook(threading.ExceptHookArgs(arguments))


def check_owner(owner: int) -> None:
    """Raise ForeignPoolError in a process that did not make the pool."""
    if os.getpid() != owner:
        raise ForeignPoolError(
            f"this pool belongs to process {owner}, not to its fork {os.getpid()}; "
            "make a new pool here"
        )


class AsyncResult:
    """The result of one call that runs in a worker."""

    def __init__(
        self,
        pool: Any,
        callback: _Callback | None = None,
        error_callback: _Callback | None = None,
    ) -> None:
        self._pool = pool
        self._owner = os.getpid()
        self._callback = callback
        self._error_callback = error_callback
        self._complete = False
        self._success = True
        self._value: Any = None

    def ready(self) -> bool:
        """Tell whether the call has ended."""
        return self._complete

    def successful(self) -> bool:
        """Tell whether the call ended without an error; ValueError while it has not ended."""
        if not self._complete:
            raise ValueError(f"{self!r} not ready")
        return self._success

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the call has ended, for ``timeout`` seconds at most."""
        if self._complete:
            return
        check_owner(self._owner)
        # setdefault is atomic: all who wait use one bell. It is stored before _complete
        # is read again, and _end writes _complete before it looks for the bell.
        bell: Bell = self.__dict__.setdefault("_bell", Bell())
        bell.wait_for(self.ready, timeout)

    def get(self, timeout: float | None = None) -> Any:
        """Return the result, or raise what the call raised.

        Raises multiprocessing.TimeoutError when it has not ended after ``timeout``
        seconds, PoolTerminatedError when it never will.
        """
        self.wait(timeout)
        if not self._complete:
            raise multiprocessing.TimeoutError
        if self._success:
            return self._value
        raise self._value

    def begin(self) -> bool:
        """Engine: always wanted."""
        return True

    def put(
        self, index: int, size: int, values: list[Any], errors: dict[int, BaseException] | None
    ) -> bool:
        """Engine: take the outcome."""
        if errors:
            self._end(False, errors[0])
        else:
            self._end(True, values[0])
        return True

    def input_ended(self, units: int, error: BaseException | None) -> bool:
        """Engine: an input that fails fails the whole result."""
        if error is not None and not self._complete:
            self._end(False, error)
        return self._complete

    def wake(self) -> None:
        """Engine: nothing to do, ``put`` wakes."""

    def lift_limit(self) -> None:
        """Engine: nothing to do, all input is there."""

    def fail(self, error: BaseException, *, tell: bool) -> None:
        """Engine: end with an error."""
        if not tell:
            self._callback = self._error_callback = None
        self._end(False, error)

    def _end(self, success: bool, value: Any) -> None:
        run_callback(self._callback if success else self._error_callback, value)
        self._success = success
        self._value = value
        self._callback = self._error_callback = self._pool = None
        self._complete = True
        bell: Bell | None = self.__dict__.get("_bell")
        if bell is not None:
            bell.ring()

    __class_getitem__: Any = classmethod(types.GenericAlias)


ApplyResult = AsyncResult


class MapResult(AsyncResult):
    """The result of a map: a list, complete when every chunk is."""

    def __init__(
        self,
        pool: Any,
        chunksize: int,
        length: int,
        callback: _Callback | None = None,
        error_callback: _Callback | None = None,
    ) -> None:
        super().__init__(pool, callback, error_callback)
        self._chunksize = chunksize
        self._left = -(-length // chunksize) if length else 0
        self._values: list[Any] = [None] * length
        self._error: BaseException | None = None
        if not length:
            # As in multiprocessing, nobody is called back for an empty map.
            self._callback = None
            self._end(True, [])

    def put(
        self, index: int, size: int, values: list[Any], errors: dict[int, BaseException] | None
    ) -> bool:
        """Engine: take one chunk; the first error that arrives is the map's."""
        self._left -= 1
        if self._error is None:
            if errors:
                self._error = errors[min(errors)]
                self._values = []
            else:
                start = index * self._chunksize
                self._values[start : start + len(values)] = values
        if self._left:
            return False
        if self._error is not None:
            self._end(False, self._error)
        else:
            self._end(True, self._values)
        self._values = []
        self._error = None
        return True


class Stream:
    """The engine's side of an imap: outcomes in order of input or of arrival.

    Also the brake of its feeder: what was pulled and not yet consumed is at most
    ``window`` items, until the pool is closed (then nobody may be left to consume).
    """

    def __init__(self, window: int, *, ordered: bool) -> None:
        self.items: deque[tuple[bool, Any]] = deque()
        self.room_wanted = False
        self.cancelled = False
        self._owner = os.getpid()
        self._changed = Bell()
        self._window = window
        self._unlimited = False
        self._ordered = ordered
        self._early: dict[int, list[tuple[bool, Any]]] = {}
        self._early_items = 0
        self._next = 0
        self._arrived = 0
        self._length: int | None = None
        self._ended = False
        self._pulled_items = 0
        self._arrived_items = 0

    # Engine

    def begin(self) -> bool:
        """Engine: always wanted."""
        return True

    def put(
        self, index: int, size: int, values: list[Any], errors: dict[int, BaseException] | None
    ) -> bool:
        """Engine: take one unit; True when it was the last."""
        outcomes: list[tuple[bool, Any]]
        if errors:
            outcomes = [
                (False, errors[place]) if place in errors else (True, value)
                for place, value in enumerate(values)
            ]
        else:
            outcomes = [(True, value) for value in values]
        self._arrived += 1
        self._arrived_items += size
        if not self._ordered:
            self.items.extend(outcomes)
        elif index == self._next:
            self._next += 1
            self.items.extend(outcomes)
            while self._early and self._next in self._early:
                outcomes = self._early.pop(self._next)
                self._early_items -= len(outcomes)
                self.items.extend(outcomes)
                self._next += 1
        else:
            self._early[index] = outcomes
            self._early_items += len(outcomes)
        self._ended = self._arrived == self._length
        return self._ended

    def input_ended(self, units: int, error: BaseException | None) -> bool:
        """Engine: the input had so many units, then ``error``; True when all have arrived."""
        self._length = units
        if error is not None:
            self._length += 1
            return self.put(units, 0, [None], {0: error})
        self._ended = self._arrived == units
        return self._ended

    def wake(self) -> None:
        """Engine: wake those who wait, once for all that has been put."""
        self._changed.ring()

    def fail(self, error: BaseException, *, tell: bool) -> None:
        """Engine: what has not arrived never will."""
        self.items.append((False, error))
        self._early.clear()
        self._ended = self.cancelled = True
        self.wake()

    def lift_limit(self) -> None:
        """Engine: the pool was closed; read the input to its end."""
        self._unlimited = True
        self.wake()

    # Feeder

    def pulled(self, count: int) -> None:
        """Feeder: so many items were taken from the input."""
        self._pulled_items += count

    def wait_for_room(self) -> bool:
        """Feeder: wait until another chunk may be pulled; False when the job was cancelled."""
        if not self._is_full():
            return not self.cancelled
        # Before the look: a consumer makes room first and reads this afterwards.
        self.room_wanted = True
        self._changed.wait_for(self._has_room)
        self.room_wanted = False
        return not self.cancelled

    def _has_room(self) -> bool:
        return not self._is_full()

    def _is_full(self) -> bool:
        if self._unlimited or self.cancelled:
            return False
        waiting = self._pulled_items - self._arrived_items + len(self.items) + self._early_items
        return waiting >= self._window

    # Consumer

    def take(self, timeout: float | None) -> tuple[bool, Any]:
        """The next outcome; StopIteration at the end, TimeoutError after ``timeout`` seconds."""
        try:
            outcome = self.items.popleft()
        except IndexError:
            check_owner(self._owner)
            outcome = self._wait(timeout)
        if self.room_wanted and len(self.items) <= self._window // 4:
            self.wake()
        return outcome

    def _wait(self, timeout: float | None) -> tuple[bool, Any]:
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                return self.items.popleft()
            except IndexError:
                if self._ended and not self.items:
                    raise StopIteration from None
            left = None if until is None else until - time.monotonic()
            if not self._changed.wait_for(self._has_news, left):
                raise multiprocessing.TimeoutError

    def _has_news(self) -> bool:
        return bool(self.items) or self._ended


class IMapIterator:
    """Iterates over results in the order of the input."""

    def __init__(self, pool: Any, stream: Stream) -> None:
        self._pool = pool
        self._stream = stream

    def __iter__(self) -> Iterator[Any]:
        return self

    def next(self, timeout: float | None = None) -> Any:
        """Return the next result or raise the next error; iteration may go on after it.

        Raises multiprocessing.TimeoutError when there is none after ``timeout`` seconds.
        """
        try:
            success, value = self._stream.take(timeout)
        except StopIteration:
            self._pool = None
            raise
        if success:
            return value
        raise value

    __next__ = next  # noqa: A003 - the method above, as in multiprocessing


class IMapUnorderedIterator(IMapIterator):
    """Iterates over results in the order in which they arrive."""
