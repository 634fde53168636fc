"""Signals that a process raises in itself: to be suspended, or to end as another process did.

Whoever stands between a shell and a program has to show the shell what the program
shows it: that it was stopped (Ctrl-Z), and which signal it died of. No other process
can be meant, so no handle is needed.

Called by: ``safepool run``, on its own process.
"""

from __future__ import annotations

import os
import resource
import signal
from typing import NoReturn


def suspend() -> None:
    """Stop this process until somebody continues it, as Ctrl-Z does."""
    signal.raise_signal(signal.SIGSTOP)


def end_by(number: int) -> NoReturn:
    """End this process by a signal, so that its parent sees it as killed by that signal.

    Without a core file: it would be of the wrong program. Exit functions do not run.
    A signal that does not end a process by default makes the exit status 128 + number.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    signal.raise_signal(number)
    os._exit(128 + number)
