"""How much work a worker may hold at a time, and for how long it may be silent.

A worker holds as many items as make about QUICK seconds of work, by its pace so far; in
two parts, so that it has the second when it asks for it. Before it has shown itself quick
it holds one. What a pace has promised and a task does not keep is taken back: at once when
somebody else has nothing to do, after a while in any case, since what was finished before
that task waits in the worker's page.

Pure. Called by: the ledger.
"""

from __future__ import annotations

from typing import Generic

from safepool.core.commands import U

QUICK = 0.005
STALLED = 0.005
"""Seconds without news, while others have nothing to do, after which work is taken back."""
HELD_UP = 0.02
"""The same while all have something to do."""
MOST_ITEMS = 2048
MOST_BYTES = 1 << 16
ALONE = MOST_BYTES + 1
"""The bytes of a unit that shares no worker's time with others, if it is smaller than that."""


class Seat(Generic[U]):
    """A worker as the ledger sees it."""

    __slots__ = (
        "fresh", "lane", "leaving", "pace", "ready", "recalled", "retiring", "served", "since",
        "units",
    )  # fmt: skip

    def __init__(self) -> None:
        self.lane: int | None = None
        self.units: dict[int, U] = {}
        self.ready = False
        self.retiring = False
        self.leaving = False
        self.recalled = False
        self.served = 0
        self.fresh = 0
        self.since = 0.0
        self.pace: float | None = None

    def is_open(self) -> bool:
        """May it get something to do?"""
        return self.ready and not self.retiring and not self.leaving

    def depth(self) -> int:
        """How many items it may hold: one until it has shown itself quick."""
        if self.pace is None or self.pace >= QUICK:
            return 1
        return max(1, min(MOST_ITEMS, int(QUICK / max(self.pace, 1e-7))))

    def held(self) -> int:
        """How many items it has."""
        return sum(unit.size - unit.done for unit in self.units.values())

    def room(self, share: int) -> int:
        """How many items it may get now, if ``share`` are its part of all; 0: none."""
        held = self.held()
        depth = self.depth()
        if held > depth // 2:
            return 0
        return max(1, min(depth - held, (depth + 1) // 2, share))

    def tasks_left(self, lifetime: int) -> int:
        """How many tasks more may it get, if it lives for ``lifetime``?"""
        held = sum(unit.size - unit.done if unit.is_group else 1 for unit in self.units.values())
        return lifetime - self.served - held

    def room_for_bytes(self, unit: U) -> int:
        """How many items of a group it may get besides what it has, by their bytes."""
        left = MOST_BYTES - self.nbytes()
        return max(0, left * unit.size // max(1, unit.nbytes))

    def fits_behind(self, unit: U, room: int) -> bool:
        """May the unit wait behind what the worker has?"""
        nbytes = self.nbytes()
        if unit.is_group:
            return nbytes < MOST_BYTES
        is_small = unit.may_split or unit.size - unit.done <= room
        return is_small and nbytes + unit.nbytes <= MOST_BYTES

    def most(self, unit: U, room: int, workers: int) -> int:
        """How many items of the unit it gets, of a pool with so many workers."""
        whole = unit.size - unit.done
        if unit.is_group:
            return min(whole, room, max(1, self.room_for_bytes(unit)))
        if unit.is_rest:
            # Of what was taken back for an idle worker's sake each gets a part, and smaller
            # ones towards the end, or the rest would go to and fro.
            return max(1, -(-whole // (2 * workers)))
        return whole

    def measure(self, now: float) -> None:
        """Take the mean time of the items that have ended since the last look."""
        took = (now - self.since) / self.fresh
        self.pace = took if self.pace is None else 0.7 * self.pace + 0.3 * took
        self.since = now
        self.fresh = 0
        self.recalled = False

    def nbytes(self) -> int:
        """The bytes of what it has."""
        return sum(unit.nbytes for unit in self.units.values())

    def patience(self, *, others_wait: bool) -> float | None:
        """Seconds without news after which what it has not begun is taken back; None: never."""
        units = iter(self.units.values())
        first = next(units, None)
        if first is None or self.recalled or self.retiring:
            return None
        is_behind = next(units, None) is not None
        if others_wait and (is_behind or (first.may_split and first.size - first.done > 1)):
            return STALLED
        if first.is_group and (is_behind or first.size > 1):
            return HELD_UP
        return None

    def start_over(self, now: float) -> None:
        """Its pace was misleading: one item at a time again."""
        self.recalled = True
        self.pace = None
        self.since = now
        self.fresh = 0
