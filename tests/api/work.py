"""What the workers of these tests run: importable there under every start method."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import safepool

LIFE = 120
"""Seconds that something stays which a test is going to end."""


def add(x: int, y: int = 0) -> int:
    return x + y


def nothing() -> None:
    pass


def put(queue: Any, item: Any) -> None:
    queue.put(item)


def put_self(queue: Any) -> None:
    """What a process can find out about itself."""
    this = safepool.current_process()
    parent = safepool.parent_process()
    assert parent is not None
    queue.put((this.name, this.pid, os.getpid(), bytes(this.authkey), parent.pid, this.daemon))


def exit_with(status: Any) -> None:
    sys.exit(status)


def exit_hard(status: int) -> None:
    os._exit(status)


def fail(text: str = "it broke") -> None:
    raise ZeroDivisionError(text)


def fail_once(flag: str) -> None:
    """Fail in the first process that comes here."""
    try:
        with open(flag, "x"):
            pass
    except FileExistsError:
        return
    raise ZeroDivisionError("the first one fails")


def wait_for(path: str) -> None:
    """Wait for a file of the test's."""
    end = time.monotonic() + 30
    while not os.path.exists(path):
        if time.monotonic() > end:
            raise TimeoutError(path)
        time.sleep(0.005)


def die_of(number: int) -> None:
    os.kill(os.getpid(), number)
    threading.Event().wait(LIFE)


def last(ready: Any) -> None:
    """Say that we are here, then stay until we are ended."""
    ready.set()
    threading.Event().wait(LIFE)


def last_whatever_comes(ready: Any) -> None:
    """Stay, and ignore SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    last(ready)


def leave_a_stubborn_stray(ready: Any) -> None:
    """End with status 5; what was started ignores SIGTERM and lives on."""
    stray = subprocess.Popen(
        ["/bin/sh", "-c", f"trap '' TERM; echo; exec sleep {LIFE}"], stdout=subprocess.PIPE
    )
    assert stray.stdout is not None
    stray.stdout.readline()
    ready.put(stray.pid)
    ready.close()
    ready.join_thread()
    os._exit(5)


def start_a_stray() -> tuple[int, int]:
    """Return this worker's pid and that of a stray that was started."""
    stray = subprocess.Popen(["/bin/sleep", str(LIFE)], start_new_session=True)
    return os.getpid(), stray.pid


def start_another(method: str, levels: int, queue: Any) -> None:
    """Start a process that starts a process ...; each says its level when it is there."""
    if levels:
        child = safepool.get_context(method).Process(
            target=start_another, args=(method, levels - 1, queue)
        )
        child.start()
        child.join()
        assert child.exitcode == 0
    queue.put(levels)


def hold_a_child(method: str, queue: Any) -> None:
    """Start a child that stays, tell its pid, and stay."""
    context = safepool.get_context(method)
    ready = context.Event()
    child = context.Process(target=last, args=(ready,))
    child.start()
    assert ready.wait(30)
    queue.put(child.pid)
    child.join()


def use_everything(queue: Any, lock: Any, event: Any, value: Any, array: Any, pipe: Any) -> None:
    """Touch each kind of object that processes share."""
    with lock:
        value.value += 1
        array[0] += 1
    pipe.send("through the pipe")
    pipe.close()
    assert event.wait(30)
    queue.put("done")


def meet(barrier: Any, semaphore: Any, condition: Any, flag: Any, simple: Any) -> None:
    """Meet the owner at a barrier, take a semaphore, wake who waits, answer."""
    barrier.wait(30)
    with semaphore, condition:
        flag.value = 1
        condition.notify_all()
    simple.put(os.getpid())


def fill_joinable(queue: Any, answers: Any) -> None:
    """Work off a joinable queue."""
    for item in iter(queue.get, None):
        answers.put(item * 2)
        queue.task_done()
    queue.task_done()


def write_shared(name: str) -> None:
    """Write into a shared memory block of this name."""
    from multiprocessing import shared_memory

    block = shared_memory.SharedMemory(name)
    assert block.buf is not None
    block.buf[:5] = b"hello"
    block.close()


class Subclassed(safepool.SafeProcess):
    """A process class with its own constructor and ``run``."""

    def __init__(self, queue: Any, text: str) -> None:
        super().__init__(name="subclassed")
        self.queue = queue
        self.text = text

    def run(self) -> None:
        self.queue.put((self.text, self.name, os.getpid()))


class Payload:
    """Something that can be weakly referenced."""


class Unpicklable:
    """Cannot go to another process."""

    def __reduce__(self) -> Any:
        raise TypeError("this thing stays here")


def use_a_pool_in_a_thread(method: str, queue: Any) -> None:
    """Make and use a pool in another thread than the one that was forked."""

    def use() -> None:
        with safepool.get_context(method).Pool(1) as pool:
            queue.put(pool.apply(add, (1, 2)))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join(60)
