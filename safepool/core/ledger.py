"""Which task is where: the deciding half of the engine.

Events go in (submitted, started, ready, progressed, answered, taken back, lost, closed,
terminated), commands come out of ``advance``: Start, Send, TakeBack, Retire, Break,
Finish. Every item is resolved once and is never with two workers at a time:

* A unit (a call, a chunk of a map, a group of either's items) is queued, or with one
  worker, or resolved. What may be cut is cut when it is handed out, to what the worker may hold.
* When a worker is lost, what it had not begun is queued again at the front; of the
  unit that it ran, just the item in progress is charged with the death, and the
  items behind it are queued again.
* If a worker is held up, what it has not begun is taken back, out of the midst of a
  group as well.
* Workers that die before they are ready are replaced a bounded number of times.

How much a worker may hold is in ``dealing``, what is next for it in ``lanes``.
Pure: ``now`` is a parameter, units are opaque but for size and bytes. Called by the engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic

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
from safepool.core.dealing import Seat
from safepool.core.lanes import Lanes
from safepool.core.levels import Levels
from safepool.core.staffing import Staff

SHORTEST_PAUSE, LONGEST_PAUSE = 0.025, 1.0
"""Seconds between attempts to start a worker when the system refuses: doubled each time."""

MOST_MISSES = 3
"""So many workers may die before they begin what they have got. Then it is put down to that:
its bytes alone may be more than a worker can take."""


class Ledger(Generic[U]):
    """The book of one pool with ``processes`` workers, each for at most ``lifetime`` tasks."""

    def __init__(
        self, processes: int, lifetime: int | None = None, staff: Staff | None = None
    ) -> None:
        self._staff = staff or Staff(processes)
        self._lifetime = lifetime
        self._waiting: Levels[U] = Levels(processes)
        self._seats: dict[int, Seat[U]] = {}
        self._numbers = 0
        self._postponed = 0
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
        self._waiting.add(units)

    def source_opened(self) -> None:
        """A job will submit more units later; the pool is not finished before it has."""
        self._sources += 1

    def source_ended(self) -> None:
        """A job has submitted its last unit."""
        self._sources -= 1

    def started(self, worker: int) -> None:
        """A worker process exists; it is not ready yet."""
        self._seats[worker] = Seat()

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

    @property
    def last_number(self) -> int:
        """No unit has a greater number yet."""
        return self._numbers

    def unit(self, worker: int, number: int) -> U | None:
        """The unit of this number if the worker has it."""
        seat = self._seats.get(worker)
        return seat.units.get(number) if seat else None

    def first_unit(self, worker: int) -> U | None:
        """The unit that the worker has had longest."""
        seat = self._seats.get(worker)
        return next(iter(seat.units.values()), None) if seat else None

    def queued(self) -> int:
        """Items that wait for a worker, or in one behind the item that it is at."""
        waiting = sum(unit.size - unit.done for unit in self._waiting)
        return waiting + sum(max(0, seat.held() - 1) for seat in self._seats.values())

    def occupants(self) -> list[Occupant]:
        """What each worker is doing."""
        return [
            Occupant(
                worker,
                seat.ready,
                seat.retiring,
                next(iter(seat.units.values()), None),
                seat.since,
            )
            for worker, seat in self._seats.items()
        ]

    def holders(self, job: Any) -> list[int]:
        """The workers that have items of this job."""
        return [
            worker
            for worker, seat in self._seats.items()
            if any(unit.holds(job) for unit in seat.units.values())
        ]

    def progressed(self, worker: int, count: int, *, tasks: int) -> None:
        """The worker is through with so many items, which are so many ``tasks`` of its life."""
        seat = self._seats[worker]
        seat.fresh += count
        seat.served += tasks

    def answered(self, worker: int, unit: U) -> None:
        """All of a unit is resolved."""
        del self._seats[worker].units[unit.number]

    def leave(self, worker: int) -> None:
        """The worker is to leave when it is through with what it has begun."""
        self._seats[worker].leaving = True

    def resize(self, size: int) -> None:
        """Have so many workers from now on; who is too many leaves after what it has begun."""
        self._staff.resize(size)
        self._waiting.resize(size)
        staying = [seat for seat in self._seats.values() if not (seat.retiring or seat.leaving)]
        staying.sort(key=lambda seat: (seat.ready, seat.held()))
        for seat in self._seats.values():
            seat.lane = None
        for seat in staying[: max(0, len(staying) - size)]:
            seat.leaving = True

    def postponed(self) -> None:
        """A unit that was resolved is to run again, but not yet."""
        self._postponed += 1

    def resumed(self, unit: U) -> None:
        """Now it is."""
        self._postponed -= 1
        if not self._ended:
            self._waiting.add([unit])

    def bounced(self, worker: int, number: int, units: list[U]) -> None:
        """The worker could not read the unit of this number; these go out in its place."""
        unit = self._seats[worker].units.pop(number)
        for each in units:
            each.lane, each.turn, each.priority = unit.lane, unit.turn, unit.priority
        self._waiting.put_back(units)

    def taken_back(self, worker: int, number: int) -> None:
        """Nothing of what the worker has will be begun there, but for the item that it is at in
        the unit ``number``: its next one after those that are resolved."""
        seat = self._seats[worker]
        begun = seat.units.get(number)
        waiting = [unit for unit in seat.units.values() if unit is not begun]
        seat.units.clear()
        if begun is not None:
            seat.units[number] = begun
            if begun.may_split and begun.size - begun.done > 1:
                rest = self._waiting.cut(begun, begun.done + 1)
                rest.is_rest = True
                waiting.insert(0, rest)
        self._waiting.put_back(waiting)

    def not_begun(self, worker: int) -> None:
        """There was nothing to be taken back yet: the worker has not begun what it has."""
        self._seats[worker].recalled = False

    def handed_back(self, worker: int, unit: U) -> None:
        """The worker saw in time that nothing more was to be begun; what is not resolved of the
        unit was not."""
        del self._seats[worker].units[unit.number]
        self._waiting.put_back([unit])

    def lost(self, worker: int, number: int) -> Lost[U] | None:
        """The worker is gone; it was at the unit of this number, if it had that.

        Returns the item that the death is put down to, if there is one.
        """
        seat = self._seats.pop(worker)
        if not seat.ready:
            self._failures += 1
        if number not in seat.units and seat.units:
            following = next(iter(seat.units.values()))
            following.missed += 1
            if following.missed >= MOST_MISSES:
                number = following.number
        ran = seat.units.pop(number, None)
        self._waiting.put_back(list(seat.units.values()))
        if ran is None:
            return None
        item = ran.done
        ran.done = item + 1
        complete = ran.done >= ran.size
        if not complete:
            self._waiting.put_back([ran])
        return Lost(ran, item, complete)

    def closed(self) -> None:
        """No more jobs come; those that are there are done."""
        self._closed = True

    def terminated(self) -> list[U]:
        """Nothing is run any more. Returns all units that were not resolved."""
        self._closed = self._ended = True
        units = list(self._waiting)
        self._waiting.clear()
        for seat in self._seats.values():
            units.extend(seat.units.values())
            seat.units.clear()
        self._postponed = self._sources = 0
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
        if not self._ended and failures >= self._staff.size + 2:
            self._ended = True
            commands.append(Break(failures))
        if not self._ended:
            for seat in self._seats.values():
                if seat.fresh:
                    seat.measure(now)
            if self._waiting:
                self._hand_out(commands, now)
            self._even_out(commands, now)
            self._retire(commands, now)
            missing = self._missing()
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
        if self._missing() > 0 and self._start_again_at > now:
            return self._start_again_at - now
        others_wait = self._do_others_wait()
        waits: list[float | None] = []
        for seat in self._seats.values():
            patience = seat.patience(others_wait=others_wait)
            if patience is not None:
                waits.append(seat.since + patience - now)
            elif seat.is_open() and not seat.units:
                waits.append(self._staff.idle_for(seat.since, now))
        least = min((wait for wait in waits if wait is not None), default=None)
        return None if least is None else max(0.0, least)

    # Deciding

    def _is_idle_for_good(self) -> bool:
        if self._ended or not self._closed:
            return self._ended
        is_some_left = self._waiting or self._postponed or self._sources
        return not is_some_left and not any(seat.units for seat in self._seats.values())

    def _do_others_wait(self) -> bool:
        """Is there a worker that could do something, and nothing left for it?"""
        return not self._waiting and any(
            seat.is_open() and not seat.units for seat in self._seats.values()
        )

    def _missing(self) -> int:
        """How many workers are to be started."""
        staff = self._staff
        if staff.wanted < staff.size:
            busy = sum(bool(seat.units) for seat in self._seats.values())
            staff.need(busy, self._waiting.top().waiting())
        return staff.wanted - len(self._seats)

    def _hand_out(self, commands: list[Command[U]], now: float) -> None:
        hungry = sorted(
            (held, worker)
            for worker, seat in self._seats.items()
            if seat.is_open() and ((held := seat.held()) <= seat.depth() // 2)
        )
        if not hungry:
            return
        waiting = self._waiting.top().waiting()
        for position, (held, worker) in enumerate(hungry):
            seat = self._seats[worker]
            units = self._take(worker, -(-waiting // (len(hungry) - position)))
            if units:
                waiting -= sum(unit.size - unit.done for unit in units)
                if not held:
                    seat.since = now
                commands.append(Send(worker, units))

    def _lane_for(self, worker: int, lanes: Lanes[U]) -> int | None:
        """Where the next unit for a worker is; None: there is none."""
        seat = self._seats[worker]
        if not seat.units:
            lane = lanes.first()
            for other in self._seats.values():
                if other.lane == lane:
                    other.lane = None
            seat.lane = lane
        return seat.lane

    def _take(self, worker: int, share: int) -> list[U]:
        """Move units to a worker, about ``share`` items at most; those that are large or slow
        one at a time."""
        seat, units = self._seats[worker], []
        room = seat.room(share)
        lanes = self._waiting.top()
        lane = self._lane_for(worker, lanes)
        while room > 0 and lane is not None:
            unit = lanes.head(lane)
            if unit is None:
                break
            if self._lifetime is not None:
                left = seat.tasks_left(self._lifetime)
                if left <= 0:
                    break
                if unit.is_group:
                    room = min(room, left)
            if seat.units and not seat.fits_behind(unit, room):
                break
            lanes.pop(lane)
            most = seat.most(unit, room, len(self._seats))
            if most < unit.size - unit.done:
                lanes.put_back([lanes.cut(unit, unit.done + most)])
            self._numbers += 1
            unit.number = self._numbers
            seat.units[unit.number] = unit
            seat.recalled = False
            units.append(unit)
            room -= unit.size - unit.done
        return units

    def _even_out(self, commands: list[Command[U]], now: float) -> None:
        """Take back what waits behind a task that takes its time."""
        others_wait = self._do_others_wait()
        for worker, seat in self._seats.items():
            patience = seat.patience(others_wait=others_wait)
            if patience is not None and now - seat.since >= patience:
                seat.start_over(now)
                commands.append(TakeBack(worker))

    def _retire(self, commands: list[Command[U]], now: float) -> None:
        through = self._is_idle_for_good()
        for worker, seat in self._seats.items():
            if seat.retiring or seat.units:
                continue
            used_up = self._lifetime is not None and seat.served >= self._lifetime
            idle_for = self._staff.idle_for(seat.since, now)
            if through or used_up or (seat.leaving and seat.ready):
                pass
            elif seat.ready and idle_for is not None and idle_for <= 0:
                self._staff.one_left()
            else:
                continue
            seat.retiring = True
            commands.append(Retire(worker))
