"""``safepool log [RUN]``: what was ended, when, why, and how to spare it.

Called by: the command line.
"""

from __future__ import annotations

import sys
from typing import Any

from safepool import registry
from safepool.cli import words
from safepool.cli.choose import SHORT
from safepool.run_logs import LogLine, logged_runs, read_logs


def show(name: str | None, count: int, *, as_json: bool) -> int:
    """Show the newest ``count`` lines, of all runs or of one; 2 if ``name`` means not just one."""
    directory = registry.directory()
    runs = logged_runs(directory)
    if name is not None:
        meant = [run_id for run_id in runs if run_id.startswith(name.lower())]
        if len(meant) != 1:
            print(f"safepool log: {_complaint(name, meant, runs)}", file=sys.stderr)
            return 2
        runs = meant
    lines = read_logs(directory, runs)[:count]
    if as_json:
        words.print_json({"lines": [_as_json(line) for line in lines]})
    elif not lines:
        print("nothing was logged")
    for line in () if as_json else lines:
        time = line.time[:19].replace("T", " ")
        print(f"{time} {line.run_id[:SHORT]} {line.level} {line.text}")
    return 0


def _complaint(name: str, meant: list[str], runs: list[str]) -> str:
    if meant:
        return f"{name!r} means {len(meant)} runs; give more digits: {' '.join(meant)}"
    known = "".join(f"\n  {run_id}" for run_id in runs) or " there is no log"
    return f"no log is of a run whose ID begins with {name!r}:{known}"


def _as_json(line: LogLine) -> dict[str, Any]:
    ended: dict[str, Any] | None = None
    if line.ended is not None:
        ended = {**line.ended, "pid": int(line.ended["pid"] or 0)}
    return {
        "time": line.time,
        "run": line.run_id,
        "level": line.level,
        "text": line.text,
        "ended": ended,
    }
