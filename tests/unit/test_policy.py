"""Which values of the grace make sense."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safepool.core.policy import LONGEST_GRACE, checked_grace


@given(st.floats(0, LONGEST_GRACE) | st.integers(0, int(LONGEST_GRACE)))
def test_every_number_of_seconds_up_to_a_week(grace: float) -> None:
    """It is kept as it is, as a float that poll(2) can wait for."""
    got = checked_grace(grace)
    assert type(got) is float
    assert got == grace
    assert (got + 3600) * 1000 < 2**31


@pytest.mark.parametrize(
    "grace", [-1, -1e-9, float("nan"), float("inf"), float("-inf"), LONGEST_GRACE + 1, 10**300]
)
def test_numbers_that_are_no_wait(grace: float) -> None:
    """ValueError that names the argument and the value."""
    with pytest.raises(ValueError, match="grace must be"):
        checked_grace(grace)


@pytest.mark.parametrize("grace", [None, "5", True, [5], b"5", 5j])
def test_what_is_no_number(grace: Any) -> None:
    """TypeError that names the argument and the type."""
    with pytest.raises(TypeError, match=f"not {type(grace).__name__}"):
        checked_grace(grace)
