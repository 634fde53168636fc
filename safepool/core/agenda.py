"""What is to be done at which instant: a heap, and nothing else.

Pure: ``now`` is a parameter. Called by: the engine and its crew.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Agenda(Generic[T]):
    """Entries by their instants (monotonic seconds)."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._order = itertools.count()

    def add(self, due: float, what: T) -> None:
        """Have ``what`` returned by ``take`` from ``due`` on."""
        heapq.heappush(self._heap, (due, next(self._order), what))

    def wait(self, now: float) -> float | None:
        """Seconds until the first entry is due; None: there is none."""
        return max(0.0, self._heap[0][0] - now) if self._heap else None

    def __len__(self) -> int:
        return len(self._heap)

    def keep_only(self, is_wanted: Callable[[T], object]) -> None:
        """Strike off the entries that nobody wants any more."""
        self._heap = [entry for entry in self._heap if is_wanted(entry[2])]
        heapq.heapify(self._heap)

    def take(self, now: float) -> list[T]:
        """The entries that are due, in their order; they are struck off."""
        due: list[T] = []
        while self._heap and self._heap[0][0] <= now:
            due.append(heapq.heappop(self._heap)[2])
        return due
