"""What a sweep has to say: one line for each process that was ended or would not end.

Decides the words and how loud they are; the launcher and the sidecar pass them on.
A line says which process (pid, command line, age, how it was found), what was done
to it, why, and how to keep it next time. Quiet are the ends that somebody asked for.

Called by: the launcher and the sidecar, when a sweep is over.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from safepool.core.identity import Incarnation
from safepool.core.planner import EndedProcess
from safepool.sweeper import Sweep

SPARE = "what must outlive the run has to be started outside of it"


def describe(
    sweep: Sweep, why: str, own: Collection[int], *, asked: bool
) -> Iterator[tuple[str, str]]:
    """Yield (level, text) for each process of a finished sweep.

    ``own`` are the pids of workers and launchers, which end as a matter of course;
    ``asked`` says that the owner's program wanted this end.
    """
    report = sweep.report
    if report is None:
        return
    for process in report.ended:
        is_own = process.incarnation.pid in own
        if process.last_signal is None:
            continue
        level = "debug" if is_own and asked else "info" if is_own else "warning"
        kind = "worker" if is_own else "stray"
        advice = "" if is_own else f" ({SPARE})"
        yield (
            level,
            f"{why}: ended {kind} {_who(sweep, process.incarnation)}, {_how(process)}, "
            f"with {process.last_signal.value}{advice}",
        )
    for stuck in report.stuck:
        yield "error", f"{why}: could not end {_who(sweep, stuck.incarnation)}: {stuck.reason}"


def _who(sweep: Sweep, incarnation: Incarnation) -> str:
    command = sweep.command_lines.get(incarnation, "")
    return f"{incarnation.pid} ({command})" if command else str(incarnation.pid)


def _how(process: EndedProcess) -> str:
    return f"found as {process.how}" if process.how != "named" else "as registered"
