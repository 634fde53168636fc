"""What ps shows of a process: its name and its command line, read and overwritten.

A launcher is a fork of the owner or the sidecar and would carry their command line; so
would its workers. The kernel reads the command line from the process's own memory
(proc(5), ``arg_start`` and ``arg_end`` of ``/proc/PID/stat``), so it can be written over.
The environment that follows it, where the mark is, stays as it is.

Where the addresses are not to be had, nothing changes. Called by: launchers and
workers, on themselves.
"""

from __future__ import annotations

import os

from safepool.core.values import dataclass
from safepool.host import choose, prctl

_ARG_START = 48 - 3
_ARG_END = 49 - 3


@dataclass(frozen=True)
class Title:
    """``name`` as in ``/proc/PID/comm``, ``arguments`` as in ``/proc/PID/cmdline``."""

    name: str
    arguments: bytes


def read() -> Title:
    """What this process is called now; nothing with the portable backend."""
    if choose.is_portable():
        return Title("", b"")
    with open("/proc/self/cmdline", "rb") as file:
        return Title(prctl.get_name(), file.read())


def write(title: Title) -> None:
    """Call this process so; what does not fit in the place of the old command line is cut.

    With the portable backend it keeps the title that it was born with.
    """
    if choose.is_portable():
        return
    prctl.set_name(title.name)
    start, size = _place()
    if size > 1:
        import ctypes

        content = title.arguments[: size - 1].ljust(size, b"\0")
        ctypes.memmove(start, content, size)


def _place() -> tuple[int, int]:
    """Address and size of the command line in this process's memory; (0, 0): unknown."""
    fd = os.open("/proc/self/stat", os.O_RDONLY | os.O_CLOEXEC)
    try:
        stat = os.read(fd, 4096)
    finally:
        os.close(fd)
    fields = stat[stat.rindex(b")") + 2 :].split()
    if len(fields) <= _ARG_END:
        return 0, 0
    start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    return (start, end - start) if 0 < start < end else (0, 0)
