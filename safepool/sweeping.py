"""``safepool.sweep()``: end what dead runs of this user have left, or say what that would be.

The same as every start of a run does by itself, from any process, also one that has no
run. It plans with :mod:`safepool.leftovers`, and answers with a report.

Called by: users; the command line.
"""

from __future__ import annotations

import logging
import math
import select
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from safepool import registry
from safepool.core.identity import Incarnation, Snapshot
from safepool.core.membership import Target, find_members
from safepool.core.planner import BLIND
from safepool.core.policy import DEFAULT_GRACE, StopPolicy, checked_grace
from safepool.core.record import RunRecord, Verdict
from safepool.core.values import dataclass
from safepool.errors import ProtectionError
from safepool.host import choose
from safepool.host.base import Host
from safepool.leftovers import look_inside, protected, release, spared_rows, sweep_of, target_of
from safepool.sweeper import Sweep
from safepool.telling import describe

_log = logging.getLogger("safepool")


@dataclass(frozen=True)
class SweptProcess:
    """A process that a dead run has left.

    ``outcome``: "ended", "stuck" (alive at the deadline), "spared", or "found" (in a
    dry run: it would be ended). ``found``: how it was found, "" if it is stuck
    or was spared. ``last_signal``: the last that it got, None for none. ``reason``: why it is stuck
    or was spared.
    """

    pid: int
    command: str
    outcome: str
    found: str = ""
    last_signal: str | None = None
    reason: str = ""

    def __str__(self) -> str:
        found = f", found as {self.found}" if self.found else ""
        signal = f", with {self.last_signal}" if self.last_signal else ""
        reason = f": {self.reason}" if self.reason else ""
        return f"{self.outcome} {self.pid} ({self.command}){found}{signal}{reason}"


@dataclass(frozen=True)
class SweptRun:
    """A run whose owner is proven dead. ``command`` and ``cwd`` are its owner's;
    ``started`` is in seconds since 1970. ``problem``: why there may be more of it, "" if
    nobody else is left."""

    run_id: str
    owner: int
    command: str
    cwd: str
    started: float
    processes: tuple[SweptProcess, ...]
    problem: str = ""

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.started))
        head = f"run {self.run_id} of owner {self.owner} ({self.command}), of {since}"
        lines = [str(process) for process in self.processes]
        if self.problem or not lines:
            lines.append(self.problem or "it has left nothing")
        return "\n    ".join([head, *lines])


@dataclass(frozen=True)
class KeptRecord:
    """A record that was not acted upon. ``verdict``: "live", "foreign", "unknown", or
    "claimed" (somebody else is sweeping that run just now)."""

    run_id: str
    path: str
    verdict: str
    reason: str

    def __str__(self) -> str:
        return f"run {self.run_id} ({self.verdict}): {self.reason}"


@dataclass(frozen=True)
class SweepResult:
    """What :func:`sweep` has done, or would do; ``str()`` is for people."""

    dry_run: bool
    runs: tuple[SweptRun, ...]
    kept: tuple[KeptRecord, ...]

    @property
    def is_clean(self) -> bool:
        """Is nobody left who should be gone?"""
        return not self.has("stuck") and not any(run.problem for run in self.runs)

    def has(self, outcome: str) -> bool:
        """Did any process come to this?"""
        return any(process.outcome == outcome for process in self.processes)

    @property
    def processes(self) -> tuple[SweptProcess, ...]:
        """Those of all dead runs."""
        return tuple(process for run in self.runs for process in run.processes)

    def __str__(self) -> str:
        what = "would be swept (dry run)" if self.dry_run else "swept"
        return "\n".join(
            [
                f"{_count(len(self.runs), 'dead run')} {what}",
                *(f"  {run}" for run in self.runs),
                f"{_count(len(self.kept), 'record')} left alone",
                *(f"  {record}" for record in self.kept),
            ]
        )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def sweep(*, dry_run: bool = False, grace: float = DEFAULT_GRACE) -> SweepResult:
    """End what this user's dead runs have left: SIGTERM, the grace, SIGKILL.

    A run is dead if its owner is proven dead; then whatever bears its tag or mark and
    was born within its life is ended, and its record goes. Never touched: other runs,
    detached and spared processes, the caller and what it descends from.

    Args:
        dry_run: signal nothing, change nothing on disk, and return the same report.
        grace: seconds between SIGTERM and SIGKILL; 0 kills at once.

    Takes ``grace`` and one second at most, however many runs there are. What was ended
    is logged (logger ``safepool``) and added to the log of its run. Safe in threads;
    not for signal handlers.

    Raises:
        ProtectionError: the registry is not private to this user, or this system does
            not show its processes.
        OSError: the registry cannot be read.
        TypeError, ValueError: an argument makes no sense.

    Example::

        print(safepool.sweep(dry_run=True))
    """
    if not isinstance(dry_run, bool):
        raise TypeError(f"dry_run must be True or False, not {type(dry_run).__name__}")
    return sweep_runs("", dry_run=dry_run, grace=checked_grace(grace))


def sweep_runs(only: str, *, dry_run: bool, grace: float) -> SweepResult:
    """The same for the run ``only``, or for all if that is empty."""
    policy = StopPolicy(grace)
    host = choose.host()
    if not host.sees_own_namespace():
        raise ProtectionError(
            "/proc shows another pid namespace than this process is in, so no process can be told "
            "from a stranger; mount a fresh one (unshare --mount-proc, mount -t proc)"
        )
    directory = registry.existing_directory()
    if directory is None:
        return SweepResult(dry_run, (), ())
    spare = protected(host, directory)
    dead: list[_DeadRun] = []
    kept: list[KeptRecord] = []
    for found in registry.scan(directory, registry.here(host), host):
        if only and found.run_id != only:
            continue
        verdict, reason = found.judgement.verdict, found.judgement.reason
        if verdict is not Verdict.DEAD or not isinstance(found.record, RunRecord):
            kept.append(KeptRecord(found.run_id, found.path, verdict.value, reason))
            continue
        files = registry.RunFiles.attach(directory, found.run_id)
        if not dry_run and not files.claim():
            reason = "another process is sweeping it, or has just done so"
            kept.append(KeptRecord(found.run_id, found.path, "claimed", reason))
            continue
        target = target_of(registry.DeadRun(found.record, found.members), files, spare)
        dead.append(_DeadRun(host, found.record, files, target))
    if dry_run:
        runs = [run.foresee() for run in dead]
    else:
        try:
            _carry_out([run.begin(policy) for run in dead])
        finally:
            runs = [run.settle() for run in dead]
    return SweepResult(dry_run, tuple(runs), tuple(kept))


class _DeadRun:
    """One dead run on its way through a sweep."""

    def __init__(
        self, host: Host, record: RunRecord, files: registry.RunFiles, target: Target
    ) -> None:
        self._host = host
        self._record = record
        self._files = files
        self._target = target
        self._look = partial(host.look_all, tags=True)
        self._sweep: Sweep | None = None
        self._let_go: frozenset[Incarnation] = registry.detached_incarnations(files.directory, host)

    def foresee(self) -> SweptRun:
        """What would be ended now."""
        snapshot = look_inside(self._record, self._host)
        members = [
            SweptProcess(each.row.pid, self._command(each.row.pid), "found", each.how)
            for each in find_members(self._target, (), snapshot)
        ]
        return self._swept([*members, *self._spared(snapshot)])

    def begin(self, policy: StopPolicy) -> Sweep:
        """The sweep of this run, which is claimed."""
        self._sweep = sweep_of(self._target, self._record, self._host, policy)
        return self._sweep

    def settle(self) -> SweptRun:
        """After the sweep: tell, strike the run off, and report."""
        sweep = self._sweep
        if sweep is None or sweep.report is None:
            self._files.close()  # interrupted: the run stays on record
            return self._swept([])
        why = f"left by an earlier run whose owner {self._record.owner.pid} is gone"
        for level, text in describe(sweep, why, asked=False):
            _log.log(getattr(logging, level.upper()), "%s", text)
            stamp = time.strftime("%Y-%m-%d %H:%M:%S")
            self._files.append_log(f"{stamp} {level.upper()} {text}\n")
        release(self._files, self._record, sweep)
        lines = sweep.command_lines
        ended = [
            SweptProcess(
                each.incarnation.pid,
                lines.get(each.incarnation, ""),
                "ended",
                each.how,
                None if each.last_signal is None else each.last_signal.value,
            )
            for each in sweep.report.ended
        ]
        stuck = [
            SweptProcess(name.pid, lines.get(name, ""), "stuck", reason=reason)
            for name, reason in sweep.report.stuck
        ]
        if sweep.report.is_blind:
            return self._swept([*ended, *stuck], BLIND)
        return self._swept([*ended, *stuck, *self._spared(self._look())])

    def _spared(self, snapshot: Snapshot) -> Iterator[SweptProcess]:
        for row, reason in spared_rows(self._target, snapshot, self._let_go):
            yield SweptProcess(row.pid, self._command(row.pid), "spared", reason=reason)

    def _command(self, pid: int) -> str:
        return self._host.command_line(pid)

    def _swept(self, processes: Iterable[SweptProcess], problem: str = "") -> SweptRun:
        record = self._record
        return SweptRun(
            record.run_id,
            record.owner.pid,
            " ".join(record.argv),
            record.cwd,
            record.started_wall,
            tuple(processes),
            problem,
        )


def _carry_out(sweeps: Sequence[Sweep]) -> None:
    """Carry sweeps through side by side: one wedged process delays no other."""
    try:
        while running := [each for each in sweeps if each.report is None]:
            for each in running:
                each.advance()
            _wait(running)
    finally:
        for each in sweeps:
            each.give_up()


def _wait(sweeps: Sequence[Sweep]) -> None:
    """Wait until one of them is to be advanced."""
    times = [each.wake_at for each in sweeps if each.wake_at is not None]
    if len(times) < len(sweeps):
        return  # one is over
    poll = select.poll()
    for each in sweeps:
        for fd in each.watched:
            poll.register(fd, select.POLLIN)
    poll.poll(math.ceil(max(0.0, min(times) - time.monotonic()) * 1000))
