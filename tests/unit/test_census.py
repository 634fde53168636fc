"""The census: looks at its pace, remembers, and takes nobody for gone without proof."""

from __future__ import annotations

import errno
import math

import pytest

from safepool.census import Census
from safepool.core.identity import Incarnation, ProcessRow, Snapshot
from safepool.host import choose
from safepool.host.base import NoHandle
from tests.unit.test_kinship import HEAD, seen

OWNER = Incarnation(5, 50)


class Table:
    """A process table that the test writes."""

    def __init__(self) -> None:
        self.snapshot = Snapshot()
        self.single: dict[int, ProcessRow] = {}
        self.opened: object = NoHandle.UNKNOWN
        self.looks = 0
        self.problem: OSError | None = None

    def look_all(self, *, tags: bool) -> Snapshot:
        self.looks += 1
        if self.problem is not None:
            raise self.problem
        return self.snapshot

    def row(self, pid: int) -> ProcessRow | None:
        return self.single.get(pid)

    def open(self, name: Incarnation) -> object:
        assert name == OWNER
        return self.opened


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    monkeypatch.setattr(choose, "_name", "portable")
    return Table()


def census_of(table: Table) -> Census:
    return Census(table, OWNER)  # type: ignore[arg-type]  # the part of a host that it asks


def test_where_the_kernel_keeps_orphans_nobody_looks(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It costs nothing there."""
    monkeypatch.setattr(choose, "_name", "linux")
    census = census_of(table)
    census.soon()
    census.take([HEAD])
    assert (census.wake_at, census.delay, table.looks) == (math.inf, 0.0, 0)


def test_it_looks_when_it_is_time_and_no_earlier(table: Table) -> None:
    """Again and again in between the same answer; a new head is looked at soon."""
    census = census_of(table)
    table.snapshot = seen((10, 1, 100), (11, 10, 101))
    census.take([HEAD])
    table.snapshot = seen((10, 1, 100))
    census.take([HEAD])
    assert table.looks == 1
    assert census.of() == census.of(HEAD) == {Incarnation(11, 101)}
    assert census.of(OWNER) == frozenset()
    census.soon()
    census.take([HEAD])
    assert (table.looks, census.of()) == (2, frozenset())


def test_a_look_that_misses_somebody_forgets_nobody(table: Table) -> None:
    """Who is not in a torn look is asked for by number."""
    census = census_of(table)
    table.snapshot = seen((10, 1, 100), (11, 10, 101))
    census.take([HEAD])
    table.snapshot, table.single = seen((10, 1, 100)), {11: ProcessRow(11, 101, 1)}
    census.soon()
    census.take([HEAD])
    assert census.of() == {Incarnation(11, 101)}


def test_without_descriptors_it_forgets_nobody_and_goes_on(table: Table) -> None:
    """A look that fails is no look."""
    census = census_of(table)
    table.snapshot = seen((10, 1, 100), (11, 10, 101))
    census.take([HEAD])
    table.problem = OSError(errno.EMFILE, "none left")
    census.soon()
    census.take([HEAD])
    assert census.of() == {Incarnation(11, 101)}
    assert 0 < census.wake_at < math.inf


@pytest.mark.parametrize(
    ("answer", "is_gone"), [(NoHandle.GONE, True), (NoHandle.UNKNOWN, False), ("handle", False)]
)
def test_the_owner_is_gone_only_when_that_is_certain(
    table: Table, answer: object, is_gone: bool
) -> None:
    """An owner that cannot be told is alive."""
    table.opened = answer
    census = census_of(table)
    census.take([])
    assert census.owner_is_gone is is_gone
