"""How many workers a pool has: all from the start, or as many as there is work for.

A worker that has had nothing to do for a while leaves, and is started again when there is
something for it. One that has something never leaves.

Pure. Called by: the ledger.
"""

from __future__ import annotations


class Staff:
    """``size``: workers at most. ``lazy``: none before there is work. ``idle_timeout``: seconds
    after which one without work leaves; None: never. ``wanted``: workers there should be now."""

    def __init__(self, size: int, *, lazy: bool = False, idle_timeout: float | None = None) -> None:
        self.size = size
        self.wanted = 0 if lazy else size
        self._idle_timeout = idle_timeout

    def need(self, busy: int, waiting: int) -> None:
        """So many workers have something to do, and so many items wait for one."""
        self.wanted = max(self.wanted, min(self.size, busy + waiting))

    def idle_for(self, since: float, now: float) -> float | None:
        """Seconds until a worker that has had nothing to do ``since`` leaves; None: it stays."""
        return None if self._idle_timeout is None else since + self._idle_timeout - now

    def one_left(self) -> None:
        """One had nothing to do, and leaves."""
        self.wanted = max(0, self.wanted - 1)

    def resize(self, size: int) -> None:
        """Have so many from now on; a pool that had all has all again."""
        had_all = self.wanted >= self.size
        self.size = size
        self.wanted = size if had_all else min(self.wanted, size)
