"""Which values of a policy make sense, and what they come to."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safepool.core.policy import LONGEST_GRACE, EndPolicy, checked_grace, checked_policy


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


def test_the_defaults_ask_first_and_spare_nobody() -> None:
    """SIGTERM and five seconds at every end; strays go with their worker."""
    policy = checked_policy(5)
    assert policy == EndPolicy(5.0, "terminate", "kill")
    assert (policy.grace, policy.last_grace, policy.spares) == (5.0, 5.0, False)


def test_kill_takes_the_grace_of_the_owners_end_alone() -> None:
    """While the owner lives there is the same grace as ever."""
    policy = checked_policy(5, "kill", "spare")
    assert (policy.grace, policy.last_grace, policy.spares) == (5.0, 0.0, True)
    assert EndPolicy(*policy.fields()) == policy


@pytest.mark.parametrize("name", ["on_owner_death", "strays"])
@pytest.mark.parametrize("word", ["", "Kill", "term", "none", "spare ", "terminated"])
def test_a_word_that_is_none_of_the_policy(name: str, word: str) -> None:
    """ValueError that names the argument, what was given, and the words that there are."""
    with pytest.raises(
        ValueError, match=f'^{name} must be "(terminate|kill)" or "(kill|spare)"'
    ) as e:
        checked_policy(1.0, **{name: word})
    assert repr(word) in str(e.value)


@pytest.mark.parametrize("name", ["on_owner_death", "strays"])
@pytest.mark.parametrize("word", [None, True, b"kill", ["kill"], 0])
def test_what_is_no_word(name: str, word: Any) -> None:
    """TypeError that names the argument and the type."""
    with pytest.raises(TypeError, match=f"^{name} must be .*, not {type(word).__name__}"):
        checked_policy(1.0, **{name: word})
