"""Says how a worker ended: by which signal, perhaps for lack of memory, and where it was.

Called by: the crew, in the engine's thread.
"""

from __future__ import annotations

import signal

from safepool.core.oom import OomSuspicion
from safepool.host.oom import oom_kills
from safepool.service import OURS

_FAULTS = frozenset({"SIGSEGV", "SIGABRT", "SIGFPE", "SIGBUS", "SIGILL"})
"""Signals at which a worker writes its traceback."""

_BEGIN = "Fatal Python error:"


class Losses:
    """For the workers of one pool; make it before the first is lost."""

    def __init__(self) -> None:
        self._suspicion = OomSuspicion(oom_kills())

    def describe(self, pid: int, exitcode: int | None) -> str:
        """A worker's death in words."""
        if exitcode is None:
            return f"worker {pid} vanished"
        if exitcode >= 0:
            return f"worker {pid} left with exit code {exitcode}"
        name = name_of(exitcode)
        hint = self._suspicion.hint(oom_kills()) if name == "SIGKILL" else ""
        return f"worker {pid} was killed by {name}{hint}"


def name_of(exitcode: int) -> str:
    """The name of the signal that this negative exit code stands for."""
    try:
        return signal.Signals(-exitcode).name
    except ValueError:
        return f"signal {-exitcode}"


def traceback_in(last_words: str, exitcode: int | None) -> str:
    """The traceback of a worker that died of a fault; "" where there is none.

    ``last_words``: what it has written. A fork of it may have written before. The most
    recent call comes first, so what lies below the task loop is at the end of its thread.
    """
    if exitcode is None or exitcode >= 0 or name_of(exitcode) not in _FAULTS:
        return ""
    at = last_words.rfind(_BEGIN)
    lines = []
    is_ours = False
    for line in last_words[at:].splitlines() if at >= 0 else ():
        is_ours = line.startswith("  ") and (is_ours or any(file in line for file in OURS))
        if not is_ours:
            lines.append(line)
    return "\n".join(lines).strip()
