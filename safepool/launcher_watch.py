"""The launchers that a sidecar knows of, whoever forked them, and how patient each is.

Each is watched by pidfd, where the host has such; else it is looked for. One that said
``retired`` has ended what was below it; one that died without was killed, and then the
sidecar has to look for what it left. Whose that was cannot always be told, so it gets the
longest grace of those that may have left it.

Called by: the sidecar.
"""

from __future__ import annotations

from collections.abc import Collection

from safepool.census import Census
from safepool.core.identity import CgroupName, Incarnation
from safepool.core.planner import Target
from safepool.core.policy import EndPolicy
from safepool.core.record import Member
from safepool.core.values import dataclass, replace
from safepool.host import container
from safepool.host.base import Handle, Host, NoHandle
from safepool.registry import RunFiles


@dataclass
class _Launcher:
    incarnation: Incarnation
    handle: Handle | None
    policy: EndPolicy
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
    """``lost_any``: at least one was killed. ``grace``: seconds for where none is known.

    ``cgroup`` is that of the run. ``census`` looks for the owner and for what is below
    launchers, if the kernel does not keep that together.
    """

    def __init__(
        self,
        host: Host,
        files: RunFiles,
        grace: float,
        owner: Incarnation,
        cgroup: CgroupName,
    ) -> None:
        self._host = host
        self._files = files
        self._cgroup = cgroup
        self._launchers: dict[int, _Launcher] = {}
        self._names: dict[int, Incarnation] = {}
        self._default = EndPolicy(grace)
        self._lost: set[EndPolicy] = set()
        self.census = Census(host, owner)
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

    def fds(self) -> list[int]:
        """Descriptors that are readable when a launcher is dead."""
        return [each.fd for each in self._launchers.values() if each.fd >= 0]

    def incarnations(self) -> frozenset[Incarnation]:
        """All that are watched."""
        return frozenset(each.incarnation for each in self._launchers.values())

    def attach(self, launcher_id: int, incarnation: Incarnation, policy: EndPolicy) -> None:
        """Watch a launcher; one that is gone already needs none, nor one that is known."""
        if launcher_id in self._launchers:
            return
        opened = self._host.open(incarnation)
        if opened is NoHandle.GONE or not incarnation.start:
            self._lost.add(policy)
            self._remove_container(launcher_id)
            return
        # Without a free descriptor it is looked for.
        handle = None if isinstance(opened, NoHandle) else opened
        self._launchers[launcher_id] = _Launcher(incarnation, handle, policy)
        self._names[launcher_id] = incarnation
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
