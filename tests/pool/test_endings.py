"""Every way in which a pool ends or fails to begin: bounded, clean, and with a clear error."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import safepool
from safepool.errors import (
    ForeignPoolError,
    InitializerError,
    PoolClosedError,
    PoolTerminatedError,
)
from safepool.pool import SafePool
from tests.kit import truth
from tests.kit.jail import Jail
from tests.pool import tasks
from tests.pool.standin import StandinContext

BOUND = 60
ROOT = str(Path(__file__).resolve().parents[2])


def fork_pool(processes: int, **kwargs: Any) -> SafePool:
    return SafePool(processes, context=safepool.get_context("fork"), **kwargs)


def test_close_and_join(method: str, tmp_path: Path) -> None:
    """What is submitted is done; then the workers leave and their exit functions run."""
    marker = tmp_path / "left"
    pool = SafePool(
        1, initializer=_at_exit, initargs=(str(marker),), context=safepool.get_context(method)
    )
    results = [pool.apply_async(tasks.square, (n,)) for n in range(20)]
    pool.close()
    with pytest.raises(PoolClosedError, match="Pool not running"):
        pool.apply(tasks.square, (1,))
    pool.join()
    assert [result.get(0) for result in results] == [n * n for n in range(20)]
    assert marker.exists()
    assert pool._pool == []
    pool.join()
    pool.close()
    pool.terminate()


def _at_exit(path: str) -> None:
    from multiprocessing import util

    util.Finalize(None, tasks.touch, args=(path,), exitpriority=1)


def test_join_needs_close_or_terminate() -> None:
    """As in multiprocessing: joining a running pool is a mistake, not a wait for ever."""
    with fork_pool(1) as pool, pytest.raises(ValueError, match="still running"):
        pool.join()
    with pytest.raises(ValueError, match="not running"), pool:
        pass


def test_terminate_fails_what_is_not_done(tmp_path: Path) -> None:
    """Running and queued results raise at once; those that were ready stay."""
    pool = fork_pool(1, grace=0.5)
    done = pool.apply_async(tasks.square, (3,))
    assert done.get(BOUND) == 9
    running = pool.apply_async(tasks.touch_and_hang, (str(tmp_path / "a"),))
    queued = pool.map_async(tasks.square, range(100))
    truth.until((tmp_path / "a").exists, "the task never began", BOUND)
    pool.terminate()
    for result in (running, queued):
        with pytest.raises(PoolTerminatedError):
            result.get(0)
    assert done.get(0) == 9
    with pytest.raises(PoolClosedError):
        pool.map(tasks.square, [1])
    pool.terminate()
    pool.join()
    assert pool._pool == []


def test_terminate_wakes_those_who_wait(tmp_path: Path) -> None:
    """A thread in get() is told when another thread ends the pool."""
    pool = fork_pool(1, grace=0.5)
    result = pool.apply_async(tasks.touch_and_hang, (str(tmp_path / "a"),))
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            result.get(BOUND)
        except PoolTerminatedError as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    truth.until((tmp_path / "a").exists, "the task never began", BOUND)
    pool.terminate()
    thread.join(BOUND)
    assert caught


def test_terminate_in_a_callback() -> None:
    """A callback may end the pool that runs it."""
    pool = fork_pool(2)
    pool.apply_async(tasks.square, (3,), callback=lambda _: pool.terminate()).wait(BOUND)
    pool.join()
    assert pool._pool == []


def test_terminate_while_a_callback_is_stuck() -> None:
    """The workers end in bounded time even if the user's callback never returns."""
    go = threading.Event()
    entered = threading.Event()

    def stuck(_: int) -> None:
        entered.set()
        assert go.wait(BOUND)

    pool = fork_pool(2, grace=0.5)
    processes = list(pool._pool)
    pool.apply_async(tasks.square, (3,), callback=stuck)
    assert entered.wait(BOUND)
    begun = time.monotonic()
    pool.terminate()
    assert time.monotonic() - begun < 15
    for process in processes:
        process.join(15)
        assert process.exitcode is not None
    assert not go.is_set()
    go.set()
    pool.join()


def test_terminate_at_any_moment() -> None:
    """Pools that are ended while they are being used end, every time."""
    for turn in range(30):
        pool = fork_pool(1 + turn % 2)
        result = pool.map_async(tasks.square, range(turn * 10), 1)
        if turn % 3 == 0:
            pool.close()
        if turn % 5 == 0:
            result.get(BOUND)
        pool.terminate()
        pool.join()
        assert pool._pool == []


def test_an_exception_in_the_with_block() -> None:
    """It comes out as it is, and the pool is gone."""

    def use(pool: SafePool) -> None:
        with pool:
            pool.map_async(tasks.sleep, [30] * 10)
            raise ZeroDivisionError

    pool = fork_pool(2)
    with pytest.raises(ZeroDivisionError):
        use(pool)
    assert pool._pool == []


def test_a_dropped_pool_ends(recwarn: pytest.WarningsRecorder) -> None:
    """Without close a pool that nobody refers to warns and ends, without holding up the drop."""
    pool = fork_pool(2)
    assert pool.apply(tasks.square, (3,)) == 9
    engine = pool._engine
    del pool
    gc.collect()
    assert any("unclosed running" in str(warning.message) for warning in recwarn)
    engine.join()
    assert engine.processes == []


def test_a_dropped_pool_with_work_finishes_it() -> None:
    """A result refers to its pool until it is complete."""
    result = fork_pool(2).map_async(tasks.square, range(2000), 1)
    gc.collect()
    with pytest.warns(ResourceWarning, match="unclosed running"):
        got = finish_and_drop(result)
    assert len(got) == 2000


def finish_and_drop(result: Any) -> Any:
    """Wait for a result and for the end of the engine of its pool, which nobody else holds."""
    got = result.get(BOUND)
    truth.until(lambda: not engine_threads(), "the pool was kept", BOUND)
    return got


def engine_threads() -> list[str]:
    return [
        t.name for t in threading.enumerate() if t.name.startswith(("safepool-e", "safepool-f"))
    ]


def test_references_are_let_go() -> None:
    """After its result neither function nor arguments nor results nor callbacks are kept."""

    class Thing:
        pass

    def function(_: Any) -> int:
        return 1

    def callback(_: Any) -> None:
        pass

    with fork_pool(1) as pool:
        thing = Thing()
        results = [
            pool.apply_async(function, (thing,), callback=callback),
            pool.map_async(function, [thing], callback=callback),
        ]
        for result in results:
            result.get(BOUND)
        assert list(pool.imap(function, [thing])) == [1]
        kept = [weakref.ref(each) for each in (thing, function, callback, *results)]
        del thing, function, callback, result, results
        truth.until(
            lambda: gc.collect() >= 0 and not any(reference() for reference in kept),
            "something is kept",
            10,
        )


def test_a_forked_copy_of_the_owner(tmp_path: Path) -> None:
    """Every method says clearly that the pool is not there; the copy's exit touches nothing."""
    with fork_pool(1) as pool:
        pending = pool.apply_async(tasks.wait_for_file, (str(tmp_path / "go"),))
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            said = []
            calls: list[Any] = [
                lambda: pool.apply(tasks.square, (1,)),
                lambda: pool.map(tasks.square, [1]),
                lambda: pool.imap(tasks.square, [1]),
                pool.close,
                pool.terminate,
                pool.join,
                pending.get,
            ]
            for call in calls:
                try:
                    call()
                    said.append("nothing")
                except ForeignPoolError:
                    said.append("foreign")
                except BaseException as error:
                    said.append(repr(error))
            del pool, pending, calls
            gc.collect()
            os.write(write, ",".join(said).encode())
            os._exit(0)
        os.close(write)
        with open(read) as answers:
            assert answers.read().split(",") == ["foreign"] * 7
        os.waitpid(child, 0)
        tasks.touch(str(tmp_path / "go"))
        assert pending.get(BOUND)
        assert pool.apply(tasks.square, (3,)) == 9


def test_an_initializer_that_fails(method: str) -> None:
    """A bounded number of attempts, then one error with the initializer's own as cause."""
    pool = SafePool(
        2, initializer=_fail, initargs=("no GPU",), context=safepool.get_context(method)
    )
    try:
        with pytest.raises(InitializerError, match="no GPU") as caught:
            pool.apply_async(tasks.square, (3,)).get(BOUND)
    except PoolClosedError:  # pragma: no cover
        raise AssertionError("the wrong error") from None
    assert isinstance(caught.value.__cause__, ValueError)
    assert "_fail" in str(caught.value.__cause__.__cause__)
    assert 0 < caught.value.attempts <= 6
    with pytest.raises(InitializerError):
        pool.map(tasks.square, range(5))
    with pytest.raises(InitializerError):
        pool.imap(tasks.square, range(5))
    pool.terminate()
    pool.join()


def _fail(text: str) -> None:
    raise ValueError(text)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_workers_that_die_before_they_are_ready(number: int) -> None:
    """A crash loop at start-up ends in an error that says how the last one died."""
    pool = fork_pool(2, initializer=tasks.kill_self, initargs=(None, number))
    with pytest.raises(InitializerError, match=signal.Signals(number).name):
        pool.apply_async(tasks.square, (3,)).get(BOUND)
    pool.close()
    pool.join()


def test_a_start_that_fails_in_the_constructor() -> None:
    """The error comes out, and what was started before it is gone."""
    context = StandinContext("fork", fail_from=2)
    with pytest.raises(OSError, match="no more processes here"):
        SafePool(4, context=context, grace=0.5)
    (source,) = context.sources
    assert len(source.started) == 2
    assert all(process.exitcode is not None for process in source.started)
    assert source.closed


def test_a_start_that_fails_later() -> None:
    """Replacing a worker fails for good: pending and later calls raise the reason."""
    context = StandinContext("fork", fail_from=1)
    pool = SafePool(1, context=context)
    assert pool.apply(tasks.square, (3,)) == 9
    lost = pool.apply_async(tasks.kill_self)
    queued = pool.apply_async(tasks.square, (3,))
    with pytest.raises(safepool.WorkerLostError):
        lost.get(BOUND)
    with pytest.raises(OSError, match="no more processes here"):
        queued.get(BOUND)
    with pytest.raises(OSError, match="no more processes here"):
        pool.apply(tasks.square, (3,))
    pool.terminate()
    pool.join()
    assert context.sources[0].closed


def test_handlers_of_the_owner_are_not_the_workers() -> None:
    """A worker that gets a signal neither runs the owner's handler nor wakes the owner's loop."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    seen: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda number, _frame: seen.append(number))
    wakeup = signal.set_wakeup_fd(theirs.fileno())
    try:
        with fork_pool(1, grace=0.5) as pool, ours, theirs:
            pid = pool.apply(tasks.pid)
            os.kill(pid, signal.SIGTERM)
            truth.until(
                lambda: pid not in [process.pid for process in pool._pool],
                "SIGTERM did not end the worker",
                BOUND,
            )
            assert pool.apply(tasks.square, (3,)) == 9
            with pytest.raises(BlockingIOError):
                ours.recv(1)
            signal.set_wakeup_fd(wakeup)
    finally:
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGTERM, previous)
    assert seen == []


def test_interrupts_reach_tasks_only(tmp_path: Path) -> None:
    """An idle worker ignores SIGINT; in a task it is KeyboardInterrupt, and the worker goes on."""
    with fork_pool(1) as pool:
        pid = pool.apply(tasks.pid)
        os.kill(pid, signal.SIGINT)
        assert pool.apply(tasks.pid) == pid
        result = pool.apply_async(tasks.touch_and_hang, (str(tmp_path / "a"),))
        truth.until((tmp_path / "a").exists, "the task never began", BOUND)
        os.kill(pid, signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            result.get(BOUND)
        assert pool.apply(tasks.pid) == pid


AT_EXIT = """
import sys, time
sys.path.insert(0, {root!r})
import safepool

def sq(x): return x * x

if __name__ == "__main__":
    pool = safepool.get_context({method!r}).Pool(2)
    class Holder: pass
    holder = Holder()
    holder.pool = pool
    holder.me = holder
    assert pool.map(sq, range(10)) == [n * n for n in range(10)]
    pending = pool.map_async(time.sleep, [60, 60])
    print("end")
"""


def test_a_pool_that_is_left_to_the_interpreters_exit(method: str, tmp_path: Path) -> None:
    """A script that ends without closing its pool ends soon, quietly and with status 0."""
    script = tmp_path / "script.py"
    script.write_text(AT_EXIT.format(root=ROOT, method=method))
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=BOUND, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Engines and feeders end with their pools."""
    yield
    truth.until(lambda: not engine_threads(), "a thread is left", 10)


def test_a_first_pool_leaves_the_finalizers_as_they_were(jail: Jail) -> None:
    """Of multiprocessing: what a run needs at the exit was registered with its import."""
    owner = jail.script(
        """
        from multiprocessing import util
        from safepool import SafePool, SafeProcess

        if __name__ == "__main__":
            before = set(util._finalizer_registry)
            with SafePool(1) as pool:
                pool.apply(abs, (-1,))
            process = SafeProcess(target=abs, args=(-1,))
            process.start()
            process.join()
            del pool, process
            say("new", str(len(set(util._finalizer_registry) - before)))
        """
    )
    assert jail.hear("new")[0].text == "0"
    assert owner.wait() == 0
