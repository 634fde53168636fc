"""Ending one living run from outside: ``safepool stop``.

Only the owner is signalled: SIGTERM, the grace, SIGKILL. All else is its launchers' and
its sidecar's to end, which notice by themselves; a signal from here to a process of
theirs would come beside their own order. So the sweep that ends the owner is shown
nothing but the owner, and what is left at the end is reported, not touched.

Called by: the command line.
"""

from __future__ import annotations

import math
import select

from safepool import sweeper
from safepool.core.identity import Incarnation, Snapshot
from safepool.core.planner import SweepReport, Target
from safepool.core.policy import StopPolicy
from safepool.core.record import Verdict
from safepool.dead_runs import ancestry
from safepool.host.base import Handle, NoHandle
from safepool.host.linux import LinuxHost
from safepool.inventory import ListedProcess, ListedRun

MARGIN = 3.0
"""Seconds that a run's own processes get beyond their grace to end the rest and leave."""


def refusal(run: ListedRun, host: LinuxHost) -> str:
    """Why this run may not be stopped from here; "" if it may."""
    if run.verdict is not Verdict.LIVE or run.record is None:
        return f"it is {run.verdict.value}: {run.reason}"
    if run.record.owner.pid == 1:
        return "its owner is pid 1, whose end ends the whole container; that is for whoever made it"
    own = ancestry(host)
    inside = [process for process in run.processes if process.incarnation in own]
    if inside:
        what = f"{inside[-1].role} {inside[-1].incarnation.pid}"
        return f"this very command comes from it ({what}); stop it from outside, or end its owner"
    return ""


def end_owner(owner: Incarnation, grace: float, host: LinuxHost) -> SweepReport:
    """End the owner, and nobody else. Takes grace + 1 s at most."""

    def look() -> Snapshot:
        row = host.row(owner.pid)
        return Snapshot({} if row is None else {row.pid: row}, host.now())

    target = Target(roots=frozenset({owner}))
    return sweeper.run(sweeper.Sweep(host, target, StopPolicy(grace), look))


class Farewell:
    """Waits for processes of a run; made before its owner is ended. Use it in a ``with``."""

    def __init__(self, processes: tuple[ListedProcess, ...], host: LinuxHost) -> None:
        self._host = host
        self._handles: dict[int, Handle] = {}
        for process in processes:
            # A detached one stays: that is what it was let go for.
            if process.role == "detached" or process.incarnation.pid <= 1:
                continue
            handle = host.open(process.incarnation)
            if not isinstance(handle, NoHandle):
                self._handles[handle.fd] = handle

    def __enter__(self) -> Farewell:  # noqa: PYI034  Self needs Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles.values():
            handle.close()
        self._handles.clear()

    def wait(self, seconds: float) -> None:
        """Wait until all are dead, ``seconds`` at most."""
        until = self._host.now() + seconds
        poll = select.poll()
        for fd in self._handles:
            poll.register(fd, select.POLLIN)
        while self._handles and (left := until - self._host.now()) > 0:
            for fd, _ in poll.poll(math.ceil(left * 1000)):
                poll.unregister(fd)
                self._handles.pop(fd).close()
