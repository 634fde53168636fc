"""The launchers that a sidecar knows of, whoever forked them, and how patient each is.

Each is watched by pidfd. One that said ``retired`` has ended what was below it; one
that died without was killed, and then the sidecar has to look for what it left. Whose
that was cannot always be told, so it gets the longest grace of those that may have left it.

Called by: the sidecar.
"""

from __future__ import annotations

import os

from safepool.core.identity import CgroupName, Incarnation
from safepool.core.policy import EndPolicy
from safepool.core.record import Member
from safepool.core.values import dataclass
from safepool.host import container
from safepool.host.base import Host
from safepool.registry import RunFiles


@dataclass
class _Launcher:
    incarnation: Incarnation
    pidfd: int
    policy: EndPolicy
    retired: bool = False


class LauncherWatch:
    """``lost_any``: at least one was killed. ``grace``: seconds for where none is known.

    ``cgroup`` is that of the run.
    """

    def __init__(self, host: Host, files: RunFiles, grace: float, cgroup: CgroupName) -> None:
        self._host = host
        self._files = files
        self._cgroup = cgroup
        self._launchers: dict[int, _Launcher] = {}
        self._default = EndPolicy(grace)
        self._lost: set[EndPolicy] = set()
        self.lost_any = False

    def __len__(self) -> int:
        return len(self._launchers)

    @property
    def grace(self) -> float:
        """Seconds that the most patient launcher gives to what it ends while the owner lives."""
        return max(policy.grace for policy in self._policies())

    @property
    def last_grace(self) -> float:
        """The same once the owner has ended."""
        return max(policy.last_grace for policy in self._policies())

    def _policies(self) -> set[EndPolicy]:
        """Those of the living and of the killed; the others have left nothing."""
        here = {each.policy for each in self._launchers.values()}
        return here | self._lost or {self._default}

    def impatient(self) -> frozenset[Incarnation]:
        """The living ones below which nobody gets a grace once the owner has ended."""
        living = self._launchers.values()
        return frozenset(each.incarnation for each in living if not each.policy.last_grace)

    def pidfds(self) -> list[int]:
        """Descriptors that are readable when a launcher is dead."""
        return [each.pidfd for each in self._launchers.values()]

    def incarnations(self) -> frozenset[Incarnation]:
        """All that are watched."""
        return frozenset(each.incarnation for each in self._launchers.values())

    def attach(self, launcher_id: int, incarnation: Incarnation, policy: EndPolicy) -> None:
        """Watch a launcher; one that is gone already needs none, nor one that is known."""
        if launcher_id in self._launchers:
            return
        try:
            pidfd = os.pidfd_open(incarnation.pid)
        except ProcessLookupError:
            self._lost.add(policy)
            self._remove_container(launcher_id)
            return
        if self._host.incarnation(incarnation.pid) != incarnation:
            os.close(pidfd)
            self._lost.add(policy)
            self._remove_container(launcher_id)
            return
        self._launchers[launcher_id] = _Launcher(incarnation, pidfd, policy)
        self._files.add_member(Member("launcher", incarnation))

    def note_retired(self, launcher_id: int) -> None:
        """It has said goodbye: its death will be no loss."""
        if launcher_id in self._launchers:
            self._launchers[launcher_id].retired = True

    def note_dead(self, ready: set[int]) -> None:
        """Strike off those whose pidfds are among ``ready``."""
        for launcher_id, each in list(self._launchers.items()):
            if each.pidfd in ready:
                os.close(each.pidfd)
                del self._launchers[launcher_id]
                self._files.remove_member(Member("launcher", each.incarnation))
                self._remove_container(launcher_id)
                if not each.retired:
                    self.lost_any = True
                    self._lost.add(each.policy)

    def _remove_container(self, launcher_id: int) -> None:
        """What is not empty yet goes with the run."""
        part = container.of_launcher(self._cgroup, launcher_id)
        if part is not None:
            part.remove(0.0)
            part.close()

    def close_in_child(self) -> None:
        """Close all descriptors in a fork of the sidecar."""
        for each in self._launchers.values():
            os.close(each.pidfd)
