"""Sends tasks again, in another form, that a worker could not read as they were.

A chunk or a call goes once more by value, without names of the main module. A group is
broken up: each of its tasks goes alone, and what is wrong with one is its own error.

Called by: the crew, in the engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable

from safepool.core.ledger import Ledger
from safepool.deliveries import Travelling
from safepool.groups import CallGroup, Functions, Group, ItemGroup, calls_of
from safepool.jobs import Job, Jobs


class Resending:
    """``renew`` is called with a job whose function has changed its form."""

    def __init__(
        self,
        jobs: Jobs,
        ledger: Ledger[Travelling],
        functions: Functions,
        renew: Callable[[Job], None],
    ) -> None:
        self._jobs = jobs
        self._ledger = ledger
        self._functions = functions
        self._renew = renew

    def again(self, worker: int, unit: Travelling) -> bool:
        """Queue a task again whose names its worker does not know; once, and if we can."""
        if isinstance(unit, Group):
            self.break_up(worker, unit)
            return True
        job = self._jobs.find(unit.job)
        if job is None:
            return False
        was_by_value = job.by_value
        if not unit.pickle_by_value(job):
            return False
        if job.by_value and not was_by_value:
            self._renew(job)
        unit.nbytes = max(unit.nbytes, len(unit.body))
        self._ledger.bounced(worker, unit.number, [unit])
        return True

    def break_up(self, worker: int, unit: Group) -> None:
        """Queue each task of a group for itself, in the group's place."""
        chunks: list[Travelling] = []
        if isinstance(unit, CallGroup):
            for call in calls_of([unit]):
                self._functions.forget(call.function)
                try:
                    chunks.append(call.alone(by_value=self._functions.by_value))
                except Exception as error:
                    call.is_over = True
                    call.sink.put(0, 1, [None], {0: error})
                else:
                    self._jobs.add(call)
        elif isinstance(unit, ItemGroup):
            job = self._jobs.find(unit.job)
            chunks += unit.alone(job) if job else []
        self._ledger.bounced(worker, unit.number, chunks)
