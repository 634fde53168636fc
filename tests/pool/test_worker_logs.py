"""Log records of workers reach the owner's handlers, and a task knows its worker."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import safepool
from safepool import SafePool, WorkerLostError, current_worker
from tests.pool import tasks

BOUND = 60


class Heard(logging.Handler):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def heard() -> Iterator[Heard]:
    handler, logger = Heard(), logging.getLogger("tests.worker")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def log(count: int) -> int:
    logger = logging.getLogger("tests.worker")
    logger.debug("nobody wants this")
    for number in range(count):
        logger.info("number %d of %s", number, count, extra={"odd": threading.Lock()})
    return count


def log_error(words: str) -> None:
    try:
        raise ValueError(words)
    except ValueError:
        logging.getLogger("tests.worker").exception("it failed")


def log_and_die() -> None:
    logging.getLogger("tests.worker").warning("the last words")
    tasks.kill_self()


def log_from_threads(count: int) -> None:
    threads = [threading.Thread(target=log, args=(count,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def make(method: str = "fork", processes: int = 1) -> SafePool:
    return SafePool(processes, context=safepool.get_context(method), log_to_owner=True, grace=0.5)


def test_records_arrive_in_order_and_before_the_result(method: str, heard: Heard) -> None:
    """All of them, with the owner's levels, and never twice."""
    with make(method) as pool:
        assert pool.apply_async(log, (500,)).get(BOUND) == 500
        messages = [record.getMessage() for record in heard.records]
        assert messages == [f"number {number} of 500" for number in range(500)]
        assert all(record.process != os.getpid() for record in heard.records)


def test_what_was_said_before_a_death_is_not_lost(heard: Heard) -> None:
    """And is there when the loss is told."""
    with make() as pool:
        with pytest.raises(WorkerLostError):
            pool.apply_async(log_and_die).get(BOUND)
        assert [record.getMessage() for record in heard.records] == ["the last words"]


def test_tracebacks_and_long_messages(heard: Heard) -> None:
    """A traceback comes as its text; what is too long for a packet is cut."""
    with make() as pool:
        pool.apply_async(log_error, ("x" * 300_000,)).get(BOUND)
        (record,) = heard.records
        assert "ValueError" in (record.exc_text or "")
        assert record.getMessage() == "it failed"


def test_threads_do_not_get_in_each_others_way(heard: Heard) -> None:
    """Each record whole."""
    with make(processes=2) as pool:
        pool.starmap(log_from_threads, [(100,)] * 4, 1)
        assert len(heard.records) == 1600
        assert all(record.getMessage().endswith("of 100") for record in heard.records)


def test_without_it_workers_log_as_they_always_did(heard: Heard) -> None:
    """The owner's handlers hear nothing."""
    with SafePool(1, context=safepool.get_context("fork")) as pool:
        pool.apply(log, (3,))
    assert not heard.records


def remember(word: str) -> tuple[int, int, list[str]]:
    worker = current_worker()
    assert worker is not None
    words = worker.state.setdefault("words", [])
    words.append(word)
    return worker.id, worker.pid, list(words)


def ask_in_a_child() -> Any:
    reader, writer = os.pipe()
    if not os.fork():
        os.write(writer, b"none" if current_worker() is None else b"some")
        os._exit(0)
    os.wait()
    return os.read(reader, 10)


def test_a_task_knows_its_worker() -> None:
    """Its number, which a replacement takes over; its state, which it does not."""
    assert current_worker() is None
    with SafePool(3, context=safepool.get_context("fork"), grace=0.5) as pool:
        pids = {worker.pid for worker in pool._pool}
        seen: dict[int, int] = {}
        while len(seen) < 3:
            seen |= {number: pid for number, pid, _ in pool.map(remember, ["a"] * 30, 1)}
        assert set(seen) == {0, 1, 2}
        assert set(seen.values()) == pids
        assert pool.apply(ask_in_a_child) == b"none"
        with pytest.raises(WorkerLostError) as caught:
            pool.apply(tasks.kill_self)
        (lost,) = [number for number, pid in seen.items() if pid == caught.value.pid]
        new: dict[int, tuple[int, list[str]]] = {}
        while lost not in new or new[lost][0] == caught.value.pid:
            for number, pid, words in pool.map(remember, ["b"] * 30, 1):
                new.setdefault(number, (pid, words))
        assert set(new) <= {0, 1, 2}
        assert new[lost][1][0] == "b"
