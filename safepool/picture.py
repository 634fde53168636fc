"""Takes the picture of a pool at one moment, for ``pool.stats()``.

Called by: the crew, in the engine's thread.
"""

from __future__ import annotations

import time
from typing import Protocol

from safepool.core.commands import Occupant
from safepool.core.ledger import Ledger
from safepool.deliveries import Travelling
from safepool.host import vitals
from safepool.stats import PoolStats, WorkerStats


class Workers(Protocol):
    """What of the crew is needed here."""

    def pid(self, worker: int) -> int:
        """The number of a worker's process."""

    def name_of(self, unit: Travelling) -> str:
        """What a worker that has this unit is at."""


def picture(
    ledger: Ledger[Travelling], counts: tuple[int, int, int, int], workers: Workers
) -> PoolStats:
    """``counts``: items done and failed, workers lost, attempts retried."""
    now = time.monotonic()
    occupants = ledger.occupants()
    return PoolStats(
        ledger.queued(),
        sum(one.unit is not None for one in occupants),
        *counts,
        tuple(_stats_of(one, now, workers) for one in occupants),
    )


def _stats_of(one: Occupant, now: float, workers: Workers) -> WorkerStats:
    pid, unit = workers.pid(one.worker), one.unit
    name = workers.name_of(unit) if unit else ""
    busy = "busy" if unit else "idle"
    state = "leaving" if one.is_retiring else busy if one.is_ready else "starting"
    since = now - one.since if unit else None
    return WorkerStats(pid, state, name, since, vitals.memory(pid))
