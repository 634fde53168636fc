"""What is measured: each row in a process of its own, with two workers that have run before.

A row returns figures by name. Times are in seconds, sizes in bytes.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.benchmarks.pools import PoolFace

WORKERS = 2
MB = 1 << 20

Figures = dict[str, float]


def nothing(_: Any = None) -> None:
    """The smallest task."""


def same(value: Any) -> Any:
    """There and back."""
    return value


def work(seconds: float) -> None:
    """Be busy for so long."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def die(_: Any = None) -> None:
    """Be killed."""
    os.kill(os.getpid(), signal.SIGKILL)


def _rate(count: int, run: Callable[[], Any]) -> Figures:
    begun = time.perf_counter()
    run()
    return {"per second": count / (time.perf_counter() - begun)}


def imap_unordered(pool: PoolFace) -> Figures:
    """No-op tasks, chunksize 1."""
    return _rate(20_000, lambda: sum(1 for _ in pool.unordered(nothing, range(20_000))))


def one_by_one(pool: PoolFace) -> Figures:
    """No-op calls, submitted one by one."""
    return _rate(10_000, lambda: pool.one_by_one(nothing, range(10_000)))


def one_call(pool: PoolFace) -> Figures:
    """One call at a time."""
    times = []
    for number in range(1000):
        begun = time.perf_counter()
        pool.call(nothing, number)
        times.append(time.perf_counter() - begun)
    times.sort()
    return {"p50": times[500], "p99": times[990]}


def map_default(pool: PoolFace) -> Figures:
    """A map of no-ops in default chunks."""
    return _rate(200_000, lambda: pool.map(nothing, range(200_000)))


def tasks_of_1_ms(pool: PoolFace) -> Figures:
    """Busy tasks of 1 ms."""
    return _rate(1000, lambda: sum(1 for _ in pool.unordered(work, [0.001] * 1000)))


def tasks_of_50_ms(pool: PoolFace) -> Figures:
    """Busy tasks of 50 ms."""
    return _rate(40, lambda: sum(1 for _ in pool.unordered(work, [0.05] * 40)))


def uneven(pool: PoolFace) -> Figures:
    """A map whose last items take long: who helps whom?"""
    items = [0.001] * 300 + [0.05] * 12
    begun = time.perf_counter()
    pool.map(work, items)
    return {"seconds": time.perf_counter() - begun}


def _back(pool: PoolFace, value: Any, times: int) -> Figures:
    pool.call(same, value)
    begun = time.perf_counter()
    for _ in range(times):
        pool.call(same, value)
    return {"seconds": (time.perf_counter() - begun) / times}


def array_1_mb(pool: PoolFace) -> Figures:
    """An array there and back."""
    import numpy as np

    return _back(pool, np.ones(MB // 8), 30)


def array_100_mb(pool: PoolFace) -> Figures:
    """A large array there and back."""
    import numpy as np

    return _back(pool, np.ones(100 * MB // 8), 2)


def bytes_1_mb(pool: PoolFace) -> Figures:
    """Bytes there and back."""
    return _back(pool, b"x" * MB, 30)


def bytes_100_mb(pool: PoolFace) -> Figures:
    """Many bytes there and back."""
    return _back(pool, b"x" * (100 * MB), 2)


def start(pool: PoolFace) -> Figures:
    """Until the first result, until two workers have answered, and the end in order."""
    begun = time.perf_counter()
    pool.open(WORKERS)
    pool.call(nothing, 0)
    first = time.perf_counter() - begun
    pool.one_by_one(work, [0.01] * WORKERS)
    ready = time.perf_counter() - begun
    begun = time.perf_counter()
    pool.close()
    return {"first result": first, "ready": ready, "close": time.perf_counter() - begun}


def lost_worker(pool: PoolFace) -> Figures:
    """From the call that kills its worker to the error, and to the next result."""
    begun = time.perf_counter()
    try:
        pool.call(die, 0)
    except Exception:
        reported = time.perf_counter() - begun
    pool.call(nothing, 0)
    return {"reported": reported, "goes on": time.perf_counter() - begun}


def long_input(pool: PoolFace) -> Figures:
    """A million items from a generator, in order."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    count = 1_000_000
    figures = _rate(count, lambda: sum(1 for _ in pool.ordered(nothing, (n for n in range(count)))))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {**figures, "memory": peak - before}


def idle(pool: PoolFace) -> Figures:
    """A pool of 16 workers that has nothing to do: what it costs."""
    pool.open(16)
    pool.one_by_one(work, [0.005] * 64)
    time.sleep(0.5)
    tree = _tree(os.getpid())
    before = sum(map(_cpu, tree))
    time.sleep(2.0)
    figures = {
        "memory": float(sum(map(_pss, tree))),
        "cpu": (sum(map(_cpu, tree)) - before) / 2.0,
        "descriptors": float(len(os.listdir("/proc/self/fd"))),
        "threads": float(len(os.listdir("/proc/self/task"))),
    }
    pool.close()
    return figures


def _tree(pid: int) -> list[int]:
    found = [pid]
    for each in found:
        for path in Path(f"/proc/{each}/task").glob("*/children"):
            found += map(int, path.read_text().split())
    return found


def _pss(pid: int) -> int:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return (
        next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) * 1024
    )


def _cpu(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


ROWS: dict[str, Callable[[PoolFace], Figures]] = {
    row.__name__: row
    for row in (
        imap_unordered, one_by_one, one_call, map_default, tasks_of_1_ms, tasks_of_50_ms, uneven,
        array_1_mb, array_100_mb, bytes_1_mb, bytes_100_mb, start, lost_worker, long_input, idle,
    )
}  # fmt: skip
OPENS_ITSELF = {"start", "idle"}
"""Rows that measure the pool's start as well."""
HIGHER_IS_BETTER = {"per second"}
