"""The pools that are compared, behind one face. Those that are not installed are left out."""

from __future__ import annotations

import concurrent.futures
import importlib.util
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Task = Callable[[Any], Any]


class PoolFace:
    """``multiprocessing.Pool`` and what looks like it."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self._make = make

    def open(self, workers: int) -> None:
        """Start it."""
        self.pool: Any = self._make(workers)

    def call(self, task: Task, item: Any) -> Any:
        """One call, and its result."""
        return self.pool.apply(task, (item,))

    def one_by_one(self, task: Task, items: Iterable[Any]) -> int:
        """Submit all, then take all results; how many."""
        results = [self.pool.apply_async(task, (item,)) for item in items]
        return sum(1 for result in results if result.get() is None or True)

    def unordered(self, task: Task, items: Iterable[Any]) -> Iterator[Any]:
        """Results as they come, chunksize 1."""
        results: Iterator[Any] = self.pool.imap_unordered(task, items)
        return results

    def ordered(self, task: Task, items: Iterable[Any]) -> Iterator[Any]:
        """Results in order, chunksize 1."""
        results: Iterator[Any] = self.pool.imap(task, items)
        return results

    def map(self, task: Task, items: Iterable[Any]) -> list[Any]:
        """All results; chunks as the pool likes them."""
        return list(self.pool.map(task, items))

    def close(self) -> None:
        """End it in order."""
        self.pool.close()
        self.pool.join()


class ExecutorFace(PoolFace):
    """``concurrent.futures.ProcessPoolExecutor`` and what looks like it."""

    def call(self, task: Task, item: Any) -> Any:
        """One call, and its result."""
        return self.pool.submit(task, item).result()

    def one_by_one(self, task: Task, items: Iterable[Any]) -> int:
        """Submit all, then take all results; how many."""
        futures = [self.pool.submit(task, item) for item in items]
        return sum(1 for future in futures if future.result() is None or True)

    def unordered(self, task: Task, items: Iterable[Any]) -> Iterator[Any]:
        """Results as they come."""
        futures = [self.pool.submit(task, item) for item in items]
        return (future.result() for future in concurrent.futures.as_completed(futures))

    def ordered(self, task: Task, items: Iterable[Any]) -> Iterator[Any]:
        """Results in order."""
        results: Iterator[Any] = self.pool.map(task, items)
        return results

    def close(self) -> None:
        """End it in order."""
        self.pool.shutdown()


def _safepool(method: str) -> Callable[[int], Any]:
    def make(workers: int) -> Any:
        import safepool

        return safepool.get_context(method).Pool(workers)

    return make


def _standard(method: str) -> Callable[[int], Any]:
    return lambda workers: multiprocessing.get_context(method).Pool(workers)


def _safe_executor(workers: int) -> Any:
    import safepool

    return safepool.SafePoolExecutor(workers, mp_context=safepool.get_context("fork"))


def _executor(workers: int) -> Any:
    context = multiprocessing.get_context("fork")
    return concurrent.futures.ProcessPoolExecutor(workers, mp_context=context)


def _foreign(module: str, name: str, **options: Any) -> Callable[[int], Any]:
    def make(workers: int) -> Any:
        return getattr(importlib.import_module(module), name)(workers, **options)

    return make


METHODS = ("fork", "spawn", "forkserver")

POOLS: dict[str, PoolFace] = {
    **{f"safepool.Pool ({method})": PoolFace(_safepool(method)) for method in METHODS},
    "safepool.Executor (fork)": ExecutorFace(_safe_executor),
    **{f"multiprocessing.Pool ({method})": PoolFace(_standard(method)) for method in METHODS},
    "ProcessPoolExecutor (fork)": ExecutorFace(_executor),
    "loky": ExecutorFace(_foreign("loky", "ProcessPoolExecutor")),
    "billiard": PoolFace(_foreign("billiard", "Pool")),
    "multiprocess": PoolFace(_foreign("multiprocess", "Pool")),
}
_NEEDS = {"loky": "loky", "billiard": "billiard", "multiprocess": "multiprocess"}


def is_ours(name: str) -> bool:
    """Is it one of safepool's?"""
    return name.startswith("safepool")


def is_installed(name: str) -> bool:
    """Can it be made here?"""
    return name not in _NEEDS or importlib.util.find_spec(_NEEDS[name]) is not None
