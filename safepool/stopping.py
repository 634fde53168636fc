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
from collections.abc import Iterable
from contextlib import ExitStack

from safepool import sweeper
from safepool.core.identity import Incarnation, Snapshot
from safepool.core.planner import SweepReport, Target
from safepool.core.policy import StopPolicy
from safepool.core.record import Verdict
from safepool.host.base import Host, NoHandle
from safepool.inventory import ListedProcess, ListedRun, take_inventory
from safepool.leftovers import ancestry

MARGIN = 3.0
"""Seconds that a run's own processes get beyond their grace to end the rest and leave."""

_LOOK_AGAIN = 0.05


def refusal(run: ListedRun, host: Host) -> str:
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


def end_owner(owner: Incarnation, grace: float, host: Host) -> SweepReport:
    """End the owner, and nobody else. Takes grace + 1 s at most."""

    def look() -> Snapshot:
        row = host.row(owner.pid)
        return Snapshot({} if row is None else {row.pid: row}, host.now())

    target = Target(roots=frozenset({owner}))
    return sweeper.run(sweeper.Sweep(host, target, StopPolicy(grace), look))


def wait_for_rest(run_id: str, directory: str, host: Host, seconds: float) -> list[ListedProcess]:
    """Wait until no process of the run is alive; return those that are after ``seconds``.

    Detached ones may stay: that is what they were let go for. Looks again whenever all that
    were seen are gone, since a young sidecar may not have been on record yet.
    """
    until = host.now() + seconds
    while True:
        runs = [run for run in take_inventory(directory, host) if run.run_id == run_id]
        left = [each for run in runs for each in run.processes if each.role != "detached"]
        patience = until - host.now()
        if not left or patience <= 0:
            return left
        _wait_for_ends(left, host, patience)


def _wait_for_ends(processes: Iterable[ListedProcess], host: Host, seconds: float) -> None:
    """Wait until all are dead, ``seconds`` at most."""
    until = host.now() + seconds
    with ExitStack() as undo:
        poll = select.poll()
        waiting = set()
        for process in processes:
            handle = host.open(process.incarnation) if process.incarnation.pid > 1 else None
            if handle is not None and not isinstance(handle, NoHandle):
                undo.callback(handle.close)
                if handle.fd >= 0:
                    poll.register(handle.fd, select.POLLIN)
                    waiting.add(handle.fd)
        if not waiting:
            poll.poll(_LOOK_AGAIN * 1000)  # no descriptor is free, or the host has none
        while waiting and (left := until - host.now()) > 0:
            for fd, _ in poll.poll(math.ceil(left * 1000)):
                poll.unregister(fd)
                waiting.discard(fd)
