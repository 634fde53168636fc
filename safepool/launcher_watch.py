"""The launchers that a sidecar knows of, whoever forked them.

Each is watched by pidfd, where the host has such; else it is looked for. One that said
``retired`` has ended what was below it; one that died without was killed, and then the
sidecar has to look for what it left.

Called by: the sidecar.
"""

from __future__ import annotations

from collections.abc import Collection

from safepool.census import Census
from safepool.core.identity import Incarnation
from safepool.core.planner import Target
from safepool.core.record import Member
from safepool.core.values import dataclass, replace
from safepool.host.base import Handle, Host, NoHandle
from safepool.registry import RunFiles


@dataclass
class _Launcher:
    incarnation: Incarnation
    handle: Handle | None
    retired: bool = False

    @property
    def fd(self) -> int:
        """Readable when it is dead; -1: look for it."""
        return -1 if self.handle is None else self.handle.fd

    def close(self) -> None:
        """Let go of the descriptor."""
        if self.handle is not None:
            self.handle.close()


class LauncherWatch:
    """``lost_any``: at least one was killed. ``grace``: the longest of all that were there.

    ``census`` looks for the owner and for what is below launchers, if the kernel does not
    keep that together.
    """

    def __init__(self, host: Host, files: RunFiles, grace: float, owner: Incarnation) -> None:
        self._host = host
        self._files = files
        self._launchers: dict[int, _Launcher] = {}
        self._names: dict[int, Incarnation] = {}
        self._default_grace = grace
        self._longest: float | None = None
        self.census = Census(host, owner)
        self.lost_any = False

    def __len__(self) -> int:
        return len(self._launchers)

    @property
    def grace(self) -> float:
        """Seconds that the most patient launcher gives to what it ends."""
        return self._default_grace if self._longest is None else self._longest

    def fds(self) -> list[int]:
        """Descriptors that are readable when a launcher is dead."""
        return [each.fd for each in self._launchers.values() if each.fd >= 0]

    def incarnations(self) -> frozenset[Incarnation]:
        """All that are watched."""
        return frozenset(each.incarnation for each in self._launchers.values())

    def attach(self, launcher_id: int, incarnation: Incarnation, grace: float) -> None:
        """Watch a launcher; one that is gone already needs none, nor one that is known."""
        if launcher_id in self._launchers:
            return
        opened = self._host.open(incarnation)
        if opened is NoHandle.GONE or not incarnation.start:
            return
        # Without a free descriptor it is looked for.
        handle = None if isinstance(opened, NoHandle) else opened
        self._launchers[launcher_id] = _Launcher(incarnation, handle)
        self._names[launcher_id] = incarnation
        self._longest = max(grace, self._longest or 0.0)
        self._files.add_member(Member("launcher", incarnation))
        self.census.soon()

    def note_retired(self, launcher_id: int) -> None:
        """It has said goodbye: its death will be no loss."""
        if launcher_id in self._launchers:
            self._launchers[launcher_id].retired = True

    def note_dead(self, ready: set[int]) -> None:
        """Strike off those that are dead: their descriptors are among ``ready``."""
        self.census.take(self.incarnations())
        for launcher_id, each in list(self._launchers.items()):
            if each.fd in ready or (each.fd < 0 and self._is_gone(each)):
                each.close()
                del self._launchers[launcher_id]
                self._files.remove_member(Member("launcher", each.incarnation))
                self.lost_any = self.lost_any or not each.retired

    def workers(self, numbers: Collection[int] | None = None) -> frozenset[Incarnation]:
        """Workers on record; of these numbers or all. Launchers write them down only where
        the kernel does not end them with their launcher."""
        return frozenset(
            member.incarnation
            for member in self._files.members()
            if member.kind == "worker" and (numbers is None or member.worker in numbers)
        )

    def with_lost(self, launcher_id: int, target: Target) -> Target:
        """Add to a target what is on record or was seen below a launcher that was killed."""
        name = self._names.get(launcher_id)
        known = frozenset() if name is None else self.census.of(name)
        return replace(target, roots=self.workers(target.workers), known=known)

    def close_in_child(self) -> None:
        """Close all descriptors in a fork of the sidecar."""
        for each in self._launchers.values():
            each.close()

    def _is_gone(self, launcher: _Launcher) -> bool:
        # With the last word said it has nothing left to do; the next look would come late.
        return launcher.retired or self._host.open(launcher.incarnation) is NoHandle.GONE
