"""``safepool stop RUN``: end one run, politely first, and wait until it is gone.

Called by: the command line.
"""

from __future__ import annotations

import sys

from safepool import registry
from safepool.cli import words
from safepool.cli.choose import SHORT, NoSuchRunError, choose
from safepool.cli.ps import process_as_json
from safepool.cli.sweep import LEFT, print_swept
from safepool.core.planner import BLIND, SweepReport
from safepool.core.record import Verdict
from safepool.host import choose as backend
from safepool.host.base import Host
from safepool.inventory import ListedRun, take_inventory
from safepool.stopping import MARGIN, end_owner, refusal, wait_for_rest
from safepool.sweeping import sweep_runs

_NOT_POSSIBLE = 2


def stop(name: str, grace: float, patience: float | None, *, as_json: bool) -> int:
    """Stop the run that ``name`` means; the exit status is in the subcommand's help."""
    host = backend.host()
    directory = registry.directory()
    try:
        run = choose(name, take_inventory(directory, host))
    except NoSuchRunError as error:
        print(f"safepool stop: {error}", file=sys.stderr)
        return _NOT_POSSIBLE
    if run.verdict is Verdict.DEAD:
        how = "swept"
    else:
        reason = refusal(run, host)
        if reason or run.record is None:
            print(f"safepool stop: not {run.run_id[:SHORT]}: {reason}", file=sys.stderr)
            return _NOT_POSSIBLE
        report = end_owner(run.record.owner, grace, host)
        how = _outcome(report)
        if report.is_clean:
            longest = max(run.record.grace, grace) + MARGIN
            wait_for_rest(run.run_id, directory, host, longest if patience is None else patience)
    return _finish(run, how, grace, directory, host, as_json=as_json)


def _outcome(report: SweepReport) -> str:
    """What became of the owner, in a word or two."""
    if report.is_blind:
        return f"could not be ended: {BLIND}"
    if report.stuck:
        return f"could not be ended: {report.stuck[0].reason}"
    last = report.ended[0].last_signal if report.ended else None
    return f"ended with {last.value}" if last is not None else "ended by itself"


def _finish(
    run: ListedRun, how: str, grace: float, directory: str, host: Host, *, as_json: bool
) -> int:
    """Sweep if nobody is left who would, look once more, and tell."""
    swept = sweep_runs(run.run_id, dry_run=False, grace=grace)
    left = wait_for_rest(run.run_id, directory, host, 0.0)
    is_clean = not left and swept.is_clean
    if as_json:
        listed = [process_as_json(process) for process in left]
        words.print_json({"id": run.run_id, "owner": how, "clean": is_clean, "left": listed})
        return 0 if is_clean else LEFT
    if run.verdict is not Verdict.DEAD and run.record is not None:
        print(f"owner {run.record.owner.pid} {how}")
    for each in swept.runs:
        print_swept(each)
    for process in left:
        print(f"left: {process.role} {process.incarnation.pid} ({process.command})")
    if is_clean:
        print(f"nothing is left of run {run.run_id[:SHORT]}")
    else:
        print(f"safepool stop: not all of run {run.run_id[:SHORT]} is gone", file=sys.stderr)
    return 0 if is_clean else LEFT
