"""Large data travels beside its pickle, arrives as it was, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import safepool
from safepool import SafePool, WorkerLostError
from tests.kit import truth
from tests.pool import tasks

BOUND = 120
MB = 1 << 20


@pytest.fixture
def pool() -> Iterator[SafePool]:
    with SafePool(2, context=safepool.get_context("fork"), grace=0.5) as pool:
        yield pool


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Neither a name nor a descriptor, when the pool is gone."""
    before = _shared_memory()
    yield
    # Tests that run at the same time have names there for a while.
    truth.until(lambda: _shared_memory() <= before, "/dev/shm has something new")


def _shared_memory() -> set[str]:
    """The names of shared memory; locks of other programs are none."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


def change(value: Any) -> tuple[str, int]:
    """Write into what came, and say what type it is."""
    value[0] = 7
    return type(value).__name__, len(value)


def make(megabytes: int) -> Any:
    return np.full(megabytes * MB // 8, 1.5)


def back(value: Any) -> Any:
    return value


def total(value: Any) -> float:
    return float(value["a"].sum() + sum(value["b"][1]))


def die_with(value: Any, path: str) -> int:
    """The first of all dies of it."""
    if not Path(path).exists():
        Path(path).touch()
        value[:] = 9
        tasks.kill_self()
    return int(value.sum())


def test_data_comes_back_as_it_was(method: str) -> None:
    """Arrays, bytes and bytearrays, alone and within others, by all ways."""
    array = np.arange(MB, dtype=np.int64).reshape(1024, 1024)
    values: list[Any] = [
        array,
        array.T,
        array[::2],
        os.urandom(3 * MB),
        bytearray(2 * MB),
        (b"x" * MB, [array, "text"], {"key": b"y" * MB}),
    ]
    with SafePool(1, context=safepool.get_context(method)) as pool:
        results = [
            [pool.apply(back, (value,)) for value in values],
            pool.map(back, values, chunksize=3),
            list(pool.imap(back, values)),
            [pool.apply(back, (), {"value": value}) for value in values],
        ]
    for got in results:
        for ours, theirs in zip(got, values, strict=True):
            assert type(ours) is type(theirs)
            assert same(ours, theirs)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and bool((one == other).all())
    if isinstance(one, (tuple, list)):
        return all(same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


def test_what_arrives_can_be_changed_and_is_nobody_elses(pool: SafePool) -> None:
    """In the worker and in the owner."""
    array = np.zeros(MB)
    block = bytearray(MB)
    assert pool.map(change, [array, block, array], 1) == [
        ("ndarray", MB),
        ("bytearray", MB),
        ("ndarray", MB),
    ]
    assert array[0] == block[0] == 0
    first, second = pool.map(make, [1, 1])
    first[0] = 9
    assert second[0] == 1.5
    assert first[0] == 9


def test_arrays_keep_no_descriptors(pool: SafePool) -> None:
    """However many results are held; and their memory is given back."""
    pool.apply(make, (1,))
    kept = pool.map(make, [1] * 60)
    assert not _segments()
    with_them = _mapped()
    assert with_them >= 60 * MB
    del kept
    # The pool's thread may be about to let go of the last ones.
    truth.until(lambda: _mapped() <= with_them - 60 * MB, "their memory is not given back")


def _mapped() -> int:
    """Bytes of this process's mappings of such data."""
    size = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "safepool-data" in line:
            start, end = line.split()[0].split("-")
            size += int(end, 16) - int(start, 16)
    return size


def test_more_than_two_gib(pool: SafePool) -> None:
    """There and back, without a copy more than is needed."""
    block = np.zeros((5 * MB // 2, 1024), dtype=np.uint8)
    block[-1, -1] = 5
    got = pool.apply(back, (block,))
    assert got.nbytes == block.nbytes > 2 << 30
    assert got[-1, -1] == 5


def test_nested_arrays(pool: SafePool) -> None:
    """Wherever pickle meets them."""
    value = {"a": np.ones(MB), "b": ("x", np.ones(MB // 2))}
    assert pool.apply(total, (value,)) == MB + MB // 2


def test_a_worker_killed_while_data_travels(pool: SafePool) -> None:
    """To it or from it: the task is lost or done, the pool goes on, no descriptor is left."""
    pool.map(make, [1, 1])
    size = 100
    for _ in range(3):
        process = pool._pool[0]
        calls = [pool.apply_async(make, (size,)) for _ in range(2)]
        calls += [pool.apply_async(back, (np.ones(size * MB // 8),)) for _ in range(2)]
        os.kill(process.pid, signal.SIGKILL)
        for call in calls:
            call.wait(BOUND)
            if call.successful():
                assert call.get().nbytes == size * MB
            else:
                with pytest.raises(WorkerLostError, match=str(process.pid)):
                    call.get()
        truth.until(partial(_is_gone, pool, process), "it is not buried")
    del calls, call
    truth.until(lambda: len(pool._pool) == 2, "it is not replaced")
    assert pool.map(back, [1, 2]) == [1, 2]
    truth.until(lambda: not _segments(), "descriptors are left")


def _segments() -> list[str]:
    return [name for name in truth.open_files().values() if "safepool-data" in name]


def _is_gone(pool: SafePool, process: Any) -> bool:
    return process not in pool._pool


def test_a_second_attempt_has_the_data_as_it_was(pool: SafePool, tmp_path: Path) -> None:
    """The first has changed its own copy."""
    data = np.ones(MB, dtype=np.int64)
    view = pool.options(retries=1)
    assert view.apply(die_with, (data, str(tmp_path / "died"))) == MB


def test_no_memory_beside_the_pickle(pool: SafePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then it travels in the pickle."""
    from safepool.host import own

    def refuse(_name: str) -> int:
        raise OSError(28, "No space left on device")

    data = np.ones(MB)
    monkeypatch.setattr(own, "unnamed_file", refuse)
    assert (pool.apply(back, (data,)) == data).all()
