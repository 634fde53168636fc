"""Units that wait for a worker, in as many lanes as there are workers.

What is queued is dealt out like cards. A worker that has nothing takes what is first of all,
and its lane with it; more than that one item it gets from the same lane. So with n workers any
n tasks that were queued one behind the other can run at the same time and wait for each
other: what a worker has behind the task that it is at is n turns later, or more.

Pure. Called by: the ledger.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Generic

from safepool.core.commands import U

_ENOUGH = 1 << 16


class Lanes(Generic[U]):
    """Units by lane, and behind them those that are not dealt out yet."""

    def __init__(self, ways: int) -> None:
        self._undealt: deque[U] = deque()
        self._lanes: list[deque[U]] = [deque() for _ in range(ways)]
        self._turns = 0

    def __bool__(self) -> bool:
        return bool(self._undealt) or any(self._lanes)

    def __iter__(self) -> Iterator[U]:
        for lane in self._lanes:
            yield from lane
        yield from self._undealt

    def clear(self) -> None:
        """Forget all."""
        self._undealt.clear()
        for lane in self._lanes:
            lane.clear()

    def waiting(self) -> int:
        """How many items wait; what is more than enough for everybody is not counted."""
        waiting = 0
        for unit in self:
            waiting += unit.size - unit.done
            if waiting > _ENOUGH:
                break
        return waiting

    def add(self, units: Iterable[U]) -> None:
        """Queue units behind all others."""
        self._undealt.extend(units)

    def put_back(self, units: list[U]) -> None:
        """Queue units again that were here, before those that wait in their lane."""
        for unit in reversed(units):
            unit.lane %= len(self._lanes)  # there may have been more
            self._lanes[unit.lane].appendleft(unit)

    def in_order(self) -> list[U]:
        """All units, the first first."""
        dealt = [unit for lane in self._lanes for unit in lane]
        return [*sorted(dealt, key=lambda unit: unit.turn), *self._undealt]

    def add_dealt(self, unit: U) -> None:
        """Queue a unit behind all others, and do not deal it out any more."""
        unit.turn = self._turns
        unit.lane = unit.turn % len(self._lanes)
        self._lanes[unit.lane].append(unit)
        self._turns += 1

    def first(self) -> int | None:
        """The lane in which the first of all units is."""
        if not any(self._lanes):
            if not self._undealt:
                return None
            self._deal()
        return min((lane[0].turn, place) for place, lane in enumerate(self._lanes) if lane)[1]

    def head(self, lane: int) -> U | None:
        """What is next in a lane."""
        own = self._lanes[lane]
        while not own and self._undealt:
            self._deal()
        return own[0] if own else None

    def pop(self, lane: int) -> U:
        """Take it."""
        return self._lanes[lane].popleft()

    def cut(self, unit: U, at: int) -> U:
        """Cut a unit; what is returned is the rest."""
        rest = unit.split(at)
        rest.lane = unit.lane
        rest.priority = unit.priority
        rest.turn = unit.turn + (at * len(self._lanes) if unit.is_group else 0)
        return rest

    def _deal(self) -> None:
        """Deal out what has waited longest, beginning with the lane after the last one's."""
        unit = self._undealt.popleft()
        ways = len(self._lanes)
        for turn, part in enumerate(unit.deal(ways), self._turns):
            part.turn = turn
            part.priority = unit.priority
            part.lane = turn % ways
            self._lanes[part.lane].append(part)
        self._turns += unit.size if unit.is_group else 1
