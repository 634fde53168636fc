"""pool.stats() says what is true at that moment."""

from __future__ import annotations

from pathlib import Path

import pytest

import safepool
from safepool import PoolStats, SafePool, WorkerLostError
from tests.kit import truth
from tests.pool import tasks
from tests.pool.test_options import BOUND, held, hold


def make(processes: int) -> SafePool:
    return SafePool(processes, context=safepool.get_context("fork"), grace=0.5)


def test_who_runs_what_and_what_waits(tmp_path: Path) -> None:
    """Two hold, the third is idle; with a fourth task in the queue none is."""
    with make(3) as pool:
        pool.map(tasks.square, range(3))
        for number in range(2):
            pool.apply_async(hold, (str(tmp_path), number))
        pids = held(tmp_path, 2)[::2]
        picture = pool.stats()
        assert (picture.queued, picture.running) == (0, 2)
        states = {worker.pid: worker for worker in picture.workers}
        assert {pid for pid, worker in states.items() if worker.state == "busy"} == set(pids)
        assert sorted(worker.state for worker in picture.workers) == ["busy", "busy", "idle"]
        for pid in pids:
            assert states[pid].task == "hold"
            assert 0 <= (states[pid].since or 0) < BOUND
            assert (states[pid].memory or 0) > 1 << 20
        for number in range(2, 6):
            pool.apply_async(hold, (str(tmp_path), number))
        held(tmp_path, 3)
        assert pool.stats().queued == 3


def test_what_became_of_tasks() -> None:
    """Items, not chunks; a lost worker's is a failure as well."""
    with make(2) as pool:
        pool.map(tasks.square, range(100))
        with pytest.raises(ValueError):
            pool.apply(tasks.raise_it, (ValueError("no"),))
        with pytest.raises(WorkerLostError):
            pool.apply(tasks.kill_self)
        with pytest.raises(WorkerLostError):
            pool.options(retries=1).apply(tasks.kill_self)
        picture = pool.stats()
        counts = picture.done, picture.failed, picture.lost, picture.retried
        assert counts == (100, 3, 3, 1)
    ended = pool.stats()
    assert (ended.done, ended.failed, ended.workers) == (100, 3, ())


def test_from_a_callback() -> None:
    """The engine's own thread asks itself."""
    pictures: list[PoolStats] = []
    with make(1) as pool:
        pool.apply_async(tasks.square, (1,), callback=lambda _: pictures.append(pool.stats()))
        truth.until(lambda: pictures, "the callback hangs", BOUND)
    assert pictures[0].workers
