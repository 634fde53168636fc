"""Tag and mark: what they say of a process, for every run and worker there can be."""

from __future__ import annotations

import resource

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safepool.core import lineage

RUNS = st.integers(0, 2**128 - 1).map(lambda number: f"{number:032x}")
WORKERS = st.integers(1, 2**23 - 2)


@given(RUNS, WORKERS)
def test_a_tag_names_its_run_and_worker(run: str, worker: int) -> None:
    """Its own run is recognised; it is a limit that the kernel can hold and nobody else sets."""
    tag = lineage.tag_of(run, worker)
    assert lineage.is_tag(tag)
    assert lineage.is_tag_of_run(tag, run)
    assert not lineage.is_helper_tag(tag)
    assert 0 < tag < 2**63
    assert tag != resource.RLIM_INFINITY


@given(RUNS, WORKERS, RUNS)
def test_a_helper_of_an_inner_run_is_its_workers(outer: str, worker: int, inner: str) -> None:
    """It bears the tag of the worker that made the inner run, and says that it is a helper."""
    tag = lineage.tag_of(outer, worker)
    helper = lineage.helper_tag(tag, inner)
    assert lineage.is_tag(helper)
    assert lineage.is_helper_tag(helper)
    assert lineage.is_tag_of_run(helper, outer)
    assert lineage.plain_tag(helper) == tag == lineage.plain_tag(tag)


@given(RUNS, st.sampled_from([resource.RLIM_INFINITY, 0, 950_000]))
def test_a_helper_of_an_outermost_run_is_its_own_runs(run: str, limit: int) -> None:
    """Without a tag to begin with it gets one of its own run, and no worker's."""
    helper = lineage.helper_tag(limit, run)
    assert lineage.is_helper_tag(helper)
    assert lineage.is_tag_of_run(helper, run)
    assert lineage.plain_tag(helper) != lineage.tag_of(run, 1)


@given(RUNS, st.integers(0, 2**40), RUNS)
def test_only_a_detached_process_looks_detached(run: str, worker: int, inner: str) -> None:
    """No number of a worker does, however high; what a detached process starts does."""
    assert not lineage.is_detached_tag(lineage.tag_of(run, worker))
    assert not lineage.is_detached_tag(lineage.helper_tag(lineage.tag_of(run, worker), inner))
    tag = lineage.detached_tag(run)
    assert lineage.is_detached_tag(tag)
    assert lineage.is_tag_of_run(tag, run)
    assert lineage.is_detached_tag(lineage.helper_tag(tag, inner))


@pytest.mark.parametrize("limit", [None, 0, resource.RLIM_INFINITY, 2**23 - 1])
def test_an_ordinary_limit_is_no_sign_of_being_detached(limit: int | None) -> None:
    """Limits that the user or the system has set are no tags."""
    assert not lineage.is_detached_tag(limit)


@given(RUNS, WORKERS, WORKERS)
def test_tags_of_two_workers_differ(run: str, one: int, other: int) -> None:
    """Within a run no two workers share a tag."""
    assert (lineage.tag_of(run, one) == lineage.tag_of(run, other)) == (one == other)


@given(st.integers(0, 2**38 - 1), st.integers(0, 2**38 - 1), WORKERS, WORKERS)
def test_tags_of_two_runs_differ(one: int, other: int, worker: int, second: int) -> None:
    """Whatever the workers' numbers are: a tag is of one run only (of its last 38 bits)."""
    tag = lineage.tag_of(f"{one:032x}", worker)
    assert lineage.is_tag_of_run(tag, f"{other:032x}") == (one == other)
    assert lineage.is_tag_of_run(lineage.tag_of(f"{other:032x}", second), f"{one:032x}") == (
        one == other
    )


@pytest.mark.parametrize("limit", [resource.RLIM_INFINITY, -1, 0, 1, 950_000, 2**62 - 1, 2**63])
def test_limits_that_people_set_are_no_tags(limit: int) -> None:
    """Unlimited, none, and every real-time limit of less than a hundred thousand years."""
    assert not lineage.is_tag(limit)
    assert not lineage.is_helper_tag(limit)


def test_no_tag_is_of_no_run() -> None:
    """A process whose limit could not be read belongs to nobody."""
    assert not lineage.is_tag_of_run(None, "0" * 32)
    assert not lineage.is_helper_tag(None)


@given(st.lists(st.tuples(RUNS, WORKERS), min_size=1, max_size=5))
def test_a_mark_names_every_run_it_went_through(chain: list[tuple[str, int]]) -> None:
    """Inner runs append: the outermost is still recognised, with its worker, and no other is."""
    mark: str | None = None
    for run, worker in chain:
        mark = lineage.extend(mark, run, worker)
    for run, worker in chain:
        assert lineage.is_mark_of(mark, run)
        assert lineage.is_mark_of(mark, run, worker)
        assert lineage.is_mark_of(mark, run, worker + 1) == ((run, worker + 1) in chain)
    assert not lineage.is_mark_of(mark, "f" * 31)


@pytest.mark.parametrize("mark", [None, "", "/", ":", "abc", "x:y/z", "0" * 32 + "00:1"])
def test_a_mark_that_is_none_is_of_no_run(mark: str | None) -> None:
    """Missing, empty and mangled marks are nobody's."""
    assert not lineage.is_mark_of(mark, "0" * 32)
