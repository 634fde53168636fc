"""What the kernel says of a process, read straight from /proc.

The tests never ask the library what is alive: that would be asking the suspect.
Nothing here uses psutil or safepool. A process that is gone while it is read
counts as gone. Zombies exist but are dead.

``until`` is the one place where the tests poll: the kernel has no event for "a
child has appeared" or "a line was written to that file". It is bounded, and its
message says what was waited for.

Called by: the jail and the tests of tests/real.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

PATIENCE = 30.0
"""Seconds after which a test gives up; generous, since the machine may be busy."""

T = TypeVar("T")


def fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the command name, [] when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text[text.rindex(")") + 2 :].split()


def state(pid: int) -> str:
    """The state letter, "" when the process is gone."""
    return (fields(pid) or [""])[0]


def is_alive(pid: int) -> bool:
    """Tell whether a process is there and no zombie."""
    return state(pid) not in ("", "Z", "X")


def parent(pid: int) -> int:
    """The parent's pid, 0 when the process is gone."""
    return int((fields(pid) or ["", "0"])[1])


def started(pid: int) -> int:
    """The start time in ticks since boot, 0 when the process is gone."""
    stat = fields(pid)
    return int(stat[19]) if stat else 0


def command_line(pid: int) -> str:
    """The command line, spaces between the arguments; "" for a zombie or none."""
    try:
        data = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return data.replace(b"\0", b" ").decode(errors="replace").strip()


def describe(pid: int) -> str:
    """One line for a failure message."""
    line = command_line(pid) or "no command line"
    return f"{pid} (parent {parent(pid)}, state {state(pid) or 'gone'}): {line[:150]}"


def everybody() -> list[int]:
    """All pids of this pid namespace."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def children(pid: int) -> list[int]:
    """The children of a process, zombies as well."""
    return [other for other in everybody() if parent(other) == pid]


def descendants(root: int) -> list[int]:
    """All that descend from a process, parents first, zombies as well."""
    offspring: dict[int, list[int]] = {}
    for pid in everybody():
        offspring.setdefault(parent(pid), []).append(pid)
    found = [root]
    for pid in found:
        found.extend(offspring.get(pid, []))
    return found[1:]


def open_files(pid: int | None = None) -> dict[int, str]:
    """The descriptors of a process (default: this one) and what they lead to."""
    folder = f"/proc/{pid or 'self'}/fd"
    found = {}
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of this very listing
            found[int(name)] = os.readlink(f"{folder}/{name}")
    return found


def sidecars(owner: int) -> list[int]:
    """The living children of an owner whose title says that they are its sidecar."""
    return [
        pid for pid in children(owner) if is_alive(pid) and "safepool-sidecar" in command_line(pid)
    ]


def until(claim: Callable[[], T], what: str, seconds: float = PATIENCE) -> T:
    """Return the first true answer of ``claim``; fail with ``what`` after ``seconds``."""
    limit = time.monotonic() + seconds
    while True:
        answer = claim()
        if answer:
            return answer
        if time.monotonic() > limit:
            raise AssertionError(f"waited {seconds:g} s in vain: {what}")
        select.select([], [], [], 0.01)


def wait_gone(pid: int, seconds: float = PATIENCE) -> bool:
    """Wait for the end of one process by its pidfd; True when it has ended."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], seconds)[0])
    finally:
        os.close(fd)
