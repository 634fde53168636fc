"""Quick tasks travel together, and behave as if each travelled alone."""

from __future__ import annotations

import itertools
import mmap
import os
import pickle
import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import safepool
from safepool import SafePool, WorkerLostError
from safepool.cancellation import TaskCancelledError
from safepool.copies import Copies
from safepool.core import frames
from safepool.host import barrier
from safepool.item_run import NEVER, ItemRun
from tests.pool import tasks

BOUND = 60
MANY = 600


def warm(pool: SafePool) -> SafePool:
    """Have the workers show themselves quick, so that they get many tasks at a time."""
    assert list(pool.imap(tasks.square, range(20_000)))[-1] == 19_999**2
    return pool


@pytest.fixture
def pool() -> Iterator[SafePool]:
    """Two workers."""
    with SafePool(2, context=safepool.get_context("fork"), grace=0.5) as pool:
        yield warm(pool)


@pytest.fixture(params=["with barrier", "without"])
def either_pool(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SafePool]:
    """The same; in the second case of a system that has no membarrier(2)."""
    if request.param == "without":
        monkeypatch.setattr(barrier, "register", lambda: False)
    with SafePool(2, context=safepool.get_context("fork"), grace=0.5) as pool:
        yield warm(pool)


def test_tasks_that_wait_for_each_other(either_pool: SafePool, tmp_path: Path) -> None:
    """None of them ever waits behind the other in one worker."""
    pool = either_pool
    task = partial(tasks.meet, str(tmp_path))
    results = pool.imap(task, range(20))
    assert [results.next(BOUND) for _ in range(20)] == list(range(20))
    warm(pool)
    calls = [pool.apply_async(tasks.meet, (str(tmp_path), item)) for item in range(20, 40)]
    assert [call.get(BOUND) for call in calls] == list(range(20, 40))


def test_results_before_a_slow_task_do_not_wait_for_it(
    either_pool: SafePool, tmp_path: Path
) -> None:
    """They are there while it runs; those behind it are run by others."""
    pool = either_pool
    task = partial(tasks.wait_at, str(tmp_path), slow=300)
    ordered = pool.imap(task, range(MANY))
    assert [ordered.next(BOUND) for _ in range(300)] == list(range(300))
    tasks.wait_for_file(str(tmp_path / "slow"))
    (tmp_path / "go").touch()
    assert [ordered.next(BOUND) for _ in range(300)] == list(range(300, MANY))

    (tmp_path / "go").unlink()
    unordered = pool.imap_unordered(task, range(MANY))
    got = {unordered.next(BOUND) for _ in range(MANY - 1)}
    assert got == set(range(MANY)) - {300}
    (tmp_path / "go").touch()
    assert unordered.next(BOUND) == 300


def test_a_task_that_fails_fails_alone(pool: SafePool) -> None:
    """In order, each with its own error; what cannot be unpickled as well."""
    items = [0 if item % 7 == 3 else item for item in range(1, MANY)]
    results = pool.imap(partial(divmod, 10**6), items)
    for item in items:
        if item:
            assert results.next(BOUND) == divmod(10**6, item)
        else:
            with pytest.raises(ZeroDivisionError):
                results.next(BOUND)
    odd: list[Any] = [[item] for item in range(50)]
    odd[20] = tasks.Unreadable()
    results = pool.imap(tasks.identity, odd)
    assert [results.next(BOUND) for _ in range(20)] == odd[:20]
    with pytest.raises(LookupError, match="cannot be read"):
        results.next(BOUND)
    assert [results.next(BOUND) for _ in range(29)] == odd[21:]


def test_calls_that_fail_fail_alone(pool: SafePool) -> None:
    """Plain arguments and others, in one stream of calls."""
    calls: list[tuple[Any, Any]] = []
    for item in range(MANY):
        calls.append((item, pool.apply_async(tasks.square, (item,))))
        if item % 50 == 7:
            calls.append((LookupError, pool.apply_async(tasks.identity, (tasks.Unreadable(),))))
            calls.append((ValueError, pool.apply_async(tasks.raise_it, (ValueError(item),))))
            calls.append(([item], pool.apply_async(sorted, ([item],), {"reverse": True})))
    for expected, call in calls:
        if isinstance(expected, type):
            with pytest.raises(expected):
                call.get(BOUND)
        else:
            assert call.get(BOUND) == (expected if isinstance(expected, list) else expected**2)
    assert pool.stats().failed == 2 * MANY // 50


def test_a_death_costs_one_task_of_its_group(pool: SafePool, tmp_path: Path) -> None:
    """Every other one is run, once."""
    killers = {50, 51, 400}
    items = [(str(tmp_path), item, item if item in killers else -1) for item in range(MANY)]
    results = pool.imap(partial(_note), items)
    for item in range(MANY):
        if item in killers:
            with pytest.raises(WorkerLostError, match=rf"\(item {item}\)"):
                results.next(BOUND)
        else:
            assert results.next(BOUND) == item
    warm(pool)
    calls = [
        pool.apply_async(tasks.note, (str(tmp_path), MANY + item, MANY + 70)) for item in range(100)
    ]
    with pytest.raises(WorkerLostError, match="note"):
        calls[70].get(BOUND)
    assert [call.get(BOUND) for call in calls[:70]] == list(range(MANY, MANY + 70))
    assert [call.get(BOUND) for call in calls[71:]] == list(range(MANY + 71, MANY + 100))
    runs = sorted(int(name.split("-")[0]) for name in os.listdir(tmp_path))
    assert runs == list(range(MANY + 100))


def _note(args: tuple[str, int, int]) -> int:
    return tasks.note(*args)


def test_a_call_in_a_group_is_cancelled(pool: SafePool, tmp_path: Path) -> None:
    """One that waits never runs; one that runs is ended with ``kill``; the others go on."""
    folder = str(tmp_path)
    calls = [pool.apply_async(tasks.wait_at, (folder, item, 5)) for item in range(20)]
    tasks.wait_for_file(str(tmp_path / "slow"))
    assert not calls[5].cancel()
    assert calls[5].cancel(kill=True)
    with pytest.raises(TaskCancelledError):
        calls[5].get(BOUND)
    assert [call.get(BOUND) for call in calls if call is not calls[5]] == [
        item for item in range(20) if item != 5
    ]
    (tmp_path / "slow").unlink()
    blockers = [pool.apply_async(tasks.wait_at, (folder, 0, 0)) for _ in range(2)]
    late = [pool.apply_async(tasks.leave, (folder, f"late{item}")) for item in range(4)]
    assert late[1].cancel()
    assert late[1].cancelled()
    (tmp_path / "go").touch()
    assert [blocker.get(BOUND) for blocker in blockers] == [0, 0]
    for call in (late[0], late[2], late[3]):
        call.get(BOUND)
    assert not (tmp_path / "late1").exists()


def test_what_an_input_gave_runs_while_it_gives_no_more(pool: SafePool) -> None:
    """A generator that blocks holds nothing back that it has yielded."""
    go = threading.Event()

    def items() -> Iterator[int]:
        yield from range(5)
        assert go.wait(BOUND)
        yield 5

    results = pool.imap(tasks.square, items())
    assert [results.next(BOUND) for _ in range(5)] == [0, 1, 4, 9, 16]
    go.set()
    assert results.next(BOUND) == 25


def test_the_chunk_of_a_map_is_shared_with_whoever_is_idle(pool: SafePool, tmp_path: Path) -> None:
    """The first item waits for the last of its own chunk."""
    task = partial(tasks.first_waits_for_last, str(tmp_path), last=9)
    assert pool.map_async(task, range(10), chunksize=10).get(BOUND) == list(range(10))


def test_a_function_that_is_not_where_it_was(
    pool: SafePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was found by its name, and then somebody put another one there."""
    original = tasks.square
    assert pool.apply(original, (3,)) == 9
    monkeypatch.setattr(tasks, "square", tasks.identity)
    calls = [pool.apply_async(original, (item,)) for item in range(10)]
    assert [call.get(BOUND) for call in calls] == [item * item for item in range(10)]


def test_a_terminated_pool_answers_for_all(pool: SafePool, tmp_path: Path) -> None:
    """Those in a worker's group and those in the queue raise at once."""
    folder = str(tmp_path)
    calls = [pool.apply_async(tasks.wait_at, (folder, item, item)) for item in range(5000)]
    tasks.wait_for_file(str(tmp_path / "slow"))
    pool.terminate()
    for call in calls:
        with pytest.raises(safepool.PoolTerminatedError):
            call.get(BOUND)


def test_a_page_is_read_while_it_is_written() -> None:
    """What is read was committed at one moment: values from the page's first item on, no gap."""
    page = memoryview(mmap.mmap(-1, frames.PAGE_BYTES))
    child = os.fork()
    if not child:
        _write_for_ever(page)
    try:
        seen: set[tuple[int, int, int]] = set()
        while len(seen) < 500:
            found = frames.read_live_page(page, barrier.everywhere)
            values = [
                pickle.loads(data)
                for data, times in frames.records(found.body)
                for _ in range(times)
            ]
            first = found.item
            assert values == [(first + place) // 3 for place in range(len(values))]
            seen.add((found.number, found.item, len(values)))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _write_for_ever(page: memoryview) -> None:
    """Each value comes three times, so that some are repeats; each task has 50 items or so."""

    class Interrupts:
        in_task = False

    try:
        barrier.register()
        for number in itertools.count(1):
            first = number % 7
            frames.write_page(page, number, first)
            run = ItemRun(page, NEVER, number, first, lambda *_: None, Copies())
            items = range(first, first + 50)
            run.run(lambda item: item // 3, items, Interrupts(), star=False, by_value=False)
            run.flush()
    finally:
        os._exit(1)
