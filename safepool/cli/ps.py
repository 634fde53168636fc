"""``safepool ps`` and ``safepool tree RUN``: what runs there are, and their processes.

Called by: the command line.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import Any

from safepool import registry
from safepool.cli import words
from safepool.cli.choose import SHORT, NoSuchRunError, choose, describe_owner
from safepool.core.detached_record import DetachedRecord
from safepool.core.identity import Incarnation
from safepool.core.record import Verdict
from safepool.host import choose as backend
from safepool.inventory import ListedProcess, ListedRun, now, take_inventory

_HEADER = ("RUN", "STATE", "OWNER", "AGE", "WORKERS", "STRAYS", "MEMORY", "COMMAND")
_STYLES = {Verdict.LIVE: "", Verdict.DEAD: "red", Verdict.FOREIGN: "dim", Verdict.UNKNOWN: "yellow"}
_ROLE_STYLES = {"owner": "bold", "sidecar": "dim", "launcher": "dim", "stray": "yellow"}


def look() -> list[ListedRun]:
    """Take the inventory of this user's registry."""
    directory = registry.existing_directory()
    return [] if directory is None else take_inventory(directory, backend.host())


def look_for_detached() -> list[DetachedRecord]:
    """The living processes that were let go, also of runs that are over."""
    directory = registry.existing_directory()
    if directory is None:
        return []
    return registry.detached_processes(directory, backend.host(), tidy=False)


# -- ps ----------------------------------------------------------------------------------


def list_runs(*, as_json: bool, watch: float | None) -> int:
    """List all runs, once or every ``watch`` seconds until Ctrl-C. Always 0."""
    if watch is not None:
        return _watch(watch)
    runs, detached = look(), look_for_detached()
    if as_json:
        listed = [run_as_json(run) for run in runs]
        let_go = [_detached_as_json(record) for record in detached]
        words.print_json({"time": words.iso(now()), "runs": listed, "detached": let_go})
        return 0
    if runs:
        words.print_table(_HEADER, _rows(runs), [_STYLES[run.verdict] for run in runs])
    else:
        print("no runs on record")
    for line in [*_remarks(runs), *map(_describe_detached, detached)]:
        print(line)
    return 0


def _describe_detached(record: DetachedRecord) -> str:
    run = f", of run {record.run_id[:SHORT]}" if record.run_id else ""
    how = "spared" if record.is_stray else "detached"
    return f"{how}: {record.process.pid} ({shlex.join(record.argv)}){run}; no sweep touches it"


def _rows(runs: Sequence[ListedRun]) -> list[list[str]]:
    return [
        [
            run.run_id[:SHORT],
            run.verdict.value,
            describe_owner(run),
            words.duration(run.age),
            str(run.count("worker")),
            str(run.count("stray")),
            words.size(run.memory if run.processes else None),
            "-" if run.record is None else shlex.join(run.record.argv),
        ]
        for run in runs
    ]


def _remarks(runs: Sequence[ListedRun]) -> list[str]:
    """Why a run is not simply alive, and what can be done."""
    lines = []
    for run in runs:
        if run.verdict is Verdict.LIVE:
            continue
        advice = {
            Verdict.DEAD: "; `safepool sweep` ends what is left",
            Verdict.FOREIGN: f"; nothing here can be its. Once it is over: rm {run.path}",
            Verdict.UNKNOWN: "; it is left alone",
        }[run.verdict]
        lines.append(f"{run.run_id[:SHORT]}: {run.reason}{advice}")
    return lines


def _watch(seconds: float) -> int:
    if not words.has_rich():
        print("safepool ps: --watch needs rich: pip install 'safepool[cli]'", file=sys.stderr)
        return 2
    if not sys.stdout.isatty():
        print("safepool ps: --watch needs a terminal; use --json in scripts", file=sys.stderr)
        return 2
    import select

    from rich.live import Live

    try:
        with Live(_picture(), auto_refresh=False, screen=True) as live:
            while True:
                select.select([], [], [], seconds)
                live.update(_picture(), refresh=True)
    except KeyboardInterrupt:
        return 0


def _picture() -> Any:
    runs = look()
    if not runs:
        return "no runs on record"
    lines = words.table(_HEADER, _rows(runs), words.width())
    styles = [*[_STYLES[run.verdict] for run in runs], "dim"]
    return words.coloured([*lines, *_remarks(runs)], styles)


# -- tree --------------------------------------------------------------------------------


def show_tree(name: str, *, as_json: bool) -> int:
    """Show the processes of one run; 0, or 2 when no single run is meant."""
    try:
        run = choose(name, look())
    except NoSuchRunError as error:
        print(f"safepool tree: {error}", file=sys.stderr)
        return 2
    if as_json:
        words.print_json({"time": words.iso(now()), "run": run_as_json(run)})
        return 0
    print(f"run {run.run_id}: {run.verdict.value}, {run.reason}")
    if run.record is not None:
        print(f"  command  {shlex.join(run.record.argv)}")
        print(f"  folder   {run.record.cwd}")
        print(f"  since    {words.iso(run.record.started_wall)} ({words.duration(run.age)})")
    if run.inside:
        print(f"  within   run {run.inside}")
    if not run.processes:
        print("no process of it is alive")
        return 0
    print()
    rows, styles = [], []
    for prefix, process in _in_tree_order(run.processes):
        age, memory = words.duration(process.age), words.size(process.memory)
        what = f"{prefix}{process.incarnation.pid} {_role(process)}"
        # Its true one, which starts an interpreter, would only hide the others.
        command = "safepool-sidecar" if process.role == "sidecar" else process.command
        rows.append([what, process.state, age, memory, command])
        styles.append(_ROLE_STYLES.get(process.role, ""))
    words.print_table(("PROCESS", "STATE", "AGE", "MEMORY", "COMMAND"), rows, styles)
    return 0


def _role(process: ListedProcess) -> str:
    numbered = process.worker and process.role in ("worker", "stray")
    return f"{process.role} {process.worker}" if numbered else process.role


def _in_tree_order(processes: Sequence[ListedProcess]) -> list[tuple[str, ListedProcess]]:
    """Each below its parent, with the lines of the tree in front of it."""
    there = {process.incarnation.pid for process in processes}
    ordered: list[tuple[str, ListedProcess]] = []

    def add(parent: int | None, indent: str) -> None:
        below = [p for p in processes if _parent_in(p, there) == parent]
        for process in below:
            is_last = process is below[-1]
            branch = "" if parent is None else "`-- " if is_last else "|-- "
            ordered.append((indent + branch, process))
            deeper = "" if parent is None else "    " if is_last else "|   "
            add(process.incarnation.pid, indent + deeper)

    add(None, "")
    return ordered


def _parent_in(process: ListedProcess, there: set[int]) -> int | None:
    is_inside = process.parent in there and process.parent != process.incarnation.pid
    return process.parent if is_inside else None


# -- JSON --------------------------------------------------------------------------------


def incarnation_as_json(incarnation: Incarnation) -> dict[str, int]:
    """A process for ever: its pid, and its start in clock ticks since boot."""
    return {"pid": incarnation.pid, "start": incarnation.start}


def run_as_json(run: ListedRun) -> dict[str, Any]:
    """The documented form of a run; see docs/cli.md."""
    record = run.record
    return {
        "id": run.run_id,
        "state": run.verdict.value,
        "reason": run.reason,
        "path": run.path,
        "inside": run.inside or None,
        "owner": None if record is None else incarnation_as_json(record.owner),
        "argv": None if record is None else list(record.argv),
        "cwd": None if record is None else record.cwd,
        "host": None if record is None else record.host,
        "started": None if record is None else words.iso(record.started_wall),
        "age": run.age,
        "memory": run.memory,
        "processes": [process_as_json(process) for process in run.processes],
    }


def _detached_as_json(record: DetachedRecord) -> dict[str, Any]:
    """The documented form of a process that was let go; see docs/cli.md."""
    return {
        **incarnation_as_json(record.process),
        "run": record.run_id or None,
        "argv": list(record.argv),
        "cwd": record.cwd,
        "started": words.iso(record.started_wall),
        "spared": record.is_stray,
    }


def process_as_json(process: ListedProcess) -> dict[str, Any]:
    """The documented form of a process; see docs/cli.md."""
    return {
        **incarnation_as_json(process.incarnation),
        "parent": process.parent,
        "role": process.role,
        "worker": process.worker or None,
        "state": process.state,
        "age": round(process.age, 2),
        "memory": process.memory,
        "command": process.command,
    }
