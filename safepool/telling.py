"""What a sweep has to say: one line for each process that was ended or would not end.

Decides the words and how loud they are; the launcher and the sidecar pass them on.
A line says which process (pid, command line, age, how it was found), what was done
to it, why, and how to keep it next time. Quiet are the ends that somebody asked for.

Called by: the launcher and the sidecar, when a sweep is over.
"""

from __future__ import annotations

import os
import select
from collections.abc import Iterator

from safepool.core.identity import Incarnation
from safepool.core.planner import BLIND
from safepool.host.own import ticks
from safepool.sweeper import Sweep

SPARE = "what must outlive the run: start it with safepool.detached"


_FOUND = {
    "named": "as registered",
    "tag": "found by its tag",
    "mark": "found by its mark",
    "cgroup": "found in the run's cgroup",
    "seen before": "seen before",
}


def describe(sweep: Sweep, why: str, *, asked: bool) -> Iterator[tuple[str, str]]:
    """Yield (level, text) for each process of a finished sweep that had to be ended.

    The sweep's roots are workers and launchers, which end as a matter of course;
    ``asked`` says that the owner's program wanted this end.
    """
    report = sweep.report
    if report is None:
        return
    for process in report.ended:
        if process.last_signal is None:
            continue
        is_own = process.how == "named"
        level = "debug" if is_own and asked else "info" if is_own else "warning"
        what = "worker" if is_own else "stray"
        found = _FOUND.get(process.how, f"found as {process.how}")
        advice = "" if is_own else f" ({SPARE})"
        who, signal = _who(sweep, process.incarnation), process.last_signal.value
        age = (ticks() - process.incarnation.start) / os.sysconf("SC_CLK_TCK")
        aged = f"{found}, {age:.1f} s old" if process.incarnation.start else found
        yield level, f"{why}: ended {what} {who}, {aged}, with {signal}{advice}"
    for stuck in report.stuck:
        yield "error", f"{why}: could not end {_who(sweep, stuck.incarnation)}: {stuck.reason}"
    if report.is_blind:
        yield "error", f"{why}: what is left of it could not be looked for: {BLIND}"


def _who(sweep: Sweep, incarnation: Incarnation) -> str:
    command = sweep.command_lines.get(incarnation, "")
    return f"{incarnation.pid} ({command})" if command else str(incarnation.pid)


def write_gently(fd: int, lines: list[str]) -> None:
    """Write to a descriptor that nobody may be reading; what would block is left out.

    In pieces of PIPE_BUF's least value (POSIX): what polls writable takes that much.
    """
    data = "".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace")
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    while data:
        if not any(event & select.POLLOUT for _, event in poll.poll(0)):
            return
        try:
            written = os.write(fd, data[:512])
        except OSError:
            return  # closed by its reader: there is nobody to tell
        data = data[written:]
