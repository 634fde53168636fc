"""Keeps the calls of a pool that are not done within a bound: a submitter waits, or is refused.

Called by: the pool, in the submitter's thread; the engine's thread lets go.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any, Literal

from safepool.errors import PoolFullError
from safepool.latch import Bell
from safepool.results import Sink
from safepool.sinks import WrappedSink

WhenFull = Literal["block", "raise"]


class Bound:
    """At most ``most`` calls at a time."""

    def __init__(self, most: int, when_full: WhenFull) -> None:
        self.most = most
        self._blocks = when_full == "block"
        self._taken = 0
        self._lock = threading.Lock()
        self._bell = Bell()

    def take(self, *, may_wait: bool) -> None:
        """Count one more call; waits for room, or raises PoolFullError.

        ``may_wait``: False in the engine's thread, for which nobody would make room.
        """
        while not self._try():
            if not (self._blocks and may_wait):
                raise PoolFullError(
                    f"{self.most} calls are not done yet, which is all that the pool may have "
                    "(max_queued beside its workers); get some results first"
                )
            self._bell.wait_for(self._has_room)

    def let_go(self) -> None:
        """One is done."""
        with self._lock:
            self._taken -= 1
        self._bell.ring()

    def _try(self) -> bool:
        with self._lock:
            if self._taken >= self.most:
                return False
            self._taken += 1
            return True

    def _has_room(self) -> bool:
        return self._taken < self.most


class BoundedSink(WrappedSink):
    """Lets go of its place when the call is over, once."""

    def __init__(self, inner: Sink, bound: Bound) -> None:
        super().__init__(inner)
        self._bound = bound
        self._ends = itertools.count()

    def begin(self) -> bool:
        """A call that was cancelled is over."""
        is_wanted = super().begin()
        if not is_wanted:
            self.leave()
        return is_wanted

    def put(
        self,
        first: int,
        size: int,
        values: list[Any],
        errors: dict[int, BaseException] | None,
        step: int = 1,
    ) -> bool:
        """It is done."""
        self.leave()
        return super().put(first, size, values, errors, step)

    def fail(self, error: BaseException, *, tell: bool) -> None:
        """It never will be."""
        self.leave()
        super().fail(error, tell=tell)

    def leave(self) -> None:
        """Let go of the place."""
        if next(self._ends) == 0:
            self._bound.let_go()


def checked_bound(max_queued: Any, when_full: Any, workers: int) -> Bound | None:
    """Return the bound of a pool; a TypeError or ValueError names what is wrong."""
    if when_full not in ("block", "raise"):
        raise ValueError(f'when_full must be "block" or "raise", not {when_full!r}')
    if max_queued is None:
        return None
    if isinstance(max_queued, bool) or not isinstance(max_queued, int):
        raise TypeError(f"max_queued must be an integer, not {type(max_queued).__name__}")
    if max_queued < 0:
        raise ValueError(f"max_queued must be 0 or more, not {max_queued}")
    return Bound(max_queued + workers, when_full)
