"""How the monitor speaks: to the logger ``safepool``, from a small thread of its own.

A handler may block (a full pipe that nobody reads) or do what it likes, even start
processes. So the monitor only puts lines into a queue; a thread that exists while
there is something to say hands them to the handlers.

The logger makes its records with ``threading.current_thread()``, which leaves a dummy
in ``threading.enumerate()`` for ever when the thread was started by ``_thread``. So
records are copies of one that was made in a thread of the program.

``quiet`` is held while a handler runs. A fork waits for it a moment, so that no lock of
a handler is held by a thread that does not exist in the child.

Called by: the monitor (speaks), the run (forks).
"""

from __future__ import annotations

import _thread
import copy
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from safepool.latch import Latch
from safepool.loop import signals_blocked

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


_MOST_LINES = 1000
"""Lines that wait for a handler; older ones are dropped, the run's log file has them."""

_QUIET_TIMEOUT = 1.0


class Voice:
    """Make it in a thread of the program; use it in any."""

    def __init__(self) -> None:
        self._quiet = threading.RLock()
        self._lines: deque[tuple[str, str]] = deque(maxlen=_MOST_LINES)
        self._lock = threading.Lock()
        self._silent = Latch(is_set=True)
        self._logger = logging.getLogger("safepool")
        self._blank = self._logger.makeRecord(
            self._logger.name, logging.INFO, __file__, 0, "", (), None
        )
        self._blank.threadName = "safepool-voice"

    def say(self, level: str, text: str) -> None:
        """Have one line logged soon; an unknown level counts as a warning."""
        with self._lock:
            self._lines.append((level, text))
            must_start = self._silent.is_set()
            self._silent.clear()
        if must_start:
            try:
                with signals_blocked():
                    _thread.start_new_thread(self._speak, ())
            except RuntimeError:
                # At the interpreter's end (CPython 3.12) or at a limit there is no new thread.
                self._speak()

    def wait(self, timeout: float) -> None:
        """Wait until all is said, ``timeout`` seconds at most."""
        self._silent.wait(timeout)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Keep silent in here; one that is in the middle of a line is waited for a moment."""
        held = self._quiet.acquire(timeout=_QUIET_TIMEOUT)
        try:
            yield
        finally:
            if held:
                self._quiet.release()

    def _speak(self) -> None:
        while True:
            with self._lock:
                if not self._lines:
                    self._silent.set()
                    return
                level, text = self._lines.popleft()
            try:
                with self._quiet:
                    self._log(level, text)
            except Exception:
                # A handler or filter of the program failed; the next line may pass.
                sys.excepthook(*sys.exc_info())

    def _log(self, level: str, text: str) -> None:
        number = _LEVELS.get(level, logging.WARNING)
        if not self._logger.isEnabledFor(number):
            return
        record = copy.copy(self._blank)
        now = time.time()
        record.levelno, record.levelname = number, logging.getLevelName(number)
        record.msg, record.created, record.msecs = text, now, now % 1 * 1000
        record.relativeCreated += (now - self._blank.created) * 1000
        self._logger.handle(record)
