"""``safepool sweep [--dry-run]``: end what dead runs have left.

Called by: the command line.
"""

from __future__ import annotations

from typing import Any

from safepool.cli import words
from safepool.cli.choose import SHORT
from safepool.sweeping import SweepResult, SweptProcess, SweptRun, sweep_runs

CLEAN = 0
SWEPT = 1
LEFT = 3


def sweep(*, dry_run: bool, grace: float, as_json: bool) -> int:
    """Sweep, or say what would be; the exit status is in the subcommand's help."""
    result = sweep_runs("", dry_run=dry_run, grace=grace)
    if as_json:
        words.print_json({"dry_run": dry_run, **_as_json(result)})
    else:
        for run in result.runs:
            print_swept(run)
        if not result.runs:
            print("no dead run is on record")
        for kept in result.kept:
            if kept.verdict != "live":
                print(f"{kept.run_id[:SHORT]} ({kept.verdict}): left alone: {kept.reason}")
    if not result.is_clean:
        return LEFT
    return SWEPT if result.has("ended") or result.has("found") else CLEAN


def print_swept(run: SweptRun) -> None:
    """Print what became of a dead run, a line for each process."""
    if not run.processes:
        what = run.problem or "nothing is left of it"
        print(f"{run.run_id[:SHORT]}, whose owner {run.owner} is gone: {what}")
        return
    print(f"{run.run_id[:SHORT]}, whose owner {run.owner} is gone:")
    if run.problem:
        print(f"  there may be more: {run.problem}")
    for each in run.processes:
        print(f"  {_line(each)}")


def _line(each: SweptProcess) -> str:
    outcome = "would end" if each.outcome == "found" else each.outcome
    found = f", found as {each.found}" if each.found else ""
    reason = f": {each.reason}" if each.reason else ""
    how = ""
    if each.outcome == "ended":
        how = f", with {each.last_signal}" if each.last_signal else ", which it did by itself"
    return f"{outcome} {each.pid} ({each.command}){found}{how}{reason}"


def _as_json(result: SweepResult) -> dict[str, Any]:
    """The documented form; see docs/cli.md."""
    return {
        "runs": [
            {
                "id": run.run_id,
                "owner": run.owner,
                "processes": [
                    {
                        "pid": each.pid,
                        "command": each.command,
                        "outcome": each.outcome,
                        "found": each.found or None,
                        "last_signal": each.last_signal,
                        "reason": each.reason or None,
                    }
                    for each in run.processes
                ],
                "problem": run.problem or None,
            }
            for run in result.runs
        ],
        "kept": [
            {"id": kept.run_id, "state": kept.verdict, "reason": kept.reason}
            for kept in result.kept
        ],
    }
