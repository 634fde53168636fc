"""How many workers a pool has at a time, and how much memory each may use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import safepool
from safepool import MemoryLimitError, SafePool, SafePoolExecutor, memory_watch
from tests.kit import truth
from tests.pool import tasks

BOUND = 60
MB = 1 << 20

kept: list[bytes] = []


def make(processes: int, **settings: Any) -> SafePool:
    return SafePool(processes, context=safepool.get_context("fork"), grace=0.5, **settings)


def use(megabytes: int, path: str = "") -> int:
    """Use that much memory, until ``path`` exists."""
    block = b"x" * (megabytes * MB)
    if path:
        tasks.wait_for_file(path, BOUND)
    return len(block) // MB


def keep(megabytes: int) -> int:
    """Use it for ever."""
    kept.append(b"x" * (megabytes * MB))
    return os.getpid()


def use_in_a_child(megabytes: int, path: str) -> None:
    """Have a child use it."""
    code = f"block = b'x' * ({megabytes} << 20); import time; time.sleep({BOUND})"
    with subprocess.Popen([sys.executable, "-S", "-c", code]):
        tasks.wait_for_file(path, BOUND)


def count(pool: SafePool) -> int:
    return len(pool._pool)


def test_a_lazy_pool_starts_as_many_as_have_something_to_do(tmp_path: Path) -> None:
    """None at first, and then one for each task that waits."""
    with make(1000, lazy=True) as pool:
        assert count(pool) == 0
        go = str(tmp_path / "go")
        calls = [pool.apply_async(tasks.wait_for_file, (go,)) for _ in range(3)]
        truth.until(lambda: pool.stats().running == 3, "not all three run")
        assert count(pool) == 3
        (tmp_path / "go").touch()
        assert all(call.get(BOUND) for call in calls)


def test_idle_workers_leave_and_come_back(tmp_path: Path) -> None:
    """One that is at work stays, however long it takes."""
    with make(3, idle_timeout=0.3) as pool:
        assert count(pool) == 3
        call = pool.apply_async(tasks.wait_for_file, (str(tmp_path / "go"),))
        truth.until(lambda: count(pool) == 1, "the idle ones do not leave")
        (tmp_path / "go").touch()
        assert call.get(BOUND)
        truth.until(lambda: count(pool) == 0, "the last one does not leave")
        assert pool.map(tasks.square, range(10)) == [n * n for n in range(10)]


def test_a_pool_grows_and_shrinks(tmp_path: Path) -> None:
    """At once, but for workers that have something to do."""
    with make(1) as pool:
        pool.resize(4)
        go = str(tmp_path / "go")
        calls = [pool.apply_async(tasks.wait_for_file, (go,)) for _ in range(4)]
        truth.until(lambda: pool.stats().running == 4, "not all four run")
        pool.resize(2)
        more = pool.map_async(tasks.square, range(100))
        assert not more.ready()
        (tmp_path / "go").touch()
        assert all(call.get(BOUND) for call in calls)
        assert more.get(BOUND) == [n * n for n in range(100)]
        truth.until(lambda: count(pool) == 2, "it does not shrink")
        assert list(pool.imap(tasks.square, range(3000))) == [n * n for n in range(3000)]
        with pytest.raises(ValueError, match="at least 1"):
            pool.resize(0)


def test_a_task_that_uses_too_much_memory(tmp_path: Path) -> None:
    """It fails, with its worker's tree gone; others go on."""
    never = str(tmp_path / "never")
    with make(2, max_rss=150 * MB) as pool:
        assert pool.apply_async(use, (20,)).get(BOUND) == 20
        with pytest.raises(MemoryLimitError, match="max_rss") as caught:
            pool.apply_async(use, (300, never)).get(BOUND)
        assert caught.value.limit == 150 * MB < caught.value.used
        with pytest.raises(MemoryLimitError):
            pool.apply_async(use_in_a_child, (300, never)).get(BOUND)
        assert not truth.is_alive(caught.value.pid)
        assert pool.apply_async(use, (20,)).get(BOUND) == 20
        assert pool.stats().lost == 0


def test_a_worker_that_keeps_too_much_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quietly, after its task, whose result counts; if nobody has looked meanwhile."""
    monkeypatch.setattr(memory_watch, "_PERIOD", 1000.0)
    with make(1, max_rss=150 * MB) as pool:
        assert pool.apply(tasks.square, (3,)) == 9  # the one look is over
        first = pool.apply(keep, (300,))
        second = pool.apply(keep, (1,))
        assert first != second
        assert pool.apply(keep, (1,)) == second
        assert pool.stats().failed == 0


def test_what_is_shared_counts_by_part() -> None:
    """A large owner does not make its forked workers large."""
    mine = b"x" * (300 * MB)
    with make(4, max_rss=250 * MB) as pool:
        assert pool.map(tasks.square, range(8)) == [n * n for n in range(8)]
        assert pool.apply(use, (10,)) == 10
    assert len(mine) == 300 * MB


def test_the_executor_has_the_same() -> None:
    """And refuses what makes no sense when its workers start."""
    with SafePoolExecutor(50, lazy=True) as executor:
        assert executor.submit(tasks.square, 3).result(BOUND) == 9


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"lazy": 1}, TypeError, "lazy"),
        ({"idle_timeout": 0}, ValueError, "idle_timeout"),
        ({"idle_timeout": "1"}, TypeError, "seconds"),
        ({"max_rss": 0}, ValueError, "max_rss"),
        ({"max_rss": 1.5}, TypeError, "bytes"),
    ],
)
def test_settings_that_make_no_sense(
    settings: dict[str, Any], error: type[Exception], words: str
) -> None:
    """Refused before anything is started, by name."""
    with pytest.raises(error, match=words):
        make(1, **settings)
