"""Sees to it that no worker of a pool uses more memory than it may, with its descendants.

Looks ten times a second while a worker has a task, and after each task. What is shared
with the owner since a fork counts by part.

Called by: the engine, in its thread, for pools that have such a limit.
"""

from __future__ import annotations

import logging
from typing import Protocol

from safepool.core.ledger import Ledger
from safepool.errors import MemoryLimitError
from safepool.host import tree_memory
from safepool.limits import Limits, Travelling

_log = logging.getLogger("safepool")

_PERIOD = 0.1


class Workers(Protocol):
    """What of the crew is needed here."""

    def pid(self, worker: int) -> int:
        """The number of a worker's process."""

    def name_of(self, unit: Travelling) -> str:
        """What a worker that has this unit is at."""


class MemoryWatch:
    """For one crew; ``limit`` in bytes."""

    def __init__(
        self, limit: int, workers: Workers, ledger: Ledger[Travelling], limits: Limits
    ) -> None:
        self._limit = limit
        self._workers = workers
        self._ledger = ledger
        self._limits = limits
        self._next = 0.0

    def wait(self, now: float) -> float | None:
        """Seconds until the next look; None: while nobody has a task there is none."""
        if any(one.unit is not None for one in self._ledger.occupants()):
            return max(0.0, self._next - now)
        return None

    def carry_out(self, now: float) -> None:
        """Look at all that have a task, if it is time."""
        if now < self._next:
            return
        self._next = now + _PERIOD
        for one in self._ledger.occupants():
            if one.unit is not None:
                self.check(one.worker)

    def check(self, worker: int) -> None:
        """Look at a worker now: one that uses too much goes, and its task with it."""
        pid = self._workers.pid(worker)
        pids = tree_memory.tree_of(pid)
        if tree_memory.resident(pids) <= self._limit:
            return
        used = tree_memory.proportional(pids)
        if used <= self._limit:
            return
        unit = self._ledger.first_unit(worker)
        if unit is None:
            _log.info("worker %d is replaced: it uses %d bytes (max_rss)", pid, used)
            self._ledger.leave(worker)
            return
        message = (
            f"worker {pid} used {used} bytes with its descendants while it ran "
            f"{self._workers.name_of(unit)}; max_rss is {self._limit}"
        )
        error = MemoryLimitError(message, self._limit, used, pid)
        self._limits.condemn(worker, unit.number, error)
