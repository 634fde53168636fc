"""What dead runs have left, and the sweeps that end it: the last net.

When the owner, its sidecar and its launchers were all killed in the same instant,
workers die with their launcher (PDEATHSIG) but what they had started may live on.
Every start of a run looks into the registry for runs whose owner is proven dead,
claims each, and ends what bears its tag or mark and was born within its life.

Called by: the sidecar, once it is armed; it carries the sweeps out beside its watch.
"""

from __future__ import annotations

from collections.abc import Callable

from safepool import registry
from safepool.core.identity import Incarnation, ProcessRow
from safepool.core.lineage import is_mark_of, is_tag_of_run
from safepool.core.planner import Target
from safepool.core.policy import StopPolicy
from safepool.core.values import dataclass
from safepool.errors import SafePoolError
from safepool.host.base import Host
from safepool.host.own import ticks
from safepool.sweeper import Sweep


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
) -> list[SweepTask]:
    """Return a sweep for each dead run that nobody else has claimed.

    ``note`` is told what could not be examined: old debris is not worth the
    protection of the new run, so nothing is raised.
    """
    try:
        dead = registry.dead_runs(files.directory, registry.here(host), host)
    except (OSError, SafePoolError) as error:
        note("warning", f"the registry could not be examined for dead runs: {error}")
        return []
    tasks = []
    for run in dead:
        if run.record.run_id == files.run_id:
            continue  # the owner died while the sidecar came up: that is the end of the run itself
        claimed = registry.RunFiles.attach(files.directory, run.record.run_id)
        if claimed.claim():
            tasks.append(_sweep_of(run, claimed, host, spare, note))
    return tasks


def _sweep_of(
    run: registry.DeadRun,
    files: registry.RunFiles,
    host: Host,
    spare: frozenset[Incarnation],
    note: Callable[[str, str], None],
) -> SweepTask:
    target = Target(
        roots=frozenset(member.incarnation for member in run.members),
        run_id=run.record.run_id,
        born_from=run.record.started_ticks,
        born_until=files.last_sign_of_life(ticks()),
        swept_from=ticks(),
        spare=spare,
    )
    sweep = Sweep(host, target, StopPolicy(run.record.grace), lambda: host.look_all(tags=True))

    def done(sweep: Sweep) -> None:
        for row in host.look_all(tags=True).alive():
            if target.is_of_another(row) and is_witnessed(row, run.record.run_id):
                note(
                    "warning",
                    f"spared {row.pid} ({host.command_line(row.pid)}): it bears the mark of a run "
                    f"that was over when it started",
                )
        if sweep.report is not None and sweep.report.stuck:
            files.close()  # it stays on record, for the next start to try again
        else:
            files.retire()

    owner = run.record.owner.pid
    return SweepTask(sweep, f"left by an earlier run whose owner {owner} is gone", done)
