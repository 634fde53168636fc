"""What dead runs have left, and the sweeps that end it: the last net.

When the owner, its sidecar and its launchers were all killed in the same instant,
workers die with their launcher (PDEATHSIG) but what they had started may live on.
Every start of a run looks into the registry for runs whose owner is proven dead,
claims each, and ends what bears its tag or mark and was born within its life.

Called by: the sidecar, once it is armed; it carries the sweeps out beside its watch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from safepool import registry
from safepool.core.identity import Incarnation, ProcessRow
from safepool.core.lineage import is_mark_of, is_tag_of_run
from safepool.core.membership import bears_nothing_late
from safepool.core.planner import Target
from safepool.core.policy import StopPolicy
from safepool.core.record import RunRecord, Verdict
from safepool.core.values import dataclass, replace
from safepool.errors import SafePoolError
from safepool.host.base import Host
from safepool.host.linux import ticks
from safepool.sweeper import Sweep

_UNPROVEN = (Verdict.FOREIGN, Verdict.UNKNOWN)
_NAMED = 5
_LONGEST = 4000
"""How many records that are left alone are named, in how many characters: one packet."""


def is_witnessed(row: ProcessRow, run_id: str) -> bool:
    """Do tag or mark say that it comes from the run?"""
    return is_tag_of_run(row.tag, run_id) or is_mark_of(row.mark, run_id)


@dataclass
class SweepTask:
    """A sweep, why it is made, and what to do when it is over."""

    sweep: Sweep
    why: str
    done: Callable[[Sweep], None]


def start_up_sweeps(
    files: registry.RunFiles,
    host: Host,
    spare: frozenset[Incarnation],
    note: Callable[[str, str], None],
    mention: Callable[[str], None],
) -> list[SweepTask]:
    """Return a sweep for each dead run that nobody else has claimed.

    ``note`` is told what could not be examined: old debris is not worth the
    protection of the new run, so nothing is raised. ``mention`` is told which records
    are left alone since nothing is proven about them; they are there at every start.
    """
    try:
        found = registry.scan(files.directory, registry.here(host), host)
    except (OSError, SafePoolError) as error:
        note("warning", f"the registry could not be examined for dead runs: {error}")
        return []
    tasks = []
    for run in found:
        if not isinstance(run.record, RunRecord) or run.judgement.verdict is not Verdict.DEAD:
            continue
        claimed = registry.RunFiles.attach(files.directory, run.run_id)
        if claimed.claim():
            dead = registry.DeadRun(run.record, run.members)
            tasks.append(_sweep_of(dead, claimed, host, spare, note))
    unproven = [run for run in found if run.judgement.verdict in _UNPROVEN]
    if unproven:
        mention(_left_alone(unproven))
    return tasks


def _left_alone(runs: list[registry.FoundRun]) -> str:
    """Say which records nobody acts upon, and why; the first few by name."""
    named = [f"{run.path!r}: {run.judgement.reason}" for run in runs[:_NAMED]]
    more = [f"and {len(runs) - _NAMED} more"] if len(runs) > _NAMED else []
    text = f"{len(runs)} records left alone, since nothing is proven about them: "
    return (text + "; ".join(named + more))[:_LONGEST]


def _nothing_came_later(target: Target, host: Host) -> bool:
    """Is there surely no process that got the dead run's tag or mark after its end?"""
    try:
        return bears_nothing_late(target, host.look_all(tags=True))
    except OSError:
        return False  # it cannot be told: the bound stays


def _tell_spared(run_id: str, target: Target, host: Host, note: Callable[[str, str], None]) -> None:
    """Name those that bear a dead run's tag or mark but were started after its end."""
    for row in host.look_all(tags=True).alive():
        if target.is_late(row) and is_witnessed(row, run_id):
            note(
                "warning",
                f"spared {row.pid} ({host.command_line(row.pid)}): it bears the mark of a run "
                f"that was over when it started",
            )


def _sweep_of(
    run: registry.DeadRun,
    files: registry.RunFiles,
    host: Host,
    spare: frozenset[Incarnation],
    note: Callable[[str, str], None],
) -> SweepTask:
    # Read first, so that nobody can be born between the end of a fresh run and this sweep.
    swept_from = ticks()
    target = Target(
        # What is older than the run is no member of it, whatever the name of a file says.
        roots=frozenset(
            member.incarnation
            for member in run.members
            if member.incarnation.start >= run.record.started_ticks
        ),
        run_id=run.record.run_id,
        born_from=run.record.started_ticks,
        born_until=files.last_sign_of_life(),
        swept_from=swept_from,
        spare=spare,
    )
    sought = replace(target, born_until=None) if _nothing_came_later(target, host) else target
    look = partial(host.look_all, tags=True, since=target.oldest_birth())
    sweep = Sweep(host, sought, StopPolicy(run.record.grace), look)

    def done(sweep: Sweep) -> None:
        try:
            _tell_spared(run.record.run_id, target, host, note)
        except OSError as error:  # no descriptor left: whoever was spared is spared all the same
            note("warning", f"it cannot be told who was spared: {error}")
        if sweep.report is not None and sweep.report.stuck:
            files.close()  # it stays on record, for the next start to try again
        else:
            files.retire()

    owner = run.record.owner.pid
    return SweepTask(sweep, f"left by an earlier run whose owner {owner} is gone", done)
