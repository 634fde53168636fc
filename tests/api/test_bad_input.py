"""Wrong input of every kind: one clear error, in bounded time, and nothing is left of it."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import safepool
from safepool import InitializerError, PoolClosedError, SafePool, TaskNotPicklableError
from tests.api import work
from tests.kit.jail import Jail

BOUND = 30
METHODS = ("fork", "spawn", "forkserver")
CALLS = ("map", "starmap", "map_async", "starmap_async", "imap", "imap_unordered")


@pytest.fixture(scope="module")
def pool(launchers_stay: None) -> Iterator[SafePool]:
    """One pool that all wrong calls are made on: it must survive them."""
    with SafePool(1, context=safepool.get_context("fork")) as opened:
        yield opened


@pytest.fixture
def survives(pool: SafePool) -> Iterator[SafePool]:
    """The pool, which must still work after the test, with the very same worker."""
    before = [process.pid for process in pool._pool]
    yield pool
    assert pool.apply(work.add, (1, 2)) == 3
    assert [process.pid for process in pool._pool] == before


def outcome(answer: Any) -> Any:
    """What a call returns in the end, whichever of the methods it was."""
    if hasattr(answer, "get"):
        return answer.get(BOUND)
    return list(answer) if hasattr(answer, "__next__") else answer


# -- constructors ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"processes": 0}, ValueError),
        ({"processes": -3}, ValueError),
        ({"processes": "2"}, TypeError),
        ({"processes": 1.5}, TypeError),
        ({"processes": [2]}, TypeError),
        ({"initializer": "work.nothing"}, TypeError),
        ({"initializer": 0}, TypeError),
        ({"initargs": 5}, TypeError),
        ({"initargs": None}, TypeError),
        ({"maxtasksperchild": 0}, ValueError),
        ({"maxtasksperchild": -1}, ValueError),
        ({"maxtasksperchild": "1"}, ValueError),
        ({"maxtasksperchild": 2.0}, ValueError),
        ({"grace": -1}, ValueError),
        ({"grace": float("nan")}, ValueError),
        ({"grace": "5"}, TypeError),
        ({"grace": None}, TypeError),
        ({"on_owner_death": "wait"}, ValueError),
        ({"on_owner_death": None}, TypeError),
        ({"strays": "keep"}, ValueError),
        ({"strays": True}, TypeError),
        ({"nonsense": 1}, TypeError),
    ],
)
@pytest.mark.parametrize("face", ["SafePool", "ctx.Pool", "safepool.Pool"])
def test_wrong_arguments_of_a_pool(
    face: str, arguments: dict[str, Any], error: type[Exception]
) -> None:
    """Every face of the pool refuses them in the call, and leaves nothing that it started."""
    make: Any = {
        "SafePool": SafePool,
        "ctx.Pool": safepool.get_context("fork").Pool,
        "safepool.Pool": safepool.Pool,
    }[face]
    with pytest.raises(error):
        make(**{"processes": 1, **arguments})


@pytest.mark.parametrize("context", ["thread", 5, object(), SafePool])
def test_a_wrong_context_is_named(context: Any) -> None:
    """What is no context is refused, and the message says which argument it was."""
    with pytest.raises((TypeError, ValueError), match="context"):
        SafePool(1, context=context)


GRACE = """
import safepool
from tests.api import work

if __name__ == "__main__":
    try:
        pool = safepool.get_context("fork").Pool(1, grace=float({grace!r}))
    except ValueError as error:
        say("refused", str(error))
    else:
        with pool:
            assert pool.apply(work.add, (1, 2)) == 3
        pool.join()
        say("worked")
    say("over")
"""


@pytest.mark.parametrize("grace", ["inf", "1e12", "1e7"])
def test_a_grace_beyond_all_measure(grace: str, jail: Jail) -> None:
    """It is refused by name in the constructor, or the pool works and ends like any other."""
    owner = jail.script(GRACE.format(grace=grace))
    jail.hear("over")
    assert all("grace" in line.text for line in jail.heard if line.word == "refused")
    assert owner.wait() == 0
    assert owner.errors() == ""
    jail.assert_empty("a long grace")


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize(
    "arguments",
    [
        {"initializer": threading.Lock().acquire},
        {"initializer": work.add, "initargs": (threading.Lock(),)},
    ],
    ids=["initializer", "initargs"],
)
def test_an_initializer_that_cannot_be_sent(method: str, arguments: dict[str, Any]) -> None:
    """The constructor raises pickle's own words; no worker is left of the attempt."""
    with pytest.raises(TypeError, match=r"cannot pickle '_thread.lock' object"):
        SafePool(2, context=safepool.get_context(method), **arguments)


# -- calls -----------------------------------------------------------------------------


@pytest.mark.parametrize("function", [None, 5, "abs"])
@pytest.mark.parametrize("call", [*CALLS, "apply", "apply_async"])
def test_a_function_that_is_none(survives: SafePool, call: str, function: Any) -> None:
    """TypeError that says what it is, as calling it would."""
    items = () if call.startswith("apply") else ([(1,)],)
    with pytest.raises(TypeError, match="object is not callable"):
        outcome(getattr(survives, call)(function, *items))


@pytest.mark.parametrize("items", [None, 5, work.add])
@pytest.mark.parametrize("call", CALLS)
def test_an_iterable_that_is_none(survives: SafePool, call: str, items: Any) -> None:
    """TypeError that says so, whichever method it was given to."""
    with pytest.raises(TypeError, match="not iterable"):
        outcome(getattr(survives, call)(work.add, items))


@pytest.mark.parametrize("chunksize", [0, -1, "2", 1.5, [1]])
@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_chunksize(survives: SafePool, call: str, chunksize: Any) -> None:
    """An error in bounded time; 0 and less are named as such at once."""
    with pytest.raises((ValueError, TypeError)) as caught:
        outcome(getattr(survives, call)(work.add, [(1,)], chunksize))
    if chunksize in (0, -1):
        assert str(chunksize) in str(caught.value)
        assert "hunksize" in str(caught.value)


@pytest.mark.parametrize(
    "arguments",
    [(5,), (None,), ((1,), 5), ((1,), None), ((1,), [1]), ((1,), {1: 2}), ((1, 2, 3),), ((),)],
)
@pytest.mark.parametrize("call", ["apply", "apply_async"])
def test_wrong_arguments_for_the_function(survives: SafePool, call: str, arguments: Any) -> None:
    """Not a tuple, not a mapping, too many, too few: TypeError, as the plain call gives."""
    with pytest.raises(TypeError):
        outcome(getattr(survives, call)(work.add, *arguments))


@pytest.mark.parametrize("call", ["starmap", "starmap_async"])
def test_items_that_are_no_tuples(survives: SafePool, call: str) -> None:
    """A starmap over plain values: TypeError, as ``f(*5)`` gives."""
    with pytest.raises(TypeError, match="must be an iterable, not int"):
        outcome(getattr(survives, call)(work.add, [1, 2]))


class WrongLength:
    """Says one length and yields another."""

    def __init__(self, said: int, real: int) -> None:
        self.said, self.real = said, real

    def __len__(self) -> int:
        return self.said

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.real))


@pytest.mark.parametrize("chunksize", [1, 2, 7, None])
def test_an_input_that_is_shorter_than_it_says(survives: SafePool, chunksize: int | None) -> None:
    """A result or an error, but no wait for items that never come."""
    result = survives.map_async(work.add, WrongLength(5, 2), chunksize)
    result.wait(3)
    assert result.ready(), "the map waits for ever"


def test_a_timeout_that_is_no_number(survives: SafePool, tmp_path: Path) -> None:
    """TypeError instead of a wait; the result comes all the same."""
    go = tmp_path / "go"
    result = survives.apply_async(work.wait_for, (str(go),))
    for wait in (result.get, result.wait):
        with pytest.raises(TypeError):
            wait("1")  # type: ignore[arg-type]
    with pytest.raises(safepool.TimeoutError):
        result.get(-1)
    go.touch()
    assert result.get(BOUND) is None


def test_a_pool_cannot_be_a_task_argument(survives: SafePool) -> None:
    """One error that says what to do instead."""
    with pytest.raises(NotImplementedError, match="a task can make a pool of its own"):
        survives.apply(id, (survives,))
    with pytest.raises(NotImplementedError, match="a task can make a pool of its own"):
        survives.map(id, [1, survives])
    with pytest.raises(NotImplementedError, match="a task can make a pool of its own"):
        pickle.dumps(survives)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_pool_cannot_be_given_to_a_process(survives: SafePool, method: str) -> None:
    """The error comes out of ``start``, and nothing was started."""
    process = safepool.get_context(method).Process(target=id, args=(survives,))
    with pytest.raises(NotImplementedError, match="cannot be passed between processes"):
        process.start()
    assert process.pid is None


def test_a_started_process_cannot_be_a_task_argument(survives: SafePool) -> None:
    """As in multiprocessing, a process object does not travel; the error names the argument."""
    process = safepool.get_context("fork").Process(target=work.nothing)
    process.start()
    with pytest.raises(TaskNotPicklableError, match="argument 0"):
        survives.apply(id, (process,))
    process.join(BOUND)
    assert process.exitcode == 0


# -- dead pools ------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["close", "terminate", "with"])
@pytest.mark.parametrize("method", METHODS)
def test_a_pool_that_is_over_takes_nothing(method: str, end: str) -> None:
    """Every method says so at once; ending it again and joining it are no errors."""
    pool = SafePool(1, context=safepool.get_context(method), grace=5.0)
    if end == "with":
        with pool:
            pass
    else:
        getattr(pool, end)()
    for name in (*CALLS, "apply", "apply_async"):
        items = ((1,),) if name.startswith("apply") else ([(1,)],)
        with pytest.raises(PoolClosedError, match="Pool not running"):
            getattr(pool, name)(work.add, *items)
    with pytest.raises(ValueError, match="not running"), pool:
        pass
    pool.close()
    pool.join()
    pool.terminate()
    pool.join()
    assert repr(pool).startswith("<safepool.pool.SafePool state=")


# -- initializers ----------------------------------------------------------------------

FAILS = """
import sys, time
import safepool
from tests.api import work

if __name__ == "__main__":
    begun = time.monotonic()
    pool = safepool.get_context({method!r}).Pool({count}, {initializer}, {initargs})
    try:
        pool.map(abs, range(100))
    except safepool.InitializerError as error:
        say("failed", f"{{error.attempts}} {{type(error.__cause__).__name__}} {{error}}")
    for ending in (pool.close, pool.terminate, pool.join):
        ending()
    say("took", f"{{time.monotonic() - begun}}")
    sys.stdin.readline()
"""


@pytest.mark.parametrize(
    ("initializer", "initargs", "cause", "text"),
    [
        ("work.fail", "('no GPU here',)", "ZeroDivisionError", "ZeroDivisionError: no GPU here"),
        ("work.exit_hard", "(3,)", "NoneType", "exit code 3"),
        ("work.add", "(1, 2, 3)", "TypeError", "positional arguments"),
    ],
)
def test_an_initializer_that_fails_for_good(
    method: str, initializer: str, initargs: str, cause: str, text: str, jail: Jail
) -> None:
    """Some attempts, one error that names the cause, a quiet stderr, and no process is left.

    multiprocessing starts new workers for ever here.
    """
    program = FAILS.format(method=method, count=2, initializer=initializer, initargs=initargs)
    owner = jail.script(program)
    (failed,) = jail.hear("failed")
    attempts, kind, message = failed.text.split(" ", 2)
    assert 1 <= int(attempts) <= 10
    assert kind == cause
    assert text in message
    (took,) = jail.hear("took")
    assert float(took.text) < BOUND
    owner.go()
    assert owner.wait() == 0
    jail.assert_empty("a pool whose initializer fails")
    assert len(owner.errors().splitlines()) <= 10, owner.errors()


def test_an_initializer_that_fails_once(method: str, tmp_path: Path) -> None:
    """One bad start is not the end: another worker takes its place and the tasks are done."""
    flag = tmp_path / "was here"
    with SafePool(1, work.fail_once, (str(flag),), context=safepool.get_context(method)) as pool:
        assert pool.map(work.add, range(10)) == list(range(10))
    assert flag.exists()


def test_the_error_of_an_initializer_is_for_all(method: str) -> None:
    """Whoever waits is told, and who comes later as well; nobody waits for ever."""
    begun = time.monotonic()
    with SafePool(1, work.fail, context=safepool.get_context(method)) as pool:
        for call in ("apply_async", "map_async", "imap", "imap_unordered", "starmap"):
            items = ((1,),) if call == "apply_async" else ([(1,)],)
            with pytest.raises(InitializerError, match="it broke"):
                outcome(getattr(pool, call)(work.add, *items))
    assert time.monotonic() - begun < BOUND


DEGRADED = """
import logging, sys
import multiprocessing
import safepool

logging.basicConfig(format="%(levelname)s %(message)s")
multiprocessing.set_executable("/bin/false")
try:
    with safepool.get_context(sys.argv[1]).Pool(2) as pool:
        print(pool.map(abs, [-1, -2]))
        while not pool.protection.reason:
            pool.apply(abs, (-1,))
        print(pool.map(abs, [-3]), pool.protection.sidecar)
except safepool.ProtectionError as error:
    print("ProtectionError")
"""


def test_degraded_protection_is_a_choice(method: str) -> None:
    """SAFEPOOL_PROTECTION=warn: a fork pool works without a sidecar, and says so; without the
    choice, and for workers that come from the sidecar, it is a ProtectionError."""
    for choice in ("warn", "require"):
        done = subprocess.run(
            [sys.executable, "-c", DEGRADED, method],
            env={**os.environ, "SAFEPOOL_PROTECTION": choice},
            capture_output=True,
            text=True,
            timeout=60,
        )
        if method == "fork" and choice == "warn":
            assert done.stdout.splitlines() == ["[1, 2]", "[3] False"], done.stderr
            assert "WARNING the sidecar ended before it could watch" in done.stderr
        else:
            assert done.stdout.splitlines()[-1] == "ProtectionError", done.stderr
