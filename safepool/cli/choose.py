"""Which run does the user mean? By the start of its ID, or by its owner's pid.

Called by: the subcommands that take RUN.
"""

from __future__ import annotations

from collections.abc import Sequence

from safepool.cli.words import duration
from safepool.inventory import ListedRun

SHORT = 8
"""Digits of a run's ID that are shown; any unique beginning names it."""

_MOST_LISTED = 20


class NoSuchRunError(Exception):
    """No run or more than one is meant; the message lists those there are."""


def choose(name: str, runs: Sequence[ListedRun]) -> ListedRun:
    """Return the run that ``name`` means, else raise NoSuchRunError.

    The pid of a living owner comes before an ID that happens to begin with the same digits.
    """
    owned = [run for run in runs if _owner_pid(run) == name]
    found = owned or [run for run in runs if name and run.run_id.startswith(name.lower())]
    if len(found) == 1:
        return found[0]
    if found:
        raise NoSuchRunError(f"{name!r} means {len(found)} runs; give more digits:{_list(found)}")
    known = _list(runs) if runs else " there is none on record"
    raise NoSuchRunError(f"no run has an ID that begins with {name!r}, or that owner:{known}")


def _owner_pid(run: ListedRun) -> str:
    owners = [process.incarnation.pid for process in run.processes if process.role == "owner"]
    return str(owners[0]) if owners else ""


def _list(runs: Sequence[ListedRun]) -> str:
    lines = []
    for run in runs[:_MOST_LISTED]:
        state = f"{run.verdict.value}, owner {describe_owner(run)}, {duration(run.age)} old"
        lines.append(f"\n  {run.run_id}  {state}")
    more = len(runs) - _MOST_LISTED
    return "".join(lines) + (f"\n  and {more} more" if more > 0 else "")


def describe_owner(run: ListedRun) -> str:
    """Its pid, "-" without a record."""
    return "-" if run.record is None else str(run.record.owner.pid)
