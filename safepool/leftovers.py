"""What dead runs have left, and the sweeps that end it: the last net.

When the owner, its sidecar and its launchers were all killed in the same instant,
workers die with their launcher (PDEATHSIG) but what they had started may live on.
Every start of a run looks into the registry for runs whose owner is proven dead,
claims each, and ends what bears its tag or mark and was born within its life.

Never ended: what was let go, whoever started the sweep, and what it descends from. A
shell that a dead run left may be where its user types now.

Called by: the sidecar, once it is armed, which carries the sweeps out beside its
watch; :mod:`safepool.sweeping`, on request.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial

from safepool import registry
from safepool.core import containment
from safepool.core.identity import Incarnation, ProcessRow, Snapshot
from safepool.core.lineage import is_detached_tag, is_mark_of, is_tag_of_run
from safepool.core.membership import bears_nothing_late
from safepool.core.planner import Target
from safepool.core.policy import StopPolicy
from safepool.core.record import RunRecord, Verdict
from safepool.core.values import dataclass, replace
from safepool.errors import SafePoolError
from safepool.host import container
from safepool.host.base import Host
from safepool.host.own import ticks
from safepool.sweeper import Sweep

DETACHED, LATE, OURS = (
    "it was let go on purpose",
    "it bears the mark of a run that was over when it started",
    "this very process descends from it",
)

_REMOVE_TIMEOUT = 0.1
"""Seconds. The sweep is over, so nobody should be left; and there is an owner to watch."""

_UNPROVEN = (Verdict.FOREIGN, Verdict.UNKNOWN)
_NAMED = 5
_LONGEST = 4000
"""How many records that are left alone are named, in how many characters: one packet."""


@dataclass
class SweepTask:
    """A sweep, why it is made, and what to do when it is over."""

    sweep: Sweep
    why: str
    done: Callable[[Sweep], None]


def target_of(
    run: registry.DeadRun, files: registry.RunFiles, spare: frozenset[Incarnation]
) -> Target:
    """Who is to be ended of a dead run. ``spare``: see :func:`protected`."""
    # Read first, so that nobody can be born between the end of a fresh run and this sweep.
    swept_from = ticks()
    return Target(
        # What is older than the run is no member of it, whatever the name of a file says.
        roots=frozenset(
            member.incarnation
            for member in run.members
            if member.incarnation.start >= run.record.started_ticks
        ),
        run_id=run.record.run_id,
        born_from=run.record.started_ticks,
        born_until=files.last_sign_of_life(ticks()),
        swept_from=swept_from,
        spare=spare,
    )


def sweep_of(target: Target, record: RunRecord, host: Host, policy: StopPolicy) -> Sweep:
    """The sweep that ends them."""
    look = partial(host.look_all, tags=True, since=target.oldest_birth())
    if _nothing_came_later(target, record, host):
        target = replace(target, born_until=None)
    within = container.Container.open(record.cgroup)
    return Sweep(host, target, policy, look, container=within)


def look_inside(record: RunRecord, host: Host) -> Snapshot:
    """A look at everybody that also says who is in the run's cgroup."""
    within = container.Container.open(record.cgroup)
    if within is None:
        return host.look_all(tags=True)
    try:
        listing = within.listing()
    finally:
        within.close()
    snapshot = host.look_all(tags=True)
    if listing is None:
        return snapshot
    # One that may be inside has to count here: it could have come after the run's end.
    inside = containment.inside(listing, snapshot.rows)
    return replace(snapshot, inside=inside | containment.doubtful(listing, snapshot.rows))


def _nothing_came_later(target: Target, record: RunRecord, host: Host) -> bool:
    """Is there surely no process that got the dead run's tag or mark after its end?"""
    try:
        return bears_nothing_late(target, look_inside(record, host))
    except OSError:
        return False  # it cannot be told: the bound stays


def protected(host: Host, directory: str) -> frozenset[Incarnation]:
    """This process, all that it descends from, and what the registry names as detached."""
    return registry.detached_incarnations(directory, host) | ancestry(host)


def ancestry(host: Host) -> frozenset[Incarnation]:
    """This process and all that it descends from, as far as that can be seen."""
    found: set[Incarnation] = set()
    pid = os.getpid()
    while pid > 0 and (row := host.row(pid)) is not None and row.incarnation not in found:
        found.add(row.incarnation)
        pid = row.ppid
    return frozenset(found)


def spared_rows(
    target: Target, snapshot: Snapshot, let_go: frozenset[Incarnation]
) -> Iterator[tuple[ProcessRow, str]]:
    """Those that bear the run's tag or mark and are left alone, each with the reason."""
    run_id = target.run_id or ""
    for row in snapshot.alive():
        if not (is_tag_of_run(row.tag, run_id) or is_mark_of(row.mark, run_id)):
            continue
        if is_detached_tag(row.tag) or row.incarnation in let_go:
            yield row, DETACHED
        elif row.incarnation in target.spare:
            yield row, OURS
        elif target.is_late(row):
            yield row, LATE


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
        # Only in passing: those that are gone are struck off.
        registry.detached_processes(files.directory, host)
        spare |= protected(host, files.directory)
    except (OSError, SafePoolError) as error:
        note("warning", f"the registry could not be examined for dead runs: {error}")
        return []
    tasks = []
    for run in found:
        if not isinstance(run.record, RunRecord) or run.judgement.verdict is not Verdict.DEAD:
            continue
        if run.run_id == files.run_id:
            continue  # the owner died while the sidecar came up: that is the end of the run itself
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


def _sweep_of(
    run: registry.DeadRun,
    files: registry.RunFiles,
    host: Host,
    spare: frozenset[Incarnation],
    note: Callable[[str, str], None],
) -> SweepTask:
    target = target_of(run, files, spare)
    sweep = sweep_of(target, run.record, host, StopPolicy(run.record.grace))

    def done(sweep: Sweep) -> None:
        try:
            for row, reason in spared_rows(target, host.look_all(tags=True), frozenset()):
                if reason is not DETACHED:
                    note("warning", f"spared {row.pid} ({host.command_line(row.pid)}): {reason}")
        except OSError as error:  # no descriptor left: whoever was spared is spared all the same
            note("warning", f"it cannot be told who was spared: {error}")
        release(files, run.record, sweep)

    owner = run.record.owner.pid
    return SweepTask(sweep, f"left by an earlier run whose owner {owner} is gone", done)


def release(files: registry.RunFiles, record: RunRecord, sweep: Sweep) -> None:
    """After the sweep of a dead run: strike it off, unless something of it may be left."""
    is_clean = sweep.report is None or sweep.report.is_clean
    if not is_clean or not container.remove(record.cgroup, _REMOVE_TIMEOUT):
        files.close()  # it stays on record, for the next start to try again
    else:
        files.retire()
