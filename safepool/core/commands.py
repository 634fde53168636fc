"""What the ledger deals in: units of work, what is to be done with them, and what became of them.

Values only. Called by: the ledger, the engine and its crew.
"""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar

from safepool.core.values import dataclass


class Unit:
    """What is sent as a whole: ``size`` items, of which ``done`` are resolved.

    ``first``: the position of its first item in the input of its job.
    ``is_group``: its items are tasks of their own, which travel together because they are
    quick. ``may_split``: it may be cut, so that several workers have a part of it.
    ``is_rest``: it was cut already, for the sake of a worker that had nothing to do.
    ``lane``, ``turn``: where the ledger has put it, and when it would be begun if all had
    come alone.
    ``priority``: the higher, the sooner.
    ``missed``: so many workers died that had got it as the next thing to do.
    """

    __slots__ = (
        "done", "first", "is_rest", "job", "lane", "may_split", "missed", "nbytes", "number",
        "priority", "size", "turn",
    )  # fmt: skip

    is_group = False

    def __init__(
        self, job: int, first: int, size: int, nbytes: int, *, may_split: bool = False
    ) -> None:
        self.job = job
        self.first = first
        self.size = size
        self.nbytes = nbytes
        self.may_split = may_split
        self.is_rest = False
        self.missed = 0
        self.lane = self.turn = -1
        self.priority = 0
        self.number = 0
        self.done = 0

    def holds(self, job: Any) -> bool:
        """Are there items of this job in it?"""
        return bool(self.job == job.number)

    def split(self: U, at: int) -> U:  # noqa: PYI019 - typing.Self needs Python 3.11
        """Cut it; what is returned has the items from ``at`` on, of which none has begun."""
        raise TypeError(f"{type(self).__name__} cannot be cut")

    def deal(self: U, ways: int) -> list[U]:  # noqa: PYI019 - typing.Self needs Python 3.11
        """Deal it out like cards: the first has items 0, ``ways``, 2 ``ways`` and so on.

        What is no group stays whole."""
        return [self]


U = TypeVar("U", bound=Unit)


@dataclass(frozen=True)
class Start:
    """Start so many workers and report each with ``started`` or ``start_failed``."""

    count: int


@dataclass(frozen=True)
class Send(Generic[U]):
    """Send these units to a worker, in this order."""

    worker: int
    units: list[U]


@dataclass(frozen=True)
class TakeBack:
    """Take back what the worker has not begun and report it with ``taken_back``."""

    worker: int


@dataclass(frozen=True)
class Retire:
    """Let the worker leave; it has nothing to do and gets nothing more."""

    worker: int


@dataclass(frozen=True)
class Break:
    """Workers cannot be brought up: fail all, end all. ``failures`` in a row."""

    failures: int


@dataclass(frozen=True)
class Finish:
    """Everything is resolved and no worker is left."""


Command = Start | Send[U] | TakeBack | Retire | Break | Finish


@dataclass(frozen=True)
class Lost(Generic[U]):
    """``item`` of ``unit`` was running when its worker died; ``complete``: none is left to run."""

    unit: U
    item: int
    complete: bool


class Occupant(NamedTuple):
    """What a worker is doing; ``unit`` is the one that it has had longest, None for none.
    ``since``: the instant (monotonic) at which it got that, or answered the one before."""

    worker: int
    is_ready: bool
    is_retiring: bool
    unit: Any
    since: float
