"""The methods of a pool under every start method: multiprocessing's results and errors."""

from __future__ import annotations

import inspect
import multiprocessing
import multiprocessing.pool
import pickle
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import safepool
from safepool.errors import TaskNotPicklableError
from safepool.pool import SafePool
from tests.pool import tasks

BOUND = 60
MaybeEncodingError: Any = vars(multiprocessing.pool)["MaybeEncodingError"]
RemoteTraceback: Any = vars(multiprocessing.pool)["RemoteTraceback"]


@pytest.fixture(scope="module", params=["fork", "spawn", "forkserver"])
def pool(request: pytest.FixtureRequest) -> Iterator[SafePool]:
    """One pool of two workers for all tests of this module, per start method."""
    with SafePool(2, context=safepool.get_context(request.param)) as opened:
        yield opened


METHODS = [
    name
    for name, _ in inspect.getmembers(multiprocessing.pool.Pool, inspect.isfunction)
    if not name.startswith("_") and name != "Process"
]


@pytest.mark.parametrize("name", METHODS)
def test_signatures_are_those_of_multiprocessing(name: str) -> None:
    """Every public method takes the same parameters, in the same order, with the same defaults."""

    def shape(function: Any) -> list[tuple[str, Any, Any]]:
        parameters = inspect.signature(function).parameters.values()
        return [(each.name, each.kind, each.default) for each in parameters]

    assert shape(getattr(SafePool, name)) == shape(getattr(multiprocessing.pool.Pool, name))


def test_constructor_takes_what_multiprocessing_takes() -> None:
    """The parameters of Pool come first, in the same order; what is added is keyword-only."""
    theirs = list(inspect.signature(multiprocessing.pool.Pool).parameters.values())
    ours = list(inspect.signature(SafePool).parameters.values())
    for mine, original in zip(ours, theirs, strict=False):
        assert (mine.name, mine.default) == (original.name, original.default)
    added = ours[len(theirs) :]
    assert all(each.kind is inspect.Parameter.KEYWORD_ONLY for each in added)


def test_results(pool: SafePool) -> None:
    """Each method gives the results that the plain loop gives."""
    numbers = list(range(25))
    squares = [number**2 for number in numbers]
    pairs = [(number, 1) for number in numbers]
    assert pool.apply(tasks.add, (2,), {"y": 3}) == 5
    assert pool.map(tasks.square, numbers) == squares
    assert pool.map(tasks.square, iter(numbers), chunksize=7) == squares
    assert pool.starmap(tasks.add, pairs) == [number + 1 for number in numbers]
    assert pool.map_async(tasks.square, numbers, 3).get(BOUND) == squares
    assert pool.starmap_async(tasks.add, pairs, 4).get(BOUND) == [n + 1 for n in numbers]
    for chunksize in (1, 4):
        assert list(pool.imap(tasks.square, numbers, chunksize)) == squares
        assert sorted(pool.imap_unordered(tasks.square, numbers, chunksize)) == squares


def test_empty_input(pool: SafePool) -> None:
    """No items, no results, and no waiting."""
    assert pool.map(tasks.square, []) == []
    assert pool.starmap(tasks.add, [], chunksize=3) == []
    assert list(pool.imap(tasks.square, [])) == []
    assert list(pool.imap_unordered(tasks.square, iter(()), 5)) == []


def test_functions_without_a_name_in_the_worker(pool: SafePool) -> None:
    """Lambdas, closures and classes made in functions work, and so do their results."""
    base = 100
    assert pool.apply(lambda x: x + base, (1,)) == 101
    assert pool.map(lambda x: x + base, range(4)) == [100, 101, 102, 103]
    assert list(pool.imap(lambda x: x * 2, range(5), 2)) == [0, 2, 4, 6, 8]


def test_functions_defined_after_the_start(pool: SafePool) -> None:
    """A notebook's next cell: a function of ``__main__`` that no worker has seen runs."""
    main = sys.modules["__main__"].__dict__
    exec("class Late:\n    value = 5\ndef late(x): return x + Late.value", main)
    try:
        assert pool.apply(main["late"], (1,)) == 6
        assert pool.map(main["late"], range(6), 2) == [5, 6, 7, 8, 9, 10]
        assert list(pool.imap(main["late"], range(3))) == [5, 6, 7]
        assert pool.apply(type, (main["Late"](),)).__name__ == "Late"
    finally:
        del main["late"], main["Late"]


def test_large_data(pool: SafePool) -> None:
    """Arguments and results far larger than any buffer come through whole."""
    big = bytes(range(256)) * 40_000
    assert pool.apply(tasks.identity, (big,)) == big
    assert pool.map(tasks.identity, [big, b"", big], chunksize=3) == [big, b"", big]


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad"),
        SystemExit(3),
        KeyboardInterrupt(),
        GeneratorExit(),
        StopIteration(7),
        AttributeError("not a missing name"),
    ],
)
def test_whatever_a_task_raises_is_its_result(pool: SafePool, error: BaseException) -> None:
    """Same type and arguments, with the worker's traceback as the cause; the worker lives on."""
    before = set(pool.map(tasks.pid, range(20), 1))
    with pytest.raises(type(error)) as caught:
        pool.apply(tasks.raise_it, (error,))
    assert caught.value.args == error.args
    cause: Any = caught.value.__cause__
    assert type(cause) is RemoteTraceback
    assert "raise error" in cause.tb
    assert "service.py" not in cause.tb, "the pool's own frames are noise"
    with pytest.raises(type(error)):
        pool.map(tasks.raise_it, [error])
    assert set(pool.map(tasks.pid, range(20), 1)) <= before | set(pool.map(tasks.pid, range(20)))


def test_results_that_cannot_be_pickled(pool: SafePool) -> None:
    """MaybeEncodingError with the reason and the value, alone and within a chunk."""
    with pytest.raises(MaybeEncodingError) as caught:
        pool.apply(tasks.return_lambda)
    assert "lambda" in caught.value.value
    assert "<lambda>" in caught.value.exc
    with pytest.raises(MaybeEncodingError):
        pool.map(_lock, range(4), 2)


def _lock(_: int) -> Any:
    return threading.Lock()


def test_exceptions_that_cannot_be_made_again(pool: SafePool) -> None:
    """The task alone fails, with the type's name, the text and the worker's traceback."""
    with pytest.raises(MaybeEncodingError) as caught:
        pool.apply(_raise_unreadable)
    assert "UnreadableError" in str(caught.value)
    assert "ab" in str(caught.value)
    assert "_raise_unreadable" in str(caught.value.__cause__)
    assert pool.apply(tasks.square, (3,)) == 9


def _raise_unreadable() -> None:
    raise tasks.UnreadableError("a", "b")


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(1)])
def test_unpickling_that_fails(pool: SafePool, error: BaseException) -> None:
    """In the worker it is the task's error, in the owner it spoils that result only."""
    with pytest.raises(type(error)):
        pool.apply(tasks.identity, (tasks.FailsToLoad(error),))
    with pytest.raises(MaybeEncodingError):
        pool.apply(tasks.make_fails_to_load, (error,))
    assert pool.apply(tasks.square, (3,)) == 9


def test_tasks_that_cannot_be_pickled(pool: SafePool) -> None:
    """One clear error, from the result as in multiprocessing; other tasks are not touched."""
    lock = threading.Lock()
    result = pool.apply_async(tasks.identity, (lock,))
    with pytest.raises(TaskNotPicklableError, match="argument 0") as caught:
        result.get(BOUND)
    assert isinstance(caught.value, pickle.PicklingError)
    with pytest.raises(TaskNotPicklableError, match="item 2"):
        pool.map(tasks.identity, [0, 1, lock, 3], chunksize=2)
    with pytest.raises(TaskNotPicklableError, match="the function"):
        pool.map(lock.acquire, [1])
    iterator = pool.imap(tasks.identity, [0, lock, 2])
    assert next(iterator) == 0
    with pytest.raises(TaskNotPicklableError):
        next(iterator)
    assert next(iterator) == 2
    with pytest.raises(RuntimeError, match="not this one"):
        pool.apply(tasks.identity, (tasks.Stubborn(),))


def test_callbacks(pool: SafePool) -> None:
    """Callbacks get the outcome before the result is ready."""
    got: list[Any] = []
    pool.apply_async(tasks.square, (3,), callback=got.append).wait(BOUND)
    pool.map_async(tasks.square, [1, 2], callback=got.append).wait(BOUND)
    failed = pool.apply_async(tasks.raise_it, (KeyError(1),), error_callback=got.append)
    failed.wait(BOUND)
    assert got[:2] == [9, [1, 4]]
    assert isinstance(got[2], KeyError)
    assert failed.ready()
    assert not failed.successful()


def test_a_callback_that_raises(pool: SafePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error is reported as a thread's is, the result arrives, the pool goes on."""
    seen: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", seen.append)

    def callback(_: Any) -> None:
        raise SystemExit("from the callback")

    assert pool.apply_async(tasks.square, (3,), callback=callback).get(BOUND) == 9
    assert seen[0].exc_type is SystemExit
    assert pool.apply(tasks.square, (4,)) == 16


def test_a_callback_may_use_the_pool(pool: SafePool) -> None:
    """A callback may submit: chains of tasks need no thread of the user's."""
    chained: list[Any] = []
    done = threading.Event()

    def second(value: int) -> None:
        chained.append(value)
        done.set()

    def first(value: int) -> None:
        pool.apply_async(tasks.square, (value,), callback=second)

    pool.apply_async(tasks.square, (3,), callback=first)
    assert done.wait(BOUND)
    assert chained == [81]


def test_result_objects(pool: SafePool, tmp_path: Any) -> None:
    """ready, successful, wait and get with a timeout, as in multiprocessing."""
    path = str(tmp_path / "go")
    result = pool.apply_async(tasks.wait_for_file, (path,))
    assert not result.ready()
    with pytest.raises(ValueError, match="not ready"):
        result.successful()
    result.wait(0.01)
    with pytest.raises(multiprocessing.TimeoutError):
        result.get(0.01)
    tasks.touch(path)
    assert result.get(BOUND) is True
    assert result.successful()


def test_wrong_arguments(pool: SafePool) -> None:
    """A clear error at once, in the caller."""
    for chunksize in (0, -1):
        with pytest.raises(ValueError, match="Chunksize must be 1"):
            pool.map(tasks.square, [1], chunksize)
        with pytest.raises(ValueError, match="Chunksize must be 1"):
            pool.imap(tasks.square, [1], chunksize)
    with pytest.raises(TypeError):
        pool.map(tasks.square, 5)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        pool.apply(None)  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="cannot be passed between processes"):
        pickle.dumps(pool)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"processes": 0}, ValueError, "at least 1"),
        ({"processes": -1}, ValueError, "at least 1"),
        ({"maxtasksperchild": 0}, ValueError, "positive int or None"),
        ({"maxtasksperchild": 1.5}, ValueError, "positive int or None"),
        ({"initializer": 5}, TypeError, "callable"),
        ({"grace": -1}, ValueError, "grace"),
        ({"grace": "5"}, TypeError, "grace"),
    ],
)
def test_wrong_constructor_arguments(
    arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    """Found before anything is started."""
    with pytest.raises(error, match=text):
        SafePool(**arguments)


def test_a_fork_in_a_task_that_returns_twice(pool: SafePool) -> None:
    """The copy of a worker that a task forked and did not end never answers."""
    for _ in range(3):
        assert pool.apply(tasks.fork_and_return_twice) > 0
    assert pool.map(tasks.square, range(10), 1) == [n * n for n in range(10)]
