"""Ending what dead runs have left, from any process: ``safepool sweep`` and ``safepool stop``.

The same as the sidecar of every new run does (:mod:`safepool.leftovers` says what belongs
to a dead run), with a report for whoever asked. A run is claimed first, so of two that
sweep at once only one does. A dry run looks with the same eyes, signals nobody, claims
nothing and changes no file. Whoever asked, and what it descends from, is spared.

Called by: the command line.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from safepool import registry, sweeper
from safepool.core.identity import Incarnation, Snapshot
from safepool.core.membership import Target, find_members
from safepool.core.policy import StopPolicy
from safepool.core.record import RunRecord, Verdict
from safepool.core.values import dataclass
from safepool.host.linux import LinuxHost
from safepool.leftovers import is_witnessed, target_of
from safepool.telling import describe


@dataclass(frozen=True)
class SweptProcess:
    """A process that a dead run has left.

    ``outcome``: "ended", "stuck" (alive at the deadline), "spared", or "found" (in a dry
    run: it would be ended). ``found``: how it was found, "" if that is not known.
    ``last_signal``: the last that it got. ``reason``: why it is stuck or was spared.
    """

    pid: int
    command: str
    outcome: str
    found: str = ""
    last_signal: str | None = None
    reason: str = ""


@dataclass(frozen=True)
class SweptRun:
    """A run whose owner, a pid, is proven dead, and what it had left."""

    run_id: str
    owner: int
    processes: tuple[SweptProcess, ...]


@dataclass(frozen=True)
class KeptRecord:
    """A record that was not acted upon. ``verdict``: "live", "foreign", "unknown", or
    "claimed" (somebody else is sweeping that run just now)."""

    run_id: str
    verdict: str
    reason: str


@dataclass(frozen=True)
class SweepResult:
    """What was done, or would be."""

    runs: tuple[SweptRun, ...]
    kept: tuple[KeptRecord, ...]

    def has(self, outcome: str) -> bool:
        """Did any process come to this?"""
        return any(each.outcome == outcome for run in self.runs for each in run.processes)


def sweep_dead_runs(
    directory: str, host: LinuxHost, *, dry_run: bool, grace: float, only: str = ""
) -> SweepResult:
    """End what dead runs have left, or just the run ``only``; say what came of it.

    ``grace`` is in seconds. Raises ProtectionError when the registry is not private to
    this user, OSError when it or the process table cannot be read. Takes grace + 1 s for
    each run at most.
    """
    runs: list[SweptRun] = []
    kept: list[KeptRecord] = []
    for found in registry.scan(directory, registry.here(host), host):
        if only and found.run_id != only:
            continue
        verdict, reason = found.judgement.verdict, found.judgement.reason
        if verdict is not Verdict.DEAD or not isinstance(found.record, RunRecord):
            kept.append(KeptRecord(found.run_id, verdict.value, reason))
            continue
        run = registry.DeadRun(found.record, found.members)
        files = registry.RunFiles.attach(directory, found.run_id)
        if dry_run:
            runs.append(_foresee(run, files, host))
        elif files.claim():
            try:
                runs.append(_sweep(run, files, host, grace))
            finally:
                files.close()
        else:
            reason = "another process is sweeping it, or has just done so"
            kept.append(KeptRecord(found.run_id, "claimed", reason))
    return SweepResult(tuple(runs), tuple(kept))


def ancestry(host: LinuxHost) -> frozenset[Incarnation]:
    """This process and all that it descends from, as far as that can be seen."""
    found: set[Incarnation] = set()
    row = host.row(os.getpid())
    while row is not None and row.incarnation not in found:
        found.add(row.incarnation)
        row = host.row(row.ppid)
    return frozenset(found)


def _foresee(run: registry.DeadRun, files: registry.RunFiles, host: LinuxHost) -> SweptRun:
    target = target_of(run, files, ancestry(host))
    snapshot = host.look_all(tags=True)
    members = [
        SweptProcess(each.row.pid, host.command_line(each.row.pid), "found", each.how)
        for each in find_members(target, (), snapshot)
    ]
    spared = _spared(target, snapshot, host)
    return SweptRun(run.record.run_id, run.record.owner.pid, (*members, *spared))


def _sweep(
    run: registry.DeadRun, files: registry.RunFiles, host: LinuxHost, grace: float
) -> SweptRun:
    target = target_of(run, files, ancestry(host))
    sweep = sweeper.Sweep(host, target, StopPolicy(grace), lambda: host.look_all(tags=True))
    report = sweeper.run(sweep)
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    why = f"left by an earlier run whose owner {run.record.owner.pid} is gone"
    for level, text in describe(sweep, why, asked=False):
        files.append_log(f"{stamp} {level.upper()} {text}\n")
    lines = sweep.command_lines
    ended = [
        SweptProcess(
            each.incarnation.pid,
            lines.get(each.incarnation, ""),
            "ended",
            each.how,
            None if each.last_signal is None else each.last_signal.value,
        )
        for each in report.ended
    ]
    stuck = [
        SweptProcess(name.pid, lines.get(name, ""), "stuck", reason=reason)
        for name, reason in report.stuck
    ]
    spared = _spared(target, host.look_all(tags=True), host)
    if not report.stuck:
        files.retire()  # else it stays on record, for the next to try again
    return SweptRun(run.record.run_id, run.record.owner.pid, (*ended, *stuck, *spared))


def _spared(target: Target, snapshot: Snapshot, host: LinuxHost) -> Iterator[SweptProcess]:
    """Who bears the run's tag or mark but is left alone, with the reason."""
    for row in snapshot.alive():
        if not is_witnessed(row, target.run_id or ""):
            continue
        if row.incarnation in target.spare:
            reason = "this very process descends from it"
        elif target.is_of_another(row):
            reason = "it bears the mark of a run that was over when it started"
        else:
            continue
        yield SweptProcess(row.pid, host.command_line(row.pid), "spared", reason=reason)
