"""The logs of runs, read: what was ended, when, why, and how to spare it next time.

The sidecar writes them, and whoever sweeps a dead run; a line is a time, a level and a
text (:mod:`safepool.telling`). Logs of runs that are over stay for a while.

Called by: the command line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from datetime import datetime

from safepool.core.record import is_run_id
from safepool.core.values import dataclass
from safepool.registry import place

_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) ([A-Z]+) (.*)", re.ASCII)
_ENDED = re.compile(
    r"(?P<why>.*?): ended (?P<what>worker|stray) (?P<pid>\d+)(?: \((?P<command>.*)\))?, "
    r"(?P<found>[^,]*)(?:, [\d.]+ s old)?, with (?P<signal>SIG[A-Z]+)(?: \((?P<spare>.*)\))?"
)
_LONGEST = 1 << 20
"""Bytes at a log's end that are read."""


@dataclass(frozen=True)
class LogLine:
    """One line of a log. ``time`` is local time; ``ended`` is None unless a process was ended."""

    run_id: str
    time: str
    level: str
    text: str
    ended: dict[str, str | None] | None


def logged_runs(directory: str) -> list[str]:
    """The IDs of runs that have a log; ProtectionError, OSError as in ``registry.scan``."""
    with place.verified(directory) as fd:
        names = os.listdir(fd)
    found = [name.partition(".")[0] for name in names if name.endswith(".log")]
    return sorted(run_id for run_id in found if is_run_id(run_id))


def read_logs(directory: str, run_ids: Iterable[str]) -> list[LogLine]:
    """All lines of these runs' logs, the newest first. A log that is gone by now is left out."""
    lines: list[LogLine] = []
    with place.verified(directory) as fd:
        for run_id in run_ids:
            lines += reversed(_parse(run_id, _read(fd, f"{run_id}.log")))
    return sorted(lines, key=lambda line: line.time, reverse=True)


def _read(directory: int, name: str) -> str:
    try:
        # Non-blocking, so that a named pipe in its place cannot hold us up.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        fd = os.open(name, flags, dir_fd=directory)
    except FileNotFoundError:
        return ""
    with open(fd, "rb") as file:
        size = os.fstat(fd).st_size
        file.seek(max(0, size - _LONGEST))
        return file.read(_LONGEST).decode("utf-8", "backslashreplace")


def _parse(run_id: str, text: str) -> list[LogLine]:
    """The lines of one log, in its order. What is no line, such as a cut one, is left out."""
    found = []
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        if match is None:
            continue
        time = datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S").astimezone()
        ended = _ENDED.fullmatch(match[3])
        facts = ended.groupdict() if ended is not None else None
        found.append(LogLine(run_id, time.isoformat(), match[2].lower(), match[3], facts))
    return found
