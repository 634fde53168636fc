"""What is said, and how loud: ends that nobody asked for are told, orderly programs are silent."""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import Any

import pytest

import safepool
from tests.api import work
from tests.kit import truth
from tests.kit.jail import Jail

BOUND = 30


def said(caplog: pytest.LogCaptureFixture, *words: str) -> logging.LogRecord:
    """Wait for a record of safepool's that holds all the words."""

    def found() -> list[logging.LogRecord]:
        return [
            record
            for record in caplog.records
            if record.name == "safepool" and all(w in record.getMessage() for w in words)
        ]

    truth.until(lambda: bool(found()), f"no record with {words}", BOUND)
    return found()[0]


def start_and_leave_a_stray(method: str) -> tuple[Any, int]:
    """A process that ends with status 5 and leaves a stray that ignores SIGTERM."""
    context = safepool.get_context(method)
    queue = context.Queue()
    process = context.Process(target=work.leave_a_stubborn_stray, args=(queue,))
    process.grace = 0.1
    process.start()
    stray = queue.get(timeout=BOUND)
    process.join(BOUND)
    queue.close()
    queue.join_thread()
    return process, stray


def test_a_stray_that_was_ended_is_a_warning(method: str, caplog: pytest.LogCaptureFixture) -> None:
    """Who (pid, command line), whose it was and how that ended, which signal, what to do."""
    caplog.set_level(logging.DEBUG)
    process, stray = start_and_leave_a_stray(method)
    record = said(caplog, f"ended stray {stray}")
    text = record.getMessage()
    assert record.levelno == logging.WARNING
    assert f"sleep {work.LIFE}" in text
    assert f"worker {process.pid} ended (exit status 5)" in text
    assert "with SIGKILL" in text
    assert "safepool.detached" in text


@pytest.mark.parametrize(
    ("how", "number"), [("terminate", signal.SIGTERM), ("kill", signal.SIGKILL)]
)
def test_an_end_that_the_program_asked_for_is_told_to_who_wants_to_know(
    method: str, how: str, number: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    """``terminate`` and ``kill`` of a process: DEBUG, with its pid and the signal."""
    caplog.set_level(logging.DEBUG)
    context = safepool.get_context(method)
    ready = context.Event()
    process = context.Process(target=work.last, args=(ready,))
    process.start()
    assert ready.wait(BOUND)
    getattr(process, how)()
    process.join(BOUND)
    record = said(caplog, "as asked", f"ended worker {process.pid} ", number.name)
    assert record.levelno == logging.DEBUG
    assert not [r for r in caplog.records if r.levelno > logging.DEBUG and r.name == "safepool"]


def test_a_killed_pool_worker_and_its_stray_are_told(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The stray of a worker that was killed is a warning that names the worker and the signal."""
    caplog.set_level(logging.DEBUG)
    with safepool.get_context(method).Pool(1) as pool:
        worker, stray = pool.apply(work.start_a_stray)
        os.kill(worker, signal.SIGKILL)
        record = said(caplog, f"ended stray {stray}")
    assert record.levelno == logging.WARNING
    assert f"worker {worker} ended (signal 9)" in record.getMessage()


STRAY = """
import safepool
from tests.api import work

if __name__ == "__main__":
    queue = safepool.get_context({method!r}).Queue()
    process = safepool.get_context({method!r}).Process(
        target=work.leave_a_stubborn_stray, args=(queue,)
    )
    process.grace = 0.1
    process.start()
    queue.get()
    process.join()
    sys.stdin.readline()
"""


def test_a_program_without_logging_sees_the_warning_on_stderr(method: str, jail: Jail) -> None:
    """Nobody has set up logging: the one line about the stray is on stderr, and nothing else."""
    owner = jail.script(STRAY.format(method=method))
    owner.wait_for_error("ended stray")
    owner.go()
    assert owner.wait() == 0
    jail.assert_empty("a program with a stray")
    (line,) = owner.errors().splitlines()
    assert "SIGKILL" in line


ORDERLY = """
import safepool as mp
from tests.api import work

def use(queue, lock, n):
    with lock:
        queue.put(n)

if __name__ == "__main__":
    mp.set_start_method({method!r})
    queue, lock, value = mp.Queue(), mp.Lock(), mp.Value("i", 0)
    processes = [mp.Process(target=use, args=(queue, lock, n)) for n in range(3)]
    for process in processes:
        process.start()
    got = sorted(queue.get() for _ in processes)
    for process in processes:
        process.join()
        process.close()
    with mp.Manager() as manager:
        shared = manager.list()
        with mp.Pool(2) as pool:
            pool.map(shared.append, range(4))
            total = sum(pool.imap_unordered(work.add, range(10)))
            pool.map(lambda n: n, range(3))
    pool = mp.Pool(1)
    pool.apply_async(work.add, (1,)).get()
    pool.close()
    pool.join()
    with mp.SafePool(1) as other:
        other.apply(work.add, (1,))
    block = mp.shared_memory.SharedMemory(create=True, size=8)
    writer = mp.Process(target=work.write_shared, args=(block.name,))
    writer.start()
    writer.join()
    block.close()
    block.unlink()
    queue.close()
    queue.join_thread()
    print(got, total, writer.exitcode)
"""


@pytest.mark.parametrize("mode", ["plain", "dev"])
def test_an_orderly_program_is_silent(method: str, mode: str, jail: Jail) -> None:
    """Pools that are ended, processes that are joined: not one word on stderr, in dev mode too.

    Queues, locks, a manager, shared memory and lambdas are used; at the end nothing is left.
    """
    path = jail.folder / "orderly.py"
    path.write_text(ORDERLY.format(method=method))
    options = ["-X", "dev"] if mode == "dev" else []
    owner = jail.start([sys.executable, *options, path])
    assert owner.wait(90) == 0, owner.errors()
    # The jail shows stdout and stderr in one.
    assert owner.errors() == "[0, 1, 2] 45 0\n"
    jail.assert_empty("an orderly program")


def test_the_log_goes_where_the_program_wants_it(jail: Jail) -> None:
    """The logger ``safepool`` obeys the program's settings: turned off, there is no word."""
    program = "import logging\nlogging.getLogger('safepool').setLevel(logging.CRITICAL)\n"
    owner = jail.script(program + STRAY.format(method="fork"))
    owner.go()
    assert owner.wait() == 0
    jail.assert_empty("a program that wants no log")
    assert owner.errors() == ""
