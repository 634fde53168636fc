"""A chunk's values are safe before the next item begins, whatever they are."""

from __future__ import annotations

import os
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safepool.copies import Copies
from safepool.core import frames
from safepool.item_run import NEVER, ItemRun
from safepool.parcels import Packed

VALUES = st.one_of(
    st.sampled_from([None, True, "text", 1.5]),
    st.integers(),
    st.lists(st.none(), max_size=3),
    st.sampled_from([bytes(size) for size in (0, 3000, 30_000, 65_600)]),
)
RUNS = st.lists(st.tuples(VALUES, st.integers(1, 40)), max_size=12)


class Interrupts:
    """Records whether Ctrl-C would be let in."""

    in_task = False


class Owner:
    """Knows what the owner would know if the worker were killed now."""

    def __init__(self) -> None:
        self.page = memoryview(bytearray(frames.PAGE_BYTES))
        self.sent: list[tuple[int, bytes]] = []

    def send(self, kind: int, number: int, item: int, body: Packed) -> None:
        assert number == 7
        assert kind in (frames.VALUE, frames.VALUES)
        assert isinstance(body, bytes)
        self.sent.append((item, body if kind == frames.VALUES else frames.record(body)))

    def knows(self, first: int) -> list[Any]:
        """The values from ``first`` on; those in the page may have been sent as well."""
        page = frames.read_page(self.page)
        assert page.number == 7
        values: list[Any] = []
        for item, body in [*self.sent, (page.item, page.body)]:
            place = item - first
            assert place <= len(values), "a gap"
            for data, times in frames.records(body):
                values[place : place + times] = [pickle.loads(data)] * times
                place += times
        return values


@given(RUNS, st.integers(0, 5), st.booleans())
def test_each_value_is_known_before_the_next_item_begins(
    runs: list[tuple[Any, int]], first: int, star: bool
) -> None:
    """Short and long, repeated and not; a changed list is not taken for the old one."""
    values = [value for value, times in runs for _ in range(times)]
    items = range(len(values))
    owner, interrupts = Owner(), Interrupts()
    frames.write_page(owner.page, 7, first)
    chunk = ItemRun(owner.page, NEVER, 7, first, owner.send, Copies())

    def task(place: int) -> Any:
        assert interrupts.in_task
        assert owner.knows(first) == values[:place]
        assert chunk.item == first + place
        return values[place]

    given = tuple((item,) for item in items) if star else tuple(items)
    chunk.run(task, given, interrupts, star=star, by_value=False)
    assert not interrupts.in_task
    chunk.flush()
    assert owner.knows(first) == values
    assert frames.read_page(owner.page).body == b""


def test_a_value_that_the_task_changes_is_kept_as_it_was() -> None:
    """One list, returned again and again: each time as it is then."""
    owner, shared = Owner(), []
    frames.write_page(owner.page, 7, 0)
    chunk = ItemRun(owner.page, NEVER, 7, 0, owner.send, Copies())

    def task(item: int) -> list[int]:
        shared.append(item)
        return shared

    chunk.run(task, (1, 2), Interrupts(), star=False, by_value=False)
    assert owner.knows(0) == [[1], [1, 2]]


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, StopIteration])
def test_an_error_ends_the_chunk_where_it_came(error: type[BaseException]) -> None:
    """What was finished is known, and which item failed; StopIteration is an error as any."""
    owner, interrupts = Owner(), Interrupts()
    frames.write_page(owner.page, 7, 0)
    chunk = ItemRun(owner.page, NEVER, 7, 0, owner.send, Copies())

    def task(item: int) -> None:
        if item == 5:
            raise error

    with pytest.raises(error):
        chunk.run(task, tuple(range(9)), interrupts, star=False, by_value=False)
    assert not interrupts.in_task
    assert chunk.item == 5
    assert owner.knows(0) == [None] * 5


def test_a_fork_that_returns_from_an_item_ends_there() -> None:
    """It writes nothing into the page that it shares with the worker."""
    owner, me = Owner(), os.getpid()
    reader, writer = os.pipe()
    frames.write_page(owner.page, 7, 0)
    chunk = ItemRun(owner.page, NEVER, 7, 0, owner.send, Copies())

    def task(item: int) -> None:
        if item == 2:
            child = os.fork()
            if child:
                assert os.waitpid(child, 0)[1] == 0
        else:
            os.write(writer, b"x")

    try:
        chunk.run(task, tuple(range(4)), Interrupts(), star=False, by_value=False)
    finally:
        if os.getpid() != me:
            os._exit(9)
    assert os.read(reader, 100) == b"xxx"
    assert owner.knows(0) == [None] * 4
    os.close(reader)
    os.close(writer)


@given(st.integers(1, 30), st.integers(0, 30), st.integers(0, 8))
def test_a_recall_stops_before_the_next_item(count: int, when: int, number: int) -> None:
    """What was begun goes on; of a task that is recalled nothing more is begun."""
    owner = Owner()
    frames.write_page(owner.page, 7, 0)
    cell = frames.recall_cell(owner.page)
    chunk = ItemRun(owner.page, cell, 7, 0, owner.send, Copies())
    begun: list[int] = []

    def task(item: int) -> int:
        begun.append(item)
        if item == when:
            frames.recall(owner.page, number)
        return item

    chunk.run(task, range(count), Interrupts(), star=False, by_value=False)
    expected = min(when + 1, count) if number >= 7 else count
    assert begun == list(range(expected))
    assert chunk.item == expected
    assert owner.knows(0) == begun


def test_an_item_with_another_answer_is_passed_over() -> None:
    """A task of a group that fails leaves the others as they are."""
    owner = Owner()
    frames.write_page(owner.page, 7, 0)
    run = ItemRun(owner.page, NEVER, 7, 0, owner.send, Copies())

    def task(item: int) -> int:
        return 6 // (item - 2)

    with pytest.raises(ZeroDivisionError):
        run.run(task, range(5), Interrupts(), star=False, by_value=False)
    run.flush()
    assert run.item == 2
    run.skip()
    assert frames.read_page(owner.page) == (7, 3, b"")
    run.run(task, range(3, 5), Interrupts(), star=False, by_value=False)
    run.flush()
    assert [item for item, _ in owner.sent] == [0, 3]
    assert run.item == 5
