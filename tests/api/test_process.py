"""SafeProcess is multiprocessing.Process to whoever uses it, under every start method."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from multiprocessing import process as mp_process
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from typing import Any

import pytest

import safepool
from tests.api import work
from tests.kit import truth

BOUND = 30
ROOT = str(Path(__file__).resolve().parents[2])


def start(method: str, target: Any, *args: Any, **kwargs: Any) -> Any:
    """Start a process of this method."""
    process = safepool.get_context(method).Process(target=target, args=args, **kwargs)
    process.start()
    return process


def started_last(method: str, target: Any = work.last, grace: float | None = None) -> Any:
    """Start a process that stays until it is ended, and wait until it is there."""
    context = safepool.get_context(method)
    ready = context.Event()
    process = context.Process(target=target, args=(ready,))
    if grace is not None:
        process.grace = grace
    process.start()
    assert ready.wait(BOUND)
    return process


def take(queue: Any) -> Any:
    """The next item of a SimpleQueue, whose ``get`` knows no bound."""
    assert queue._reader.poll(BOUND), "nothing came"
    return queue.get()


def ended(process: Any) -> int | None:
    """Wait for a process' end and return its exit code."""
    process.join(BOUND)
    code: int | None = process.exitcode
    return code


# -- a life ----------------------------------------------------------------------------


def test_the_life_of_a_process(method: str) -> None:
    """What each attribute says before, while and after it runs."""
    context = safepool.get_context(method)
    ready = context.Event()
    process = context.Process(target=work.last, args=(ready,), name="one", daemon=True)
    assert (process.name, process.daemon, process.pid, process.exitcode) == (
        "one",
        True,
        None,
        None,
    )
    assert not process.is_alive()
    assert process.authkey == safepool.current_process().authkey
    with pytest.raises(ValueError, match="not started"):
        _ = process.sentinel
    assert "initial" in repr(process)

    process.start()
    assert ready.wait(BOUND)
    assert process.is_alive()
    assert process.ident == process.pid
    assert truth.is_alive(process.pid)
    assert process.exitcode is None
    assert process in safepool.active_children()
    assert not safepool.connection.wait([process.sentinel], 0)
    assert "started" in repr(process)
    with pytest.raises(AssertionError, match="already started"):
        process.daemon = False
    with pytest.raises(ValueError, match="still running"):
        process.close()

    process.terminate()
    assert safepool.connection.wait([process.sentinel], BOUND)
    process.join()
    assert not process.is_alive()
    assert process.exitcode == -signal.SIGTERM
    assert process not in safepool.active_children()
    assert "exitcode=-SIGTERM" in repr(process)
    process.terminate()
    process.kill()
    process.close()
    process.close()
    for use in (process.join, process.is_alive, process.terminate, lambda: process.exitcode):
        with pytest.raises(ValueError, match="closed"):
            use()


def test_a_process_knows_itself(method: str) -> None:
    """Name, pid and authentication key in the worker; its parent_process is the owner."""
    queue = safepool.get_context(method).SimpleQueue()
    process = start(method, work.put_self, queue, name="me", daemon=True)
    name, pid, getpid, authkey, parent, daemon = take(queue)
    assert (name, pid, getpid) == ("me", process.pid, process.pid)
    assert authkey == process.authkey
    assert parent == os.getpid()
    assert daemon is True
    assert ended(process) == 0
    queue.close()


def test_keyword_arguments_and_default_names(method: str) -> None:
    """``kwargs`` arrive; names count up and are unique."""
    context = safepool.get_context(method)
    queue = context.SimpleQueue()
    processes = [
        context.Process(target=work.put, kwargs={"queue": queue, "item": n}) for n in (1, 2)
    ]
    for process in processes:
        process.start()
    assert sorted(take(queue) for _ in processes) == [1, 2]
    assert [ended(process) for process in processes] == [0, 0]
    names = {process.name for process in processes}
    assert len(names) == 2
    assert all("SafeProcess-" in name for name in names)
    queue.close()


def test_a_subclass_with_run(method: str) -> None:
    """A class of SafeProcess' own with ``run`` and state of its own; the current method decides."""
    program = (
        "import safepool, multiprocessing\n"
        "from tests.api.work import Subclassed\n"
        "if __name__ == '__main__':\n"
        f"    multiprocessing.set_start_method({method!r})\n"
        "    queue = safepool.SimpleQueue()\n"
        "    process = Subclassed(queue, 'hello')\n"
        "    process.start()\n"
        "    text, name, pid = queue.get()\n"
        "    process.join()\n"
        "    print(text, name, pid == process.pid, process.exitcode, process._popen.method)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr) == (f"hello subclassed True 0 {method}\n", "")


# -- exit codes ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "argument", "code"),
    [
        (work.exit_with, None, 0),
        (work.exit_with, 3, 3),
        (work.exit_with, True, 1),
        (work.exit_hard, 7, 7),
        (work.die_of, signal.SIGKILL, -signal.SIGKILL),
        (work.die_of, signal.SIGTERM, -signal.SIGTERM),
        (work.die_of, signal.SIGUSR1, -signal.SIGUSR1),
    ],
)
def test_exit_codes(method: str, target: Any, argument: Any, code: int) -> None:
    """``sys.exit``, ``os._exit`` and signals give the code that multiprocessing gives."""
    assert ended(start(method, target, argument)) == code


@pytest.mark.parametrize(
    ("target", "argument", "said"),
    [
        (work.fail, "why it broke", "ZeroDivisionError: why it broke"),
        (work.exit_with, "a last word", "a last word"),
    ],
)
def test_an_exception_is_exit_code_1_and_is_shown(
    method: str, target: Any, argument: str, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A traceback, or the text given to ``sys.exit``, is on stderr before ``join`` returns."""
    assert ended(start(method, target, argument)) == 1
    assert said in capfd.readouterr().err


def test_the_exit_code_is_the_process_own_whatever_its_strays_need(method: str) -> None:
    """A stray that needs SIGKILL changes neither the code nor the bound of ``join``."""
    context = safepool.get_context(method)
    queue = context.Queue()
    process = context.Process(target=work.leave_a_stubborn_stray, args=(queue,))
    process.grace = 0.2
    process.start()
    stray = queue.get(timeout=BOUND)
    assert ended(process) == 5
    assert not truth.is_alive(stray)
    queue.close()
    queue.join_thread()


# -- the end ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "how", "code"),
    [
        (work.last, "terminate", -signal.SIGTERM),
        (work.last, "kill", -signal.SIGKILL),
        (work.last_whatever_comes, "terminate", -signal.SIGKILL),
        (work.last_whatever_comes, "kill", -signal.SIGKILL),
    ],
)
def test_terminate_and_kill(method: str, target: Any, how: str, code: int) -> None:
    """SIGTERM, or SIGKILL where that is ignored for the grace; ``kill`` does not ask."""
    process = started_last(method, target, grace=0.2)
    getattr(process, how)()
    assert ended(process) == code


def test_kill_cuts_a_long_grace_short(method: str) -> None:
    """``terminate``, second thoughts, ``kill``: the end comes now, not after the grace."""
    process = started_last(method, work.last_whatever_comes, grace=100.0)
    process.terminate()
    process.join(0.1)
    assert process.exitcode is None
    process.kill()
    assert ended(process) == -signal.SIGKILL


def test_join_with_a_timeout(method: str) -> None:
    """It returns in time, None as always, and the process lives on; 0 and less only look."""
    process = started_last(method)
    for timeout in (0, -1, 0.05):
        begun = time.monotonic()
        process.join(timeout)
        assert time.monotonic() - begun < 10
        assert process.exitcode is None
        assert process.is_alive()
    process.kill()
    assert ended(process) == -signal.SIGKILL


def test_join_in_several_threads_at_once(method: str) -> None:
    """All of them return when the process has ended, and see the same exit code."""
    process = started_last(method)
    codes: list[int | None] = []
    waiting = threading.Barrier(4)

    def join() -> None:
        waiting.wait(BOUND)
        process.join(BOUND)
        codes.append(process.exitcode)

    threads = [threading.Thread(target=join) for _ in range(3)]
    for thread in threads:
        thread.start()
    waiting.wait(BOUND)
    process.terminate()
    for thread in threads:
        thread.join(BOUND)
    assert codes == [-signal.SIGTERM] * 3
    process.join()
    assert process.exitcode == -signal.SIGTERM


def test_starting_and_joining_in_different_threads(method: str) -> None:
    """A process that a thread started can be joined by another after the first has ended."""
    made: list[Any] = []
    thread = threading.Thread(target=lambda: made.append(start(method, work.exit_with, 3)))
    thread.start()
    thread.join(BOUND)
    assert ended(made[0]) == 3


def test_a_fork_while_another_thread_uses_the_resource_tracker() -> None:
    """The tracker's lock is held at the instant of the fork: the worker registers all the same."""
    block = shared_memory.SharedMemory(create=True, size=8)
    is_held, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with resource_tracker._resource_tracker._lock:  # type: ignore[attr-defined]
            is_held.set()
            let_go.wait(truth.PATIENCE)

    holder = threading.Thread(target=hold)
    holder.start()
    try:
        is_held.wait(truth.PATIENCE)
        process = safepool.get_context("fork").Process(target=work.write_shared, args=(block.name,))
        process.start()
        process.join(truth.PATIENCE)
        hangs = process.is_alive()
        process.kill()
        process.join()
        assert not hangs
        assert block.buf is not None
        assert bytes(block.buf[:5]) == b"hello"
    finally:
        let_go.set()
        holder.join()
        block.close()
        block.unlink()


def test_many_at_once(method: str) -> None:
    """Six processes started in a row all give their own code."""
    processes = [start(method, work.exit_with, code) for code in range(6)]
    assert [ended(process) for process in processes] == list(range(6))


# -- mistakes --------------------------------------------------------------------------


def test_starting_twice(method: str) -> None:
    """AssertionError, while it runs and after it."""
    process = start(method, work.nothing)
    with pytest.raises(AssertionError, match="cannot start a process twice"):
        process.start()
    assert ended(process) == 0
    with pytest.raises(AssertionError, match="cannot start a process twice"):
        process.start()
    process.close()
    with pytest.raises(ValueError, match="closed"):
        process.start()


def test_joining_before_the_start(method: str) -> None:
    """AssertionError at once instead of a wait for ever."""
    process = safepool.get_context(method).Process(target=work.nothing)
    with pytest.raises(AssertionError, match="can only join a started process"):
        process.join()


@pytest.mark.parametrize(
    ("grace", "error"),
    [
        (-1, ValueError),
        (-0.001, ValueError),
        (float("nan"), ValueError),
        (float("-inf"), ValueError),
        ("5", TypeError),
        (None, TypeError),
        (True, TypeError),
        ([1], TypeError),
    ],
)
def test_a_grace_that_makes_no_sense(grace: Any, error: type[Exception]) -> None:
    """Refused at ``start`` by name; nothing is started, and a right value mends it."""
    process = safepool.get_context("fork").Process(target=work.nothing)
    process.grace = grace
    with pytest.raises(error, match="grace must be"):
        process.start()
    assert process.pid is None
    assert process not in safepool.active_children()
    process.grace = 5
    process.start()
    assert ended(process) == 0


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"group": 1}, AssertionError),
        ({"args": 5}, TypeError),
        ({"args": None}, TypeError),
        ({"kwargs": 5}, TypeError),
        ({"nonsense": 1}, TypeError),
    ],
)
def test_wrong_constructor_arguments(arguments: dict[str, Any], error: type[Exception]) -> None:
    """The errors of multiprocessing, before anything is started."""
    with pytest.raises(error):
        safepool.SafeProcess(target=work.nothing, **arguments)


def test_a_target_that_cannot_be_called(method: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Exit code 1 and a traceback that says what it was, as in multiprocessing."""
    assert ended(start(method, 5)) == 1
    assert "'int' object is not callable" in capfd.readouterr().err


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize(
    ("thing", "error", "text"),
    [
        (threading.Lock(), TypeError, "cannot pickle '_thread.lock' object"),
        (work.Unpicklable(), TypeError, "this thing stays here"),
    ],
)
def test_an_argument_that_cannot_be_sent(
    method: str, thing: Any, error: type[Exception], text: str
) -> None:
    """The error comes out of ``start``; nothing was started, and the next process works."""
    before = len(safepool.active_children())
    process = safepool.get_context(method).Process(target=work.put, args=(None, thing))
    with pytest.raises(error, match=text):
        process.start()
    assert process.pid is None
    assert process.exitcode is None
    assert len(safepool.active_children()) == before
    assert ended(start(method, work.nothing)) == 0


def test_an_unpicklable_argument_needs_no_pickle_under_fork() -> None:
    """Under fork nothing is sent: a lock or a lambda goes as it is."""
    lock = threading.Lock()
    assert ended(start("fork", lambda held: held.locked(), lock)) == 0


def test_lambdas_and_closures_as_targets(method: str) -> None:
    """Targets that pickle cannot name run under every start method."""
    base = 3
    assert ended(start(method, lambda more: sys.exit(base + more), 4)) == 7


# -- families --------------------------------------------------------------------------


def test_processes_three_levels_deep(method: str) -> None:
    """Each level is a run of its own whose owner is the process above."""
    queue = safepool.get_context(method).SimpleQueue()
    process = start(method, work.start_another, method, 2, queue)
    assert [take(queue) for _ in range(3)] == [0, 1, 2]
    assert ended(process) == 0
    queue.close()


@pytest.mark.parametrize("daemon", [True, False])
def test_children_of_daemonic_processes(method: str, daemon: bool) -> None:
    """Forbidden in multiprocessing, for they would be orphaned; here they are allowed, and end."""
    queue = safepool.get_context(method).SimpleQueue()
    process = start(method, work.hold_a_child, method, queue, daemon=daemon)
    child = take(queue)
    assert truth.is_alive(child)
    process.terminate()
    assert ended(process) == -signal.SIGTERM
    assert not truth.is_alive(child)
    queue.close()


# -- objects ---------------------------------------------------------------------------


def test_processes_as_keys(method: str) -> None:
    """A process object is hashable, equal to itself only, before and after its life."""
    context = safepool.get_context(method)
    one, two = context.Process(target=work.nothing), context.Process(target=work.nothing)
    table = {one: 1, two: 2}
    one.start()
    assert table[one] == 1
    assert ended(one) == 0
    assert (table[one], table[two], one == two) == (1, 2, False)


def test_arguments_are_let_go_at_the_end(method: str) -> None:
    """The owner's process object keeps neither arguments nor target alive (bpo-30775): under
    fork after the start, else after the end, since the worker may not have read them yet."""
    thing = work.Payload()
    reference = weakref.ref(thing)
    process = safepool.get_context(method).Process(target=id, args=(thing,))
    process.start()
    del thing
    gc.collect()
    assert (reference() is None) == (method == "fork")
    process.join(60)
    gc.collect()
    assert reference() is None


def test_a_dropped_process_object_is_no_end(method: str) -> None:
    """As in multiprocessing: the process goes on and can be found among the children."""
    pid = started_last(method).pid
    gc.collect()
    (found,) = [child for child in safepool.active_children() if child.pid == pid]
    assert truth.is_alive(pid)
    found.terminate()
    assert ended(found) == -signal.SIGTERM
    assert found not in mp_process._children  # type: ignore[attr-defined]


def test_descriptors_are_given_back(method: str) -> None:
    """Processes that were joined and dropped leave no descriptor open in the owner."""
    before = truth.open_files()
    for _ in range(2):
        batch = [start(method, work.nothing) for _ in range(3)]
        assert [ended(process) for process in batch] == [0] * 3
    del batch
    gc.collect()
    assert truth.open_files().keys() == before.keys()


def test_standard_streams_are_the_owners(method: str, capfd: pytest.CaptureFixture[str]) -> None:
    """What a process prints is where the owner prints, in the order of start and join."""
    print("before", flush=True)
    assert ended(start(method, print, "from the process")) == 0
    print("after", flush=True)
    assert capfd.readouterr().out == "before\nfrom the process\nafter\n"


def test_a_thread_of_a_process_may_make_a_pool(method: str) -> None:
    """A process that was forked in the midst of a start is free to start others, in any thread."""
    context = safepool.get_context(method)
    queue = context.Queue()
    process = context.Process(target=work.use_a_pool_in_a_thread, args=(method, queue))
    process.start()
    assert queue.get(timeout=60) == 3
    assert ended(process) == 0
