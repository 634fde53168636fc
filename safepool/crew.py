"""The workers of one pool: started, sent to, read from, buried.

Carries out what the ledger decides about workers and tells it what happened to them.

A worker is gone when its sentinel says so, not before: then its whole tree is gone.
What it had finished is taken from its socket and its page, the item that it ran is
failed, the rest goes back to the ledger, and only then is there room for another.

Called by: the engine, in its thread (in the constructor's for the first start).
"""

from __future__ import annotations

import itertools
import logging
import select
import time
from collections.abc import Callable

from safepool import sender
from safepool.channel import Channel, Part, WorkerProcess, WorkerSource
from safepool.core import frames
from safepool.core.commands import Lost
from safepool.core.ledger import Ledger
from safepool.deliveries import Deliveries, Travelling
from safepool.errors import InitializerError, WorkerLostError
from safepool.groups import CallGroup, Functions, ItemGroup
from safepool.jobs import PLAIN, Chunk, Job, Jobs, note_unreadable, unpack_error
from safepool.limits import Limits
from safepool.losses import Losses, traceback_in
from safepool.memory_watch import MemoryWatch
from safepool.picture import picture
from safepool.resending import Resending
from safepool.stats import PoolStats
from safepool.vigils import Vigils
from safepool.waiting import Watch
from safepool.worker_life import WorkerLife

_log = logging.getLogger("safepool")

_REAP = 1.0
"""Seconds to wait for an exit code after the sentinel has fired; it is there at once."""


def _ignore(_error: BaseException) -> None:
    """Stands in until the engine says what an abort is."""


class Crew:
    """The workers and their channels, by the worker's number."""

    def __init__(
        self,
        source: WorkerSource,
        ledger: Ledger[Travelling],
        watch: Watch,
        functions: Functions,
        life: WorkerLife,
        max_rss: int | None,
    ) -> None:
        self.vigils = Vigils(life, self._on_too_late)
        self.processes: list[WorkerProcess] = []
        self.jobs = Jobs(self._forget_function)
        self._source = source
        self._ledger = ledger
        self._watch = watch
        self.limits = Limits(self, ledger)
        self.deliveries = Deliveries(self.jobs, ledger)
        self.memory = None if max_rss is None else MemoryWatch(max_rss, self, ledger, self.limits)
        self._resending = Resending(self.jobs, ledger, functions, self._renew_function)
        self.on_abort: Callable[[BaseException], None] = _ignore
        self._lost = self._retried = 0
        self._channels: dict[int, Channel] = {}
        self._numbers = itertools.count(1)
        self._slots: set[int] = set()
        self._has_logs = life.log_levels is not None
        self._init_error: BaseException | None = None
        self._start_error: BaseException | None = None
        self._losses = Losses()
        self._last_death = ""

    # Beginnings

    def start(self) -> None:
        """Start one worker; raises what the source raises."""
        worker = next(self._numbers)
        slot = next(slot for slot in itertools.count() if slot not in self._slots)
        channel = Channel(worker, slot, self._source, has_logs=self._has_logs)
        self._slots.add(slot)
        self._channels[worker] = channel
        self.processes.append(channel.process)
        self._ledger.started(worker)
        self._watch.add(channel.socket.fileno(), lambda events: self._on_socket(channel, events))
        self._watch.add(channel.sentinel, lambda _events: self._bury(channel))
        if channel.logs is not None:
            self._watch.add(channel.logs.fileno(), lambda _events: self._on_logs(channel))

    def replace(self) -> None:
        """Start one worker; the ledger counts a failure, and gives up after some."""
        try:
            self.start()
        except Exception as error:
            self._start_error = error
            self._ledger.start_failed(time.monotonic())

    def why_broken(self, failures: int) -> BaseException:
        """The reason why no worker comes up."""
        if self._start_error is not None:
            return self._start_error
        reason = self._last_death
        if self._init_error is not None:
            reason = f"{type(self._init_error).__name__}: {self._init_error}"
        error = InitializerError(
            f"{failures} workers in a row ended before they were ready; the last: {reason}",
            failures,
        )
        error.__cause__ = self._init_error
        return error

    def _on_too_late(self, worker: int, is_beginning: bool) -> None:
        """A worker takes too long for its initializer, or for leaving."""
        channel = self._channels[worker]
        if is_beginning:
            channel.init_failed = True
            self._init_error = TimeoutError("the initializer did not return within init_timeout")
        else:
            _log.warning(
                "worker %d took longer than exit_timeout to leave; it is ended", channel.pid
            )
        channel.signal()

    def name_of(self, unit: Travelling) -> str:
        """What a worker that has this unit is at."""
        job = self.deliveries.job_at(unit, unit.done)
        return job.name() if job else ""

    # Tasks

    def send(self, worker: int, units: list[Travelling]) -> None:
        """Send tasks to a worker, with the functions that it does not have yet."""
        channel = self._channels[worker]
        parts = sender.forgotten(channel)
        for unit in units:
            if isinstance(unit, CallGroup):
                parts += self._of_calls(worker, unit)
                continue
            job = self.jobs.find(unit.job)
            if job is not None and not job.sink.begin():
                self.jobs.forget(job)
                job = None
            if job is None:
                # It was cancelled, or the input of its map failed: nobody waits for the answer.
                self._ledger.answered(worker, unit)
                continue
            parts += sender.function(channel, job)
            if isinstance(unit, ItemGroup):
                unit.prepare()
                parts += sender.group(unit)
                continue
            assert isinstance(unit, Chunk)
            if job.options is not PLAIN:
                self.limits.sent(worker, unit, job)
            parts += sender.chunk(unit, job)
        if parts and not channel.send(parts):
            self._watch.writable_too(channel.socket.fileno(), wanted=True)

    def _of_calls(self, worker: int, unit: CallGroup) -> list[Part]:
        unit.prepare()
        if not unit.items:
            self._ledger.answered(worker, unit)
            return []
        try:
            return sender.group(unit)
        except Exception:
            # A function is not where it was any more.
            self._resending.break_up(worker, unit)
            return []

    def relieve(self, worker: int) -> None:
        """Take back what waits behind the task that a worker is at; if it is at one."""
        first = self._ledger.first_unit(worker)
        if first is not None and self._channels[worker].is_at() == first.number:
            self.take_back(worker)
        else:
            # It may be receiving a large task.
            self._ledger.not_begun(worker)

    def take_back(self, worker: int) -> None:
        """Take back what a worker has not begun, and take what it has finished."""
        channel = self._channels[worker]
        page = channel.recall(self._ledger.last_number)
        # What it has sent is not in the page any more.
        self.hear(worker)
        self._take_page(channel, page)
        self._ledger.taken_back(worker, page.number)

    def _take_page(self, channel: Channel, page: frames.Page) -> None:
        unit = self._ledger.unit(channel.worker, page.number)
        if unit is not None:
            bodies = frames.records(page.body)
            self.deliveries.take_values(channel.worker, unit, page.item, bodies)

    def pid(self, worker: int) -> int:
        """The number of a worker's process."""
        return self._channels[worker].pid

    def hear(self, worker: int) -> None:
        """Take in what a worker has sent so far."""
        channel = self._channels[worker]
        while channel.open and self._read(channel):
            pass

    def end(self, worker: int) -> None:
        """Ask for the end of a worker and its tree."""
        self._channels[worker].signal()

    def retire(self, worker: int) -> None:
        """Tell a worker to leave."""
        channel = self._channels[worker]
        channel.retiring = True
        self.vigils.leaves(worker, time.monotonic())
        self._source.retiring(channel.process)
        if not channel.send([frames.header(frames.QUIT, 0, 0, 0, 0)]):
            self._watch.writable_too(channel.socket.fileno(), wanted=True)

    def _forget_function(self, job: Job) -> None:
        """A job is complete; workers drop its function with the next thing that they get."""
        if job.kind != frames.CALL:
            for channel in self._channels.values():
                if job.number in channel.functions:
                    channel.functions.discard(job.number)
                    channel.stale.append(job.number)

    def _renew_function(self, job: Job) -> None:
        """A job's function has another form now; workers get it again."""
        for channel in self._channels.values():
            channel.functions.discard(job.number)

    # Answers

    def _on_socket(self, channel: Channel, events: int) -> None:
        fd = channel.socket.fileno()
        if events & select.POLLOUT and channel.flush():
            self._watch.writable_too(fd, wanted=False)
        if events & ~select.POLLOUT:
            self._read(channel)
            if not channel.open:
                self._watch.remove(fd)
                if not (channel.retiring or channel.init_failed):
                    # It cannot answer any more: end what is left of it. A worker that is
                    # dying anyway is not changed by this.
                    channel.signal()

    def _read(self, channel: Channel) -> bool:
        """Take in the answers that are there; False when there were none."""
        if channel.logs is not None:
            # What a task has logged comes before its result.
            channel.take_logs()
        answers = channel.read()
        for frame in answers or ():
            self._on_answer(channel, frame)
        if answers and self.memory is not None and self._ledger.first_unit(channel.worker) is None:
            self.memory.check(channel.worker)
        return answers is not None

    def _on_logs(self, channel: Channel) -> None:
        if not channel.take_logs() and channel.logs is not None:
            self._watch.remove(channel.logs.fileno())

    def _on_answer(self, channel: Channel, frame: frames.Frame) -> None:
        worker, kind = channel.worker, frame.kind & frames.KIND
        segment = channel.segments.popleft() if frame.kind & frames.PARCEL else None
        if kind == frames.READY:
            channel.has_barrier = bool(frame.job)
            self.vigils.forget(worker)
            self._ledger.ready(worker, time.monotonic())
            return
        if kind == frames.INITIALIZING:
            self.vigils.begins(worker, time.monotonic())
            return
        if kind == frames.INIT_FAILED:
            channel.init_failed = True
            self._init_error = unpack_error(frame.body)
            return
        unit = self._ledger.unit(worker, frame.number)
        if unit is None:
            return
        if kind == frames.VALUE:
            self.deliveries.take_value(worker, unit, frame.item, frame.body, segment)
        elif kind == frames.VALUES:
            self.deliveries.take_values(worker, unit, frame.item, frames.records(frame.body))
        elif kind == frames.STOPPED:
            self._ledger.handed_back(worker, unit)
        elif kind != frames.BY_VALUE or not self._resending.again(worker, unit):
            self._on_error(worker, unit, unpack_error(frame.body), is_tasks=kind == frames.ERROR)

    def _on_error(
        self, worker: int, unit: Travelling, error: BaseException, *, is_tasks: bool
    ) -> None:
        if isinstance(unit, Chunk):
            job = self.jobs.find(unit.job)
            if self.limits.tries_again(unit, job, error, is_loss=False):
                self._ledger.progressed(worker, 1, tasks=1)
                self._ledger.answered(worker, unit)
                self._note_retry(job)
                return
        error = error if is_tasks else note_unreadable(error)
        self.deliveries.take_error(worker, unit, error)

    def stats(self) -> PoolStats:
        """A picture of this moment."""
        counts = self.deliveries.done, self.deliveries.failed, self._lost, self._retried
        return picture(self._ledger, counts, self)

    # Endings

    def _bury(self, channel: Channel) -> None:
        """A worker and its tree are gone: take what it left, and say what was lost."""
        self._watch.remove(channel.sentinel)
        self._watch.remove(channel.socket.fileno())
        if channel.logs is not None:
            self._watch.remove(channel.logs.fileno())
        while channel.open and self._read(channel):
            pass
        page = channel.page()
        self._take_page(channel, page)
        process = channel.process
        process.join(_REAP)
        self._last_death = self._losses.describe(channel.pid, process.exitcode)
        lost = self._ledger.lost(channel.worker, page.number)
        if lost is not None:
            self._charge(channel, lost)
        del self._channels[channel.worker]
        self.processes.remove(process)
        channel.close()
        self.limits.buried(channel.worker)
        self.vigils.forget(channel.worker)
        self._slots.discard(channel.slot)

    def _charge(self, channel: Channel, lost: Lost[Travelling]) -> None:
        """Put a worker's end down to the item that it ran."""
        unit = lost.unit
        job = self.deliveries.job_at(unit, lost.item)
        error = self.limits.verdict(channel.worker, unit.number)
        is_loss = error is None
        if error is None:
            error = self._loss(channel, unit, lost.item, job)
        self._lost += is_loss
        if isinstance(unit, Chunk) and self.limits.tries_again(unit, job, error, is_loss=is_loss):
            self._note_retry(job)
            return
        self.deliveries.take_loss(unit, lost.item, error, is_last=lost.complete)
        if is_loss and job is not None and job.options.on_worker_lost == "abort":
            self.on_abort(error)

    def _note_retry(self, job: Job | None) -> None:
        self._retried += 1
        if job is not None:
            job.sink.tried_again()

    def _loss(
        self, channel: Channel, unit: Travelling, item: int, job: Job | None
    ) -> WorkerLostError:
        """Say which task is lost, with whom, and why."""
        code, name = channel.process.exitcode, job.name() if job else "its task"
        is_one_of_many = job is not None and job.kind != frames.CALL
        place = unit.place(item) if isinstance(unit, ItemGroup) else unit.first + item
        where = f" (item {place})" if is_one_of_many else ""
        message = f"{self._last_death} while it ran {name}{where}; only this task is lost"
        trace = traceback_in(channel.last_words(), code)
        message += f"\n{trace}" if trace else ""
        attempts = unit.attempts + 1 if isinstance(unit, Chunk) else 1
        return WorkerLostError(message, channel.pid, code, name, attempts, trace)

    def signal_all(self, *, force: bool = False) -> None:
        """Ask for the end of all workers and their trees; any thread may do it."""
        for channel in list(self._channels.values()):
            channel.signal(force=force)

    def bury_all(self, until: float) -> list[int]:
        """Let go of all workers; returns the pids of those that live on at ``until``."""
        late: list[int] = []
        for channel in list(self._channels.values()):
            channel.process.join(max(0.0, until - time.monotonic()))
            if channel.process.is_alive():
                late.append(channel.pid)
            self._bury(channel)
        return late

    def close(self) -> None:
        """No more workers will be started."""
        self._source.close()
