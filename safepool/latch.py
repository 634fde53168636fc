"""Waiting in a thread that a signal handler may interrupt anywhere.

``threading.Event`` and ``Condition`` take their inner lock in Python code. A Ctrl-C
between the taking and the ``try`` leaves that lock taken for ever, and whoever sets the
event next waits for ever: the pool's engine, say, while the program wants to leave
(https://github.com/python/cpython/issues/73816 tells of such gaps). Here nothing is
shared but a deque, whose operations are whole; each waiter has a lock of its own, which
the waker only releases.

Used wherever a thread of the program waits for a thread of ours.
"""

from __future__ import annotations

import _thread
import time
from collections import deque
from collections.abc import Callable


class Bell:
    """Wakes those who wait for something to become true. Safe in threads and handlers."""

    def __init__(self) -> None:
        self._waiters: deque[_thread.LockType] = deque()

    def ring(self) -> None:
        """Have all who wait look again."""
        waiters = self._waiters
        while waiters:
            try:
                waiters.popleft().release()
            except IndexError:
                return  # another ring took the last one

    def wait_for(self, is_true: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until ``is_true()``, ``timeout`` seconds at most; return what it said last."""
        until = None if timeout is None else time.monotonic() + timeout
        while not is_true():
            left = -1.0 if until is None else until - time.monotonic()
            if until is not None and left <= 0:
                return False
            waiter = _thread.allocate_lock()
            waiter.acquire()
            # Listed before the second look: a ring after that look finds it.
            self._waiters.append(waiter)
            try:
                if is_true():
                    return True
                waiter.acquire(timeout=left)
            finally:
                self._forget(waiter)
        return True

    def _forget(self, waiter: _thread.LockType) -> None:
        try:
            self._waiters.remove(waiter)
        except (ValueError, IndexError):
            return  # it was rung, or another waiter came or went: a later ring frees it


class Latch:
    """What ``threading.Event`` is, and safe where a signal handler may raise."""

    def __init__(self, *, is_set: bool = False) -> None:
        self._flag = is_set
        self._bell = Bell()

    def is_set(self) -> bool:
        """Tell whether it is set."""
        return self._flag

    def set(self) -> None:
        """Set it, and wake all who wait."""
        self._flag = True
        self._bell.ring()

    def clear(self) -> None:
        """Take it back; those who wait from now on do wait."""
        self._flag = False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, ``timeout`` seconds at most; return whether it is."""
        return self._bell.wait_for(self.is_set, timeout)
