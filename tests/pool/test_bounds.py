"""A bound for calls that are not done: the submitter waits, or is refused; nobody hangs."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import safepool
from safepool import PoolClosedError, PoolFullError, SafePool, SafePoolExecutor
from tests.kit import truth
from tests.pool import tasks

BOUND = 60


def make(**settings: Any) -> SafePool:
    return SafePool(1, context=safepool.get_context("fork"), grace=0.5, **settings)


def test_a_full_pool_refuses(tmp_path: Path) -> None:
    """One more than it may have; when one is done there is room again."""
    go = str(tmp_path / "go")
    with make(max_queued=2, when_full="raise") as pool:
        calls = [pool.apply_async(tasks.wait_for_file, (go,)) for _ in range(3)]
        with pytest.raises(PoolFullError, match="max_queued"):
            pool.apply_async(tasks.square, (3,))
        assert calls[2].cancel()
        fourth = pool.apply_async(tasks.square, (3,))
        with pytest.raises(PoolFullError):
            pool.apply_async(tasks.square, (3,))
        (tmp_path / "go").touch()
        assert fourth.get(BOUND) == 9
        assert pool.apply(tasks.square, (4,)) == 16
        for item in range(1000):
            assert pool.apply(tasks.identity, (item,)) == item


def test_a_full_pool_makes_the_submitter_wait(tmp_path: Path) -> None:
    """Until one is done, failed or lost; not longer."""
    with make(max_queued=0) as pool:
        go = str(tmp_path / "go")
        first = pool.apply_async(tasks.wait_for_file, (go,))
        second: list[Any] = []
        thread = threading.Thread(target=lambda: second.append(pool.apply_async(tasks.kill_self)))
        thread.start()
        thread.join(0.1)
        assert not second
        (tmp_path / "go").touch()
        thread.join(BOUND)
        assert first.get(BOUND)
        with pytest.raises(safepool.WorkerLostError):
            second[0].get(BOUND)
        results = [pool.apply_async(tasks.square, (item,)) for item in range(200)]
        assert [result.get(BOUND) for result in results] == [n * n for n in range(200)]


@pytest.mark.parametrize("end", ["close", "terminate"])
def test_an_end_wakes_who_waits(end: str, tmp_path: Path) -> None:
    """With the error that a call after the end gets."""
    pool = make(max_queued=0)
    go = str(tmp_path / "go")
    pool.apply_async(tasks.wait_for_file, (go,))
    errors: list[BaseException] = []

    def submit() -> None:
        try:
            pool.apply_async(tasks.square, (1,))
        except PoolClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=submit)
    thread.start()
    bound = pool._bound
    assert bound is not None
    truth.until(lambda: bool(bound._bell._waiters), "it does not wait")
    getattr(pool, end)()
    (tmp_path / "go").touch()
    thread.join(BOUND)
    assert len(errors) == 1
    pool.join()


def test_a_callback_is_refused_instead_of_waiting_for_itself(tmp_path: Path) -> None:
    """Nobody else would make room."""
    go = str(tmp_path / "go")
    said: list[str] = []
    with make(max_queued=1) as pool:

        def again(_: Any) -> None:
            try:
                pool.apply_async(tasks.square, (1,))
                pool.apply_async(tasks.square, (1,))
            except PoolFullError as error:
                said.append(str(error))

        first = pool.apply_async(tasks.wait_for_file, (go,), callback=again)
        second = pool.apply_async(tasks.square, (3,))
        (tmp_path / "go").touch()
        assert first.get(BOUND)
        assert second.get(BOUND) == 9
        assert len(said) == 1


def test_the_executor_has_it_too(tmp_path: Path) -> None:
    """A cancelled future makes room."""
    go = str(tmp_path / "go")
    with SafePoolExecutor(1, max_queued=1, when_full="raise") as executor:
        executor.submit(tasks.wait_for_file, go)
        executor.submit(tasks.square, 2)
        with pytest.raises(PoolFullError):
            executor.submit(tasks.square, 3)
        (tmp_path / "go").touch()
    with SafePoolExecutor(1, max_queued=1) as executor:
        futures = [executor.submit(tasks.square, item) for item in range(50)]
        assert [future.result(BOUND) for future in futures] == [n * n for n in range(50)]


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"max_queued": -1}, ValueError),
        ({"max_queued": "1"}, TypeError),
        ({"when_full": "wait"}, ValueError),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], error: type[Exception]) -> None:
    """Refused before anything is started, by name."""
    (name,) = settings
    with pytest.raises(error, match=name):
        make(**settings)
