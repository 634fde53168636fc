"""What a pool's worker does: take tasks from its owner, run them, answer.

One thread, one socket, one page (see core.frames). A task is begun only after it was
noted in the page and was found not to be recalled. Every way out of a task is an answer: a
value, any exception, a value that cannot be pickled. Values of a chunk or a group go to
the page as they come and to the socket at its end; a single call's answer is sent at once.

Called by: the process that a WorkerSource starts. A normal return lets
multiprocessing run its exit functions.
"""

from __future__ import annotations

import mmap
import os
import select
import signal
import socket
from collections import deque
from contextlib import nullcontext
from typing import Any

from safepool import current, entries, item_run, last_words, payload
from safepool.answers import error_body, pack
from safepool.bootstrap import rearm
from safepool.copies import Copies
from safepool.core import frames
from safepool.entries import UnreadableItemError, for_sealed, run_call
from safepool.host import barrier
from safepool.item_run import NEVER, ItemRun
from safepool.parcels import Packed, Parcel, opened
from safepool.segments import Segment, receive, send_with
from safepool.soft_limit import soft_limit
from safepool.worker_life import WorkerLife
from safepool.worker_signals import Interrupts, Terminations, WorkerEndedError, reset_signals

_READ_BYTES = 1 << 18
_MOST_AT_ONCE = 1 << 24
_AFTER_INTERRUPT = 0.5
OURS = frozenset({__file__, item_run.__file__, entries.__file__})
"""Files whose frames are no part of a task's traceback."""


def serve(conn: socket.socket, life: WorkerLife, by_value: bool = False) -> None:
    """Be a worker: run the initializer, then tasks until the owner says so or is gone.

    ``by_value``: the owner's main module cannot be imported here. Raises nothing that
    a task, the initializer or the finalizer raises; SystemExit when SIGTERM ended it in
    order. Call it in the main thread.
    """
    interrupts = Interrupts()
    reset_signals(interrupts)
    try:
        _message, fds, _flags, _address = socket.recv_fds(conn, 1, 2)
        if len(fds) < 1 + (life.log_levels is not None):
            return
        for fd in fds:
            # Received descriptors are not close-on-exec in CPython; they are no task's business.
            os.set_inheritable(fd, False)
        page_fd = fds[0]
        if life.log_levels is not None:
            from safepool import worker_logs

            worker_logs.hand_over(fds[1], life.log_levels)
        page = memoryview(mmap.mmap(page_fd, frames.PAGE_BYTES))
        last_words.leave_in(page_fd)
        current.become(frames.slot_of(page))
        terminations = None if life.finalizer is None else Terminations(interrupts)
        service = _Service(conn, page, interrupts, terminations, by_value=by_value)
        launcher = os.getppid()
        try:
            if life.initializer is not None:
                service.send(frames.INITIALIZING, 0, 0, b"")
            life.begin()
            rearm(launcher)
        except BaseException as error:
            body = error_body(error, by_value=by_value, hidden=OURS)
            service.send(frames.INIT_FAILED, 0, 0, body)
            return
        try:
            service.run()
        except WorkerEndedError:
            raise SystemExit(128 + signal.SIGTERM) from None
        finally:
            life.finish()
    except (EOFError, OSError):
        # The owner is gone, or a task closed our descriptors: there is nobody to tell.
        return


class _Task:
    """A task as it came: the items from ``item`` to before ``end`` are to be run."""

    __slots__ = (
        "body", "by_value", "end", "item", "job", "kind", "number", "sealed", "segment", "soft",
        "splits",
    )  # fmt: skip

    def __init__(
        self,
        frame: frames.Frame,
        segment: Segment | None,
        soft: float | None,
        *,
        by_value: bool,
    ) -> None:
        self.segment = segment
        self.soft = soft
        self.number = frame.number
        self.kind = frame.kind & frames.KIND
        self.by_value = by_value or bool(frame.kind & frames.AGAIN)
        self.splits = bool(frame.kind & frames.SPLITS)
        self.sealed = bool(frame.kind & frames.SEALED)
        self.job = frame.job
        self.item = frame.item
        self.end = frame.end
        self.body = frame.body

    def load(self) -> Any:
        """Unpickle it. Its large buffers are this worker's own copy: it may be sent again."""
        if self.segment is None:
            return payload.loads(self.body)
        return opened(self.body, self.segment, private=True)


class _Service:
    """One worker at work."""

    def __init__(
        self,
        conn: socket.socket,
        page: memoryview,
        interrupts: Interrupts,
        terminations: Terminations | None,
        *,
        by_value: bool,
    ) -> None:
        self._conn = conn
        self._page = page
        self._recall = frames.recall_cell(page)
        self._interrupts = interrupts
        self._terminations = terminations
        self._by_value = by_value
        self._decoder = frames.Decoder()
        self._tasks: deque[_Task] = deque()
        self._segments: deque[Segment] = deque()
        self._is_told_to_leave = False
        self._soft: float | None = None
        self._functions: dict[int, bytes] = {}
        self._loaded: dict[int, Any] = {}
        self._jobs_by_value: set[int] = set()
        self._copies = Copies()

    def run(self) -> None:
        """Say so, and do tasks until the owner says QUIT; EOFError or OSError when it is gone.

        WorkerEndedError when somebody else ended it, and it may clean up."""
        if self._terminations is not None:
            self._terminations.arm()
        self._conn.sendall(frames.header(frames.READY, 0, int(barrier.register()), 0, 0))
        while True:
            while not self._tasks:
                if self._is_told_to_leave:
                    return
                self._wait()
            task = self._tasks.popleft()
            if not self._may_begin(task):
                continue
            task.by_value = task.by_value or task.job in self._jobs_by_value
            if task.kind == frames.CALL:
                self._do_call(task)
            elif task.kind in (frames.GROUP, frames.CALLS):
                self._do_group(task)
            else:
                self._do_chunk(task)
            self._pause_if_asked()

    def _wait(self) -> None:
        """Wait for something from the owner."""
        terminations = self._terminations
        if terminations is None:
            self._read()
            return
        terminations.is_waiting = True
        terminations.check()
        self._read()
        terminations.is_waiting = False

    def _pause_if_asked(self) -> None:
        """Between two tasks."""
        if self._terminations is not None:
            self._terminations.check()
        if self._interrupts.hit:
            self._interrupts.hit = False
            self._await_the_owner()

    def _may_begin(self, task: _Task) -> bool:
        """Note the task in the page; False if the owner has taken it back."""
        if self._recall[0] >= task.number:
            return False
        frames.write_page(self._page, task.number, task.item)
        if self._recall[0] >= task.number:
            # The owner may have seen the note already, and then it waits for an answer.
            self.send(frames.STOPPED, task.number, task.item, b"")
            return False
        return True

    def _await_the_owner(self) -> None:
        """After Ctrl-C in a task: the owner got it, too, and most owners end the pool then.

        So nothing new is begun for a moment, whatever has been sent; only its end cuts this short.
        """
        poll = select.poll()
        poll.register(self._conn, 0)
        poll.poll(_AFTER_INTERRUPT * 1000)

    def send(self, kind: int, number: int, item: int, body: Packed) -> None:
        """Send one frame; waits while the owner is busy."""
        if isinstance(body, Parcel):
            head = frames.header(kind | frames.PARCEL, number, 0, item, len(body.head))
            sent = send_with(self._conn, head, body.segment)
            self._conn.sendall(head[sent:] + body.head, socket.MSG_NOSIGNAL)
            return
        head = frames.header(kind, number, 0, item, len(body))
        if len(body) < _READ_BYTES:
            self._conn.sendall(head + body, socket.MSG_NOSIGNAL)
        else:
            self._conn.sendall(head, socket.MSG_NOSIGNAL)
            self._conn.sendall(body, socket.MSG_NOSIGNAL)

    def _read(self) -> None:
        """Take in what the owner has sent; waits if that is nothing."""
        size = max(_READ_BYTES, min(self._decoder.missing, _MOST_AT_ONCE))
        data, segments = receive(self._conn, size)
        self._segments.extend(segments)
        if not data:
            raise EOFError
        for frame in self._decoder.feed(data):
            kind = frame.kind & frames.KIND
            if kind == frames.FUNCTION:
                self._functions[frame.job] = frame.body
                self._loaded.pop(frame.job, None)
                if frame.kind & frames.AGAIN:
                    self._jobs_by_value.add(frame.job)
            elif kind == frames.QUIT:
                self._is_told_to_leave = True
            elif kind == frames.SOFT:
                self._soft = frames.read_seconds(frame.body)
            elif kind == frames.FORGET:
                self._jobs_by_value.discard(frame.job)
                self._functions.pop(frame.job, None)
                self._loaded.pop(frame.job, None)
            else:
                segment = self._segments.popleft() if frame.kind & frames.PARCEL else None
                self._tasks.append(_Task(frame, segment, self._soft, by_value=self._by_value))
                self._soft = None

    def _do_call(self, task: _Task) -> None:
        """Run one call and answer, whatever it does."""
        try:
            function, args, kwds = self._user(task.load, (), {})
        except BaseException as error:
            self._not_loaded(task, task.item, error)
            return
        self._do_one(task, function, args, kwds)

    def _do_chunk(self, task: _Task) -> None:
        """Run the items of a chunk up to the first error, as multiprocessing does."""
        try:
            function, items = self._user(self._load_chunk, (task,), {})
        except BaseException as error:
            self._not_loaded(task, task.item, error)
            return
        star = task.kind == frames.STARMAP
        if len(items) == 1:
            item = items[task.item]
            self._do_one(task, function, item if star else (item,), {})
            return
        run = self._item_run(task)
        items = items[task.item : task.end]
        try:
            run.run(function, items, self._interrupts, star=star, by_value=task.by_value)
        except BaseException as error:
            run.flush()
            self._fail(frames.ERROR, run.item, task, error)
            return
        run.flush()
        self._hand_back(task, run)

    def _do_group(self, task: _Task) -> None:
        """Run tasks that travel together: each is answered for itself."""
        try:
            function, items = self._user(self._load_group, (task,), {})
        except BaseException as error:
            # Whatever it was (a name, Ctrl-C): the owner sends them again, each alone.
            self._fail(frames.BY_VALUE, task.item, task, error)
            return
        if len(items) == 1:
            self._do_one(task, function, (items[0],), {})
            return
        run = self._item_run(task)
        while run.item < task.end:
            rest = items[run.item - task.item :]
            try:
                run.run(function, rest, self._interrupts, star=False, by_value=task.by_value)
            except BaseException as error:
                run.flush()
                self._fail(frames.ERROR, run.item, task, error)
                run.skip()
            else:
                break
            self._pause_if_asked()
        run.flush()
        self._hand_back(task, run)

    def _item_run(self, task: _Task) -> ItemRun:
        recall = self._recall if task.splits else NEVER
        return ItemRun(self._page, recall, task.number, task.item, self.send, self._copies)

    def _hand_back(self, task: _Task, run: ItemRun) -> None:
        """Say that a task was left in its midst, since it was recalled."""
        if run.item < task.end:
            self.send(frames.STOPPED, task.number, run.item, b"")

    def _do_one(self, task: _Task, function: Any, args: Any, kwds: Any) -> None:
        """A task of one item needs no page."""
        try:
            limit = nullcontext() if task.soft is None else soft_limit(task.soft, self._interrupts)
            with limit:
                value = self._user(function, args, kwds)
            data = pack(value, by_value=task.by_value)
        except BaseException as error:
            self._fail(frames.ERROR, task.item, task, error)
            return
        self.send(frames.VALUE, task.number, task.item, data)

    def _function(self, task: _Task) -> Any:
        try:
            return self._loaded[task.job]
        except KeyError:
            function = self._loaded[task.job] = payload.loads(self._functions[task.job])
            return function

    def _load_chunk(self, task: _Task) -> tuple[Any, tuple[Any, ...]]:
        return self._function(task), task.load()

    def _load_group(self, task: _Task) -> tuple[Any, list[Any]]:
        items = payload.loads(task.body)
        if task.kind == frames.CALLS:
            return run_call, items
        function = self._function(task)
        return (for_sealed(function) if task.sealed else function), items

    def _user(self, function: Any, args: Any, kwds: Any) -> Any:
        """Call the user's code: the only place where Ctrl-C is let in."""
        self._interrupts.in_task = True
        try:
            return function(*args, **kwds)
        finally:
            self._interrupts.in_task = False
            self._copies.end_if_one()

    def _not_loaded(self, task: _Task, item: int, error: BaseException) -> None:
        """Answer for a task that cannot be read; a missing name may be had by value."""
        is_name = isinstance(error, (AttributeError, ImportError))
        kind = frames.BY_VALUE if is_name else frames.UNREADABLE
        self._fail(kind, item, task, error)

    def _fail(self, kind: int, item: int, task: _Task, error: BaseException) -> None:
        if isinstance(error, WorkerEndedError):
            raise error  # who asked for it knows what the task's end means
        if isinstance(error, UnreadableItemError):
            kind, error = frames.UNREADABLE, error.reason
        body = error_body(error, by_value=task.by_value, hidden=OURS)
        self.send(kind, task.number, item, body)
