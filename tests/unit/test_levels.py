"""What waits, by priority: the highest first, and within one what came first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from safepool.core.commands import Unit
from safepool.core.levels import Levels

STEPS = st.lists(st.one_of(st.integers(-3, 3), st.sampled_from(["take", "back"])), max_size=60)


@given(STEPS)
def test_the_order_is_that_of_a_sorted_list(steps: list[int | str]) -> None:
    """For one worker: what is put back goes before all others of its priority."""
    levels: Levels[Unit] = Levels(1)
    expected: list[tuple[int, int]] = []
    taken: list[Unit] = []
    for count, step in enumerate(steps):
        if isinstance(step, int):
            unit = Unit(1, count, 1, 10)
            unit.priority = step
            levels.add([unit])
            expected.append((-step, count))
        elif step == "take" and expected:
            expected.sort()
            lanes = levels.top()
            lane = lanes.first()
            assert lane == 0
            unit = lanes.pop(lane)
            assert (-unit.priority, unit.first) == expected.pop(0)
            taken.append(unit)
        elif step == "back" and taken:
            unit = taken.pop()
            levels.put_back([unit])
            expected.append((-unit.priority, unit.first))
        assert bool(levels) == bool(expected)
        assert sorted(unit.first for unit in levels) == sorted(first for _, first in expected)
    levels.clear()
    assert not levels
