"""Which task is where: the deciding half of the engine.

Events go in (submitted, started, ready, answered, taken back, lost, closed,
terminated), commands come out of ``advance``: Start, Send, TakeBack, Retire, Break,
Finish. Every item is resolved once and is never with two workers at a time:

* A unit (one call, or one chunk of a map) is queued, or with one worker, or resolved.
* When a worker is lost, what it had not begun is queued again at the front; of the
  unit that it ran, just the item in progress is charged with the death, and the
  items behind it are queued again.
* A worker gets more than one unit at a time only while its units are quick: as many
  as make about QUICK seconds of work. If it is then held up while another is idle,
  its waiting units are taken back. Two tasks that wait for each other so never end
  up behind each other in one worker.
* Workers that die before they are ready are replaced a bounded number of times.

Pure: ``now`` is a parameter, units are opaque but for size and bytes. Called by the engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Generic

from safepool.core.commands import (
    Break,
    Command,
    Finish,
    Lost,
    Occupant,
    Retire,
    Send,
    Start,
    TakeBack,
    U,
)

QUICK = 0.005
STALLED = 0.005
SHORTEST_PAUSE, LONGEST_PAUSE = 0.025, 1.0
"""Seconds between attempts to start a worker when the system refuses: doubled each time."""
MOST_UNITS = 64
MOST_BYTES = 1 << 16
ALONE = MOST_BYTES + 1
"""The bytes of a unit that shares no worker's time with others, if it is smaller than that."""


class _Seat(Generic[U]):
    """A worker as the ledger sees it."""

    __slots__ = ("fresh", "nbytes", "pace", "ready", "retiring", "served", "since", "units")

    def __init__(self) -> None:
        self.units: dict[int, U] = {}
        self.ready = False
        self.retiring = False
        self.served = 0
        self.nbytes = 0
        self.fresh = 0
        self.since = 0.0
        self.pace: float | None = None

    def depth(self) -> int:
        """How many units it may hold: one until it has shown itself quick."""
        if self.pace is None or self.pace >= QUICK:
            return 1
        return max(1, min(MOST_UNITS, int(QUICK / max(self.pace, 1e-6))))


class Ledger(Generic[U]):
    """The book of one pool with ``processes`` workers, each for at most ``lifetime`` units."""

    def __init__(self, processes: int, lifetime: int | None = None) -> None:
        self._processes = processes
        self._lifetime = lifetime
        self._queue: deque[U] = deque()
        self._seats: dict[int, _Seat[U]] = {}
        self._numbers = 0
        self._unresolved = 0
        self._sources = 0
        self._failures = 0
        self._refusals = 0
        self._start_again_at = 0.0
        self._closed = False
        self._ended = False
        self._finished = False

    # Events

    def submitted(self, units: Iterable[U]) -> None:
        """New units, to run after those that are there."""
        before = len(self._queue)
        self._queue.extend(units)
        self._unresolved += len(self._queue) - before

    def source_opened(self) -> None:
        """A job will submit more units later; the pool is not finished before it has."""
        self._sources += 1

    def source_ended(self) -> None:
        """A job has submitted its last unit."""
        self._sources -= 1

    def started(self, worker: int) -> None:
        """A worker process exists; it is not ready yet."""
        self._seats[worker] = _Seat()

    def start_failed(self, now: float) -> None:
        """A worker process could not be made: the system refused it, perhaps not for long."""
        self._refusals += 1
        self._start_again_at = now + min(LONGEST_PAUSE, SHORTEST_PAUSE * 2**self._refusals)

    def ready(self, worker: int, now: float) -> None:
        """A worker is past its initializer."""
        seat = self._seats[worker]
        seat.ready = True
        seat.since = now
        self._failures = 0
        self._refusals = 0

    def unit(self, worker: int, number: int) -> U | None:
        """The unit of this number if the worker has it."""
        seat = self._seats.get(worker)
        return seat.units.get(number) if seat else None

    def queued(self) -> int:
        """Items that wait for a worker, or in one behind the unit that it is at."""
        behind = (unit for seat in self._seats.values() for unit in list(seat.units.values())[1:])
        return sum(unit.size - unit.done for unit in (*self._queue, *behind))

    def occupants(self) -> list[Occupant]:
        """What each worker is doing."""
        return [
            Occupant(
                worker,
                seat.ready,
                seat.retiring,
                next((unit.job for unit in seat.units.values()), 0),
                seat.since,
            )
            for worker, seat in self._seats.items()
        ]

    def holders(self, job: int) -> list[int]:
        """The workers that have units of this job."""
        return [
            worker
            for worker, seat in self._seats.items()
            if any(unit.job == job for unit in seat.units.values())
        ]

    def answered(self, worker: int, unit: U) -> None:
        """The worker is through with a unit."""
        seat = self._seats[worker]
        del seat.units[unit.number]
        seat.nbytes -= unit.nbytes
        seat.served += 1
        seat.fresh += 1
        self._unresolved -= 1

    def postponed(self) -> None:
        """A unit that was resolved is to run again, but not yet."""
        self._unresolved += 1

    def resumed(self, unit: U) -> None:
        """Now it is."""
        if not self._ended:
            self._queue.append(unit)

    def bounced(self, worker: int, unit: U) -> None:
        """The worker could not read the unit; it goes out again, in another form."""
        seat = self._seats[worker]
        del seat.units[unit.number]
        seat.nbytes -= unit.nbytes
        self._queue.appendleft(unit)

    def taken_back(self, worker: int, numbers: Iterable[int]) -> None:
        """These units of the worker were not begun and never will be there."""
        seat = self._seats[worker]
        units = [seat.units.pop(number) for number in numbers if number in seat.units]
        seat.nbytes -= sum(unit.nbytes for unit in units)
        self._queue.extendleft(reversed(units))

    def lost(self, worker: int, unclaimed: Iterable[int]) -> Lost[U] | None:
        """The worker is gone; ``unclaimed`` are the numbers that it had not begun.

        Returns the item that the death is put down to, if there is one.
        """
        seat = self._seats.pop(worker)
        if not seat.ready:
            self._failures += 1
        left = set(unclaimed)
        waiting = [unit for number, unit in seat.units.items() if number in left]
        begun = [unit for number, unit in seat.units.items() if number not in left]
        ran = begun[0] if begun else None
        # The worker begins one unit at a time; more can only be here if claims went missing.
        self._queue.extendleft(reversed(begun[1:] + waiting))
        if ran is None:
            return None
        item = ran.done
        ran.done = item + 1
        complete = ran.done >= ran.size
        if complete:
            self._unresolved -= 1
        else:
            self._queue.appendleft(ran)
        return Lost(ran, item, complete)

    def closed(self) -> None:
        """No more jobs come; those that are there are done."""
        self._closed = True

    def terminated(self) -> list[U]:
        """Nothing is run any more. Returns all units that were not resolved."""
        self._closed = self._ended = True
        units = list(self._queue)
        self._queue.clear()
        for seat in self._seats.values():
            units.extend(seat.units.values())
            seat.units.clear()
        self._unresolved = self._sources = 0
        return units

    # Commands

    def advance(self, now: float) -> list[Command[U]]:
        """What to do now. Call it again until it is empty: the answers to TakeBack and Start
        are events."""
        commands: list[Command[U]] = []
        failures = self._failures
        if not any(seat.ready for seat in self._seats.values()):
            # While others work, a refusal is no reason to give up.
            failures += self._refusals
        if not self._ended and failures >= self._processes + 2:
            self._ended = True
            commands.append(Break(failures))
        if not self._ended:
            for seat in self._seats.values():
                if seat.fresh:
                    self._measure(seat, now)
            self._even_out(commands, now)
            if self._queue and not commands:
                self._hand_out(commands, now)
            self._retire(commands)
            missing = self._processes - len(self._seats)
            may_start = now >= self._start_again_at and not self._is_idle_for_good()
            if missing > 0 and may_start:
                commands.append(Start(missing))
        if self._closed and not self._seats and not self._finished and self._is_idle_for_good():
            self._finished = True
            commands.append(Finish())
        return commands

    def look_again_in(self, now: float) -> float | None:
        """Seconds until ``advance`` may want something although no event came; None: never."""
        if self._ended:
            return None
        if len(self._seats) < self._processes and self._start_again_at > now:
            return self._start_again_at - now
        if self._queue:
            return None
        held = [seat.since for seat in self._seats.values() if len(seat.units) > 1]
        if not held or all(seat.units for seat in self._seats.values() if seat.ready):
            return None
        return max(0.0, min(held) + STALLED - now)

    # Deciding

    def _is_idle_for_good(self) -> bool:
        return self._ended or (self._closed and not self._unresolved and not self._sources)

    @staticmethod
    def _measure(seat: _Seat[U], now: float) -> None:
        """Take the mean time of the units that were answered since the last look."""
        took = (now - seat.since) / seat.fresh
        seat.pace = took if seat.pace is None else 0.7 * seat.pace + 0.3 * took
        seat.since = now
        seat.fresh = 0

    def _hand_out(self, commands: list[Command[U]], now: float) -> None:
        seats = [
            (len(seat.units), worker)
            for worker, seat in self._seats.items()
            if seat.ready and not seat.retiring
        ]
        seats.sort()
        for position, (held, worker) in enumerate(seats):
            if not self._queue:
                break
            seat = self._seats[worker]
            depth = seat.depth()
            if held and held > depth // 2:
                continue
            share = -(-len(self._queue) // (len(seats) - position))
            room = max(1, min(depth - held, share))
            units = self._take(seat, room)
            if units:
                if not held:
                    seat.since = now
                commands.append(Send(worker, units))

    def _take(self, seat: _Seat[U], room: int) -> list[U]:
        """Move up to ``room`` units from the queue to a seat; many only if they are small."""
        if self._lifetime is not None:
            room = min(room, self._lifetime - seat.served - len(seat.units))
        units: list[U] = []
        while self._queue and len(units) < room:
            unit = self._queue[0]
            if seat.units and seat.nbytes + unit.nbytes > MOST_BYTES:
                break
            self._queue.popleft()
            self._numbers += 1
            unit.number = self._numbers
            seat.units[unit.number] = unit
            seat.nbytes += unit.nbytes
            units.append(unit)
        return units

    def _even_out(self, commands: list[Command[U]], now: float) -> None:
        """Take back what waits behind a task that takes its time, if somebody has none."""
        idle = any(
            seat.ready and not seat.units and not seat.retiring for seat in self._seats.values()
        )
        if not idle:
            return
        for worker, seat in self._seats.items():
            if len(seat.units) > 1 and now - seat.since >= STALLED:
                # The worker's pace was misleading; start over with one at a time.
                seat.pace = None
                seat.since = now
                commands.append(TakeBack(worker))

    def _retire(self, commands: list[Command[U]]) -> None:
        through = self._is_idle_for_good()
        for worker, seat in self._seats.items():
            used_up = self._lifetime is not None and seat.served >= self._lifetime
            if not seat.retiring and (through or used_up):
                seat.retiring = True
                commands.append(Retire(worker))
