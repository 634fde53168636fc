"""Tasks that travel together because they are quick: calls, or items of an imap.

They are tasks of their own: each has its own outcome, and one that fails, is cancelled or
kills its worker leaves the others alone. How many go together is decided when they are
handed out (see core.dealing); they are pickled then, all at once.

Only plain values may wait for that, which nobody can change and which any worker can
read. All else is *sealed*: pickled at once, in the thread that gives it to the pool, so that
errors and later changes are that caller's. What is large, or may be unknown to a worker
because it is defined in the main module, travels alone.

Called by: the pool and the feeder (make them), the engine and its crew.
"""

from __future__ import annotations

import pickle
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from types import BuiltinFunctionType, FunctionType
from typing import Any, TypeVar

from safepool import payload
from safepool.core import frames
from safepool.core.commands import Unit
from safepool.jobs import PLAIN, Chunk, Job, new_number
from safepool.parcels import Packed
from safepool.results import Sink

SCALARS = frozenset({int, float, bool, complex, type(None)})
_SHORT = 256
_FEW = 16
_PLAIN_BYTES = 64
"""What a plain value is taken for, which is at most a few times as much."""
MOST_SEALED = 1 << 14
"""Bytes of a pickle that may travel in a group."""


def is_plain(value: Any, depth: int = 2) -> bool:
    """Is it small, unchangeable, and the same in every process?"""
    kind = type(value)
    if kind in SCALARS:
        return True
    if kind is str or kind is bytes:
        return len(value) <= _SHORT
    if kind is tuple and depth:
        return len(value) <= _FEW and all(is_plain(each, depth - 1) for each in value)
    return False


class Functions:
    """Which functions can go by name: pickle finds them where they say they are."""

    def __init__(self, *, by_value: bool) -> None:
        self.by_value = by_value
        self._by_name: set[Any] = set()

    def make_plain(self, function: Any, args: Any, kwds: Any) -> bool:
        """Can this call wait, and go in a group's pickle? No keywords is the usual case."""
        if type(args) is not tuple or type(kwds) is not dict or kwds:
            return False
        for each in args:
            if type(each) not in SCALARS and not is_plain(each, 1):
                return False
        return len(args) <= _FEW and self.are_by_name(function)

    def are_by_name(self, function: Any) -> bool:
        """Can it travel in a group's pickle? Cheap for a function that was asked for before."""
        kind = type(function)
        if kind is not FunctionType and kind is not BuiltinFunctionType:
            return False
        if function in self._by_name:
            return True
        name = getattr(function, "__qualname__", "")
        where = getattr(function, "__module__", None) or ""
        module = sys.modules.get(where)
        if self.by_value and where == "__main__":
            return False
        if getattr(module, name, None) is not function:
            return False
        self._by_name.add(function)
        return True

    def forget(self, function: Any) -> None:
        """A worker could not find it."""
        self._by_name.discard(function)


class Call(Job):
    """A job of one call that may travel in a group; ``sealed``: its pickle, if it is not plain."""

    __slots__ = ("args", "kwds", "sealed")

    kind = frames.CALL
    body = b""
    by_value = False
    options = PLAIN
    submitted_at = 0.0

    def __init__(
        self,
        sink: Sink,
        function: Any,
        args: Iterable[Any],
        kwds: Mapping[str, Any],
        sealed: bytes | None,
    ) -> None:
        # Not the constructor of Job: this one is a good part of what a quick call costs.
        self.number = 0
        self.is_over = False
        self.sink = sink
        self.function = function
        self.args = args
        self.kwds = kwds
        self.sealed = sealed

    def alone(self, *, by_value: bool) -> Chunk:
        """Make what travels alone of it. Raises what pickling it raises."""
        self.number = new_number()
        call = (self.function, self.args, self.kwds)
        body: Packed
        if self.sealed is not None:
            body = self.sealed
        else:
            body = payload.dumps_call(*call, by_value=by_value)
        again = not by_value and payload.names_main(body)
        return Chunk(self, 0, 1, body, call if again else None)


class Pile:
    """Items of an imap, one behind the other, that the engine has not taken yet."""

    __slots__ = ("first", "is_noticed", "items", "job", "sealed")

    def __init__(self, job: Job, first: int, *, sealed: bool) -> None:
        self.job = job
        self.first = first
        self.sealed = sealed
        self.items: deque[Any] = deque()
        self.is_noticed = False

    def take(self) -> ItemGroup:
        """The engine: take what is there."""
        # Before the look: the feeder adds an item first and reads this afterwards.
        self.is_noticed = False
        pop = self.items.popleft
        items = [pop() for _ in range(len(self.items))]
        group = ItemGroup(self.job.number, self.first, items, sealed=self.sealed)
        self.first += len(items)
        return group


class Group(Unit):
    """Several tasks; ``items`` has those that are not known to be done when it is sent."""

    __slots__ = ("items",)

    is_group = True
    base = 0

    def __init__(self, job: int, first: int, items: list[Any], nbytes: int) -> None:
        super().__init__(job, first, len(items), nbytes, may_split=True)
        self.items = items

    def part(self: G, which: slice) -> G:  # noqa: PYI019 - typing.Self needs Python 3.11
        """Make a group of some of its items."""
        raise NotImplementedError

    def split(self: G, at: int) -> G:  # noqa: PYI019 - typing.Self needs Python 3.11
        """Cut it."""
        rest = self.part(slice(at, None))
        self.nbytes -= rest.nbytes
        del self.items[at:]
        self.size = at
        return rest

    def deal(self: G, ways: int) -> list[G]:  # noqa: PYI019 - typing.Self needs Python 3.11
        """Deal it out."""
        if ways == 1:
            return [self]
        return [self.part(slice(place, None, ways)) for place in range(min(ways, self.size))]

    def _keep(self, items: list[Any]) -> None:
        """Have these instead, none of them begun."""
        self.nbytes = self.nbytes * len(items) // max(1, self.size)
        self.items = items
        self.size = len(items)
        self.done = 0

    def body(self) -> bytes:
        """Pickle it."""
        raise NotImplementedError


G = TypeVar("G", bound=Group)


class ItemGroup(Group):
    """Items of one map, each ``step`` behind the one before; ``sealed``: each is a pickle."""

    __slots__ = ("sealed", "step")

    def __init__(
        self, job: int, first: int, items: list[Any], *, sealed: bool, step: int = 1
    ) -> None:
        nbytes = sum(map(len, items)) if sealed else _PLAIN_BYTES * len(items)
        super().__init__(job, first, items, nbytes)
        self.sealed = sealed
        self.step = step

    def place(self, item: int) -> int:
        """The position of an item in the input."""
        return self.first + item * self.step

    def part(self, which: slice) -> ItemGroup:
        """Make a group of some of its items."""
        step = self.step * (which.step or 1)
        first = self.place(which.start)
        return ItemGroup(self.job, first, self.items[which], sealed=self.sealed, step=step)

    def prepare(self) -> None:
        """It is about to be sent, perhaps once more."""
        if self.done:
            self.first = self.place(self.done)
            self._keep(self.items[self.done :])

    def body(self) -> bytes:
        """Pickle what is not done."""
        return pickle.dumps(self.items, 5)

    def alone(self, job: Job) -> list[Chunk]:
        """Make what travels alone of the items that are not done."""
        chunks = []
        for item in range(self.done, self.size):
            place = self.place(item)
            plain = payload.loads(self.items[item]) if self.sealed else self.items[item]
            body = payload.dumps_items((plain,), place, by_value=job.by_value)
            chunks.append(Chunk(job, place, 1, body, (plain,)))
        return chunks


class CallGroup(Group):
    """Calls, each of which is a job of its own."""

    __slots__ = ()

    def __init__(self, calls: list[Call]) -> None:
        nbytes = sum(_PLAIN_BYTES if call.sealed is None else len(call.sealed) for call in calls)
        super().__init__(0, 0, calls, nbytes)

    def holds(self, job: Any) -> bool:
        """Is this call in it, and not done?"""
        return any(call is job for call in self.items[self.done :])

    def part(self, which: slice) -> CallGroup:
        """Make a group of some of its calls."""
        return CallGroup(self.items[which])

    def prepare(self) -> None:
        """It is about to be sent: leave out whom nobody wants any more."""
        wanted = []
        for call in self.items[self.done :]:
            if not call.is_over:
                if call.sink.begin():
                    wanted.append(call)
                else:
                    call.is_over = True
        self._keep(wanted)

    def body(self) -> bytes:
        """Pickle it. Raises what pickle says of a function that is not where it was any more."""
        return pickle.dumps(
            [
                (call.function, call.args, call.kwds) if call.sealed is None else call.sealed
                for call in self.items
            ],
            5,
        )


def calls_of(units: Iterable[Unit]) -> list[Call]:
    """The calls of these units' groups that somebody waits for."""
    return [
        call
        for unit in units
        if isinstance(unit, CallGroup)
        for call in unit.items[unit.done :]
        if not call.is_over
    ]
