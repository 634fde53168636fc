"""Kinship: whoever was once below a head stays its kin, and nobody else becomes it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from safepool.core.identity import Incarnation, ProcessRow, Snapshot
from safepool.core.kinship import trace

HEAD = Incarnation(10, 100)
OTHER = Incarnation(20, 100)


def seen(*rows: tuple[int, int, int], dead: tuple[int, ...] = ()) -> Snapshot:
    """A look at (pid, parent, start) rows."""
    return Snapshot(
        {
            pid: ProcessRow(pid, start, parent, "Z" if pid in dead else "S")
            for pid, parent, start in rows
        }
    )


def test_an_orphan_stays_with_its_head() -> None:
    """Its parents die one after the other, and the head as well."""
    kin = trace({}, [HEAD], seen((10, 1, 100), (11, 10, 101), (12, 11, 102)))
    assert set(kin.values()) == {HEAD}
    kin = trace(kin, [HEAD], seen((10, 1, 100), (12, 1, 102)))
    assert kin == {Incarnation(12, 102): HEAD}
    assert trace(kin, [], seen((12, 1, 102))) == kin


def test_what_an_orphan_starts_is_kin() -> None:
    """Though no head is above it any more."""
    kin = trace({Incarnation(12, 102): HEAD}, [], seen((12, 1, 102), (13, 12, 103)))
    assert kin[Incarnation(13, 103)] == HEAD


def test_a_number_that_is_handed_out_again_is_no_kin() -> None:
    """Nor are the children of whoever has it now, nor of a dead process."""
    kin = trace(
        {Incarnation(12, 102): HEAD}, [HEAD], seen((10, 1, 100), (12, 1, 900), (13, 12, 901))
    )
    assert kin == {}
    assert trace({Incarnation(12, 102): HEAD}, [], seen((12, 1, 102), dead=(12,))) == {}


def test_each_head_has_its_own() -> None:
    """Heads are nobody's kin, and a child is not older than its parent."""
    look = seen((10, 1, 100), (20, 10, 100), (11, 10, 101), (21, 20, 101), (9, 10, 5))
    kin = trace({}, [HEAD, OTHER], look)
    assert kin == {Incarnation(11, 101): HEAD, Incarnation(21, 101): OTHER}


@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8), st.integers(0, 4)), max_size=8),
    st.lists(st.tuples(st.integers(2, 8), st.integers(1, 4)), max_size=4),
)
def test_no_look_makes_it_raise_or_go_round_for_ever(
    rows: list[tuple[int, int, int]], before: list[tuple[int, int]]
) -> None:
    """Torn looks show circles; pid 1 and unknown start times are never kin."""
    known = {Incarnation(*name): HEAD for name in before}
    kin = trace(known, [Incarnation(2, 1), Incarnation(3, 2)], seen(*rows))
    assert all(name.pid > 1 and name.start for name in kin)
