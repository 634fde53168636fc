"""SafePoolExecutor: the face of concurrent.futures, with an engine that loses one call at most."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import pytest

import safepool
from safepool import SafePoolExecutor
from tests.kit import truth
from tests.kit.jail import Jail

BOUND = 20.0


def make(workers: int = 2, **options: Any) -> SafePoolExecutor:
    return SafePoolExecutor(workers, safepool.get_context("fork"), grace=0.5, **options)


@pytest.fixture
def executor() -> Iterator[SafePoolExecutor]:
    with make() as made:
        yield made


def double(number: int) -> int:
    return 2 * number


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise ValueError("no such thing")


def hold(gate: str) -> int:
    """Say who this is, and wait until the test opens the other end."""
    with open(gate, "w") as file:
        file.write(f"{os.getpid()}\n")
    with open(gate):
        return os.getpid()


class Unreadable:
    """Pickles, and cannot be unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return fail, ()


def make_unreadable() -> Unreadable:
    return Unreadable()


def make_unpicklable() -> Any:
    return threading.Lock()


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_calls_and_maps(method: str) -> None:
    """Under every start method, as users of the standard executor write it."""
    with SafePoolExecutor(2, safepool.get_context(method)) as executor:
        future = executor.submit(pow, 2, exp=10)
        assert isinstance(future, concurrent.futures.Future)
        assert future.result(BOUND) == 1024
        assert list(executor.map(pow, [1, 2, 3], [2, 2])) == [1, 4]
        assert list(executor.map(double, range(10), chunksize=3)) == list(range(0, 20, 2))
        futures = {executor.submit(double, number) for number in range(20)}
        done = concurrent.futures.as_completed(futures, BOUND)
        assert sorted(each.result() for each in done) == list(range(0, 40, 2))
    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.submit(double, 1)


def test_arguments_are_checked_as_the_standard_executor_does() -> None:
    """At once, before anything is started."""
    with pytest.raises(ValueError):
        SafePoolExecutor(0)
    with pytest.raises(ValueError):
        SafePoolExecutor(1, max_tasks_per_child=0)
    with pytest.raises(TypeError):
        SafePoolExecutor(1, initializer="none")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        SafePoolExecutor(1, max_tasks_per_child=1.5)  # type: ignore[arg-type]
    executor = SafePoolExecutor(1)
    for options in ({"chunksize": 0}, {"buffersize": 0}):
        with pytest.raises(ValueError):
            executor.map(double, [1], **options)
    executor.shutdown()


def test_a_lost_worker_fails_its_call_and_no_other(executor: SafePoolExecutor) -> None:
    """The error is known to both worlds; the executor goes on."""
    lost = executor.submit(die)
    others = [executor.submit(double, number) for number in range(50)]
    error = lost.exception(BOUND)
    assert isinstance(error, safepool.WorkerLostError)
    assert isinstance(error, BrokenProcessPool)
    assert error.exitcode == -signal.SIGKILL
    assert [each.result(BOUND) for each in others] == list(range(0, 100, 2))
    assert executor.submit(double, 4).result(BOUND) == 8


def test_what_cannot_be_read_or_sent_is_the_calls_error(executor: SafePoolExecutor) -> None:
    """The classes are those of the standard executor, with the cause."""
    for future in (executor.submit(double, Unreadable()), executor.submit(make_unreadable)):
        error = future.exception(BOUND)
        assert isinstance(error, BrokenProcessPool)
        assert isinstance(error.__cause__, ValueError)
    assert isinstance(executor.submit(make_unpicklable).exception(BOUND), TypeError)
    assert isinstance(executor.submit(fail).exception(BOUND), ValueError)
    assert executor.submit(double, 4).result(BOUND) == 8


def test_a_cancelled_call_never_runs(tmp_path: Any) -> None:
    """Also when its turn would come later; one that runs cannot be cancelled."""
    gate, trace = tmp_path / "gate", tmp_path / "trace"
    os.mkfifo(gate)
    with make(1) as executor:
        running = executor.submit(hold, str(gate))
        with open(gate) as said:
            assert said.readline()
        queued = [executor.submit(trace.touch) for _ in range(3)]
        assert not running.cancel()
        assert all(future.cancel() for future in queued)
        assert all(future.cancelled() for future in queued)
        last = executor.submit(double, 1)
        with open(gate, "w"):
            pass
        assert last.result(BOUND) == 2
    assert not trace.exists()


def test_shutdown_may_cancel_what_has_not_begun(tmp_path: Any) -> None:
    """What runs is done; the rest is told to be cancelled."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    executor = make(1)
    running = executor.submit(hold, str(gate))
    with open(gate) as said:
        worker = int(said.readline())
    queued = [executor.submit(double, number) for number in range(5)]
    executor.shutdown(wait=False, cancel_futures=True)
    assert all(future.cancelled() for future in queued)
    with open(gate, "w"):
        pass
    assert running.result(BOUND) == worker
    executor.shutdown()
    assert truth.wait_gone(worker)


@pytest.mark.parametrize("end", ["terminate_workers", "kill_workers"])
def test_workers_can_be_ended_at_once(end: str, tmp_path: Any) -> None:
    """With the call that runs and the calls that wait; nobody waits for ever."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    executor = make(1)
    running = executor.submit(hold, str(gate))
    with open(gate) as said:
        worker = int(said.readline())
    queued = executor.submit(double, 1)
    getattr(executor, end)()
    assert isinstance(running.exception(BOUND), BrokenProcessPool)
    assert queued.cancelled()
    assert truth.wait_gone(worker)
    with pytest.raises(RuntimeError):
        executor.submit(double, 1)
    executor.shutdown()


def test_a_failing_initializer_breaks_it() -> None:
    """The futures say why, and so does the next submit."""
    executor = make(1, initializer=fail)
    error = executor.submit(double, 1).exception(BOUND)
    assert isinstance(error, safepool.InitializerError)
    assert isinstance(error, BrokenProcessPool)
    assert isinstance(error.__cause__, ValueError)
    with pytest.raises(BrokenProcessPool):
        executor.submit(double, 1)
    executor.shutdown()


def test_a_buffered_map_reads_its_input_little_by_little(executor: SafePoolExecutor) -> None:
    """Not further ahead than it was told; without a buffer all is read at once."""
    numbers = itertools.count()
    results = executor.map(double, numbers, buffersize=4)
    assert next(numbers) == 4
    assert list(itertools.islice(results, 10)) == list(range(0, 8, 2)) + list(range(10, 22, 2))
    assert next(numbers) <= 4 + 10 + 1
    results.close()  # type: ignore[attr-defined]


def test_a_map_that_takes_too_long(executor: SafePoolExecutor, tmp_path: Any) -> None:
    """The time counts from the call."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    results = executor.map(hold, [str(gate)], timeout=0.05)
    with open(gate) as said:
        said.readline()
        with pytest.raises(concurrent.futures.TimeoutError):
            next(results)
    with open(gate, "w"):
        pass


def test_with_asyncio(executor: SafePoolExecutor) -> None:
    """It serves an event loop as any executor does."""

    async def work() -> list[int]:
        loop = asyncio.get_running_loop()
        return await asyncio.gather(
            *(loop.run_in_executor(executor, double, number) for number in range(8))
        )

    assert asyncio.run(work()) == list(range(0, 16, 2))


FORGETFUL = """
    import safepool

    def late(number):
        time.sleep(0.2)
        say("did", str(number))

    if __name__ == "__main__":
        executor = safepool.SafePoolExecutor(2, safepool.get_context(sys.argv[1]))
        for number in range(4):
            executor.submit(late, number)
        if sys.argv[2] == "dropped":
            del executor
"""


@pytest.mark.parametrize("how", ["kept", "dropped"])
def test_what_was_submitted_is_done_before_the_program_ends(how: str, jail: Jail) -> None:
    """Without a shutdown, as concurrent.futures promises; and then nothing is left."""
    owner = jail.script(FORGETFUL, "fork", how)
    assert sorted(line.text for line in jail.hear("did", 4)) == ["0", "1", "2", "3"]
    assert owner.wait() == 0, owner.errors()
    jail.assert_empty("the program has ended", BOUND)


def test_nothing_survives_the_owner(jail: Jail) -> None:
    """Its workers are as safe as a pool's."""
    source = FORGETFUL.replace("time.sleep(0.2)", 'say("works"); time.sleep(180)')
    owner = jail.script(source, "fork", "kept")
    jail.hear("works", 2)
    owner.send(signal.SIGKILL)
    jail.assert_empty("owner killed", BOUND)


THREADS = """
    import safepool

    if __name__ == "__main__":
        for _ in range(2):
            with safepool.SafePoolExecutor(1, safepool.get_context("fork")) as executor:
                executor.submit(abs, 1).result()
            limit = time.monotonic() + 10
            while len(os.listdir("/proc/self/task")) > 1 and time.monotonic() < limit:
                time.sleep(0.01)
            say("threads", str(len(os.listdir("/proc/self/task"))))
"""


def test_no_thread_is_left_after_a_shutdown(jail: Jail) -> None:
    """Not even one that only watches; the next executor is watched all the same."""
    owner = jail.script(THREADS)
    assert [line.text for line in jail.hear("threads", 2)] == ["1", "1"]
    assert owner.wait() == 0, owner.errors()
