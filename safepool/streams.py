"""What imap hands back: outcomes one by one, while the input is read little by little.

The engine's thread calls ``put`` and ``fail``; the feeder pulls; any thread of the owner
consumes. See :mod:`safepool.results` for what all results have in common.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from safepool.latch import Bell
from safepool.results import check_owner

_MOMENT = 0.02
_MISSING, _NONE = object(), object()
"""In the place of an outcome that has not arrived, and of one that there will not be."""


class Stream:
    """The engine's side of an imap: outcomes in order of input or of arrival.

    ``run_some``: of a serial pool, runs some items and puts them in.

    Also the brake of its feeder: what was pulled and not yet consumed is at most
    ``window`` items, which grows up to ``widest`` while results are consumed quickly, until
    the pool is closed (then nobody may be left to consume).
    """

    def __init__(self, window: int, widest: int, *, ordered: bool) -> None:
        self.items: deque[tuple[bool, Any]] = deque()
        self.listener: Callable[[], None] | None = None
        self.room_wanted = False
        self.cancelled = False
        self.run_some: Callable[[], bool] | None = None
        self._owner = os.getpid()
        self._changed = Bell()
        self._room = Bell()
        self._window = window
        self._widest = widest
        self._full_at = 0.0
        self._unlimited = False
        self._ordered = ordered
        self._early: list[Any] = []
        self._early_items = 0
        self._next = 0
        self._arrived = 0
        self._length: int | None = None
        self._ended = False
        self._pulled = 0

    # Engine

    def begin(self) -> bool:
        """Engine: always wanted."""
        return True

    def put(
        self,
        first: int,
        size: int,
        values: list[Any],
        errors: dict[int, BaseException] | None,
        step: int = 1,
    ) -> bool:
        """Engine: take ``size`` items from ``first`` on; True when they were the last."""
        outcomes: list[Any]
        if errors:
            outcomes = [
                (False, errors[place]) if place in errors else (True, value)
                for place, value in enumerate(values)
            ]
        else:
            outcomes = [(True, value) for value in values]
        self._arrived += size
        if not self._ordered:
            self.items.extend(outcomes)
        else:
            self._early_items += len(outcomes)
            # A chunk that ended with an error has no outcomes for the items behind that.
            outcomes += [_NONE] * (size - len(outcomes))
            self._put_in_order(first - self._next, outcomes, step)
        self._ended = self._arrived == self._length
        return self._ended

    def _put_in_order(self, offset: int, outcomes: list[Any], step: int) -> None:
        """Put outcomes in their places, and hand on what has none missing before it."""
        early = self._early
        end = offset + (len(outcomes) - 1) * step + 1
        if end > len(early):
            early.extend([_MISSING] * (end - len(early)))
        early[offset:end:step] = outcomes
        if offset:
            return
        try:
            count = early.index(_MISSING)
        except ValueError:
            count = len(early)
        ready = early[:count]
        del early[:count]
        self._next += count
        if _NONE in ready:
            ready = [outcome for outcome in ready if outcome is not _NONE]
        self._early_items -= len(ready)
        self.items.extend(ready)

    def input_ended(self, items: int, error: BaseException | None) -> bool:
        """Engine: the input had so many items, then ``error``; True when all have arrived."""
        self._length = items
        if error is not None:
            self._length += 1
            return self.put(items, 1, [None], {0: error})
        self._ended = self._arrived == items
        return self._ended

    def tried_again(self) -> None:
        """Engine: nothing to do."""

    def wake(self) -> None:
        """Engine: wake those who wait, once for all that has been put."""
        self._changed.ring()
        listener = self.listener
        if listener is not None:
            listener()

    def fail(self, error: BaseException, *, tell: bool) -> None:
        """Engine: what has not arrived never will."""
        self.items.append((False, error))
        self._early.clear()
        self._ended = self.cancelled = True
        self.wake()
        self._room.ring()

    def lift_limit(self) -> None:
        """Engine: the pool was closed; read the input to its end."""
        self._unlimited = True
        self._room.ring()

    # Feeder

    def pulled(self, count: int) -> None:
        """Feeder: so many items are taken from the input."""
        self._pulled += count

    def wait_for_room(self) -> int:
        """Feeder: wait until more may be pulled; so many items, 0 when the job was cancelled."""
        if self._is_full():
            self._look_further_ahead()
            # Before the look: a consumer makes room first and reads this afterwards.
            self.room_wanted = True
            self._room.wait_for(self._has_room)
            self.room_wanted = False
        if self.cancelled:
            return 0
        return self._window if self._unlimited else max(1, self._window - self._waiting())

    def _look_further_ahead(self) -> None:
        """Read more at a time if a window is consumed within a moment: then each pause counts."""
        now = time.monotonic()
        if now - self._full_at < _MOMENT and self._window < self._widest:
            self._window *= 2
        self._full_at = now

    def _has_room(self) -> bool:
        return not self._is_full()

    def _is_full(self) -> bool:
        if self._unlimited or self.cancelled:
            return False
        return self._waiting() >= self._window

    def _waiting(self) -> int:
        """Items that were pulled and not consumed."""
        return self._pulled - self._arrived + len(self.items) + self._early_items

    # Consumer

    def take(self, timeout: float | None) -> tuple[bool, Any]:
        """The next outcome; StopIteration at the end, TimeoutError after ``timeout`` seconds."""
        try:
            outcome = self.items.popleft()
        except IndexError:
            check_owner(self._owner)
            outcome = self._wait(timeout)
        if self.room_wanted and len(self.items) <= self._window // 4:
            self._room.ring()
        return outcome

    def _wait(self, timeout: float | None) -> tuple[bool, Any]:
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                return self.items.popleft()
            except IndexError:
                if self._ended and not self.items:
                    raise StopIteration from None
            if self.run_some is not None:
                self.run_some()
                continue
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

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        """The same in a coroutine; for one of them at a time."""
        from safepool.awaiting import next_of

        try:
            success, value = await next_of(self._stream)
        except StopAsyncIteration:
            self._pool = None
            raise
        if success:
            return value
        raise value


class IMapUnorderedIterator(IMapIterator):
    """Iterates over results in the order in which they arrive."""
