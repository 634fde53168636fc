"""A worker that dies costs the item that it ran, never more, never a hang."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import safepool
from safepool.errors import WorkerLostError
from safepool.pool import SafePool
from tests.kit import truth
from tests.pool import tasks

BOUND = 60


def outcomes(iterator: Any) -> list[Any]:
    """All results of an imap, errors in their places."""
    got: list[Any] = []
    while True:
        try:
            got.append(iterator.next(BOUND))
        except StopIteration:
            return got
        except WorkerLostError as error:
            got.append(error)


def test_only_the_task_that_ran_is_lost(method: str) -> None:
    """The error names worker, signal and exit code; the other tasks and the pool go on."""
    with SafePool(2, context=safepool.get_context(method)) as pool:
        results = [
            pool.apply_async(tasks.kill_self if item == 3 else tasks.square, (item,))
            for item in range(10)
        ]
        with pytest.raises(WorkerLostError, match=r"SIGKILL.*kill_self") as caught:
            results[3].get(BOUND)
        assert caught.value.exitcode == -signal.SIGKILL
        assert str(caught.value.pid) in str(caught.value)
        assert [r.get(BOUND) for r in results[:3] + results[4:]] == [
            0,
            1,
            4,
            *(n * n for n in range(4, 10)),
        ]
        assert pool.map(tasks.square, range(6)) == [0, 1, 4, 9, 16, 25]


@pytest.mark.parametrize("chunksize", [1, 4, 10, 30])
def test_a_chunk_loses_one_item_and_repeats_none(tmp_path: Path, chunksize: int) -> None:
    """Items before the killer keep their results, items behind it run elsewhere, each once."""
    folder = str(tmp_path)
    with SafePool(2, context=safepool.get_context("fork")) as pool:
        items = [(folder, item, 7) for item in range(30)]
        got = outcomes(pool.imap(lambda args: tasks.note(*args), items, chunksize))
    assert isinstance(got[7], WorkerLostError)
    if chunksize > 1:
        assert "(item 7)" in str(got[7])
    assert got[:7] + got[8:] == [*range(7), *range(8, 30)]
    runs = Counter(int(file.name.split("-")[0]) for file in tmp_path.iterdir())
    assert runs == Counter(range(30))


def test_map_raises_the_loss_when_everything_else_has_run(tmp_path: Path) -> None:
    """map() ends with the error instead of waiting for ever."""
    with SafePool(2, context=safepool.get_context("fork")) as pool:
        with pytest.raises(WorkerLostError):
            pool.starmap(tasks.note, [(str(tmp_path), item, 2) for item in range(10)], 5)
        assert len(list(tmp_path.iterdir())) == 10


def test_an_idle_worker_that_is_killed_is_replaced(method: str) -> None:
    """With one worker killed while idle the next call still gets its answer."""
    with SafePool(1, context=safepool.get_context(method)) as pool:
        first = pool.apply(tasks.pid)
        process = pool._pool[0]
        os.kill(first, signal.SIGKILL)
        process.join(BOUND)
        second = pool.apply_async(tasks.pid).get(BOUND)
        assert second != first


def _is_buried(pool: SafePool, process: Any) -> bool:
    return process not in pool._pool


@pytest.mark.parametrize("size", [1, 10_000_000])
def test_a_worker_killed_while_it_is_sent_to(size: int) -> None:
    """Neither side of a large transfer can hang the pool when the worker dies in it."""
    with SafePool(2, context=safepool.get_context("fork")) as pool:
        for _ in range(3):
            process = pool._pool[0]
            victim = process.pid
            results = [pool.apply_async(len, (bytes(size),)) for _ in range(6)]
            os.kill(victim, signal.SIGKILL)
            for result in results:
                result.wait(BOUND)
                if result.successful():
                    assert result.get() == size
                else:
                    with pytest.raises(WorkerLostError, match=str(victim)):
                        result.get()
            # The others may all have been done before its end was noticed.
            process.join(BOUND)
            truth.until(partial(_is_buried, pool, process), "it is not buried")


def test_chaos(tmp_path: Path) -> None:
    """Workers are killed all the time; every item is there or lost, and none runs twice."""
    folder = str(tmp_path)
    stop = threading.Event()
    with SafePool(3, context=safepool.get_context("fork")) as pool:

        def kill_now_and_then() -> None:
            while not stop.wait(0.1):
                for process in pool._pool[:1]:
                    process.kill()

        killer = threading.Thread(target=kill_now_and_then)
        killer.start()
        try:
            got = outcomes(pool.imap(lambda n: tasks.note(folder, n, -1), range(600), 5))
        finally:
            stop.set()
            killer.join()
    assert len(got) == 600
    assert all(value == place for place, value in enumerate(got) if isinstance(value, int))
    runs = Counter(int(file.name.split("-")[0]) for file in tmp_path.iterdir())
    assert max(runs.values()) == 1
    ran = {item for item, value in enumerate(got) if isinstance(value, int)}
    assert ran <= set(runs)


def test_a_task_that_closes_all_descriptors() -> None:
    """A worker that can no longer answer is ended, and its task says so."""
    with SafePool(1, context=safepool.get_context("fork"), grace=0.5) as pool:
        with pytest.raises(WorkerLostError):
            pool.apply_async(tasks.close_everything).get(BOUND)
        assert pool.apply(tasks.square, (3,)) == 9


@pytest.mark.parametrize("most", [1, 2, 3])
def test_maxtasksperchild(most: int) -> None:
    """A worker runs so many tasks and is replaced; nothing is lost or delayed by it."""
    with SafePool(2, maxtasksperchild=most, context=safepool.get_context("fork")) as pool:
        pids = Counter(r.get(BOUND) for r in [pool.apply_async(tasks.pid) for _ in range(20)])
        assert max(pids.values()) <= most
        assert pool.map(tasks.square, range(20), 5) == [n * n for n in range(20)]


def test_tasks_that_wait_for_each_other(tmp_path: Path) -> None:
    """Quick tasks before do not put two tasks behind each other that need to run together."""
    with SafePool(2, context=safepool.get_context("fork")) as pool:
        assert len(pool.map(tasks.square, range(2000), 1)) == 2000
        for turn in range(5):
            path = str(tmp_path / str(turn))
            waiting = [pool.apply_async(tasks.wait_for_file, (path,))]
            quick = [pool.apply_async(tasks.square, (n,)) for n in range(5)]
            last = pool.apply_async(tasks.touch, (path,))
            assert [result.get(BOUND) for result in quick] == [0, 1, 4, 9, 16]
            last.get(BOUND)
            assert waiting[0].get(BOUND)


def test_quick_tasks_are_not_stuck_behind_a_slow_one(tmp_path: Path) -> None:
    """While one worker is busy for long, all other results arrive."""
    path = str(tmp_path / "go")
    with SafePool(2, context=safepool.get_context("fork")) as pool:
        pool.map(tasks.square, range(2000), 1)
        results = []
        for n in range(300):
            results.append(pool.apply_async(tasks.square, (n,)))
            if n == 100:
                slow = pool.apply_async(tasks.wait_for_file, (path,))
        assert [result.get(BOUND) for result in results] == [n * n for n in range(300)]
        assert not slow.ready()
        tasks.touch(path)
        assert slow.get(BOUND)
