"""How the monitor thread logs: to the logger ``safepool``, without being a thread of Python's.

The logger makes its records with ``threading.current_thread()``, which leaves a dummy
in ``threading.enumerate()`` for ever when the thread was started by ``_thread``. So
records are copies of one that was made in a thread of the program.

``quiet`` is held while handlers run; a fork takes it, so that no lock of a handler is
held by a thread that does not exist in the child.

Called by: the monitor (speaks), the run (forks).
"""

from __future__ import annotations

import copy
import logging
import threading
import time

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


class Voice:
    """Make it in a thread of the program; use it in any."""

    def __init__(self) -> None:
        self.quiet = threading.Lock()
        self._logger = logging.getLogger("safepool")
        self._blank = self._logger.makeRecord(
            self._logger.name, logging.INFO, __file__, 0, "", (), None
        )
        self._blank.threadName = "safepool-monitor"

    def say(self, level: str, text: str) -> None:
        """Log one line; an unknown level counts as a warning."""
        number = _LEVELS.get(level, logging.WARNING)
        if not self._logger.isEnabledFor(number):
            return
        record = copy.copy(self._blank)
        now = time.time()
        record.levelno, record.levelname = number, logging.getLevelName(number)
        record.msg, record.created, record.msecs = text, now, now % 1 * 1000
        record.relativeCreated += (now - self._blank.created) * 1000
        with self.quiet:
            self._logger.handle(record)
