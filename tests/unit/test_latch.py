"""Waiting that a signal handler may interrupt at any instruction."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest

from safepool import latch
from safepool.latch import Bell, Latch

PATIENCE = 30.0


def interrupted(call: Callable[[], Any], after: int) -> bool:
    """Call, and raise inside at the ``after``-th instruction in the module; False if it had less.

    A trace function raises where a signal handler would.
    """
    left = after

    def trace(frame: types.FrameType, event: str, _argument: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename != latch.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def test_an_interrupted_wait_holds_nobody_up() -> None:
    """At whatever instruction the wait is left: others can set it, and others can wait for it."""
    after = 0
    while True:
        gate = Latch()
        if not interrupted(lambda gate=gate: gate.wait(0.01), after):  # type: ignore[misc]
            break
        setter = threading.Thread(target=gate.set, daemon=True)
        waiter = threading.Thread(target=gate.wait, daemon=True)
        waiter.start()
        setter.start()
        for thread in (setter, waiter):
            thread.join(PATIENCE)
            assert not thread.is_alive(), f"hangs after an interruption at instruction {after}"
        after += 1
    assert after > 50, "the wait was never interrupted"


def test_set_wakes_all_who_wait() -> None:
    gate = Latch()
    answers: list[bool] = []
    threads = [
        threading.Thread(target=lambda: answers.append(gate.wait(PATIENCE)), daemon=True)
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    gate.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert answers == [True] * 8


def test_a_wait_ends_at_its_timeout() -> None:
    gate = Latch()
    assert gate.wait(0.01) is False
    assert gate.wait(0) is False
    assert gate.wait(-1) is False
    gate.set()
    assert gate.wait(0) is True


def test_a_latch_that_was_cleared_is_waited_for_again() -> None:
    gate = Latch(is_set=True)
    assert gate.wait(0)
    gate.clear()
    assert not gate.is_set()
    assert not gate.wait(0)


@pytest.mark.parametrize("rounds", [300])
def test_no_ring_is_lost(rounds: int) -> None:
    """Two threads hand a number to and fro; one lost ring would end in the timeout."""
    bell, numbers = Bell(), [0]

    def take_turns(parity: int) -> None:
        for number in range(parity, 2 * rounds, 2):
            assert bell.wait_for(lambda n=number: numbers[0] == n, PATIENCE)  # type: ignore[misc]
            numbers[0] += 1
            bell.ring()

    other = threading.Thread(target=take_turns, args=(1,), daemon=True)
    other.start()
    take_turns(0)
    other.join(PATIENCE)
    assert numbers == [2 * rounds]
