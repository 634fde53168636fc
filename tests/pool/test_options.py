"""Time limits, further attempts and cancelling: what is over is gone, and costs nobody else."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import subprocess
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import safepool
from safepool import (
    SafePool,
    SoftTimeoutError,
    TaskCancelledError,
    TaskTimeoutError,
    WorkerLostError,
)
from tests.kit import truth
from tests.pool import tasks

BOUND = 20.0


def make(processes: int = 2, **options: Any) -> SafePool:
    return SafePool(processes, context=safepool.get_context("fork"), grace=0.5, **options)


@pytest.fixture
def pool() -> Iterator[SafePool]:
    with make() as made:
        yield made


def hold(folder: str, item: int = 0) -> int:
    """Start a process of its own session, say who both are, and stay."""
    child = subprocess.Popen(["/bin/sleep", "180"], start_new_session=True)
    path = Path(folder) / f"held-{item}-{os.getpid()}"
    path.with_suffix(".part").write_text(f"{os.getpid()} {child.pid}")
    path.with_suffix(".part").rename(path)
    time.sleep(180)
    return item


def held(folder: Path, count: int = 1) -> list[int]:
    """Wait until so many tasks hold; the pids of them and of their children."""
    paths = truth.until(
        lambda: [*folder.glob("held-*")] if len([*folder.glob("held-*")]) == count else [],
        "no task holds",
    )
    return [int(word) for path in paths if path.suffix == "" for word in path.read_text().split()]


def attempt(folder: str, error: BaseException | None, failures: int, item: int = 0) -> int:
    """Fail so often, each time in the same way: by an error or by death."""
    number = len(os.listdir(folder)) + 1
    (Path(folder) / f"{number}-{time.monotonic_ns()}").touch()
    if number <= failures:
        if error is not None:
            raise error
        tasks.kill_self()
    return number


# -- timeout and deadline --------------------------------------------------------------


def test_a_task_that_runs_too_long_is_gone_with_its_tree(pool: SafePool, tmp_path: Path) -> None:
    """Before the call reports; the pool works on."""
    result = pool.options(timeout=0.3).apply_async(hold, (str(tmp_path),))
    pids = held(tmp_path)
    with pytest.raises(TaskTimeoutError) as caught:
        result.get(BOUND)
    assert [pid for pid in pids if truth.is_alive(pid)] == []
    assert (caught.value.limit, caught.value.seconds) == ("timeout", 0.3)
    assert caught.value.pid == pids[0]
    assert isinstance(caught.value, TimeoutError)
    assert pool.map(tasks.square, range(10)) == [n * n for n in range(10)]


def test_the_timeout_counts_the_run_and_not_the_wait() -> None:
    """Ten tasks in a row take longer than the limit of each."""
    with make(1) as pool:
        view = pool.options(timeout=2.0)
        assert view.map(tasks.sleep, [0.25] * 10) == [0.25] * 10


def test_each_item_of_a_map_has_its_own_time(pool: SafePool, tmp_path: Path) -> None:
    """The one that takes too long is the one that fails; the others are done, also of a chunk."""
    results = pool.options(timeout=0.5).imap(tasks.sleep, [0.0, 60.0, 0.0, 0.01], 4)
    assert next(results) == 0.0
    with pytest.raises(TaskTimeoutError):
        next(results)
    assert list(results) == [0.0, 0.01]


def test_a_deadline_counts_from_the_call(tmp_path: Path) -> None:
    """What waits for a worker is over then as well, and never runs."""
    trace = tmp_path / "trace"
    with make(1) as pool:
        running = pool.apply_async(hold, (str(tmp_path),))
        pids = held(tmp_path)
        waiting = pool.options(deadline=0.2).apply_async(trace.touch)
        with pytest.raises(TaskTimeoutError) as caught:
            waiting.get(BOUND)
        assert caught.value.limit == "deadline"
        assert truth.is_alive(pids[0]), "the other task has nothing to do with it"
        assert not running.ready()
    assert not trace.exists()


def test_a_deadline_ends_all_that_runs_of_a_map(pool: SafePool, tmp_path: Path) -> None:
    """With its trees, before it reports."""
    result = pool.options(deadline=1.0).starmap_async(
        hold, [(str(tmp_path), n) for n in range(4)], 1
    )
    pids = held(tmp_path, 2)
    with pytest.raises(TaskTimeoutError):
        result.get(BOUND)
    assert [pid for pid in pids if truth.is_alive(pid)] == []
    assert pool.apply(tasks.square, (3,)) == 9
    assert len([*tmp_path.glob("held-*")]) == 2, "the rest never runs"


# -- cancelling ------------------------------------------------------------------------


def test_a_cancelled_task_never_runs(tmp_path: Path) -> None:
    """While its worker is held by another; who runs already cannot be cancelled so."""
    trace = tmp_path / "trace"
    told: list[BaseException] = []
    with make(1) as pool:
        running = pool.apply_async(hold, (str(tmp_path),))
        held(tmp_path)
        queued = pool.apply_async(trace.touch, error_callback=told.append)
        behind = pool.apply_async(tasks.square, (3,))
        assert queued.cancel()
        assert not queued.cancel(), "it is over"
        assert queued.cancelled()
        with pytest.raises(TaskCancelledError):
            queued.get(BOUND)
        assert [type(error) for error in told] == [TaskCancelledError]
        assert not running.cancel()
        assert running.cancel(kill=True)
        with pytest.raises(TaskCancelledError):
            running.get(BOUND)
        assert behind.get(BOUND) == 9
        assert not behind.cancel()
    assert not trace.exists()


def test_cancel_with_kill_ends_the_tree_and_nobody_elses(pool: SafePool, tmp_path: Path) -> None:
    """The task beside it goes on."""
    first, second = (tmp_path / name for name in ("first", "second"))
    first.mkdir()
    second.mkdir()
    one, other = (pool.apply_async(hold, (str(folder),)) for folder in (first, second))
    gone, kept = held(first), held(second)
    assert one.cancel(kill=True)
    with pytest.raises(TaskCancelledError):
        one.get(BOUND)
    assert [pid for pid in gone if truth.is_alive(pid)] == []
    assert [pid for pid in kept if not truth.is_alive(pid)] == []
    assert not other.ready()
    assert pool.apply(tasks.square, (4,)) == 16


def test_a_map_can_be_cancelled(pool: SafePool, tmp_path: Path) -> None:
    """Not once it has begun, but with ``kill``."""
    result = pool.starmap_async(hold, [(str(tmp_path), n) for n in range(50)], 1)
    pids = held(tmp_path, 2)
    assert not result.cancel()
    assert result.cancel(kill=True)
    with pytest.raises(TaskCancelledError):
        result.get(BOUND)
    assert [pid for pid in pids if truth.is_alive(pid)] == []
    assert pool.map(tasks.square, range(3)) == [0, 1, 4]


def test_cancel_from_a_callback(tmp_path: Path) -> None:
    """The engine's own thread answers itself."""
    answers: list[bool] = []
    trace = tmp_path / "trace"
    with make(1) as pool:
        later: list[Any] = []
        first = pool.apply_async(
            tasks.sleep, (0.2,), callback=lambda _: answers.append(later[0].cancel())
        )
        later.append(pool.apply_async(trace.touch))
        first.get(BOUND)
        with pytest.raises(TaskCancelledError):
            later[0].get(BOUND)
    assert answers == [True]
    assert not trace.exists()


# -- further attempts ------------------------------------------------------------------


def test_a_task_whose_worker_died_is_tried_again(pool: SafePool, tmp_path: Path) -> None:
    """And says nothing if that helped."""
    assert pool.options(retries=2).apply(attempt, (str(tmp_path), None, 2)) == 3


def test_what_kills_three_workers_is_not_tried_again(pool: SafePool, tmp_path: Path) -> None:
    """However many attempts are allowed."""
    with pytest.raises(WorkerLostError) as caught:
        pool.options(retries=50).apply(attempt, (str(tmp_path), None, 99))
    assert caught.value.attempts == 3
    assert caught.value.task == "attempt"
    assert len(os.listdir(tmp_path)) == 3
    assert pool.apply(tasks.square, (3,)) == 9


def test_errors_are_tried_again_only_if_asked(pool: SafePool, tmp_path: Path) -> None:
    """The classes that are named, as often as allowed."""
    plain, named = tmp_path / "plain", tmp_path / "named"
    plain.mkdir()
    named.mkdir()
    with pytest.raises(ConnectionError):
        pool.options(retries=3).apply(attempt, (str(plain), ConnectionError("no"), 1))
    assert len(os.listdir(plain)) == 1
    view = pool.options(retries=3, retry_on=OSError, retry_delay=0.01)
    assert view.apply(attempt, (str(named), ConnectionError("no"), 3)) == 4
    with pytest.raises(ConnectionError):
        view.apply(attempt, (str(named), ConnectionError("no"), 99))
    assert len(os.listdir(named)) == 4 + 4


def test_items_of_a_map_are_tried_again_alone(pool: SafePool, tmp_path: Path) -> None:
    """Each item runs once, but the one that failed."""
    folders = [tmp_path / str(number) for number in range(6)]
    for folder in folders:
        folder.mkdir()
    rows = [(str(folder), None, number == 2, number) for number, folder in enumerate(folders)]
    view = pool.options(retries=1)
    assert view.starmap(attempt, rows, 3) == [1, 1, 2, 1, 1, 1]
    assert [len(os.listdir(folder)) for folder in folders] == [1, 1, 2, 1, 1, 1]


def test_a_closed_pool_waits_for_further_attempts(tmp_path: Path) -> None:
    """It is not done before they are."""
    pool = make(1)
    view = pool.options(retries=1, retry_on=ValueError, retry_delay=0.3)
    result = view.apply_async(attempt, (str(tmp_path), ValueError("no"), 1))
    pool.close()
    pool.join()
    assert result.get(0) == 2


# -- how far an input is read ahead ------------------------------------------------------


@pytest.mark.parametrize("name", ["imap", "imap_unordered"])
def test_an_endless_input_is_read_as_far_as_allowed(name: str, pool: SafePool) -> None:
    """And no further while nobody takes results; each that is taken makes room."""
    read = itertools.count()
    results = getattr(pool.options(max_pending=8), name)(tasks.square, iter(read.__next__, None))
    first = [next(results) for _ in range(100)]
    assert len(set(first)) == 100
    assert next(read) <= 100 + 8
    assert list(itertools.islice(results, 50))


# -- the loss of a worker, the pool's own options, arguments -----------------------------


def test_a_lost_worker_may_end_the_pool(tmp_path: Path) -> None:
    """With all its tasks, as ProcessPoolExecutor does it; for who cannot go on without it."""
    pool = make(2, on_worker_lost="abort")
    other = pool.apply_async(hold, (str(tmp_path),))
    pids = held(tmp_path)
    with pytest.raises(WorkerLostError):
        pool.apply(tasks.kill_self)
    with pytest.raises(WorkerLostError):
        other.get(BOUND)
    with pytest.raises(WorkerLostError):
        pool.apply(tasks.square, (1,))
    pool.terminate()
    pool.join()
    assert [pid for pid in pids if truth.is_alive(pid)] == []


def test_options_of_the_pool_and_of_views_add_up(tmp_path: Path) -> None:
    """A view changes what it names, and the pool stays as it is."""
    with make(1, timeout=0.3) as pool:
        with pytest.raises(TaskTimeoutError):
            pool.apply(tasks.sleep, (60,))
        patient = pool.options(timeout=None, retries=1)
        assert patient.apply(tasks.sleep, (0.6,)) == 0.6
        assert patient.options(retries=0).apply(attempt, (str(tmp_path), None, 0)) == 1
        with pytest.raises(TaskTimeoutError):
            pool.apply(tasks.sleep, (60,))


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ({"timeout": 0}, ValueError),
        ({"timeout": "1"}, TypeError),
        ({"timeout": float("nan")}, ValueError),
        ({"deadline": -1}, ValueError),
        ({"retries": -1}, ValueError),
        ({"retries": 1.5}, TypeError),
        ({"retry_on": "OSError"}, TypeError),
        ({"retry_delay": -1}, ValueError),
        ({"on_worker_lost": "ignore"}, ValueError),
        ({"time_out": 1}, TypeError),
        ({"max_pending": 0}, ValueError),
        ({"max_pending": "all"}, TypeError),
        ({"retry_on": (OSError, int)}, TypeError),
        ({"priority": 1.5}, TypeError),
        ({"soft_timeout": 0}, ValueError),
    ],
)
def test_options_that_make_no_sense(
    option: dict[str, Any], error: type[Exception], pool: SafePool
) -> None:
    """At once, and the argument is named."""
    (name,) = option
    with pytest.raises(error, match=name):
        pool.options(**option)
    with pytest.raises(error, match=name):
        SafePool(1, **option)


def test_a_killed_worker_between_limits_is_a_loss_as_ever(pool: SafePool) -> None:
    """A timeout that is not reached changes nothing about what else may happen."""
    with pytest.raises(WorkerLostError) as caught:
        pool.options(timeout=60, deadline=60).apply(tasks.kill_self)
    assert caught.value.exitcode == -signal.SIGKILL


def test_limits_that_were_not_reached_keep_nothing_alive(pool: SafePool) -> None:
    """A result is forgotten when its task is done, however long it might have taken."""
    view = pool.options(timeout=3600, deadline=3600)
    results = [view.apply_async(tasks.square, (number,)) for number in range(20)]
    assert [result.get(BOUND) for result in results] == [number**2 for number in range(20)]
    alive = [weakref.ref(result) for result in results]
    del results
    # One per worker may be known until that gets the next task.
    pool.map(tasks.square, range(20), 1)

    def forgotten() -> bool:
        gc.collect()
        return sum(each() is not None for each in alive) <= 2

    truth.until(forgotten, "results are kept")


def test_the_higher_priority_goes_first(tmp_path: Path) -> None:
    """Among what waits; within one priority the order of the calls, groups included."""
    order: list[str] = []
    with make(1) as pool:
        blocker = pool.apply_async(tasks.wait_for_file, (str(tmp_path / "go"),))
        plain = [
            pool.apply_async(tasks.identity, (f"plain{n}",), callback=order.append)
            for n in range(3)
        ]
        low = pool.options(priority=-1).apply_async(tasks.identity, ("low",), {}, order.append)
        high = [
            pool.options(priority=5).apply_async(tasks.identity, (f"high{n}",), {}, order.append)
            for n in range(3)
        ]
        items = pool.options(priority=7).imap(tasks.identity, ["item0", "item1"])
        while pool.stats().queued < 9:
            pass
        (tmp_path / "go").touch()
        for call in (blocker, *plain, low, *high):
            call.get(BOUND)
        assert [items.next(BOUND), items.next(BOUND)] == ["item0", "item1"]
    assert order == ["high0", "high1", "high2", "plain0", "plain1", "plain2", "low"]


def test_a_soft_timeout_is_an_exception_in_the_task() -> None:
    """It may catch it, or fail of it; the worker goes on, and nothing is left of the timer."""
    with make(1) as pool:
        soft = pool.options(soft_timeout=0.1)
        pid = pool.apply(tasks.pid)
        assert soft.apply_async(tasks.sleep_softly, (BOUND,)).get(BOUND) == "SoftTimeoutError"
        with pytest.raises(SoftTimeoutError, match=r"0\.1 s") as caught:
            soft.apply_async(tasks.sleep, (BOUND,)).get(BOUND)
        assert caught.value.seconds == 0.1
        assert soft.map(tasks.sleep_softly, [0.0, BOUND, 0.0]) == [
            "slept",
            "SoftTimeoutError",
            "slept",
        ]
        assert pool.apply(tasks.has_timer) is False
        assert pool.apply(tasks.pid) == pid


def test_a_soft_timeout_that_is_ignored_becomes_a_hard_one() -> None:
    """Both together: first the exception, then the end."""
    with make(1, soft_timeout=0.05, timeout=0.3) as pool:
        call = pool.apply_async(tasks.sleep_twice, (BOUND,))
        with pytest.raises(TaskTimeoutError):
            call.get(BOUND)
