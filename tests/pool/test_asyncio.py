"""Results in an event loop: awaited, iterated, cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

import safepool
from safepool import SafePool, TaskTimeoutError, WorkerLostError
from tests.kit import truth
from tests.pool import tasks
from tests.pool.test_options import held, hold

BOUND = 20.0


@pytest.fixture
def pool() -> Iterator[SafePool]:
    with SafePool(2, context=safepool.get_context("fork"), grace=0.5) as made:
        yield made


def run(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(work(), BOUND))


def test_results_are_awaited_side_by_side(pool: SafePool) -> None:
    """Calls and maps; a result that is there already needs no waiting."""

    async def work() -> list[Any]:
        results = [pool.apply_async(tasks.square, (number,)) for number in range(20)]
        first = await asyncio.gather(*results)
        return [first, await pool.map_async(tasks.square, range(5)), await results[3]]

    assert run(work) == [[n * n for n in range(20)], [0, 1, 4, 9, 16], 9]


def test_errors_are_raised_where_they_are_awaited(pool: SafePool) -> None:
    """Those of tasks, of lost workers and of limits."""

    async def work() -> None:
        with pytest.raises(ValueError):
            await pool.apply_async(tasks.raise_it, (ValueError("no"),))
        with pytest.raises(WorkerLostError):
            await pool.apply_async(tasks.kill_self)
        with pytest.raises(TaskTimeoutError):
            await pool.options(timeout=0.1).apply_async(tasks.sleep, (60,))

    run(work)


def test_the_loop_goes_on_meanwhile(pool: SafePool, tmp_path: Path) -> None:
    """The task waits for what only another coroutine makes."""
    path = tmp_path / "made"

    async def work() -> bool:
        waiting = asyncio.ensure_future(
            _awaited(pool.apply_async(tasks.wait_for_file, (str(path),)))
        )
        await asyncio.sleep(0)
        path.touch()
        return bool(await waiting)

    assert run(work)


async def _awaited(result: Any) -> Any:
    return await result


def test_a_cancelled_await_ends_its_task_and_no_other(pool: SafePool, tmp_path: Path) -> None:
    """With its tree."""

    async def work() -> list[int]:
        waiting = asyncio.ensure_future(_awaited(pool.apply_async(hold, (str(tmp_path),))))
        other = pool.apply_async(tasks.sleep, (0.5,))
        pids = await asyncio.get_running_loop().run_in_executor(None, held, tmp_path)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await other == 0.5
        return pids

    for pid in run(work):
        assert truth.wait_gone(pid, BOUND)
    assert pool.apply(tasks.square, (3,)) == 9


@pytest.mark.parametrize("name", ["imap", "imap_unordered"])
def test_iteration(name: str, pool: SafePool) -> None:
    """Each item once, errors in their places, and an end."""

    async def work() -> list[Any]:
        results: AsyncIterator[Any] = getattr(pool, name)(tasks.square, range(300))
        got = [value async for value in results]
        failing: AsyncIterator[Any] = getattr(pool, name)(tasks.raise_it, [KeyError("no")])
        with pytest.raises(KeyError):
            await failing.__anext__()
        with pytest.raises(StopAsyncIteration):
            await failing.__anext__()
        return got

    got = run(work)
    assert (got if name == "imap" else sorted(got)) == [n * n for n in range(300)]
