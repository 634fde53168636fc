"""imap and imap_unordered: lazy input, errors in their places, and an end in every case."""

from __future__ import annotations

import itertools
import multiprocessing
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import safepool
from safepool.errors import PoolTerminatedError
from safepool.pool import SafePool
from tests.kit import truth
from tests.pool import tasks

BOUND = 60


@pytest.fixture(scope="module")
def pool() -> Iterator[SafePool]:
    """One pool of two workers."""
    with SafePool(2, context=safepool.get_context("fork")) as opened:
        yield opened


def failing(count: int) -> Iterator[int]:
    yield from range(count)
    raise KeyError("the input is broken")


class Counted:
    """Counts how much was read of an endless input."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.read += 1
        return self.read - 1


def test_an_endless_input_is_read_little_by_little(pool: SafePool) -> None:
    """So many items ahead of a consumer that stops, not for ever."""
    for view, most in ((pool, 10_000), (pool.options(max_pending=300), 1301)):
        endless = Counted()
        iterator = view.imap(tasks.square, endless)
        assert [next(iterator) for _ in range(1000)] == [n * n for n in range(1000)]
        assert endless.read <= most
    with SafePool(2, context=safepool.get_context("fork")) as other:
        endless = Counted()
        iterator = other.imap_unordered(tasks.square, endless, 10)
        next(iterator)
        assert endless.read < 2500
        del iterator


@pytest.mark.parametrize("chunksize", [1, 2, 4])
def test_an_input_that_raises(pool: SafePool, chunksize: int) -> None:
    """Results of whole chunks before it come first, then the input's own error, then the end."""
    whole = 10 // chunksize * chunksize
    iterator = pool.imap(tasks.square, failing(10), chunksize)
    assert [next(iterator) for _ in range(whole)] == [n * n for n in range(whole)]
    with pytest.raises(KeyError, match="the input is broken") as caught:
        next(iterator)
    assert caught.value.__cause__ is None
    with pytest.raises(StopIteration):
        next(iterator)
    with pytest.raises(KeyError):
        list(pool.imap_unordered(tasks.square, failing(10), chunksize))
    with pytest.raises(KeyError):
        pool.map(tasks.square, failing(10), chunksize)
    assert pool.apply(tasks.square, (5,)) == 25


def test_a_map_whose_input_raises_on_the_way(pool: SafePool) -> None:
    """An input with a length that breaks off fails the map, and the pool goes on."""

    class Broken(list[int]):
        def __iter__(self) -> Iterator[int]:
            return failing(20)

    for chunksize in (1, 3, 50):
        with pytest.raises(KeyError):
            pool.map_async(tasks.square, Broken(range(100)), chunksize).get(BOUND)
    assert pool.map(tasks.square, range(5)) == [0, 1, 4, 9, 16]


def test_errors_do_not_end_the_iteration(pool: SafePool) -> None:
    """After the error of one item next() gives the next one."""
    iterator = pool.imap(lambda n: 1 // (n - 2), range(5))
    got: list[Any] = []
    for _ in range(5):
        try:
            got.append(iterator.next(BOUND))
        except ZeroDivisionError:
            got.append("error")
    assert got == [-1, -1, "error", 1, 0]
    with pytest.raises(StopIteration):
        next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)


def test_an_input_that_waits_for_results(pool: SafePool) -> None:
    """The input may be fed from the results of the same iteration."""
    source: queue.Queue[int | None] = queue.Queue()
    source.put(1)
    got = []
    for value in pool.imap_unordered(lambda n: n + 1, iter(source.get, None)):
        got.append(value)
        source.put(value if value < 20 else None)
    assert got == list(range(2, 21))


def test_a_blocked_input_holds_up_nobody(pool: SafePool) -> None:
    """While one job's input waits, other calls are answered."""
    go = threading.Event()

    def blocked() -> Iterator[int]:
        yield 1
        assert go.wait(BOUND)
        yield 2

    iterator = pool.imap(tasks.square, blocked())
    assert iterator.next(BOUND) == 1
    assert pool.map(tasks.square, range(5)) == [0, 1, 4, 9, 16]
    with pytest.raises(multiprocessing.TimeoutError):
        iterator.next(0.01)
    go.set()
    assert iterator.next(BOUND) == 4


def test_close_reads_the_rest() -> None:
    """close() and join() run everything, also what nobody has consumed yet."""
    pool = SafePool(2, context=safepool.get_context("fork"))
    ordered = pool.imap(tasks.square, range(1500))
    unordered = pool.imap_unordered(tasks.square, range(1500), 7)
    pool.close()
    pool.join()
    assert list(ordered) == [n * n for n in range(1500)]
    assert sorted(unordered) == [n * n for n in range(1500)]


def test_an_iterator_keeps_its_pool() -> None:
    """A pool that only its iterator refers to works until the last result."""
    pool = SafePool(2, context=safepool.get_context("fork"))
    engine = pool._engine
    iterator = pool.imap(tasks.square, range(1000))
    del pool
    with pytest.warns(ResourceWarning, match="unclosed running"):
        got = list(iterator)
    engine.join()
    assert got == [n * n for n in range(1000)]


def test_iterating_after_the_with_block(tmp_path: Path) -> None:
    """Results that never come are an error, not an endless wait."""
    with SafePool(2, context=safepool.get_context("fork"), grace=0.5) as pool:
        iterator = pool.imap(tasks.touch_and_hang, [str(tmp_path / "a")])
        truth.until((tmp_path / "a").exists, "the task never began", BOUND)
    with pytest.raises(PoolTerminatedError):
        iterator.next(BOUND)
    with pytest.raises(StopIteration):
        iterator.next(BOUND)


def test_large_windows_for_large_chunks(pool: SafePool) -> None:
    """Chunks larger than the window do not stop the reading."""
    got = list(pool.imap(tasks.square, itertools.islice(itertools.count(), 5000), 1000))
    assert got == [n * n for n in range(5000)]
