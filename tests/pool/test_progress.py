"""A bar shows how far a map is, and is gone from the way when it is over."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from typing import Any

import pytest

import safepool
from safepool import SafePool, progress
from tests.pool import tasks

BOUND = 60


@pytest.fixture
def pool() -> Iterator[SafePool]:
    with SafePool(2, context=safepool.get_context("fork"), grace=0.5) as pool:
        yield pool


def fail_at(item: int) -> int:
    if item % 10 == 7:
        raise ValueError(item)
    return item


def test_the_bar_of_a_map(pool: SafePool, capfd: pytest.CaptureFixture[str]) -> None:
    """Done, of how many, by how many workers; with a text if one was given."""
    view = pool.options(progress="squares")
    assert view.map(tasks.square, range(100)) == [n * n for n in range(100)]
    text = capfd.readouterr().err
    assert "squares" in text
    assert "100/100" in text
    assert "2 workers" in text


def test_the_bar_of_an_input_of_unknown_length(
    pool: SafePool, capfd: pytest.CaptureFixture[str]
) -> None:
    """It knows the number when the input has ended."""
    results = pool.options(progress=True).imap(tasks.square, (n for n in range(50)))
    assert sorted(results) == [n * n for n in range(50)]
    assert "50/50" in capfd.readouterr().err


def test_it_counts_what_failed_and_was_tried_again(
    pool: SafePool, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each failed item, and each further attempt."""
    view = pool.options(progress=True, retries=1, retry_on=ValueError)
    results = view.imap(fail_at, range(20))
    failed = 0
    for _ in range(20):
        try:
            results.next(BOUND)
        except ValueError:
            failed += 1
    with pytest.raises(StopIteration):
        results.next(BOUND)
    text = capfd.readouterr().err
    assert failed == 2
    assert "2 failed" in text
    assert "2 retried" in text


def test_a_terminated_map_leaves_its_bar(capfd: pytest.CaptureFixture[str]) -> None:
    """It stops where it was; nothing waits for it."""
    with SafePool(1, context=safepool.get_context("fork"), grace=0.2, progress=True) as pool:
        result = pool.map_async(tasks.sleep, [60.0] * 3)
    with pytest.raises(safepool.PoolTerminatedError):
        result.get(BOUND)
    assert "0/3" in capfd.readouterr().err


def test_without_tqdm_the_error_says_what_to_install(
    pool: SafePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, in the caller; the pool goes on."""
    original = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("tqdm"):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    progress._bar_class.cache_clear()
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=r"safepool\[progress\]"):
        pool.options(progress=True).map(tasks.square, range(3))
    with pytest.raises(ImportError, match=r"safepool\[progress\]"):
        pool.options(progress=True).imap(tasks.square, range(3))
    assert pool.map(tasks.square, range(3)) == [0, 1, 4]


def test_progress_must_be_true_or_a_text(pool: SafePool) -> None:
    """Refused by name."""
    with pytest.raises(TypeError, match="progress"):
        pool.options(progress=5)  # type: ignore[arg-type]
