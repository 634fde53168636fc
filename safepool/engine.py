"""The engine of a pool: one thread that asks the ledger what to do and does it.

It waits for the workers' sockets and sentinels and for its inbox, and never for one
worker alone. Other threads only put events into the inbox. Its crew owns the
workers; the ledger knows where each task is.

The engine knows no pool object, so a dropped pool can be collected and end its
engine. Users' code runs in this thread in two places, callbacks and unpickling, and
nothing that it raises gets further than its task.

An end is asked for in three ways: ``close`` (do what is there, then leave), ``stop`` (end
everything), and a crew that cannot be brought up (then ``broken`` is the reason). Every
end is bounded: what does not end politely is forced, what cannot be forced is reported.

Called by: the pool and its feeder.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing import util
from typing import Any

from safepool.channel import WorkerProcess, WorkerSource
from safepool.core.commands import Break, Command, Finish, Retire, Send, Start, TakeBack
from safepool.core.ledger import Ledger
from safepool.core.policy import DEFAULT_KILL_TIMEOUT
from safepool.crew import Crew
from safepool.deliveries import Travelling
from safepool.errors import PoolTerminatedError
from safepool.groups import Call, Functions, Pile
from safepool.intake import Intake
from safepool.jobs import Chunk, Job, fresh
from safepool.latch import Latch
from safepool.loop import signals_blocked
from safepool.results import Sink
from safepool.size_settings import SizeSettings
from safepool.stats import PoolStats
from safepool.waiting import Answer, Inbox, Watch
from safepool.worker_life import WorkerLife

_log = logging.getLogger("safepool")

_SLACK = 1.0
"""Seconds beyond grace and kill timeout until the engine stops waiting for a worker's end."""


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def _cancelled(job: Job) -> BaseException:
    from safepool.cancellation import TaskCancelledError

    return TaskCancelledError(f"{job.name()} was cancelled")


class Engine:
    """Runs so many workers from ``source``; see the module's text. ``grace``: seconds that
    ``source`` takes at most between asking a worker to end and forcing it.
    """

    is_serial = False

    def __init__(
        self,
        source: WorkerSource,
        sizes: SizeSettings,
        grace: float,
        functions: Functions,
        life: WorkerLife,
    ) -> None:
        self.broken: BaseException | None = None
        self._source = source
        self._staff = sizes.staff()
        self._patience = grace + DEFAULT_KILL_TIMEOUT + _SLACK
        self._inbox = Inbox()
        self._watch = Watch()
        self._ledger: Ledger[Travelling] = Ledger(sizes.size, sizes.lifetime, self._staff)
        self._crew = Crew(source, self._ledger, self._watch, functions, life, sizes.max_rss)
        self._crew.on_abort = self._abort
        self._limits = self._crew.limits
        self._jobs = self._crew.jobs
        self._finished = False
        self._deadline: float | None = None
        self._stopped = Latch()
        self._intake = Intake(
            self._ledger, self._jobs, self._limits, self._stopped, self._end_error
        )
        self._ended = Latch()
        self._thread = threading.Thread(target=self._run, name="safepool-engine", daemon=True)
        self._finalizer: Any = None

    # Any thread of the owner

    @property
    def processes(self) -> list[WorkerProcess]:
        """The workers' processes, as they are now."""
        return self._crew.processes

    def start(self) -> None:
        """Start all workers and the thread; on an error nothing is left and it is raised."""
        try:
            self._watch.add(self._inbox.fileno(), lambda _events: self._inbox.hear())
            for _ in range(self._staff.wanted):
                self._crew.start()
            self._finalizer = util.Finalize(None, self._terminate_at_exit, exitpriority=15)
            _engines.add(self)
            # Signals are for the program's own threads.
            with signals_blocked():
                self._thread.start()
        except BaseException:
            if self._thread.is_alive():
                # Only one thread may bury the workers, and it is that one.
                self.terminate()
                raise
            self._ledger.terminated()
            self._crew.signal_all()
            self._end(time.monotonic() + self._patience)
            raise

    def is_own_thread(self) -> bool:
        """Is the caller a callback, which the engine waits for?"""
        return threading.current_thread() is self._thread

    def submit(self, job: Job, chunk: Chunk) -> None:
        """Run a job of one chunk."""
        self._post(self._intake.take_job, job, chunk)

    def call(self, call: Call) -> None:
        """Run a call, alone or with others."""
        self._post(self._intake.take_call, call)

    def open(self, job: Job) -> None:
        """Begin a job whose chunks or piles follow and end with ``input_ended``."""
        self._post(self._intake.open, job)

    def add(self, chunk: Chunk) -> None:
        """Run one more chunk of an open job."""
        self._post(self._intake.take_chunk, chunk)

    def notice(self, pile: Pile) -> None:
        """Run the items that are on the pile of an open job."""
        self._post(self._intake.take_pile, pile)

    def add_failed(self, job: Job, first: int, size: int, error: BaseException) -> None:
        """A chunk of an open job that cannot be sent has this outcome instead."""
        self._post(self._jobs.deliver, job.number, first, size, [None], {0: error})

    def input_ended(self, job: Job, items: int, error: BaseException | None) -> None:
        """An open job had so many items, and then the input raised ``error`` (None: ended)."""
        self._post(self._intake.end_input, job, items, error)

    def refuse(self, sink: Sink, error: BaseException) -> None:
        """Fail a job that was never submitted; its callbacks run where others do."""
        self._post(self._intake.refuse, sink, error)

    def cancel(self, job: Job, *, kill: bool) -> bool:
        """End a job that has not begun, with ``kill`` also one that has; False if it is over.

        Waits for the engine's answer, not for the end of a worker.
        """
        if self.is_own_thread():
            return self._limits.end_job(job, _cancelled(job), kill=kill)
        answer = Answer(False)
        self._post(self._on_cancel, job, kill, answer)
        return answer.get()

    def cancel_soon(self, job: Job) -> None:
        """The same with ``kill``, without waiting for the answer."""
        self._post(self._on_cancel, job, True, Answer(False))

    def stats(self) -> PoolStats:
        """A picture of this moment; of an engine that has ended or is held up, without workers."""
        if self.is_own_thread() or self._ended.is_set():
            return self._crew.stats()
        answer: Answer[PoolStats | None] = Answer(None)
        self._post(self._on_stats, answer)
        return answer.get() or PoolStats(0, 0, 0, 0, 0, 0, ())

    def resize(self, size: int) -> None:
        """Have so many workers."""
        self._post(self._ledger.resize, size)

    def close(self) -> None:
        """Take no more jobs; workers leave when all is done."""
        self._post(self._intake.close)

    def stop(self, *, force: bool = False) -> None:
        """End everything; does not wait. May be called at any instruction of any thread.

        ``force``: without asking politely.
        """
        self._post(self._on_stop, force)

    def _terminate_at_exit(self) -> None:
        """At the interpreter's exit: ask all pools first, so that their graces run side by side."""
        for engine in list(_engines):
            engine.stop()
        self.terminate()

    def terminate(self) -> None:
        """End everything and wait for that, at most grace and kill timeout and a little more."""
        self.stop()
        if self.is_own_thread():
            return
        if not self._stopped.wait(_SLACK):
            # The engine is held up in a user's callback: ask the workers without it.
            self._crew.signal_all()
        self._await_end(self._patience + _SLACK)

    def join(self) -> None:
        """Wait until every worker has left and the engine has ended."""
        self._await_end(None)

    def _await_end(self, timeout: float | None) -> None:
        """Wait for the thread. An interrupted Thread.join may take a thread for dead that is not
        (https://github.com/python/cpython/issues/90882), so it is asked only when that is sure."""
        if self._ended.wait(timeout):
            self._thread.join(_SLACK)

    def check(self) -> None:
        """Raise the error that broke the pool, if one did, or what its source has to say."""
        if self.broken is not None:
            raise fresh(self.broken)
        self._source.check()

    def _post(self, handler: Callable[..., None], *arguments: Any) -> None:
        if not self._inbox.put(handler, *arguments):
            self._refuse_rest()

    def _refuse_rest(self) -> None:
        """Answer the events that came after the end."""
        intake = self._intake
        for handler, arguments in self._inbox.take():
            if handler in (intake.refuse, self._on_stats):
                handler(*arguments)
            elif handler == self._on_cancel:
                arguments[2].put(False)
            elif handler in (intake.take_job, intake.open, intake.take_call):
                arguments[0].sink.fail(self._end_error(), tell=False)

    def _end_error(self) -> BaseException:
        if self.broken is not None:
            return fresh(self.broken)
        return PoolTerminatedError("the pool was terminated before this task ended")

    # The engine's thread: the loop

    def _run(self) -> None:
        try:
            while not self._finished:
                self._turn()
        except BaseException:
            self.broken = RuntimeError("the pool's engine failed; its error was logged")
            self.broken.__cause__ = sys.exc_info()[1]
            _log.exception("the pool's engine failed")
            self._crew.signal_all()
            self._intake.fail_all(tell=True)
            self._deadline = time.monotonic() + self._patience
        finally:
            try:
                self._end(self._deadline or 0.0)
            finally:
                self._ended.set()

    def _turn(self) -> None:
        """Once round: events, decisions, waiting, input."""
        self._take_events()
        self._advance()
        self._jobs.wake_sinks()
        if self._finished:
            return
        with self._inbox.asleep() as has_events:
            ready = self._watch.look(0.0 if has_events else self._next_look())
        self._watch.serve(ready)
        self._limits.carry_out()
        now = time.monotonic()
        self._crew.vigils.carry_out(now)
        if self._crew.memory is not None:
            self._crew.memory.carry_out(now)
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._force()

    def _take_events(self) -> None:
        """Calls that came one behind the other go into one group."""
        intake = self._intake
        take_call = intake.take_call
        for handler, arguments in self._inbox.take():
            if intake.calls and handler != take_call:
                intake.submit_calls()
            handler(*arguments)
        if intake.calls:
            intake.submit_calls()

    def _next_look(self) -> float | None:
        """Seconds until something is to be done although nothing comes in; None: never."""
        now = time.monotonic()
        waits = [self._ledger.look_again_in(now), self._limits.wait(now)]
        waits.append(self._crew.vigils.wait(now))
        if self._crew.memory is not None:
            waits.append(self._crew.memory.wait(now))
        if self._deadline is not None:
            waits.append(max(0.0, self._deadline - now))
        return min((wait for wait in waits if wait is not None), default=None)

    def _advance(self) -> None:
        while not self._finished:
            commands = self._ledger.advance(time.monotonic())
            if not commands:
                return
            for command in commands:
                self._carry_out(command)

    def _carry_out(self, command: Command[Travelling]) -> None:
        if isinstance(command, Send):
            self._crew.send(command.worker, command.units)
        elif isinstance(command, TakeBack):
            self._crew.relieve(command.worker)
        elif isinstance(command, Retire):
            self._crew.retire(command.worker)
        elif isinstance(command, Start):
            for _ in range(command.count):
                self._crew.replace()
        elif isinstance(command, Break):
            self.broken = self._crew.why_broken(command.failures)
            self._begin_end(tell=True)
        elif isinstance(command, Finish):
            self._finished = True

    # Events from the inbox

    def _on_cancel(self, job: Job, kill: bool, answer: Answer[bool]) -> None:
        answer.put(self._limits.end_job(job, _cancelled(job), kill=kill))

    def _on_stats(self, answer: Answer[PoolStats | None]) -> None:
        answer.put(self._crew.stats())

    def _on_stop(self, force: bool) -> None:
        # As in multiprocessing, callbacks are not told of an end that the program asked for.
        self._begin_end(tell=False)
        if force:
            self._crew.signal_all(force=True)

    # Endings

    def _abort(self, error: BaseException) -> None:
        """A worker was lost, and the program wants no more of the pool then."""
        if not self._stopped.is_set():
            self.broken = error
            self._begin_end(tell=True)

    def _begin_end(self, *, tell: bool) -> None:
        """Ask all workers to end, and resolve everything that is not."""
        if self._stopped.is_set():
            return
        self._deadline = time.monotonic() + self._patience
        self._crew.signal_all()
        self._intake.fail_all(tell=tell)

    def _force(self) -> None:
        """The time for a polite end is over."""
        self._crew.signal_all(force=True)
        self._report(self._crew.bury_all(time.monotonic() + _SLACK))

    @staticmethod
    def _report(late: list[int]) -> None:
        for pid in late:
            _log.error("worker %d does not end; it is left alone", pid)

    def _end(self, until: float) -> None:
        """The last thing in the engine's thread, or in the constructor's if that failed."""
        try:
            self._report(self._crew.bury_all(until))
            self._crew.close()
        finally:
            self._stopped.set()
            self._inbox.end()
            self._refuse_rest()
            if self._finalizer is not None:
                self._finalizer.cancel()
