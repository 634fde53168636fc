"""What a pool's worker does: take tasks from its owner, run them, answer.

One thread, one socket, one pipe of claims, one page (see core.frames). A task is
begun only after its claim was read: from then on it is this worker's alone. Every
way out of a task is an answer: a value, any exception, a value that cannot be
pickled. Values of a chunk go to the page as they come and to the socket at its end;
a single call's answer is sent at once.

Ctrl-C goes to the whole foreground group. Workers ignore it except inside a task,
where it raises KeyboardInterrupt as in any program; nothing is printed. The handler
is a Python one, so that programs started by a task get the default action.

Called by: the process that a WorkerSource starts. A normal return lets
multiprocessing run its exit functions.
"""

from __future__ import annotations

import mmap
import os
import select
import signal
import socket
from collections.abc import Callable
from typing import Any

from safepool import chunk_run, last_words, payload
from safepool.answers import error_body, pack
from safepool.bootstrap import rearm
from safepool.chunk_run import ChunkRun
from safepool.copies import Copies
from safepool.core import frames

_READ_BYTES = 1 << 18
_MOST_AT_ONCE = 1 << 24
_AFTER_INTERRUPT = 0.5
OURS = frozenset({__file__, chunk_run.__file__})
"""Files whose frames are no part of a task's traceback."""


def serve(
    conn: socket.socket,
    initializer: Callable[..., object] | None = None,
    initargs: tuple[Any, ...] = (),
    by_value: bool = False,
) -> None:
    """Be a worker: run the initializer, then tasks until the owner says so or is gone.

    ``by_value``: the owner's main module cannot be imported here. Raises nothing that
    a task or the initializer raises. Call it in the main thread.
    """
    interrupts = _Interrupts()
    reset_signals(interrupts)
    try:
        _message, fds, _flags, _address = socket.recv_fds(conn, 1, 2)
        if len(fds) < 2:
            return
        claims, page_fd = fds
        for fd in fds:
            # Received descriptors are not close-on-exec in CPython; they are no task's business.
            os.set_inheritable(fd, False)
        page = memoryview(mmap.mmap(page_fd, frames.PAGE_BYTES))
        last_words.leave_in(page_fd)
        service = _Service(conn, claims, page, interrupts, by_value=by_value)
        if initializer is not None:
            launcher = os.getppid()
            try:
                initializer(*initargs)
                rearm(launcher)
            except BaseException as error:
                body = error_body(error, by_value=by_value, hidden=OURS)
                service.send(frames.INIT_FAILED, 0, 0, body)
                return
        service.send(frames.READY, 0, 0, b"")
        service.run()
    except (EOFError, OSError):
        # The owner is gone, or a task closed our descriptors: there is nobody to tell.
        return


class _Interrupts:
    """SIGINT's handler: raises only while a task runs, and once per task."""

    def __init__(self) -> None:
        self.in_task = False
        self.hit = False

    def __call__(self, _signal: int, _frame: object) -> None:
        if self.in_task:
            self.in_task = False
            self.hit = True
            raise KeyboardInterrupt


def reset_signals(interrupts: Callable[[int, Any], None]) -> None:
    """Take away what the owner's own handlers would do here, and let signals in again.

    What the owner ignores stays ignored, as it does in any program that it starts.
    """
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, interrupts)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


class _Task:
    """A task as it came; ``item`` is the first item to run."""

    __slots__ = ("body", "by_value", "item", "job", "kind")

    def __init__(self, frame: frames.Frame, *, by_value: bool) -> None:
        self.kind = frame.kind & ~frames.AGAIN
        self.by_value = by_value or bool(frame.kind & frames.AGAIN)
        self.job = frame.job
        self.item = frame.item
        self.body = frame.body


class _Service:
    """One worker at work."""

    def __init__(
        self,
        conn: socket.socket,
        claims: int,
        page: memoryview,
        interrupts: _Interrupts,
        *,
        by_value: bool,
    ) -> None:
        self._conn = conn
        self._claims = claims
        self._page = page
        self._interrupts = interrupts
        self._by_value = by_value
        self._decoder = frames.Decoder()
        self._tasks: dict[int, _Task] = {}
        self._functions: dict[int, bytes] = {}
        self._loaded: dict[int, Any] = {}
        self._jobs_by_value: set[int] = set()
        self._poll = select.poll()
        self._poll.register(claims, select.POLLIN)
        self._poll.register(conn, select.POLLIN)
        self._copies = Copies()

    def run(self) -> None:
        """Do tasks until the owner says QUIT; EOFError or OSError when it is gone."""
        while True:
            number = self._next_claim()
            if number == frames.QUIT:
                return
            while number not in self._tasks:
                self._read()
            for other in [other for other in self._tasks if other < number]:
                # Claims come in order: this one was taken back and never will be ours.
                del self._tasks[other]
            task = self._tasks.pop(number)
            task.by_value = task.by_value or task.job in self._jobs_by_value
            if task.kind == frames.CALL:
                self._do_call(number, task)
            else:
                self._do_chunk(number, task)
            if self._interrupts.hit:
                self._interrupts.hit = False
                self._await_the_owner()

    def _await_the_owner(self) -> None:
        """After Ctrl-C in a task: the owner got it, too, and most owners end the pool then.

        So nothing new is begun for a moment, whatever has been sent; only its end cuts this short.
        """
        poll = select.poll()
        poll.register(self._conn, 0)
        poll.poll(_AFTER_INTERRUPT * 1000)

    def send(self, kind: int, number: int, item: int, body: bytes) -> None:
        """Send one frame; waits while the owner is busy."""
        head = frames.header(kind, number, 0, item, len(body))
        if len(body) < _READ_BYTES:
            self._conn.sendall(head + body, socket.MSG_NOSIGNAL)
        else:
            self._conn.sendall(head, socket.MSG_NOSIGNAL)
            self._conn.sendall(body, socket.MSG_NOSIGNAL)

    def _next_claim(self) -> int:
        while True:
            try:
                data = os.read(self._claims, frames.CLAIM_BYTES)
            except BlockingIOError:
                for fd, _event in self._poll.poll():
                    if fd != self._claims:
                        self._read()
                continue
            if not data:
                raise EOFError
            return frames.split_claims(data)[0]

    def _read(self) -> None:
        """Take in what the owner has sent; waits if that is nothing."""
        data = self._conn.recv(max(_READ_BYTES, min(self._decoder.missing, _MOST_AT_ONCE)))
        if not data:
            raise EOFError
        for frame in self._decoder.feed(data):
            if frame.kind & ~frames.AGAIN == frames.FUNCTION:
                self._functions[frame.job] = frame.body
                self._loaded.pop(frame.job, None)
                if frame.kind & frames.AGAIN:
                    self._jobs_by_value.add(frame.job)
            elif frame.kind == frames.FORGET:
                self._jobs_by_value.discard(frame.job)
                self._functions.pop(frame.job, None)
                self._loaded.pop(frame.job, None)
            else:
                self._tasks[frame.number] = _Task(frame, by_value=self._by_value)

    def _do_call(self, number: int, task: _Task) -> None:
        """Run one call and answer, whatever it does."""
        try:
            function, args, kwds = self._user(payload.loads, (task.body,), {})
        except BaseException as error:
            self._not_loaded(number, task, error)
            return
        self._do_one(number, task, function, args, kwds)

    def _do_chunk(self, number: int, task: _Task) -> None:
        """Run the items of a chunk up to the first error, as multiprocessing does."""
        try:
            function, items = self._user(self._load_chunk, (task,), {})
        except BaseException as error:
            self._not_loaded(number, task, error)
            return
        star = task.kind == frames.STARMAP
        if len(items) == 1:
            self._do_one(number, task, function, items[0] if star else (items[0],), {})
            return
        chunk = ChunkRun(self._page, number, task.item, self.send, self._copies)
        try:
            chunk.run(function, items, self._interrupts, star=star, by_value=task.by_value)
        except BaseException as error:
            chunk.flush()
            self._fail(frames.ERROR, number, chunk.item, task, error)
            return
        chunk.flush()

    def _do_one(self, number: int, task: _Task, function: Any, args: Any, kwds: Any) -> None:
        """A task of one item needs no page."""
        try:
            data = pack(self._user(function, args, kwds), by_value=task.by_value)
        except BaseException as error:
            self._fail(frames.ERROR, number, 0, task, error)
            return
        self.send(frames.VALUE, number, 0, data)

    def _load_chunk(self, task: _Task) -> tuple[Any, tuple[Any, ...]]:
        try:
            function = self._loaded[task.job]
        except KeyError:
            function = self._loaded[task.job] = payload.loads(self._functions[task.job])
        return function, payload.loads(task.body)

    def _user(self, function: Any, args: Any, kwds: Any) -> Any:
        """Call the user's code: the only place where Ctrl-C is let in."""
        self._interrupts.in_task = True
        try:
            return function(*args, **kwds)
        finally:
            self._interrupts.in_task = False
            self._copies.end_if_one()

    def _not_loaded(self, number: int, task: _Task, error: BaseException) -> None:
        """Answer for a task that cannot be read; a missing name may be had by value."""
        is_name = isinstance(error, (AttributeError, ImportError))
        kind = frames.BY_VALUE if is_name else frames.UNREADABLE
        self._fail(kind, number, task.item, task, error)

    def _fail(self, kind: int, number: int, item: int, task: _Task, error: BaseException) -> None:
        self.send(kind, number, item, error_body(error, by_value=task.by_value, hidden=OURS))
