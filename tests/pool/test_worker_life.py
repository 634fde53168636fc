"""What a worker does before its first task and after its last one, and how long it may take."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import safepool
from safepool import InitializerError, SafePool, SafePoolExecutor, TaskTimeoutError
from tests.kit.jail import Jail
from tests.pool import tasks

BOUND = 60


def fork_pool(processes: int = 1, **settings: Any) -> SafePool:
    settings.setdefault("grace", 5)
    return SafePool(processes, context=safepool.get_context("fork"), **settings)


def leave_pid(folder: str, word: str) -> None:
    """Say that this worker was here."""
    tasks.leave(folder, f"{word}-{os.getpid()}")


def begin_and_wait(folder: str) -> str:
    """Never ends by itself; says how it ended."""
    tasks.leave(folder, "begun")
    try:
        time.sleep(BOUND)
    finally:
        tasks.leave(folder, f"unwound-{sys.exc_info()[0].__name__}")  # type: ignore[union-attr]
    return "never"


def getenv(name: str) -> str | None:
    return os.environ.get(name)


def test_the_finalizer_runs_in_every_worker_that_leaves(method: str, tmp_path: Path) -> None:
    """After close, and after so many tasks; with its arguments."""
    folder = str(tmp_path)
    with SafePool(
        2,
        context=safepool.get_context(method),
        maxtasksperchild=2,
        finalizer=leave_pid,
        finalargs=(folder, "left"),
    ) as pool:
        pids = set(pool.map(tasks.pid, range(6), 1))
        workers = {worker.pid for worker in pool.stats().workers} | pids
        pool.close()
        pool.join()
    left = {int(name.split("-")[1]) for name in os.listdir(folder)}
    assert pids <= left <= workers | left
    assert len(left) >= 3


def test_sigterm_lets_an_idle_worker_finish(tmp_path: Path) -> None:
    """terminate() asks politely first, and somebody else may as well."""
    folder = str(tmp_path)
    with fork_pool(2, finalizer=leave_pid, finalargs=(folder, "left")) as pool:
        pids = {worker.pid for worker in pool._pool}
        pool.map(tasks.square, range(10))
    assert {f"left-{pid}" for pid in pids} == set(os.listdir(folder))


def test_sigterm_unwinds_the_task_that_runs(tmp_path: Path) -> None:
    """As a SystemExit; the task ends as the limit says that ended it."""
    folder = str(tmp_path)
    with fork_pool(finalizer=leave_pid, finalargs=(folder, "left"), timeout=0.5) as pool:
        with pytest.raises(TaskTimeoutError):
            pool.apply_async(begin_and_wait, (folder,)).get(BOUND)
        assert pool.apply(tasks.square, (3,)) == 9
    words = sorted(name.split("-")[0] for name in os.listdir(folder))
    assert words == ["begun", "left", "left", "unwound"]
    assert "unwound-WorkerEndedError" in os.listdir(folder)


def test_without_a_finalizer_sigterm_is_what_it_always_was(tmp_path: Path) -> None:
    """It kills at once, and the exit code says so."""
    with fork_pool() as pool:
        call = pool.apply_async(begin_and_wait, (str(tmp_path),))
        tasks.wait_for_file(str(tmp_path / "begun"))
        pool._pool[0].terminate()
        with pytest.raises(safepool.WorkerLostError, match="SIGTERM") as caught:
            call.get(BOUND)
        assert caught.value.exitcode == -signal.SIGTERM


def test_a_finalizer_that_fails_says_so_on_stderr(jail: Jail) -> None:
    """It hinders nobody."""
    owner = jail.script(
        """
        from safepool import SafePool

        def fail():
            raise LookupError("the finalizer failed")

        if __name__ == "__main__":
            with SafePool(1, finalizer=fail) as pool:
                print(pool.apply(abs, (-1,)))
                pool.close()
                pool.join()
            say("over")
        """
    )
    jail.hear("over")
    assert owner.wait() == 0
    assert "LookupError: the finalizer failed" in owner.errors()


def test_an_initializer_that_takes_too_long(tmp_path: Path) -> None:
    """Its workers are ended, and the pool says why it gives up."""
    pool = fork_pool(initializer=begin_and_wait, initargs=(str(tmp_path),), init_timeout=0.2)
    with pool, pytest.raises(InitializerError, match="init_timeout") as caught:
        pool.apply_async(tasks.square, (1,)).get(BOUND)
    assert isinstance(caught.value.__cause__, TimeoutError)


def test_a_slow_start_is_no_slow_initializer(method: str) -> None:
    """The time counts from where the initializer begins."""
    context = safepool.get_context(method)
    with SafePool(1, tasks.square, (1,), context=context, init_timeout=0.05) as pool:
        assert pool.apply(tasks.square, (3,)) == 9


def test_a_finalizer_that_takes_too_long(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The worker is ended; close and join do not wait for it."""
    with fork_pool(
        finalizer=begin_and_wait, finalargs=(str(tmp_path),), exit_timeout=0.2, grace=0.2
    ) as pool:
        pool.apply(tasks.square, (3,))
        pool.close()
        pool.join()
    assert (tmp_path / "begun").exists()
    assert "exit_timeout" in caplog.text


def test_workers_have_an_environment_of_their_own(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Set and removed; the owner's is left alone, and the run's mark is kept."""
    monkeypatch.setenv("SAFEPOOL_TEST_GONE", "here")
    env = {"SAFEPOOL_TEST_NEW": "new", "SAFEPOOL_TEST_GONE": None}
    with SafePool(1, context=safepool.get_context(method), env=env) as pool:
        assert pool.apply(getenv, ("SAFEPOOL_TEST_NEW",)) == "new"
        assert pool.apply(getenv, ("SAFEPOOL_TEST_GONE",)) is None
        assert pool.apply(getenv, ("SAFEPOOL_RUN",))
    assert "SAFEPOOL_TEST_NEW" not in os.environ
    assert os.environ["SAFEPOOL_TEST_GONE"] == "here"


def test_spawned_workers_have_it_before_the_main_module(jail: Jail) -> None:
    """Libraries read such variables when they are imported."""
    owner = jail.script(
        """
        import os
        seen = os.environ.get("OMP_NUM_THREADS")
        from safepool import get_context

        def at_import():
            return seen

        if __name__ == "__main__":
            with get_context("spawn").Pool(1, inner_threads=3) as pool:
                say("threads", str(pool.apply(at_import)))
        """
    )
    assert jail.hear("threads")[0].text == "3"
    assert owner.wait() == 0


def test_inner_threads_leave_what_was_said_otherwise() -> None:
    """One variable that ``env`` names stays as that says."""
    with fork_pool(inner_threads=2, env={"MKL_NUM_THREADS": "7"}) as pool:
        assert pool.apply(getenv, ("OMP_NUM_THREADS",)) == "2"
        assert pool.apply(getenv, ("MKL_NUM_THREADS",)) == "7"


def test_the_executor_has_the_same(tmp_path: Path) -> None:
    """And ctx.Pool has, too."""
    folder = str(tmp_path)
    with SafePoolExecutor(1, finalizer=leave_pid, finalargs=(folder, "left")) as executor:
        pid = executor.submit(tasks.pid).result(BOUND)
    assert os.listdir(folder) == [f"left-{pid}"]


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"finalizer": 5}, TypeError, "finalizer"),
        ({"init_timeout": 0}, ValueError, "init_timeout"),
        ({"exit_timeout": "1"}, TypeError, "exit_timeout"),
        ({"env": ["A"]}, TypeError, "mapping"),
        ({"env": {"A": 1}}, TypeError, "'A'"),
        ({"env": {"A=B": "1"}}, ValueError, "A=B"),
        ({"env": {"SAFEPOOL_RUN": "x"}}, ValueError, "marks the run"),
        ({"inner_threads": 0}, ValueError, "at least 1"),
        ({"inner_threads": True}, TypeError, "int"),
    ],
)
def test_settings_that_make_no_sense(
    settings: dict[str, Any], error: type[Exception], words: str
) -> None:
    """Refused before anything is started, by name."""
    with pytest.raises(error, match=words):
        SafePool(1, **settings)
