"""Looks again and again at who descends from whom, for hosts whose kernel keeps no orphans.

With the linux backend an orphan arrives at its launcher and the owner's death is an
event; then nothing here ever looks. With the portable one the launcher looks for what its
workers have started, and the sidecar for what is below launchers, and both for the
owner, a few times a second. What was seen once is remembered for as long as it lives.

A look may cost much where there are thousands of processes, so the pause after it grows
with its cost. Called by: the launcher, and the sidecar's watch over launchers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from contextlib import suppress

from safepool.core.identity import Incarnation, Snapshot
from safepool.core.kinship import trace
from safepool.host import own
from safepool.host.base import Host, NoHandle

_SHORTEST_PAUSE = 0.2
_PAUSE_PER_COST = 25
"""So a look takes 4 % of a processor at most."""


class Census:
    """``wake_at``: the instant (monotonic) of the next look; infinite when none is needed.
    ``delay``: seconds by which somebody else may notice later than by an event."""

    def __init__(self, host: Host, owner: Incarnation) -> None:
        self._host = host
        self._owner = owner
        self._kin: dict[Incarnation, Incarnation] = {}
        self.wake_at = math.inf if own.keeps_orphans() else 0.0
        self.delay = 0.0 if own.keeps_orphans() else _SHORTEST_PAUSE
        self.owner_is_gone = False

    def take(self, heads: Collection[Incarnation]) -> None:
        """Look, if it is time: for the owner, and for what is below ``heads``."""
        began = time.monotonic()
        if began < self.wake_at:
            return
        with suppress(OSError):  # nothing to look with: the next look may have it
            self._look_for_owner()
            if heads or self._kin:
                self._kin = trace(self._kin, heads, self._look())
        ended = time.monotonic()
        self.wake_at = ended + max(_SHORTEST_PAUSE, _PAUSE_PER_COST * (ended - began))

    def soon(self) -> None:
        """Look at the next occasion: there is a new head, say."""
        if self.wake_at < math.inf:
            self.wake_at = 0.0

    def of(self, *heads: Incarnation) -> frozenset[Incarnation]:
        """What was seen below these heads, and is not known to be dead; without any: below all."""
        return frozenset(name for name, head in self._kin.items() if not heads or head in heads)

    def _look_for_owner(self) -> None:
        # An owner that is the first process of a container takes all others along.
        if self._owner.pid > 1:
            self.owner_is_gone = self._host.open(self._owner) is NoHandle.GONE

    def _look(self) -> Snapshot:
        """All processes; who is missing though known is asked for by number."""
        snapshot = self._host.look_all(tags=False)
        rows = dict(snapshot.rows)
        for name in self._kin:
            if name.pid not in rows:
                row = self._host.row(name.pid)
                if row is not None:
                    rows[name.pid] = row
        return Snapshot(rows, snapshot.taken)
