"""The launchers that a sidecar knows of, whoever forked them.

Each is watched by pidfd. One that said ``retired`` has ended what was below it; one
that died without was killed, and then the sidecar has to look for what it left.

Called by: the sidecar.
"""

from __future__ import annotations

import os

from safepool.core.identity import CgroupName, Incarnation
from safepool.core.record import Member
from safepool.core.values import dataclass
from safepool.host import container
from safepool.host.base import Host
from safepool.registry import RunFiles


@dataclass
class _Launcher:
    incarnation: Incarnation
    pidfd: int
    retired: bool = False


class LauncherWatch:
    """``lost_any``: at least one was killed. ``grace``: the longest of all that were there.

    ``cgroup`` is that of the run.
    """

    def __init__(self, host: Host, files: RunFiles, grace: float, cgroup: CgroupName) -> None:
        self._host = host
        self._files = files
        self._cgroup = cgroup
        self._launchers: dict[int, _Launcher] = {}
        self._default_grace = grace
        self._longest: float | None = None
        self.lost_any = False

    def __len__(self) -> int:
        return len(self._launchers)

    @property
    def grace(self) -> float:
        """Seconds that the most patient launcher gives to what it ends."""
        return self._default_grace if self._longest is None else self._longest

    def pidfds(self) -> list[int]:
        """Descriptors that are readable when a launcher is dead."""
        return [each.pidfd for each in self._launchers.values()]

    def incarnations(self) -> frozenset[Incarnation]:
        """All that are watched."""
        return frozenset(each.incarnation for each in self._launchers.values())

    def attach(self, launcher_id: int, incarnation: Incarnation, grace: float) -> None:
        """Watch a launcher; one that is gone already needs none, nor one that is known."""
        if launcher_id in self._launchers:
            return
        try:
            pidfd = os.pidfd_open(incarnation.pid)
        except ProcessLookupError:
            self._remove_container(launcher_id)
            return
        if self._host.incarnation(incarnation.pid) != incarnation:
            os.close(pidfd)
            self._remove_container(launcher_id)
            return
        self._launchers[launcher_id] = _Launcher(incarnation, pidfd)
        self._longest = max(grace, self._longest or 0.0)
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
                self.lost_any = self.lost_any or not each.retired

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
