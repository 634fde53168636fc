"""Log records of a worker on their way to its owner's handlers.

Each worker has a packet socket of its own: a record is one packet, so threads and signal
handlers that log at the same time do not get in each other's way, and nobody holds a lock
when the worker is killed. What was sent arrives, also after the worker's death.

Levels are the owner's as they were when the pool was made. Handlers of the worker are
taken away: the owner has them.

Called by: the task loop (worker), channels (owner).
"""

from __future__ import annotations

import logging
import pickle
import socket
from typing import Any

_MOST = 100_000
"""Bytes of a record; a longer message is cut. A packet must fit the socket's buffer."""


def levels() -> tuple[tuple[str, int], ...]:
    """In the owner: the levels that its loggers have, the root's under the name ""."""
    named = [
        (name, logger.level)
        for name, logger in logging.root.manager.loggerDict.items()
        if isinstance(logger, logging.Logger) and logger.level
    ]
    return (("", logging.root.level), *named)


class OwnerHandler(logging.Handler):
    """Sends records to the owner; waits while it is busy."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__()
        self._sock = sock

    def handle(self, record: logging.LogRecord) -> bool:
        """Without the handler's lock: a packet is sent as a whole."""
        is_wanted = bool(self.filter(record))
        if is_wanted:
            self.emit(record)
        return is_wanted

    def emit(self, record: logging.LogRecord) -> None:
        """Send one record."""
        try:
            self._sock.send(_packed(record), getattr(socket, "MSG_NOSIGNAL", 0))
        except OSError:
            return  # the owner is gone
        except Exception:
            self.handleError(record)


def _packed(record: logging.LogRecord) -> bytes:
    fields = dict(vars(record))
    fields["msg"], fields["args"] = record.getMessage(), None
    if record.exc_info:
        fields["exc_text"] = record.exc_text or logging.Formatter().formatException(record.exc_info)
    fields["exc_info"] = None
    try:
        data = pickle.dumps(fields)
    except Exception:
        # An extra field that cannot be pickled: its text says what it was.
        data = pickle.dumps({name: _plain(value) for name, value in fields.items()})
    if len(data) > _MOST:
        kept = {name: _plain(value, _MOST // 4) for name, value in fields.items()}
        data = pickle.dumps(kept)
    return data


def _plain(value: Any, most: int | None = None) -> Any:
    if value is None or isinstance(value, (int, float)):
        return value
    text = str(value)
    return text if most is None or len(text) <= most else f"{text[:most]}… (cut)"


def hand_over(fd: int, names: tuple[tuple[str, int], ...]) -> None:
    """In the worker: have all loggers send what they are told to the owner."""
    handler = OwnerHandler(socket.socket(fileno=fd))
    for logger in list(logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):
            logger.handlers.clear()
            logger.propagate = True
    logging.root.handlers[:] = [handler]
    for name, level in names:
        logging.getLogger(name or None).setLevel(level)


def take(sock: socket.socket) -> bool:
    """In the owner: hand what has come to the handlers there; False at the end."""
    while True:
        try:
            data = sock.recv(4 * _MOST, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not data:
            return False
        record = logging.makeLogRecord(pickle.loads(data))
        logger = logging.getLogger(record.name)
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)
