"""What a task may know of the worker that runs it.

Called by: users' tasks; the task loop says who it is.
"""

from __future__ import annotations

import os
from typing import Any


class CurrentWorker:
    """The pool's worker that this code runs in.

    Attributes: ``id``, a number from 0 on, below the number of workers, that no other living
    worker of the pool has; ``pid``; ``state``, a dict for what tasks and the initializer
    want to keep, which lives as long as the worker.
    """

    def __init__(self, number: int) -> None:
        self.id = number
        self.pid = os.getpid()
        self.state: dict[Any, Any] = {}

    def __repr__(self) -> str:
        return f"<worker {self.id} pid={self.pid}>"


_current: CurrentWorker | None = None


def current_worker() -> CurrentWorker | None:
    """Return the worker that this code runs in; None in any other process.

    Example::

        def work(item):
            worker = safepool.current_worker()
            model = worker.state.setdefault("model", None) or load()
            ...
    """
    if _current is None or _current.pid != os.getpid():
        return None
    return _current


def become(number: int) -> None:
    """This process is a worker from now on."""
    global _current
    _current = CurrentWorker(number)
