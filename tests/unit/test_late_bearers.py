"""When what bears a dead run's tag or mark is surely the run's own."""

from __future__ import annotations

from typing import Any

import pytest

from safepool.core.identity import ProcessRow, Snapshot
from safepool.core.lineage import extend, tag_of
from safepool.core.membership import Target, bears_nothing_late, find_members
from safepool.core.values import replace

RUN = "0123456789abcdef0123456789abcdef"
TAG = tag_of(RUN, 1)
TARGET = Target(run_id=RUN, born_from=100, born_until=200, swept_from=500)
FRESH = replace(TARGET, born_until=600)


def bearer(pid: int, start: int, ppid: int = 1, **witness: Any) -> ProcessRow:
    return ProcessRow(pid, start, ppid, **(witness or {"tag": TAG}))


def look(*rows: ProcessRow) -> Snapshot:
    return Snapshot({row.pid: row for row in rows})


@pytest.mark.parametrize(
    ("target", "rows", "surely"),
    [
        (TARGET, (), True),
        (TARGET, (bearer(10, 150), bearer(11, 200, 10)), True),
        # A shell that a server of the run opened between the run's end and the sweep.
        (TARGET, (bearer(10, 150), bearer(11, 201)), False),
        (TARGET, (bearer(10, 150), bearer(11, 201, 10)), False),
        (TARGET, (bearer(10, 150), bearer(11, 201, mark=extend(None, RUN, 1))), False),
        # Born while the sweep begins: of a member that forks on, or of nobody knows whom.
        (TARGET, (bearer(10, 150), bearer(11, 500, 10)), True),
        (TARGET, (bearer(10, 150), bearer(11, 500)), False),
        (TARGET, (bearer(10, 300), bearer(11, 500, 10)), False),
        # The run ended a moment ago.
        (FRESH, (bearer(10, 150), bearer(11, 590)), True),
        (FRESH, (bearer(10, 150), bearer(11, 601, 10)), True),
        # Strangers do not count, nor do the dead.
        (TARGET, (ProcessRow(12, 300, 1), bearer(13, 300, tag=tag_of("f" * 32, 1))), True),
        (TARGET, (bearer(14, 300, state="Z", tag=TAG),), True),
    ],
)
def test_a_late_bearer_may_be_somebody_elses(
    target: Target, rows: tuple[ProcessRow, ...], surely: bool
) -> None:
    """One is enough to keep the bound of birth, by which it and all its children are spared."""
    assert bears_nothing_late(target, look(*rows)) is surely


def test_what_is_late_is_spared_with_its_children() -> None:
    """The bound that is kept: the run's own are found, the late one and its child are not."""
    rows = (bearer(10, 150), bearer(11, 300), bearer(12, 550, 11))
    assert [found.row.pid for found in find_members(TARGET, (), look(*rows))] == [10]
    own = replace(TARGET, born_until=None)
    assert [found.row.pid for found in find_members(own, (), look(rows[0], rows[2]))] == [10, 12]
