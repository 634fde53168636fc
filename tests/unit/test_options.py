"""Further attempts and the agenda: what is tried again, when, and in which order things are due."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safepool.core.agenda import Agenda
from safepool.core.options import LONGEST_DELAY, MOST_STRIKES, TaskOptions, checked_options

SECONDS = st.floats(0, 1000)


@given(st.integers(0, 10), st.lists(st.booleans(), max_size=20))
def test_no_task_is_tried_more_often_than_allowed(retries: int, losses: list[bool]) -> None:
    """Neither than the program allows, nor once it has killed so many workers."""
    options = TaskOptions(retries=retries, retry_on=(OSError,))
    attempts = strikes = 0
    for is_loss in losses:
        attempts += 1
        strikes += is_loss
        if options.delay_of_retry(attempts, strikes, OSError(), is_loss=is_loss) is None:
            break
    assert attempts <= retries + 1
    assert strikes <= MOST_STRIKES


def test_only_what_was_named_is_tried_again() -> None:
    """A subclass is named with its class; a loss need not be."""
    options = TaskOptions(retries=1, retry_on=(OSError,))
    assert options.delay_of_retry(1, 0, ConnectionError(), is_loss=False) == 0
    assert options.delay_of_retry(1, 0, ValueError(), is_loss=False) is None
    assert options.delay_of_retry(1, 1, RuntimeError(), is_loss=True) == 0
    assert TaskOptions().delay_of_retry(1, 1, RuntimeError(), is_loss=True) is None


@given(st.floats(0, 100), st.integers(1, 60))
def test_the_pause_doubles_and_is_bounded(delay: float, attempts: int) -> None:
    """However often it is tried."""
    options = TaskOptions(retries=100, retry_on=(OSError,), retry_delay=delay)
    pauses = [
        options.delay_of_retry(number, 0, OSError(), is_loss=False) or 0.0
        for number in range(1, attempts + 1)
    ]
    assert pauses == sorted(pauses)
    assert pauses[0] == min(delay, LONGEST_DELAY)
    assert max(pauses) <= LONGEST_DELAY


@given(SECONDS, SECONDS)
def test_a_view_keeps_what_it_does_not_name(timeout: float, deadline: float) -> None:
    """And has what it names."""
    base = checked_options(TaskOptions(), {"timeout": timeout + 1, "retries": 2})
    view = checked_options(base, {"deadline": deadline + 1})
    assert (view.timeout, view.deadline, view.retries) == (timeout + 1, deadline + 1, 2)
    assert checked_options(view, {"timeout": None}).timeout is None
    assert view.is_for_items


@given(st.lists(SECONDS, max_size=30), st.lists(SECONDS, max_size=10))
def test_the_agenda_gives_each_entry_once_when_it_is_due(
    entries: list[float], looks: list[float]
) -> None:
    """In order of time; entries of one instant in the order in which they came."""
    agenda: Agenda[tuple[float, int]] = Agenda()
    for number, due in enumerate(entries):
        agenda.add(due, (due, number))
    taken = []
    for now in [*sorted(looks), 1000.0]:
        ready = agenda.take(now)
        assert all(entry[0] <= now for entry in ready)
        wait = agenda.wait(now)
        assert wait is None or wait > 0
        taken += ready
    assert taken == sorted((due, number) for number, due in enumerate(entries))
    assert agenda.wait(0.0) is None


@given(st.lists(SECONDS, max_size=30))
def test_what_nobody_wants_is_struck_off(entries: list[float]) -> None:
    """The rest keeps its order."""
    agenda: Agenda[float] = Agenda()
    for due in entries:
        agenda.add(due, due)
    agenda.keep_only(lambda due: due > 500)
    assert len(agenda) == sum(due > 500 for due in entries)
    assert agenda.take(1000.0) == sorted(due for due in entries if due > 500)


@pytest.mark.parametrize("name", ["timeout", "deadline"])
def test_a_limit_of_no_time_is_an_error(name: str) -> None:
    """None means none; zero would end everything."""
    with pytest.raises(ValueError, match=name):
        checked_options(TaskOptions(), {name: 0})
    assert checked_options(TaskOptions(), {name: None}) == TaskOptions()
