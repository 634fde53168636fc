"""What /proc says of a single process beyond its row: memory, and signals that wait.

For people and for ``safepool run``; no sweep depends on it. A process that is gone, or
may not be read, has nothing to say.

Called by: the command line.
"""

from __future__ import annotations

import os


def memory(pid: int) -> int | None:
    """Return the resident memory in bytes, pages that others share included; None: not known."""
    words = _read(f"/proc/{pid}/statm").split()
    return int(words[1]) * os.sysconf("SC_PAGE_SIZE") if len(words) > 1 else None


def has_pending(pid: int, number: int) -> bool:
    """Tell whether a signal to the process ``pid`` waits there, because it is blocked."""
    label = b"ShdPnd:"
    for line in _read(f"/proc/{pid}/status").splitlines():
        if line.startswith(label):
            return bool(int(line[len(label) :], 16) >> (number - 1) & 1)
    return False


def _read(path: str) -> bytes:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError:
        return b""
