"""What a pool is given to do, on its way into the ledger.

Calls that come one behind the other go into one group, and so do the items on a pile: as
many as have come while the engine was busy with something else.

Called by: the engine, in its thread.
"""

from __future__ import annotations

from collections.abc import Callable

from safepool.core.ledger import Ledger
from safepool.deliveries import Travelling
from safepool.groups import Call, CallGroup, Pile, calls_of
from safepool.jobs import PLAIN, Chunk, Job, Jobs
from safepool.latch import Latch
from safepool.limits import Limits
from safepool.results import Sink


class Intake:
    """For one engine. After ``stopped`` is set nothing is taken in; ``end_error`` says why."""

    def __init__(
        self,
        ledger: Ledger[Travelling],
        jobs: Jobs,
        limits: Limits,
        stopped: Latch,
        end_error: Callable[[], BaseException],
    ) -> None:
        self.calls: list[Call] = []
        self._ledger = ledger
        self._jobs = jobs
        self._limits = limits
        self._stopped = stopped
        self._end_error = end_error
        self._is_closing = False

    def take_job(self, job: Job, chunk: Chunk) -> None:
        """A job of one chunk."""
        if self._admit(job):
            chunk.priority = job.options.priority
            self._ledger.submitted([chunk])

    def take_call(self, call: Call) -> None:
        """A call, to be submitted with those that follow."""
        if self._stopped.is_set():
            call.sink.fail(self._end_error(), tell=False)
        else:
            self.calls.append(call)

    def submit_calls(self) -> None:
        """No more follow for now."""
        calls, self.calls = self.calls, []
        self._ledger.submitted([CallGroup(calls)])

    def take_pile(self, pile: Pile) -> None:
        """Items of an open job."""
        group = pile.take()
        job = self._jobs.find(group.job)
        if group.items and job is not None:
            group.priority = job.options.priority
            self._ledger.submitted([group])

    def open(self, job: Job) -> None:
        """A job whose items follow."""
        if self._admit(job):
            self._ledger.source_opened()
            if self._is_closing:
                job.sink.lift_limit()

    def take_chunk(self, chunk: Chunk) -> None:
        """A chunk of an open job."""
        job = self._jobs.find(chunk.job)
        if job is not None:
            chunk.priority = job.options.priority
            self._ledger.submitted([chunk])

    def end_input(self, job: Job, items: int, error: BaseException | None) -> None:
        """An open job has so many items and no more."""
        if self._jobs.find(job.number) is not None:
            self._jobs.input_ended(job, items, error)
        if not self._stopped.is_set():
            self._ledger.source_ended()

    @staticmethod
    def refuse(sink: Sink, error: BaseException) -> None:
        """A job that cannot be run."""
        sink.fail(error, tell=True)

    def close(self) -> None:
        """Take in what is there, and what open jobs still have."""
        self._is_closing = True
        self._ledger.closed()
        self._jobs.lift_limits()

    def fail_all(self, *, tell: bool) -> None:
        """End all that was taken in; from here on nothing is."""
        self._stopped.set()
        calls, self.calls = self.calls, []
        calls += calls_of(self._ledger.terminated())
        self._jobs.fail_calls(calls, self._end_error, tell=tell)
        self._jobs.fail_all(self._end_error, tell=tell)

    def _admit(self, job: Job) -> bool:
        if self._stopped.is_set():
            job.sink.fail(self._end_error(), tell=False)
            return False
        self._jobs.add(job)
        if job.options is not PLAIN:
            self._limits.admitted(job)
        return True
