"""What the pool's methods hand back: results that fill up as answers come in.

The same objects, methods and errors as in ``multiprocessing.pool``, with two
differences that users asked for: a result whose pool was terminated raises
PoolTerminatedError instead of waiting for ever, and one chunk of ``imap`` that meets
an error still gives the items before it.

The engine's thread calls ``put`` and ``fail``; any thread of the owner waits. Each
``put`` carries some items: the position of the first, the values, and errors by position
among them. A handle holds its pool until it is complete, so that a pool with work is not
collected. What they wait on is made by the first who waits.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Protocol

from safepool.errors import ForeignPoolError
from safepool.latch import Bell

_Callback = Callable[[Any], object]


class Sink(Protocol):
    """Where a job's answers go; called by the engine's thread only."""

    def begin(self) -> bool:
        """A unit goes to a worker; False: nobody wants it any more, and the job is over."""

    def put(
        self,
        first: int,
        size: int,
        values: list[Any],
        errors: dict[int, BaseException] | None,
        step: int = 1,
    ) -> bool:
        """Take the outcome of ``size`` items, of which ``first`` is the first and each other is
        ``step`` behind the one before; True when the job is complete.

        ``values`` ends at an error that ended a chunk.
        """

    def input_ended(self, items: int, error: BaseException | None) -> bool:
        """There were so many items, then ``error``; True when the job is complete."""

    def tried_again(self) -> None:
        """A task has failed and gets another attempt."""

    def wake(self) -> None:
        """Called once after a batch of ``put``."""

    def lift_limit(self) -> None:
        """The pool was closed: take in all input, whoever consumes the results."""

    def fail(self, error: BaseException, *, tell: bool) -> None:
        """Nothing more comes; ``tell``: call the error callback."""


def run_callback(callback: _Callback | None, value: Any) -> None:
    """Call a user's callback; its own error goes to ``threading.excepthook``."""
    if callback is None:
        return
    try:
        callback(value)
    except BaseException:
        arguments = (*sys.exc_info(), threading.current_thread())
        threading.excepthook(threading.ExceptHookArgs(arguments))


def _is_cancelled(error: object) -> bool:
    from safepool.cancellation import TaskCancelledError

    return isinstance(error, TaskCancelledError)


def check_owner(owner: int) -> None:
    """Raise ForeignPoolError in a process that did not make the pool."""
    if os.getpid() != owner:
        raise ForeignPoolError(
            f"this pool belongs to process {owner}, not to its fork {os.getpid()}; "
            "make a new pool here"
        )


class AsyncResult:
    """The result of one call that runs in a worker."""

    # What most results never change is on the class: making one is a good part of a quick call.
    _callback: _Callback | None = None
    _error_callback: _Callback | None = None
    _complete = False
    _success = True
    _value: Any = None
    _job: Any = None

    def __init__(
        self,
        pool: Any,
        callback: _Callback | None = None,
        error_callback: _Callback | None = None,
    ) -> None:
        self._pool = pool
        if callback is not None:
            self._callback = callback
        if error_callback is not None:
            self._error_callback = error_callback

    def ready(self) -> bool:
        """Tell whether the call has ended."""
        return self._complete

    def successful(self) -> bool:
        """Tell whether the call ended without an error; ValueError while it has not ended."""
        if not self._complete:
            raise ValueError(f"{self!r} not ready")
        return self._success

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the call has ended, for ``timeout`` seconds at most."""
        pool = self._pool
        if self._complete or pool is None:
            return
        check_owner(pool._owner)
        # setdefault is atomic: all who wait use one bell. It is stored before _complete
        # is read again, and _end writes _complete before it looks for the bell.
        bell: Bell = self.__dict__.setdefault("_bell", Bell())
        bell.wait_for(self.ready, timeout)

    def get(self, timeout: float | None = None) -> Any:
        """Return the result, or raise what the call raised.

        Raises multiprocessing.TimeoutError when it has not ended after ``timeout``
        seconds, PoolTerminatedError when it never will.
        """
        self.wait(timeout)
        if not self._complete:
            raise multiprocessing.TimeoutError
        if self._success:
            return self._value
        raise self._value

    def begin(self) -> bool:
        """Engine: always wanted."""
        return True

    def cancel(self, *, kill: bool = False) -> bool:
        """See to it that the call does not run; it fails with TaskCancelledError then.

        A call that waits for a worker never runs. One that has begun (of a map: any item)
        goes on, and False is returned; with ``kill`` its worker is ended with its whole
        tree, and the result is there when that is gone. Other tasks go on. False as well
        when the call has ended. Safe in threads and callbacks, not for signal handlers.
        """
        pool, job = self._pool, self._job
        if self._complete or pool is None or job is None:
            return False
        check_owner(pool._owner)
        return bool(pool._engine.cancel(job, kill=kill))

    def __await__(self) -> Generator[Any, None, Any]:
        """In a coroutine: the result, or what the call raised. A cancelled ``await`` cancels
        the call as ``cancel(kill=True)`` does, and does not wait for that."""
        from safepool.awaiting import result_of

        return result_of(self).__await__()

    def _when_done(self, ring: Callable[[], None]) -> None:
        """Have ``ring`` called once when the call has ended, in whatever thread."""
        hooks: deque[Callable[[], None]] = self.__dict__.setdefault("_hooks", deque())
        hooks.append(ring)
        # The engine sets this before it looks for hooks, so one of the two sees the other.
        if self._complete:
            self._run_hooks()

    def _run_hooks(self) -> None:
        hooks: deque[Callable[[], None]] = self.__dict__.get("_hooks", deque())
        while True:
            try:
                hook = hooks.popleft()
            except IndexError:
                return
            hook()

    def _cancel_soon(self) -> None:
        """End the call and its worker; the answer is not awaited."""
        pool, job = self._pool, self._job
        if pool is not None and job is not None:
            pool._engine.cancel_soon(job)

    def cancelled(self) -> bool:
        """Tell whether it has ended by ``cancel``."""
        return self._complete and not self._success and _is_cancelled(self._value)

    def put(
        self,
        first: int,
        size: int,
        values: list[Any],
        errors: dict[int, BaseException] | None,
        step: int = 1,
    ) -> bool:
        """Engine: take the outcome."""
        if errors:
            self._end(False, errors[0])
        else:
            self._end(True, values[0])
        return True

    def input_ended(self, items: int, error: BaseException | None) -> bool:
        """Engine: an input that fails fails the whole result."""
        if error is not None and not self._complete:
            self._end(False, error)
        return self._complete

    def tried_again(self) -> None:
        """Engine: nothing to do."""

    def wake(self) -> None:
        """Engine: nothing to do, ``put`` wakes."""

    def lift_limit(self) -> None:
        """Engine: nothing to do, all input is there."""

    def fail(self, error: BaseException, *, tell: bool) -> None:
        """Engine: end with an error."""
        if not tell:
            self._callback = self._error_callback = None
        self._end(False, error)

    def _end(self, success: bool, value: Any) -> None:
        callback = self._callback if success else self._error_callback
        if callback is not None:
            run_callback(callback, value)
        self._success = success
        self._value = value
        self._complete = True
        # After that: who waits takes a result without a pool for one that is complete.
        self._callback = self._error_callback = self._pool = self._job = None
        bell: Bell | None = self.__dict__.get("_bell")
        if bell is not None:
            bell.ring()
        if "_hooks" in self.__dict__:
            self._run_hooks()

    __class_getitem__: Any = classmethod(types.GenericAlias)


ApplyResult = AsyncResult


class MapResult(AsyncResult):
    """The result of a map: a list, complete when every chunk is."""

    def __init__(
        self,
        pool: Any,
        chunksize: int,
        length: int,
        callback: _Callback | None = None,
        error_callback: _Callback | None = None,
    ) -> None:
        super().__init__(pool, callback, error_callback)
        self._left = length
        self._values: list[Any] = [None] * length
        self._error: BaseException | None = None
        if not length:
            # As in multiprocessing, nobody is called back for an empty map.
            self._callback = None
            self._end(True, [])

    def put(
        self,
        first: int,
        size: int,
        values: list[Any],
        errors: dict[int, BaseException] | None,
        step: int = 1,
    ) -> bool:
        """Engine: take one chunk; the first error that arrives is the map's."""
        self._left -= size
        if self._error is None:
            if errors:
                self._error = errors[min(errors)]
                self._values = []
            else:
                self._values[first : first + len(values)] = values
        if self._left:
            return False
        if self._error is not None:
            self._end(False, self._error)
        else:
            self._end(True, self._values)
        self._values = []
        self._error = None
        return True
