"""How long a worker may take for its beginning and for its end.

A worker whose initializer does not return in time is ended, and counts as one whose
initializer has failed. One that does not leave in time is ended.

Called by: the crew, in the engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable

from safepool.worker_life import WorkerLife


class Vigils:
    """``too_late`` is called with a worker, and whether it was at its initializer."""

    def __init__(self, life: WorkerLife, too_late: Callable[[int, bool], None]) -> None:
        self._life = life
        self._too_late = too_late
        self._due: dict[int, tuple[float, bool]] = {}

    def begins(self, worker: int, now: float) -> None:
        """Its initializer begins."""
        if self._life.init_timeout is not None:
            self._due[worker] = now + self._life.init_timeout, True

    def leaves(self, worker: int, now: float) -> None:
        """It was told to leave."""
        if self._life.exit_timeout is not None:
            self._due[worker] = now + self._life.exit_timeout, False

    def forget(self, worker: int) -> None:
        """It has done what it was to do, or is gone."""
        self._due.pop(worker, None)

    def wait(self, now: float) -> float | None:
        """Seconds until one of them is too late; None: nobody can be."""
        return max(0.0, min(self._due.values())[0] - now) if self._due else None

    def carry_out(self, now: float) -> None:
        """End who is too late."""
        for worker, (due, is_beginning) in list(self._due.items()):
            if due <= now:
                del self._due[worker]
                self._too_late(worker, is_beginning)
