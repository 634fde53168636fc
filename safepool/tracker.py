"""multiprocessing's resource tracker, started only when somebody needs it.

Spawned workers must share the owner's tracker, or a shared memory segment that one
of them makes and hands back would be unlinked when that worker ends. The standard
library starts the tracker process with the first spawned child. Here workers get
the writing end of a pipe that has no tracker yet; the first registration, by a worker
or in the owner, starts the tracker on its reading end. Most pools never need one.

Until then ``ensure_running`` of this process's tracker object is ours; from then on
everything is the standard library's again. Private names of ``ResourceTracker`` are
used as they are in CPython 3.10 to 3.14.

Safe in threads. Called by: :mod:`safepool.process` (``descriptor``), the monitor
(``launch``, when the pipe is readable), the run (``forget``, ``close``).
"""

from __future__ import annotations

import os
import sys
import threading
from multiprocessing import resource_tracker, spawn, util
from typing import Any

from safepool.loop import signals_blocked


class LazyTracker:
    """One pipe, and the tracker process that may once read from it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._reader, self._writer = os.pipe()

    @property
    def reader(self) -> int:
        """The descriptor that is readable when a tracker is needed; -1 when none is awaited."""
        return self._reader

    def descriptor(self) -> int:
        """What a worker has to write its registrations to. The caller keeps it open."""
        stock: Any = resource_tracker._resource_tracker
        with self._lock:
            if stock._fd is not None:
                return int(stock._fd)
            if self._reader < 0:
                return int(resource_tracker.getfd() or -1)
            stock.ensure_running = self.launch
            return self._writer

    def launch(self) -> None:
        """Start the tracker on our pipe, and leave everything else to the standard library."""
        stock: Any = resource_tracker._resource_tracker
        with self._lock:
            if self._reader >= 0:
                reader, self._reader = self._reader, -1
                writer, self._writer = self._writer, -1
                try:
                    pid = _start(reader)
                except BaseException:
                    os.close(writer)
                    raise
                finally:
                    os.close(reader)
                if stock._fd is None:
                    stock._fd, stock._pid = writer, pid
                # Else the program reached past us and has a second one; ours ends with its workers.
            # Only now: who asked in the meantime has waited for the lock, and starts no other.
            vars(stock).pop("ensure_running", None)
        stock.ensure_running()

    def forget(self) -> None:
        """In a forked child: its tracker is its own affair. No lock: see ``close``."""
        self._lock = threading.RLock()
        self.close()

    def close(self) -> None:
        """Give up the pipe if no tracker was needed; all workers are gone by now."""
        with self._lock:
            if self._reader >= 0:
                vars(resource_tracker._resource_tracker).pop("ensure_running", None)
                os.close(self._reader)
                os.close(self._writer)
                self._reader = self._writer = -1


def share_tracker(descriptor: int) -> None:
    """In a worker: register with the owner's tracker, not with one of our own, which would
    unlink at our end what we have only attached."""
    stock: Any = resource_tracker._resource_tracker
    # The monitor may have held it, launching the tracker, when this process was forked.
    stock._lock = threading.RLock()
    stock._fd, stock._pid = descriptor, None


def _start(reader: int) -> int:
    """Start the standard library's tracker process as it does itself."""
    fds = [reader]
    try:
        fds.append(sys.stderr.fileno())
    except (AttributeError, OSError, ValueError):
        pass  # no stderr: the tracker has nobody to warn
    tools: Any = util
    executable: Any = spawn.get_executable()
    arguments = [
        executable,
        *tools._args_from_interpreter_flags(),
        "-c",
        f"from multiprocessing.resource_tracker import main;main({reader})",
    ]
    # Blocked until its handlers are there, else an early Ctrl-C ends it (bpo-33613).
    with signals_blocked():
        return int(tools.spawnv_passfds(executable, arguments, fds))
