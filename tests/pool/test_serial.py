"""Without processes: the same answers, in the caller's own thread."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import safepool
from safepool import SafePool, SafePoolExecutor
from tests.pool import tasks


@pytest.fixture
def pool() -> Iterator[SafePool]:
    with SafePool(2, serial=True) as pool:
        yield pool


def where(_: Any) -> tuple[int, int]:
    return os.getpid(), threading.get_ident()


def test_tasks_run_here(pool: SafePool) -> None:
    """In this process and thread, by every method."""
    here = where(None)
    assert pool.apply(where, (1,)) == here
    assert pool.apply_async(where, (1,)).get(0) == here
    assert set(pool.map(where, range(3))) == {here}
    assert set(pool.imap(where, range(3))) == {here}
    assert set(pool.imap_unordered(where, range(3), 2)) == {here}
    assert pool.starmap(pow, [(2, 3), (3, 2)]) == [8, 9]
    assert pool.apply(tasks.add, (1,), {"y": 2}) == 3
    assert pool.options(timeout=5, retries=1).apply(tasks.square, (3,)) == 9
    assert not pool._pool


def test_an_imap_runs_what_is_wanted(pool: SafePool) -> None:
    """An endless input is no problem, and an error comes where its item would have."""
    pulled: list[int] = []

    def items() -> Iterator[int]:
        while True:
            pulled.append(len(pulled))
            yield pulled[-1] - 1

    results = pool.imap(lambda n: 6 // n, items())
    assert next(results) == -6
    assert len(pulled) == 1
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert next(results) == 6
    assert list(pool.imap(tasks.square, [])) == []


def test_errors_and_callbacks(pool: SafePool) -> None:
    """As of any pool; Ctrl-C is the caller's."""
    said: list[Any] = []
    pool.apply_async(tasks.square, (3,), callback=said.append)
    failed = pool.apply_async(tasks.raise_it, (ValueError("no"),), {}, None, said.append)
    assert said[0] == 9
    assert str(said[1]) == "no"
    with pytest.raises(ValueError, match="no"):
        failed.get(0)
    with pytest.raises(SystemExit):
        pool.apply(tasks.raise_it, (SystemExit(3),))
    with pytest.raises(ZeroDivisionError):
        pool.map(lambda n: 1 // n, [1, 0, 2], 1)
    with pytest.raises(KeyboardInterrupt):
        pool.apply(tasks.raise_it, (KeyboardInterrupt(),))
    stats = pool.stats()
    assert (stats.done, stats.failed) == (3, 3)
    assert stats.workers == ()


def test_beginning_and_end() -> None:
    """Initializer and finalizer run once; a closed pool takes nothing."""
    said: list[str] = []
    pool = SafePool(
        4, said.append, ("begin",), serial=True, finalizer=said.append, finalargs=("end",)
    )
    assert said == ["begin"]
    pool.close()
    pool.join()
    pool.terminate()
    assert said == ["begin", "end"]
    with pytest.raises(safepool.PoolClosedError):
        pool.apply(tasks.square, (1,))


def test_the_executor_has_it_too() -> None:
    """Futures that are done when they are returned."""
    with SafePoolExecutor(2, serial=True) as executor:
        future = executor.submit(where, 1)
        assert future.done()
        assert future.result() == where(1)
        assert list(executor.map(tasks.square, range(5))) == [0, 1, 4, 9, 16]


def test_pdb_stops_in_a_task(tmp_path: Path) -> None:
    """With nothing but the variable set."""
    script = tmp_path / "program.py"
    script.write_text(
        "from safepool import SafePool\n\n"
        "def work(n):\n"
        "    breakpoint()\n"
        "    return n + 1\n\n"
        "if __name__ == '__main__':\n"
        "    with SafePool(2) as pool:\n"
        "        print('got', pool.map(work, [41]))\n"
    )
    root = str(Path(safepool.__file__).parents[1])
    ended = subprocess.run(
        [sys.executable, str(script)],
        input="p n * 2\nc\n",
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "SAFEPOOL_SERIAL": "1", "PYTHONPATH": root},
    )
    assert "82" in ended.stdout, ended.stderr
    assert "got [42]" in ended.stdout


def test_serial_must_be_a_truth_value() -> None:
    """Refused by name."""
    with pytest.raises(TypeError, match="serial"):
        SafePool(1, serial="yes")  # type: ignore[arg-type]
