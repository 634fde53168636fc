"""A launcher's part of its run's cgroup: who goes in when, and when the launcher is out.

Every worker is in it before it runs the user's code. To move a process there makes the
kernel wait for some milliseconds (unless one was moved just before); to be born there
costs nothing. So the first workers go in by themselves, beside each other and beside
what the owner does meanwhile; then the launcher goes in as well, and all later workers
are born inside. One that has a single worker stays outside.

A sweeper must not freeze itself: the launcher leaves before it may have to use force.
Should it be late, it is found inside, and its sweep goes by signals.

Called by: the launcher.
"""

from __future__ import annotations

from safepool.core.identity import CgroupName
from safepool.host import cgroup, container
from safepool.host.container import Container

_ENTER_AFTER = 0.02
"""Seconds after the first worker: by then the owner has asked for those of a small pool."""


class LauncherContainer:
    """``stays_out``: the launcher is not to go in. Instants are monotonic seconds."""

    def __init__(self, run: CgroupName, launcher_id: int, *, stays_out: bool) -> None:
        self._run = run
        self._launcher_id = launcher_id
        self._container = container.of_launcher(run, launcher_id)
        self._may_enter = self._container is not None and not stays_out
        self._is_inside = False
        self.enter_at: float | None = None

    def take_in(self) -> None:
        """In a worker, just forked: be inside, if it is not born there, and close."""
        if self._container is not None:
            if not self._is_inside:
                # Refused, say after a change of user: then the signals of a sweep have to do.
                cgroup.enter(self._container.fd)
            self._container.close()

    def note_worker(self, now: float) -> None:
        """A worker was forked: see to it that later ones are born inside."""
        if self._may_enter:
            self._may_enter = False
            self.enter_at = now + _ENTER_AFTER

    def advance(self, now: float) -> None:
        """Go in, when it is time."""
        if self.enter_at is not None and now >= self.enter_at and self._container is not None:
            self.enter_at = None
            self._is_inside = cgroup.enter(self._container.fd) is None

    def leave(self) -> None:
        """Leave for good, back to where the owner was when it made the run."""
        self._may_enter, self.enter_at = False, None
        if self._is_inside and self._container is not None:
            self._is_inside = cgroup.enter_above(self._container.fd, 2) is not None

    def for_sweep(self) -> Container | None:
        """The container, opened anew for a sweep, which closes it."""
        return container.of_launcher(self._run, self._launcher_id)

    def remove(self) -> None:
        """Remove it if nobody is inside; else the sidecar will, when this launcher is gone."""
        if self._container is not None and not self._is_inside:
            self._container.remove(0.0)
