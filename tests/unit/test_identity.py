"""Whether two sightings are of one process: same, other, or not to be told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safepool.core.identity import Incarnation, ProcessRow, Sameness, Snapshot

names = st.builds(Incarnation, st.integers(0, 5), st.integers(0, 3))


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (Incarnation(7, 100), Incarnation(7, 100), Sameness.SAME),
        (Incarnation(7, 100), Incarnation(7, 101), Sameness.OTHER),
        (Incarnation(7, 100), Incarnation(8, 100), Sameness.OTHER),
        (Incarnation(7, 0), Incarnation(7, 100), Sameness.UNKNOWN),
        (Incarnation(7, 0), Incarnation(7, 0), Sameness.UNKNOWN),
        (Incarnation(7, 0), Incarnation(8, 0), Sameness.OTHER),
    ],
)
def test_a_pid_alone_names_nobody(one: Incarnation, other: Incarnation, expected: Sameness) -> None:
    """Same pid and start is the same process; an unknown start leaves the question open."""
    assert one.compare(other) is expected


@given(names, names)
def test_sameness_has_no_direction(one: Incarnation, other: Incarnation) -> None:
    """Whoever is compared with whom, the answer is the same."""
    assert one.compare(other) is other.compare(one)


@pytest.mark.parametrize(("state", "expected"), [(c, c not in "ZXx") for c in "RSDTtZXxIWP"])
def test_a_zombie_is_dead(state: str, expected: bool) -> None:
    """Zombies and the gone are dead; asleep, stopped, traced and wedged are alive."""
    assert ProcessRow(7, 100, 1, state).is_alive is expected


def test_a_snapshot_finds_only_the_very_process() -> None:
    """A recycled pid and a zombie are not the process that is looked for."""
    snapshot = Snapshot({7: ProcessRow(7, 100, 1), 8: ProcessRow(8, 100, 1, "Z")})
    assert snapshot.find(Incarnation(7, 100)) == ProcessRow(7, 100, 1)
    assert snapshot.find(Incarnation(7, 99)) is None
    assert snapshot.find(Incarnation(8, 100)) is None
    assert snapshot.find(Incarnation(9, 100)) is None
    assert [row.pid for row in snapshot.alive()] == [7]
