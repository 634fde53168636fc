"""Keeps the limits of a pool's tasks: time, attempts, and the program's change of mind.

A task whose time is over is ended with its worker and that worker's whole tree; it is
reported when all that is gone, never before. Other tasks of the pool go on.

Called by: the engine and its crew, in the engine's thread.
"""

from __future__ import annotations

import time
from typing import Protocol

from safepool.core.agenda import Agenda
from safepool.core.ledger import Ledger
from safepool.errors import TaskTimeoutError
from safepool.groups import Group
from safepool.jobs import Chunk, Job, Jobs
from safepool.results import Sink

Travelling = Chunk | Group

_SOME = 1000
"""Deadlines of jobs that have ended, which may be kept."""


class Workers(Protocol):
    """What of the crew is needed here."""

    jobs: Jobs

    def pid(self, worker: int) -> int:
        """The number of a worker's process."""

    def hear(self, worker: int) -> None:
        """Take in what a worker has sent so far."""

    def take_back(self, worker: int) -> None:
        """Take back what a worker has not begun."""

    def end(self, worker: int) -> None:
        """Ask for the end of a worker and its tree."""


class _Condemned:
    """A job that is over; its sink is told once the workers that ran it are gone."""

    def __init__(self, sink: Sink, error: BaseException, workers: set[int]) -> None:
        self.sink = sink
        self.error = error
        self.workers = workers


class Limits:
    """For one crew and its ledger."""

    def __init__(self, workers: Workers, ledger: Ledger[Travelling]) -> None:
        self._workers = workers
        self._ledger = ledger
        self._clocks: dict[int, tuple[float, int, Job]] = {}
        self._deadlines: Agenda[int] = Agenda()
        self._retries: Agenda[Chunk] = Agenda()
        self._verdicts: dict[int, tuple[int, BaseException]] = {}
        self._condemned: list[_Condemned] = []

    def wait(self, now: float) -> float | None:
        """Seconds until something is due; None: nothing ever."""
        waits = [self._deadlines.wait(now), self._retries.wait(now)]
        waits += [max(0.0, due - now) for due, _, _ in self._clocks.values()]
        return min((wait for wait in waits if wait is not None), default=None)

    def carry_out(self) -> None:
        """Do what is due."""
        now = time.monotonic()
        for unit in self._retries.take(now):
            self._ledger.resumed(unit)
        for worker, (due, number, job) in list(self._clocks.items()):
            if due <= now:
                del self._clocks[worker]
                self._time_out(worker, number, job)
        for number in self._deadlines.take(now):
            late = self._workers.jobs.find(number)
            if late is not None:
                self._expire(late)

    def admitted(self, job: Job) -> None:
        """A job was submitted just now."""
        if job.options.deadline is None:
            return
        jobs = self._workers.jobs
        if len(self._deadlines) > 2 * len(jobs) + _SOME:
            # Most have ended long before their time.
            self._deadlines.keep_only(jobs.find)
        self._deadlines.add(job.submitted_at + job.options.deadline, job.number)

    def sent(self, worker: int, unit: Chunk, job: Job) -> None:
        """A unit went to a worker. With a timeout that has nothing else, so one clock is enough."""
        if job.options.timeout is not None:
            self._clocks[worker] = time.monotonic() + job.options.timeout, unit.number, job

    def verdict(self, worker: int, number: int) -> BaseException | None:
        """Why this worker was ended while it ran that unit; None: it died of itself."""
        named, error = self._verdicts.pop(worker, (-1, None))
        return error if named == number else None

    def condemn(self, worker: int, number: int, error: BaseException) -> None:
        """End a worker because of the unit that it is at, which then fails with ``error``."""
        self._verdicts[worker] = number, error
        self._workers.end(worker)

    def tries_again(
        self, unit: Chunk, job: Job | None, error: BaseException, *, is_loss: bool
    ) -> bool:
        """Note one more attempt that failed; True if there will be another."""
        unit.attempts += 1
        unit.strikes += is_loss
        if job is None or unit.size != 1:
            return False
        delay = job.options.delay_of_retry(unit.attempts, unit.strikes, error, is_loss=is_loss)
        if delay is None:
            return False
        unit.done, unit.values, unit.errors = 0, [], None
        self._ledger.postponed()
        self._retries.add(time.monotonic() + delay, unit)
        return True

    def end_job(self, job: Job, error: BaseException, *, kill: bool) -> bool:
        """End a job with ``error``, and the workers that run it; False if it is over already,
        or it has begun and ``kill`` is not wanted."""
        if job.is_over:
            return False
        running = set()
        for worker in self._ledger.holders(job):
            self._workers.take_back(worker)
            if worker in self._ledger.holders(job):
                running.add(worker)
        # What was heard from the workers meanwhile may have been the job's end.
        if self._is_over(job) or (running and not kill):
            return False
        self._workers.jobs.forget(job)
        for worker in running:
            self._workers.end(worker)
        if running:
            self._condemned.append(_Condemned(job.sink, error, running))
        else:
            job.sink.fail(error, tell=True)
        return True

    @staticmethod
    def _is_over(job: Job) -> bool:
        return job.is_over

    def buried(self, worker: int) -> None:
        """A worker and its tree are gone."""
        self._verdicts.pop(worker, None)
        self._clocks.pop(worker, None)
        for each in self._condemned:
            each.workers.discard(worker)
            if not each.workers:
                each.sink.fail(each.error, tell=True)
        self._condemned = [each for each in self._condemned if each.workers]

    def _time_out(self, worker: int, number: int, job: Job) -> None:
        if self._ledger.unit(worker, number) is None:
            return
        self._workers.hear(worker)
        if self._ledger.unit(worker, number) is None:
            return  # its answer was there already
        seconds = job.options.timeout or 0.0
        pid = self._workers.pid(worker)
        message = f"{job.name()} ran longer than {seconds:g} s; its worker {pid} was ended"
        self.condemn(worker, number, TaskTimeoutError(message, "timeout", seconds, pid))

    def _expire(self, job: Job) -> None:
        seconds = job.options.deadline or 0.0
        message = f"{job.name()} was not done {seconds:g} s after it was submitted"
        self.end_job(job, TaskTimeoutError(message, "deadline", seconds), kill=True)
