"""The import is swapped and ordinary code goes on working: names, signatures, contexts."""

from __future__ import annotations

import inspect
import json
import multiprocessing
import multiprocessing.context
import multiprocessing.pool
import multiprocessing.process
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import safepool
from tests.api import work

ROOT = str(Path(__file__).resolve().parents[2])
BY_NAME = {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}
METHODS = ("fork", "spawn", "forkserver")


def python(source: str, *options: str) -> str:
    """Run a program of its own; returns what it printed. It must be silent on stderr."""
    done = subprocess.run(
        [sys.executable, *options, "-c", source],
        env={**os.environ, "PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout


# -- names -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(multiprocessing.__all__))
def test_every_public_name_is_there(name: str) -> None:
    """Whatever multiprocessing offers, safepool offers, of the same kind, and lists it."""
    ours, theirs = getattr(safepool, name), getattr(multiprocessing, name)
    assert callable(ours) == callable(theirs)
    assert inspect.isclass(ours) == inspect.isclass(theirs)
    assert name in safepool.__all__
    assert name in dir(safepool)


def test_errors_and_functions_are_multiprocessings_own() -> None:
    """``except`` clauses and process-wide settings mean the same in both modules."""
    for name in ("TimeoutError", "ProcessError", "BufferTooShort", "AuthenticationError"):
        assert getattr(safepool, name) is getattr(multiprocessing, name)
    assert safepool.current_process() is multiprocessing.current_process()
    assert safepool.cpu_count() == os.cpu_count()
    assert issubclass(safepool.Process, multiprocessing.process.BaseProcess)


def test_import_star_brings_all_names_and_no_others() -> None:
    """``from safepool import *`` gives what ``__all__`` lists; every name of it exists."""
    printed = python(
        "from safepool import *\n"
        "import safepool\n"
        "missing = [name for name in safepool.__all__ if name not in globals()]\n"
        "print(missing, Process is SafeProcess, safepool.Queue is Queue)"
    )
    assert printed == "[] True True\n"


def test_the_import_is_light() -> None:
    """``import safepool`` alone loads neither multiprocessing nor psutil nor cloudpickle."""
    printed = python(
        "import sys, safepool\n"
        "print([n for n in ('multiprocessing', 'psutil', 'cloudpickle') if n in sys.modules])",
        "-S",
    )
    assert printed == "[]\n"


@pytest.mark.parametrize(
    "name",
    ["connection", "managers", "shared_memory", "sharedctypes", "synchronize", "queues"],
)
def test_submodules_are_reached_as_attributes(name: str) -> None:
    """``mp.connection.wait``, ``mp.managers.BaseManager`` ... are multiprocessing's modules."""
    assert getattr(safepool, name) is __import__(f"multiprocessing.{name}", fromlist=[name])


def test_a_name_that_does_not_exist() -> None:
    """A typing error is an AttributeError that names it, as with any module."""
    with pytest.raises(AttributeError, match="no attribute 'Quue'"):
        _ = safepool.Quue
    with pytest.raises(ImportError, match="Quue"):
        exec("from safepool import Quue")


# -- signatures ------------------------------------------------------------------------


def shape(function: Any) -> list[tuple[str, Any, Any]]:
    parameters = inspect.signature(function).parameters.values()
    return [(each.name, each.kind, each.default) for each in parameters]


def methods_of(cls: type) -> list[str]:
    """The public methods of a class."""
    return [n for n, _ in inspect.getmembers(cls, inspect.isfunction) if not n.startswith("_")]


@pytest.mark.parametrize("name", methods_of(multiprocessing.process.BaseProcess))
def test_methods_of_a_process_take_the_same_arguments(name: str) -> None:
    """Same parameters, same order, same defaults."""
    theirs = shape(getattr(multiprocessing.process.BaseProcess, name))
    assert shape(getattr(safepool.SafeProcess, name)) == theirs


def test_constructors_take_the_same_arguments() -> None:
    """Those of multiprocessing, in its order; what is added is keyword-only."""
    for ours, theirs in (
        (safepool.SafeProcess, multiprocessing.Process),
        (safepool.SafePool, multiprocessing.pool.Pool),
    ):
        expected = shape(theirs)
        assert shape(ours)[: len(expected)] == expected
        added = shape(ours)[len(expected) :]
        assert all(kind in BY_NAME for _, kind, _ in added)


def test_properties_of_a_process_are_there() -> None:
    """Every public attribute of multiprocessing's process exists, settable as there."""
    for name, theirs in inspect.getmembers(multiprocessing.Process):
        if isinstance(theirs, property):
            ours = inspect.getattr_static(safepool.SafeProcess, name)
            assert (ours.fset is None) == (theirs.fset is None), name


@pytest.mark.parametrize("method", METHODS)
def test_a_context_has_every_method_of_multiprocessings(method: str) -> None:
    """Same names and same parameters; what is added is keyword-only."""
    ours, theirs = safepool.get_context(method), multiprocessing.get_context(method)
    for name in methods_of(multiprocessing.context.BaseContext):
        expected = shape(getattr(theirs, name))
        assert shape(getattr(ours, name))[: len(expected)] == expected
        added = shape(getattr(ours, name))[len(expected) :]
        assert all(kind in BY_NAME for _, kind, _ in added), name


# -- contexts --------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_context_is_multiprocessings_with_safe_processes(method: str) -> None:
    """Libraries that ask ``isinstance(ctx, BaseContext)`` and for the method get an answer."""
    context = safepool.get_context(method)
    assert isinstance(context, multiprocessing.context.BaseContext)
    assert isinstance(context, type(multiprocessing.get_context(method)))
    assert context.get_start_method() == method
    assert context is safepool.get_context(method)
    assert context.get_context() is context
    assert context.get_context("spawn") is safepool.get_context("spawn")
    assert issubclass(context.Process, multiprocessing.process.BaseProcess)
    assert context.TimeoutError is multiprocessing.TimeoutError
    assert type(context.Lock()) is type(multiprocessing.get_context(method).Lock())


@pytest.mark.parametrize("wrong", ["", "Fork", "thread", 5, ["spawn"], b"spawn"])
def test_a_wrong_start_method_is_a_value_error_that_lists_the_right_ones(wrong: Any) -> None:
    """Whatever is given: ValueError, with the given thing and the known names in it."""
    with pytest.raises(ValueError, match=r"fork.*spawn.*forkserver") as caught:
        safepool.get_context(wrong)
    assert repr(wrong) in str(caught.value)


def test_the_default_is_what_the_running_python_would_use() -> None:
    """No argument, nothing set: multiprocessing's own default."""
    default = python("import multiprocessing; print(multiprocessing.get_start_method())")
    printed = python(
        "import safepool as mp\n"
        "print(mp.get_context().get_start_method())\n"
        "print(mp.get_start_method())"
    )
    assert printed == default * 2


def test_set_start_method_decides(method: str) -> None:
    """It decides for contexts, processes and pools, whichever module it is called on."""
    assert safepool.set_start_method == multiprocessing.set_start_method
    printed = python(
        "import multiprocessing, safepool as mp, json\n"
        f"multiprocessing.set_start_method({method!r})\n"
        "process = mp.Process(target=abs, args=(1,))\n"
        "process.start(); process.join()\n"
        "with mp.Pool(1) as pool:\n"
        "    kind = type(pool._pool[0]).__name__\n"
        "print(json.dumps([mp.get_context().get_start_method(), process._popen.method, kind]))"
    )
    got, popen, kind = json.loads(printed)
    assert (got, popen) == (method, method)
    assert kind.lower().startswith(method)


def test_the_factories_follow_set_start_method() -> None:
    """``mp.Queue`` and ``mp.Lock`` belong to the method in force when they are called."""
    printed = python(
        "import safepool as mp\n"
        "mp.set_start_method('spawn')\n"
        "lock = mp.Lock()\n"
        "queue = mp.Queue()\n"
        "process = mp.Process(target=queue.put, args=(7,))\n"
        "process.start(); print(queue.get(timeout=30)); process.join(); print(process.exitcode)"
    )
    assert printed == "7\n0\n"


# -- what the names make ---------------------------------------------------------------


def test_shared_objects_work_with_safe_processes(method: str) -> None:
    """Queue, Lock, Event, Value, Array and Pipe between an owner and its process."""
    mp = safepool.get_context(method)
    queue, lock, event = mp.Queue(), mp.Lock(), mp.Event()
    value, array = mp.Value("i", 41), mp.Array("i", [1, 2])
    ours, theirs = mp.Pipe()
    process = mp.Process(
        target=work.use_everything, args=(queue, lock, event, value, array, theirs)
    )
    process.start()
    theirs.close()
    assert ours.poll(30)
    assert ours.recv() == "through the pipe"
    event.set()
    assert queue.get(timeout=30) == "done"
    process.join(30)
    assert (process.exitcode, value.value, array[:]) == (0, 42, [2, 2])
    with pytest.raises(EOFError):
        ours.recv()
    ours.close()
    queue.close()
    queue.join_thread()


def test_more_shared_objects_work_with_safe_processes(method: str) -> None:
    """Barrier, Semaphores, Condition, RawValue, RLock and SimpleQueue."""
    mp = safepool.get_context(method)
    barrier, semaphore, condition = mp.Barrier(2), mp.BoundedSemaphore(1), mp.Condition(mp.RLock())
    flag, simple = mp.RawValue("i", 0), mp.SimpleQueue()
    process = mp.Process(target=work.meet, args=(barrier, semaphore, condition, flag, simple))
    process.start()
    with condition:
        barrier.wait(30)
        assert condition.wait_for(lambda: flag.value == 1, 30)
    assert simple._reader.poll(30)
    assert simple.get() == process.pid
    process.join(30)
    assert process.exitcode == 0
    assert semaphore.acquire(timeout=30)
    semaphore.release()
    with pytest.raises(ValueError, match="too many times"):
        semaphore.release()
    simple.close()


def test_a_joinable_queue_works_with_safe_processes(method: str) -> None:
    """``task_done`` in the worker releases ``join`` in the owner."""
    mp = safepool.get_context(method)
    tasks, answers = mp.JoinableQueue(), mp.Queue()
    process = mp.Process(target=work.fill_joinable, args=(tasks, answers))
    process.start()
    for item in (1, 2, 3, None):
        tasks.put(item)
    tasks.join()
    assert [answers.get(timeout=30) for _ in range(3)] == [2, 4, 6]
    process.join(30)
    assert process.exitcode == 0
    for queue in (tasks, answers):
        queue.close()
        queue.join_thread()


def test_shared_memory_works_with_safe_processes(method: str) -> None:
    """A block written by a process is there for the owner, who unlinks it without a complaint."""
    block = safepool.shared_memory.SharedMemory(create=True, size=16)
    try:
        process = safepool.get_context(method).Process(target=work.write_shared, args=(block.name,))
        process.start()
        process.join(30)
        assert process.exitcode == 0
        assert bytes(block.buf[:5]) == b"hello"
    finally:
        block.close()
        block.unlink()


def test_a_manager_of_a_context_works_and_ends(method: str) -> None:
    """``ctx.Manager()`` serves proxies to workers; its server is a safe process too."""
    mp = safepool.get_context(method)
    with mp.Manager() as manager:
        server = manager._process
        assert isinstance(server, mp.Process)
        shared = manager.dict()
        with mp.Pool(2) as pool:
            pool.starmap(shared.__setitem__, [(1, "a"), (2, "b")])
        assert dict(shared) == {1: "a", 2: "b"}
    server.join(30)
    assert server.exitcode == 0


def test_processes_mix_with_multiprocessings(method: str) -> None:
    """A queue of multiprocessing's goes to a safe process; ``wait`` takes its sentinel."""
    theirs = multiprocessing.get_context(method)
    queue: Any = theirs.SimpleQueue()
    process = safepool.get_context(method).Process(target=work.put, args=(queue, "mixed"))
    process.start()
    assert safepool.connection.wait([queue._reader], 30)
    assert queue.get() == "mixed"
    assert safepool.connection.wait([process.sentinel], 30) == [process.sentinel]
    process.join(30)
    assert process.exitcode == 0
    queue.close()


def test_a_pool_takes_a_context_of_multiprocessing(method: str) -> None:
    """``SafePool(context=multiprocessing.get_context(...))``: the same method, safe processes."""
    with safepool.SafePool(1, context=multiprocessing.get_context(method)) as pool:
        assert pool.apply(work.add, (1, 2)) == 3
        assert isinstance(pool._pool[0], safepool.get_context(method).Process)
