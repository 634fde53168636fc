"""Units that wait, by their priority: lanes for each, and the highest go first.

Pure. Called by: the ledger.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic

from safepool.core.commands import U
from safepool.core.lanes import Lanes


class Levels(Generic[U]):
    """All that waits. Within one priority, what came first goes first."""

    def __init__(self, ways: int) -> None:
        self._ways = ways
        self._usual: Lanes[U] = Lanes(ways)
        self._levels: dict[int, Lanes[U]] = {0: self._usual}

    def __bool__(self) -> bool:
        return any(self._levels.values())

    def __iter__(self) -> Iterator[U]:
        for priority in sorted(self._levels, reverse=True):
            yield from self._levels[priority]

    def top(self) -> Lanes[U]:
        """The lanes of the highest priority that anything has."""
        if len(self._levels) == 1:
            return self._usual
        for priority in sorted(self._levels, reverse=True):
            lanes = self._levels[priority]
            if lanes:
                return lanes
            if priority:
                del self._levels[priority]
        return self._usual

    def add(self, units: Iterable[U]) -> None:
        """Queue units behind all others of their priority."""
        for unit in units:
            self._of(unit).add([unit])

    def put_back(self, units: list[U]) -> None:
        """Queue units again that were here, before those that wait."""
        for unit in reversed(units):
            self._of(unit).put_back([unit])

    def cut(self, unit: U, at: int) -> U:
        """Cut a unit; what is returned is the rest."""
        return self._of(unit).cut(unit, at)

    def resize(self, ways: int) -> None:
        """Have so many lanes from now on; the order stays."""
        old, self._levels = self._levels, {0: Lanes(ways)}
        self._ways, self._usual = ways, self._levels[0]
        for lanes in old.values():
            for unit in lanes.in_order():
                self._of(unit).add_dealt(unit)

    def clear(self) -> None:
        """Forget all."""
        for lanes in self._levels.values():
            lanes.clear()

    def _of(self, unit: U) -> Lanes[U]:
        lanes = self._levels.get(unit.priority)
        if lanes is None:
            lanes = self._levels[unit.priority] = Lanes(self._ways)
        return lanes
