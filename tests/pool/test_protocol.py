"""What the engine makes of a worker that dies at an unlucky instruction.

The workers here are scripts: they speak the protocol of core.frames up to a point
and then kill themselves there, which no test could time from outside.
"""

from __future__ import annotations

import mmap
import os
import pickle
import signal
import socket
from collections.abc import Callable
from typing import Any

import pytest

from safepool.core import frames
from safepool.errors import WorkerLostError
from safepool.pool import SafePool
from tests.pool import tasks
from tests.pool.standin import StandinContext, StandinSource

BOUND = 60
Script = Callable[[socket.socket, memoryview, int], None]


class ScriptedContext(StandinContext):
    """Its first workers follow a script, the others are real ones."""

    def __init__(self, script: Script, times: int = 1) -> None:
        super().__init__("fork")
        self._script = script
        self._times = times

    def worker_source(self, target: Any, args: tuple[Any, ...], policy: Any) -> StandinSource:
        used: list[bool] = []
        source = super().worker_source(target, args, policy)
        original = source.start

        def start(conn: socket.socket) -> Any:
            is_real = len(used) >= self._times
            source._target = target if is_real else self._follow
            source._args = args if is_real else ()
            used.append(True)
            return original(conn)

        source.start = start  # type: ignore[method-assign]
        return source

    def _follow(self, conn: socket.socket) -> None:
        _, fds, _, _ = socket.recv_fds(conn, 1, 1)
        page = memoryview(mmap.mmap(fds[0], frames.PAGE_BYTES))
        send(conn, frames.READY, 0, 0, b"")
        decoder = frames.Decoder()
        numbers: list[int] = []
        conn.settimeout(BOUND)
        while not numbers:
            numbers = [frame.number for frame in decoder.feed(conn.recv(1 << 16)) if frame.number]
        frames.write_page(page, numbers[0], 0)
        self._script(conn, page, numbers[0])
        os.kill(os.getpid(), signal.SIGKILL)


def send(conn: socket.socket, kind: int, number: int, item: int, body: bytes) -> None:
    conn.sendall(frames.header(kind, number, 0, item, len(body)) + body)


def records(*values: int) -> bytes:
    return b"".join(frames.record(pickle.dumps(value)) for value in values)


def fill(page: memoryview, number: int, item: int, body: bytes) -> None:
    frames.write_page(page, number, item)
    page[frames.PAGE_START : frames.PAGE_START + len(body)] = body
    frames.commit_page(page, len(body))


def sent_and_not_forgotten(conn: socket.socket, page: memoryview, number: int) -> None:
    """Dies after it has sent the page and before it has emptied it."""
    fill(page, number, 0, records(100, 101))
    send(conn, frames.VALUES, number, 0, records(100, 101))


def half_a_frame(conn: socket.socket, page: memoryview, number: int) -> None:
    """Dies in the midst of sending the page."""
    fill(page, number, 0, records(100, 101))
    whole = records(100, 101)
    conn.sendall(frames.header(frames.VALUES, number, 0, 0, len(whole)) + whole[:7])


def part_sent_part_in_page(conn: socket.socket, page: memoryview, number: int) -> None:
    """Dies with the first value sent and the second in the page."""
    send(conn, frames.VALUES, number, 0, records(100))
    fill(page, number, 1, records(101))


@pytest.mark.parametrize("script", [sent_and_not_forgotten, half_a_frame, part_sent_part_in_page])
def test_finished_items_count_once(script: Script) -> None:
    """Two items were finished, the third ran, the rest is run by another worker."""
    with SafePool(1, context=ScriptedContext(script), grace=0.5) as pool:
        iterator = pool.imap(tasks.square, range(6), 6)
        got: list[Any] = [iterator.next(BOUND), iterator.next(BOUND)]
        with pytest.raises(WorkerLostError, match=r"\(item 2\)"):
            iterator.next(BOUND)
        assert got + [iterator.next(BOUND) for _ in range(3)] == [100, 101, 9, 16, 25]


def test_a_task_that_was_not_begun_is_not_lost() -> None:
    """Dies before it has noted the task in the page: another worker runs it."""

    def forget(conn: socket.socket, page: memoryview, number: int) -> None:
        frames.write_page(page, number - 1, 0)

    with SafePool(1, context=ScriptedContext(forget), grace=0.5) as pool:
        assert pool.apply_async(tasks.square, (3,)).get(BOUND) == 9
        assert pool.stats().lost == 0


def test_a_task_that_no_worker_can_take_is_given_up() -> None:
    """Each worker dies of it before it begins; that is not tried for ever."""

    def forget(conn: socket.socket, page: memoryview, number: int) -> None:
        frames.write_page(page, number - 1, 0)

    context = ScriptedContext(forget, times=100)
    with SafePool(1, context=context, grace=0.5) as pool, pytest.raises(WorkerLostError):
        pool.apply_async(tasks.square, (3,)).get(BOUND)


def test_a_result_cut_short_is_lost() -> None:
    """Half a result is none: the task is lost and the pool goes on."""

    def cut_short(conn: socket.socket, page: memoryview, number: int) -> None:
        conn.sendall(frames.header(frames.VALUE, number, 0, 0, 1000) + b"half")

    with SafePool(1, context=ScriptedContext(cut_short), grace=0.5) as pool:
        with pytest.raises(WorkerLostError):
            pool.apply_async(tasks.square, (3,)).get(BOUND)
        assert pool.apply(tasks.square, (3,)) == 9


def test_a_result_that_was_sent_counts_although_the_worker_died() -> None:
    """A worker killed right after its answer has not lost it."""

    def answer(conn: socket.socket, page: memoryview, number: int) -> None:
        send(conn, frames.VALUE, number, 0, pickle.dumps("answered"))

    with SafePool(1, context=ScriptedContext(answer), grace=0.5) as pool:
        assert pool.apply_async(tasks.square, (3,)).get(BOUND) == "answered"
        assert pool.apply(tasks.square, (3,)) == 9
