"""What the ledger deals in: units of work, what is to be done with them, and what became of them.

Values only. Called by: the ledger, the engine and its crew.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

from safepool.core.values import dataclass


class Unit:
    """What is sent as a whole: ``size`` items of a job; ``done`` of them are resolved."""

    __slots__ = ("done", "index", "job", "nbytes", "number", "size")

    def __init__(self, job: int, index: int, size: int, nbytes: int) -> None:
        self.job = job
        self.index = index
        self.size = size
        self.nbytes = nbytes
        self.number = 0
        self.done = 0


U = TypeVar("U", bound=Unit)


@dataclass(frozen=True)
class Start:
    """Start so many workers and report each with ``started`` or ``start_failed``."""

    count: int


@dataclass(frozen=True)
class Send(Generic[U]):
    """Offer these units to a worker, in this order."""

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
    """What a worker is doing; ``job`` is that of the unit that it has had longest, 0 for none.
    ``since``: the instant (monotonic) at which it got that, or answered the one before."""

    worker: int
    is_ready: bool
    is_retiring: bool
    job: int
    since: float
