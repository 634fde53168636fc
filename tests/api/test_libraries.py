"""Libraries that take a context or a process: they get the promise without knowing of it."""

from __future__ import annotations

import concurrent.futures
import multiprocessing.managers
import signal
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import pytest

import safepool
from tests.api import work
from tests.kit import truth
from tests.kit.jail import Jail

BOUND = 30


def test_an_executor_on_a_safe_context(method: str) -> None:
    """ProcessPoolExecutor(mp_context=ctx): results, errors, initializer and a clean end."""
    context = safepool.get_context(method)
    with concurrent.futures.ProcessPoolExecutor(
        2, mp_context=context, initializer=work.nothing
    ) as executor:
        assert list(executor.map(work.add, range(5), timeout=BOUND)) == list(range(5))
        with pytest.raises(ZeroDivisionError, match="it broke"):
            executor.submit(work.fail).result(BOUND)
        workers: Any = executor._processes
        assert all(isinstance(process, context.Process) for process in workers.values())


def test_an_executor_notices_a_dead_worker(method: str) -> None:
    """A worker that is killed breaks the executor as it does on multiprocessing; no hang."""
    context = safepool.get_context(method)
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as executor:
        future = executor.submit(work.die_of, signal.SIGKILL)
        with pytest.raises(BrokenProcessPool):
            future.result(BOUND)


class Registry(multiprocessing.managers.BaseManager):
    """A manager class of a library's own."""


class Counter:
    def __init__(self) -> None:
        self.value = 0

    def add(self, number: int) -> int:
        self.value += number
        return self.value


Registry.register("Counter", Counter)


def test_a_manager_class_of_somebody_elses(method: str) -> None:
    """``BaseManager(ctx=ctx)`` runs its server in a safe process."""
    context = safepool.get_context(method)
    with Registry(ctx=context) as manager:
        counter: Any = manager.Counter()  # type: ignore[attr-defined]
        assert [counter.add(2), counter.add(3)] == [2, 5]
        server: Any = manager._process  # type: ignore[attr-defined]
        assert isinstance(server, context.Process)
    server.join(BOUND)
    assert not server.is_alive()


def test_a_library_that_subclasses_the_contexts_process(method: str) -> None:
    """``class Worker(ctx.Process)`` with a ``run`` of its own, as torch and others do it."""
    worker = WORKERS[method]("text")
    worker.start()
    worker.join(BOUND)
    assert worker.exitcode == len("text")


class _Run:
    """What the three classes below share."""

    def __init__(self, text: str) -> None:
        super().__init__(daemon=True)  # type: ignore[call-arg]
        self.text = text

    def run(self) -> None:
        raise SystemExit(len(self.text))


class ForkWorker(_Run, safepool.get_context("fork").Process):  # type: ignore[misc]
    """On fork."""


class SpawnWorker(_Run, safepool.get_context("spawn").Process):  # type: ignore[misc]
    """On spawn."""


class ForkServerWorker(_Run, safepool.get_context("forkserver").Process):  # type: ignore[misc]
    """On forkserver."""


WORKERS: dict[str, Any] = {
    "fork": ForkWorker,
    "spawn": SpawnWorker,
    "forkserver": ForkServerWorker,
}


KILLED = """
import concurrent.futures
import subprocess
import safepool

def hold(_):
    child = subprocess.Popen(["/bin/sleep", "180"], start_new_session=True)
    say("worker", str(child.pid))
    child.wait()

if __name__ == "__main__":
    context = safepool.get_context({method!r})
    manager = context.Manager()
    shared = manager.dict()
    executor = concurrent.futures.ProcessPoolExecutor(2, mp_context=context)
    futures = [executor.submit(hold, n) for n in range(2)]
    shared["ready"] = True
    say("manager", str(manager._process.pid))
    concurrent.futures.wait(futures)
"""


def test_a_killed_owner_of_an_executor_and_a_manager_leaves_nothing(
    method: str, jail: Jail
) -> None:
    """SIGKILL: the executor's workers, what they started, and the manager's server are gone."""
    owner = jail.script(KILLED.format(method=method))
    held = [int(line.text) for line in jail.hear("worker", 2)]
    (server,) = [int(line.text) for line in jail.hear("manager")]
    assert all(truth.is_alive(pid) for pid in [*held, server])
    owner.send(signal.SIGKILL)
    jail.assert_empty("the owner of an executor and a manager was killed")
