"""Takes what workers answer into units, and hands it to the sinks of the jobs.

A chunk is handed over when all of it is there, or its first error. Of a group each item is
handed over as it comes. What is known already is passed over: it may stand in the worker's
page and in its socket.

Called by: the crew, in the engine's thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from safepool import payload
from safepool.core.ledger import Ledger
from safepool.groups import CallGroup, Group, ItemGroup
from safepool.jobs import Chunk, Job, Jobs, unreadable
from safepool.parcels import opened
from safepool.segments import Segment

Travelling = Chunk | Group
"""What the ledger's units are here."""


class Deliveries:
    """For one crew; counts what became of items."""

    def __init__(self, jobs: Jobs, ledger: Ledger[Travelling]) -> None:
        self.done = 0
        self.failed = 0
        self._jobs = jobs
        self._ledger = ledger

    def job_at(self, unit: Travelling, item: int) -> Job | None:
        """The job that an item belongs to; None: nobody waits for it any more."""
        if isinstance(unit, CallGroup):
            call: Job = unit.items[item]
            return None if call.is_over else call
        return self._jobs.find(unit.job)

    def take_value(
        self, worker: int, unit: Travelling, item: int, body: bytes, segment: Segment | None
    ) -> None:
        """One value, with a segment that has its large buffers."""
        if item - unit.base != unit.done:
            return
        value, errors = None, None
        try:
            value = _loaded(body, segment)
        except BaseException as error:
            errors = {0: unreadable(error, "a result", "")}
        self._advance(worker, unit, [value], errors)

    def take_values(
        self, worker: int, unit: Travelling, item: int, bodies: Iterable[tuple[bytes, int]]
    ) -> None:
        """Values from ``item`` of the unit's body on, each with how often it stands there."""
        start = unit.done
        place = item - unit.base - start
        values: list[Any] = []
        errors: dict[int, BaseException] | None = None
        for body, times in bodies:
            place += times
            new = place - len(values)
            if new <= 0:
                continue
            try:
                # More than one only of what cannot be changed: they may be one object.
                value = payload.loads(body)
            except BaseException as error:
                errors = errors or {}
                errors[len(values)] = unreadable(error, "a result", "")
                value = None
            if new == 1:
                values.append(value)
            else:
                values += [value] * new
        if values:
            self._advance(worker, unit, values, errors)

    def take_error(self, worker: int, unit: Travelling, error: BaseException) -> None:
        """What the worker was at has failed; with it the rest of a chunk has."""
        if isinstance(unit, Group):
            self._advance(worker, unit, [None], {0: error})
            return
        self._ledger.progressed(worker, unit.size - unit.done, tasks=1)
        self._ledger.answered(worker, unit)
        unit.fail(unit.done, error)
        self.hand_over(unit)

    def take_loss(
        self, unit: Travelling, item: int, error: BaseException, *, is_last: bool
    ) -> None:
        """An item was lost with its worker; ``is_last``: nothing of the unit is left to run."""
        if isinstance(unit, Group):
            self._put(unit, item, [None], {0: error})
            return
        unit.fail(item, error)
        if is_last:
            self.hand_over(unit)

    def hand_over(self, unit: Chunk) -> None:
        """A chunk is complete."""
        failed = len(unit.errors or ())
        self.failed += failed
        self.done += len(unit.values) - failed
        self._jobs.deliver(unit.job, unit.first, unit.size, unit.values, unit.errors)

    def _advance(
        self,
        worker: int,
        unit: Travelling,
        values: list[Any],
        errors: dict[int, BaseException] | None,
    ) -> None:
        """The next items of a unit have these outcomes."""
        count = len(values)
        start = unit.done
        unit.done += count
        is_through = unit.done >= unit.size
        tasks = count if unit.is_group else int(is_through)
        self._ledger.progressed(worker, count, tasks=tasks)
        if is_through:
            self._ledger.answered(worker, unit)
        if isinstance(unit, Group):
            self._put(unit, start, values, errors)
            return
        unit.values += values
        if errors:
            unit.errors = unit.errors or {}
            unit.errors.update({start + place: error for place, error in errors.items()})
        if is_through:
            self.hand_over(unit)

    def _put(
        self,
        unit: Group,
        start: int,
        values: list[Any],
        errors: dict[int, BaseException] | None,
    ) -> None:
        """Hand over what came of some items of a group."""
        failed = len(errors or ())
        self.failed += failed
        self.done += len(values) - failed
        if not isinstance(unit, CallGroup):
            assert isinstance(unit, ItemGroup)
            first, count = unit.place(start), len(values)
            self._jobs.deliver(unit.job, first, count, values, errors, unit.step)
            return
        for place, call in enumerate(unit.items[start : start + len(values)]):
            if not call.is_over:
                call.is_over = True
                if errors and place in errors:
                    call.sink.put(0, 1, [None], {0: errors[place]})
                else:
                    call.sink.put(0, 1, values[place : place + 1], None)


def _loaded(body: bytes, segment: Segment | None) -> Any:
    return payload.loads(body) if segment is None else opened(body, segment, private=False)
