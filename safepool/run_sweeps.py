"""The sweeps that a sidecar makes of its own run, and how patient each is.

* *lost*: a launcher was killed while the owner lives; what its workers had started is
  ended, wherever it is now.
* *hurried*: the owner has ended, and a launcher below which nobody gets a grace has not
  done its part. It comes before the last one, which would be polite to its workers.
* *last*: whatever else bears the run's tag or mark, or is below the sidecar.

Called by: the sidecar.
"""

from __future__ import annotations

from functools import partial

from safepool import registry
from safepool.core.identity import CgroupName, Incarnation
from safepool.core.planner import Target
from safepool.core.policy import StopPolicy
from safepool.host import container
from safepool.host.base import Container, Host
from safepool.launcher_watch import LauncherWatch
from safepool.sweeper import Sweep

LATER = 0.4
"""Seconds by which the sidecar's forced end comes after the launchers' own."""


class RunSweeps:
    """``own`` is the sidecar, ``began`` the start of the run in clock ticks."""

    def __init__(
        self,
        host: Host,
        files: registry.RunFiles,
        launchers: LauncherWatch,
        own: Incarnation,
        owner: Incarnation,
        began: int,
        cgroup: CgroupName,
    ) -> None:
        self._host = host
        self._files = files
        self._launchers = launchers
        self._own = own
        self._owner = owner
        self._began = began
        self._cgroup = cgroup

    def spared(self) -> frozenset[Incarnation]:
        """Who is never meant: the two that protect the run, and all that was let go."""
        let_go = registry.detached_incarnations(self._files.directory, self._host)
        return let_go | {self._own, self._owner}

    def lost(self, launcher_id: int, numbers: list[int]) -> Sweep:
        """For the workers of a launcher that was killed, by their numbers."""
        target = Target(
            run_id=self._files.run_id,
            workers=frozenset(numbers),
            born_from=self._began,
            spare=self.spared(),
        )
        target = self._launchers.with_lost(launcher_id, target)
        within = container.of_launcher(self._cgroup, launcher_id)
        return self._sweep(target, self._launchers.grace, within)

    def hurried(self) -> Sweep | None:
        """For those who get no grace, if there are others who get some."""
        impatient = self._launchers.impatient()
        if not impatient or not self._launchers.last_grace:
            return None
        known = self._launchers.census.of(*impatient)
        return self._sweep(Target(impatient, known, spare=self.spared()), 0.0)

    def last(self, *, owner_lives: bool) -> Sweep:
        """For everybody else."""
        target = Target(
            roots=self._launchers.incarnations() | self._launchers.workers(),
            known=self._launchers.census.of(),
            subtree_of=self._own,
            run_id=self._files.run_id,
            born_from=self._began,
            spare=self.spared(),
        )
        within = container.Container.open(self._cgroup)
        if owner_lives:
            return self._sweep(target, self._launchers.grace + LATER, within)
        grace = self._launchers.last_grace
        return self._sweep(target, grace + LATER if grace else 0.0, within)

    def _sweep(self, target: Target, grace: float, within: Container | None = None) -> Sweep:
        look = partial(self._host.look_all, tags=True, since=target.oldest_birth())
        return Sweep(self._host, target, StopPolicy(grace), look, None, self._own, within)
