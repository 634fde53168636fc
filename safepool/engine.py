"""The engine of a pool: one thread that moves tasks to workers and answers back.

It asks the ledger what to do and does it. It polls the workers' sockets and sentinels
and an inbox; nothing here waits for one worker alone. Other threads only put
events into the inbox, a deque that needs no lock, and ring a bell if the engine sleeps:
a finalizer or a signal handler may do that at any instruction.

A worker is gone when its sentinel says so, not before: then its whole tree is gone,
what it had finished is taken from its socket and page, the item that it ran is failed,
and only then a replacement starts.

The engine knows no pool object, so a dropped pool can be collected and end its
engine. Users' code runs in this thread in two places, callbacks and unpickling, and
nothing that it raises gets further than its task.

Called by: the pool. Calls: ledger, channel, results.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import pickle
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from multiprocessing import util
from typing import Any

from safepool import payload
from safepool.channel import Channel, WorkerProcess, WorkerSource
from safepool.core import frames
from safepool.core.ledger import Break, Command, Finish, Ledger, Retire, Send, Start, TakeBack, Unit
from safepool.core.policy import DEFAULT_KILL_TIMEOUT
from safepool.errors import InitializerError, PoolTerminatedError, WorkerLostError
from safepool.results import Sink

_log = logging.getLogger("safepool")
_job_numbers = itertools.count(1)

_SLACK = 1.0
"""Seconds beyond grace and kill timeout until the engine stops waiting for a worker's end."""


class Job:
    """One call of a pool method: where its answers go and how to send its function again."""

    __slots__ = ("body", "by_value", "function", "kind", "number", "sink")

    def __init__(self, sink: Sink, kind: int, function: Any, body: bytes) -> None:
        self.number = next(_job_numbers)
        self.sink = sink
        self.kind = kind
        self.function = function
        self.body = body
        self.by_value = False


class Chunk(Unit):
    """A unit with its bytes and what came back; ``originals``: to pickle it again by value."""

    __slots__ = ("again", "body", "errors", "originals", "values")

    def __init__(self, job: Job, index: int, size: int, body: bytes, originals: Any) -> None:
        super().__init__(job.number, index, size, len(body))
        self.body = body
        self.again = 0
        self.originals = originals
        self.values: list[Any] = []
        self.errors: dict[int, BaseException] | None = None

    def fail(self, item: int, error: BaseException) -> None:
        """Note the error of an item in the place of its value."""
        if self.errors is None:
            self.errors = {}
        self.errors[item] = error
        self.values.append(None)


class Engine:
    """Runs ``processes`` workers from ``source``; see the module's text.

    ``lifetime``: chunks per worker, None for no limit. ``grace``: seconds that
    ``source`` takes at most between asking a worker to end and forcing it.
    """

    def __init__(
        self, source: WorkerSource, processes: int, lifetime: int | None, grace: float
    ) -> None:
        self.processes: list[WorkerProcess] = []
        self.broken: BaseException | None = None
        self._source = source
        self._size = processes
        self._grace = grace
        self._ledger: Ledger[Chunk] = Ledger(processes, lifetime)
        self._jobs: dict[int, Job] = {}
        self._channels: dict[int, Channel] = {}
        self._worker_numbers = itertools.count(1)
        self._touched: set[Sink] = set()
        self._init_error: BaseException | None = None
        self._start_error: BaseException | None = None
        self._last_death = ""
        self._inbox: deque[tuple[Any, ...]] = deque()
        self._poll = select.poll()
        self._readers: dict[int, Callable[[int], None]] = {}
        self._bell_in, self._bell_out = socket.socketpair()
        # Reentrant, and held for one send: a finalizer may ring in the midst of a ring.
        self._bell_lock = threading.RLock()
        self._sleeping = False
        self._closing = False
        self._ended = False
        self._finished = False
        self._deadline: float | None = None
        self._stop_asked = threading.Event()
        self._thread = threading.Thread(target=self._run, name="safepool-engine", daemon=True)
        self._finalizer: Any = None

    # Any thread of the owner

    def start(self) -> None:
        """Start all workers and the thread; on an error nothing is left and it is raised."""
        self._bell_in.setblocking(False)
        self._bell_out.setblocking(False)
        try:
            self._watch(self._bell_out.fileno(), lambda _events: self._hear_bell())
            for _ in range(self._size):
                self._start_worker()
            self._finalizer = util.Finalize(None, self.terminate, exitpriority=15)
            self._thread.start()
        except BaseException:
            self._abandon()
            raise

    def submit(self, job: Job, chunk: Chunk) -> None:
        """Run a job of one chunk."""
        self._post(self._on_job, job, chunk)

    def open(self, job: Job) -> None:
        """Begin a job whose chunks follow with ``add`` and end with ``input_ended``."""
        self._post(self._on_open, job)

    def add(self, chunk: Chunk) -> None:
        """Run one more chunk of an open job."""
        self._post(self._on_chunk, chunk)

    def add_failed(self, job: Job, index: int, size: int, error: BaseException) -> None:
        """A chunk of an open job that cannot be sent has this outcome instead."""
        self._post(self._on_failed, job, index, size, error)

    def input_ended(self, job: Job, chunks: int, error: BaseException | None) -> None:
        """An open job had so many chunks, and then the input raised ``error`` (None: ended)."""
        self._post(self._on_input_ended, job, chunks, error)

    def refuse(self, sink: Sink, error: BaseException) -> None:
        """Fail a job that was never submitted; its callbacks run where others do."""
        self._post(self._on_refuse, sink, error)

    def close(self) -> None:
        """Take no more jobs; workers leave when all is done."""
        self._post(self._on_close)

    def stop(self) -> None:
        """End everything; does not wait. May be called at any instruction of any thread."""
        self._post(self._on_stop)

    def terminate(self) -> None:
        """End everything and wait for that, at most grace and kill timeout and a little more."""
        self.stop()
        if threading.current_thread() is self._thread:
            return
        if not self._stop_asked.wait(_SLACK):
            # The engine is held up in a user's callback: ask the workers without it.
            for channel in list(self._channels.values()):
                channel.signal()
        self._thread.join(self._grace + DEFAULT_KILL_TIMEOUT + 3 * _SLACK)

    def join(self) -> None:
        """Wait until every worker has left and the engine has ended."""
        self._thread.join()

    def check(self) -> None:
        """Raise the error that broke the pool, if one did."""
        if self.broken is not None:
            raise _fresh(self.broken)

    def _post(self, *event: Any) -> None:
        self._inbox.append(event)
        if self._sleeping:
            self._sleeping = False
            self._ring()
        if self._finished:
            self._refuse_rest()

    def _ring(self) -> None:
        # The lock keeps the descriptor from being closed under a ring.
        with self._bell_lock:
            if not self._finished:
                try:
                    self._bell_in.send(b"\0")
                except BlockingIOError:
                    pass  # Full of rings that were not heard yet: one more adds nothing.

    def _refuse_rest(self) -> None:
        """Events that came after the end; popleft gives each to one thread only."""
        while True:
            try:
                handler, *arguments = self._inbox.popleft()
            except IndexError:
                return
            if handler == self._on_refuse:
                handler(*arguments)
            elif handler in (self._on_job, self._on_open):
                arguments[0].sink.fail(self._end_error(), tell=False)

    def _end_error(self) -> BaseException:
        if self.broken is not None:
            return _fresh(self.broken)
        return PoolTerminatedError("the pool was terminated before this task ended")

    # The engine's thread: the loop

    def _run(self) -> None:
        try:
            while not self._ended:
                self._turn()
        except BaseException:
            self.broken = RuntimeError("the pool's engine failed; its error was reported")
            self.broken.__cause__ = sys.exc_info()[1]
            _log.exception("the pool's engine failed")
            self._fail_all(tell=True)
            for channel in self._channels.values():
                channel.signal()
        finally:
            self._end()

    def _turn(self) -> None:
        """Once round: events, decisions, waiting, input."""
        while self._inbox:
            handler, *arguments = self._inbox.popleft()
            handler(*arguments)
        handler = arguments = None  # type: ignore[assignment]
        self._advance()
        self._wake_sinks()
        if self._ended:
            return
        self._sleeping = True
        if self._inbox:
            self._sleeping = False
            ready = self._poll.poll(0)
        else:
            ready = self._poll.poll(self._patience())
            self._sleeping = False
        for fd, events in ready:
            reader = self._readers.get(fd)
            if reader is not None:
                reader(events)
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._force()

    def _patience(self) -> float | None:
        """How long to wait for input, in ms."""
        now = time.monotonic()
        times = [self._ledger.look_again_in(now)]
        if self._deadline is not None:
            times.append(max(0.0, self._deadline - now))
        known = [wait for wait in times if wait is not None]
        return min(known) * 1000 + 1 if known else None

    def _advance(self) -> None:
        while True:
            commands = self._ledger.advance(time.monotonic())
            if not commands:
                return
            for command in commands:
                self._carry_out(command)
                if self._ended:
                    return

    def _carry_out(self, command: Command[Chunk]) -> None:
        if isinstance(command, Send):
            self._send(self._channels[command.worker], command.units)
        elif isinstance(command, TakeBack):
            channel = self._channels[command.worker]
            self._ledger.taken_back(command.worker, channel.take_claims())
        elif isinstance(command, Retire):
            channel = self._channels[command.worker]
            channel.retiring = True
            channel.claim([frames.QUIT])
        elif isinstance(command, Start):
            for _ in range(command.count):
                self._replace_worker()
        elif isinstance(command, Break):
            self._break(command.failures)
        elif isinstance(command, Finish):
            self._ended = True

    def _wake_sinks(self) -> None:
        if self._touched:
            for sink in self._touched:
                sink.wake()
            self._touched.clear()

    def _hear_bell(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._bell_out.recv(4096)

    def _watch(self, fd: int, reader: Callable[[int], None]) -> None:
        self._readers[fd] = reader
        self._poll.register(fd, select.POLLIN)

    def _unwatch(self, fd: int) -> None:
        if self._readers.pop(fd, None) is not None:
            self._poll.unregister(fd)

    # Events from the inbox

    def _on_job(self, job: Job, chunk: Chunk) -> None:
        if self._admit(job):
            self._ledger.submitted([chunk])

    def _on_open(self, job: Job) -> None:
        if self._admit(job):
            self._ledger.source_opened()
            if self._closing:
                job.sink.lift_limit()

    def _admit(self, job: Job) -> bool:
        if self._stop_asked.is_set():
            job.sink.fail(self._end_error(), tell=False)
            return False
        self._jobs[job.number] = job
        return True

    def _on_chunk(self, chunk: Chunk) -> None:
        if chunk.job in self._jobs:
            self._ledger.submitted([chunk])

    def _on_failed(self, job: Job, index: int, size: int, error: BaseException) -> None:
        self._deliver(job.number, index, size, [None], {0: error})

    def _on_input_ended(self, job: Job, chunks: int, error: BaseException | None) -> None:
        if job.number in self._jobs:
            self._ledger.source_ended()
            self._touched.add(job.sink)
            if job.sink.input_ended(chunks, error):
                self._forget(job.number)

    def _on_refuse(self, sink: Sink, error: BaseException) -> None:
        sink.fail(error, tell=True)

    def _on_close(self) -> None:
        self._closing = True
        self._ledger.closed()
        for job in self._jobs.values():
            job.sink.lift_limit()

    def _on_stop(self) -> None:
        if self._stop_asked.is_set():
            return
        self._deadline = time.monotonic() + self._grace + DEFAULT_KILL_TIMEOUT + _SLACK
        for channel in self._channels.values():
            channel.signal()
        # As in multiprocessing, callbacks are not told of an end that the program asked for.
        self._fail_all(tell=False)

    def _fail_all(self, *, tell: bool) -> None:
        """Resolve everything that is not, and let nothing more in."""
        self._stop_asked.set()
        self._ledger.terminated()
        jobs = list(self._jobs.values())
        self._jobs.clear()
        for job in jobs:
            job.sink.fail(self._end_error(), tell=tell)

    # Workers

    def _start_worker(self) -> None:
        worker = next(self._worker_numbers)
        channel = Channel(worker, self._source)
        self._channels[worker] = channel
        self.processes.append(channel.process)
        self._ledger.started(worker)
        self._watch(channel.socket.fileno(), lambda events: self._on_socket(channel, events))
        self._watch(channel.sentinel, lambda _events: self._bury(channel))

    def _replace_worker(self) -> None:
        try:
            self._start_worker()
        except Exception as error:
            # Counted by the ledger, and raised to the user when it has failed too often.
            self._start_error = error
            self._ledger.start_failed()

    def _send(self, channel: Channel, units: list[Chunk]) -> None:
        parts = [frames.header(frames.FORGET, 0, number, 0, 0) for number in channel.stale]
        channel.stale.clear()
        numbers: list[int] = []
        for unit in units:
            job = self._jobs.get(unit.job)
            if job is None:
                # The input of its map failed, so nobody waits for the answer.
                self._ledger.answered(channel.worker, unit)
                continue
            if job.kind != frames.CALL and job.number not in channel.functions:
                channel.functions.add(job.number)
                size = len(job.body)
                parts += (frames.header(frames.FUNCTION, 0, job.number, 0, size), job.body)
            kind = job.kind | unit.again
            size = len(unit.body)
            parts += (frames.header(kind, unit.number, unit.job, unit.done, size), unit.body)
            numbers.append(unit.number)
        if not channel.offer(parts, numbers):
            self._poll.modify(channel.socket, select.POLLIN | select.POLLOUT)

    def _on_socket(self, channel: Channel, events: int) -> None:
        if events & select.POLLOUT and channel.flush():
            self._poll.modify(channel.socket, select.POLLIN)
        if events & ~select.POLLOUT:
            self._read(channel)
            if not channel.open:
                self._unwatch(channel.socket.fileno())
                if not (channel.retiring or channel.init_failed):
                    # It cannot answer any more: end what is left of it. A worker that is
                    # dying anyway is not changed by this.
                    channel.signal()

    def _read(self, channel: Channel) -> bool:
        """Take in the answers that are there; False when there were none."""
        answers = channel.read()
        for frame in answers or ():
            self._on_answer(channel, frame)
        return answers is not None

    def _on_answer(self, channel: Channel, frame: frames.Frame) -> None:
        if frame.kind == frames.READY:
            self._ledger.ready(channel.worker, time.monotonic())
            return
        if frame.kind == frames.INIT_FAILED:
            channel.init_failed = True
            self._init_error = _unpack_error(frame.body)
            return
        unit = self._ledger.unit(channel.worker, frame.number)
        if unit is None:
            return
        if frame.kind == frames.VALUE:
            self._take_values(channel, unit, 0, (frame.body,))
        elif frame.kind == frames.VALUES:
            self._take_values(channel, unit, frame.item, frames.records(frame.body))
        elif frame.kind == frames.ERROR or not self._again_by_value(channel, unit):
            unit.fail(frame.item, _unpack_error(frame.body))
            self._answered(channel, unit)

    def _take_values(
        self, channel: Channel, unit: Chunk, item: int, bodies: Iterable[bytes]
    ) -> None:
        for place, body in enumerate(bodies, item):
            if place != unit.done:
                continue  # Known already: it was in the socket as well as in the page.
            try:
                unit.values.append(payload.loads(body))
            except BaseException as error:
                unit.fail(place, _unreadable(error, "a result", ""))
            unit.done += 1
        if unit.done >= unit.size:
            self._answered(channel, unit)

    def _answered(self, channel: Channel, unit: Chunk) -> None:
        self._ledger.answered(channel.worker, unit)
        self._deliver(unit.job, unit.index, unit.size, unit.values, unit.errors)

    def _deliver(
        self,
        number: int,
        index: int,
        size: int,
        values: list[Any],
        errors: dict[int, BaseException] | None,
    ) -> None:
        job = self._jobs.get(number)
        if job is None:
            return
        self._touched.add(job.sink)
        if job.sink.put(index, size, values, errors):
            self._forget(number)

    def _forget(self, number: int) -> None:
        """A job is complete; workers drop its function with the next thing that they get."""
        job = self._jobs.pop(number, None)
        if job is not None and job.kind != frames.CALL:
            for channel in self._channels.values():
                if number in channel.functions:
                    channel.functions.discard(number)
                    channel.stale.append(number)

    def _again_by_value(self, channel: Channel, unit: Chunk) -> bool:
        """Queue a task again whose names the worker does not know; once, and if we can."""
        job = self._jobs.get(unit.job)
        if job is None or unit.originals is None:
            return False
        try:
            if job.kind != frames.CALL and not job.by_value:
                job.body = payload.dumps_by_value(job.function)
                job.by_value = True
                for other in self._channels.values():
                    other.functions.discard(job.number)
            unit.body = payload.dumps_by_value(unit.originals)
        except Exception:
            # The worker's own error says better what is wrong.
            return False
        unit.originals = None
        unit.again = frames.AGAIN
        self._ledger.bounced(channel.worker, unit)
        unit.nbytes = len(unit.body)
        return True

    def _bury(self, channel: Channel) -> None:
        """A worker and its tree are gone: take what it left, and say what was lost."""
        self._unwatch(channel.sentinel)
        self._unwatch(channel.socket.fileno())
        while channel.open and self._read(channel):
            pass
        page = channel.page()
        unit = self._ledger.unit(channel.worker, page.number)
        if unit is not None:
            self._take_values(channel, unit, page.item, frames.records(page.body))
        process = channel.process
        process.join(_SLACK)
        self._last_death = _how_it_ended(channel.pid, process.exitcode)
        lost = self._ledger.lost(channel.worker, channel.take_claims())
        if lost is not None:
            job = self._jobs.get(lost.unit.job)
            name = getattr(job.function if job else None, "__qualname__", "its task")
            where = f" (item {lost.item} of chunk {lost.unit.index})" if lost.unit.size > 1 else ""
            message = f"{self._last_death} while it ran {name}{where}; only this task is lost"
            lost.unit.fail(lost.item, WorkerLostError(message, channel.pid, process.exitcode))
            if lost.complete:
                unit = lost.unit
                self._deliver(unit.job, unit.index, unit.size, unit.values, unit.errors)
        del self._channels[channel.worker]
        self.processes.remove(process)
        channel.close()

    # Endings

    def _break(self, failures: int) -> None:
        """No worker comes up: fail everything with the reason."""
        if self._start_error is not None:
            self.broken = self._start_error
        else:
            reason = self._last_death
            if self._init_error is not None:
                reason = f"{type(self._init_error).__name__}: {self._init_error}"
            self.broken = InitializerError(
                f"{failures} workers in a row ended before they were ready; the last: {reason}",
                failures,
            )
            self.broken.__cause__ = self._init_error
        self._deadline = time.monotonic() + self._grace + DEFAULT_KILL_TIMEOUT + _SLACK
        for channel in self._channels.values():
            channel.signal()
        self._fail_all(tell=True)

    def _force(self) -> None:
        """The time for a polite end is over."""
        late = list(self._channels.values())
        for channel in late:
            channel.signal(force=True)
        until = time.monotonic() + _SLACK
        for channel in late:
            channel.process.join(max(0.0, until - time.monotonic()))
            if channel.process.is_alive():
                _log.error("worker %d does not end; it is left alone", channel.pid)
            self._bury(channel)

    def _end(self) -> None:
        """The last thing in the engine's thread."""
        try:
            for channel in list(self._channels.values()):
                self._bury(channel)
            self._source.close()
        finally:
            with self._bell_lock:
                self._finished = True
                self._stop_asked.set()
                self._bell_in.close()
                self._bell_out.close()
            self._refuse_rest()
            if self._finalizer is not None:
                self._finalizer.cancel()

    def _abandon(self) -> None:
        """The constructor failed: end what was started, in the constructor's thread."""
        self._ledger.terminated()
        for channel in self._channels.values():
            channel.signal()
        until = time.monotonic() + self._grace + DEFAULT_KILL_TIMEOUT + _SLACK
        for channel in self._channels.values():
            channel.process.join(max(0.0, until - time.monotonic()))
        for channel in self._channels.values():
            if channel.process.exitcode is None:
                channel.signal(force=True)
        self._end()


def _fresh(error: BaseException) -> BaseException:
    """A copy to raise, so that tracebacks do not pile up on one object."""
    try:
        new = copy.copy(error)
    except Exception:
        return error
    new.__cause__ = error.__cause__
    return new


def _unpack_error(body: bytes) -> BaseException:
    """The exception that a worker sent, or multiprocessing's stand-in with its text."""
    data, shown, text = pickle.loads(body)
    try:
        error = payload.loads(data)
    except BaseException as reason:
        return _unreadable(reason, shown, text)
    return error if isinstance(error, BaseException) else _unreadable(TypeError(), shown, text)


def _unreadable(reason: BaseException, shown: str, text: str) -> BaseException:
    """What arrived cannot be unpickled here, for ``reason``."""
    from multiprocessing import pool

    mp_pool: Any = pool
    error: BaseException = mp_pool.MaybeEncodingError(reason, shown)
    error.__cause__ = mp_pool.RemoteTraceback(text) if text else reason
    return error


def _how_it_ended(pid: int, exitcode: int | None) -> str:
    if exitcode is None:
        return f"worker {pid} vanished"
    if exitcode >= 0:
        return f"worker {pid} left with exit code {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    hint = " (the system does that when memory runs out)" if name == "SIGKILL" else ""
    return f"worker {pid} was killed by {name}{hint}"
