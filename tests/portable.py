"""What only the Linux kernel can promise: the tests that cannot hold with the portable backend.

    SAFEPOOL_BACKEND=portable python -m pytest

runs everything with nothing but psutil. Each entry below names tests by a pattern and says
why they need the kernel. What ``ABSENT`` names is left out: it is about something that the
portable backend does not have. The others are expected to fail.

One villain is changed instead, since it plays in forty tests: ``daemon_empty_env`` keeps
its environment (``nothing_to_know_it_by`` of kit/villains.py). That the real one gets away
is in the list: real/test_portable.py.

Used by: conftest.py (marks the tests).
"""

from __future__ import annotations

import os
from fnmatch import fnmatchcase

import pytest

IS_PORTABLE = os.environ.get("SAFEPOOL_BACKEND") == "portable"

HIDING = (
    "what loses its parent and its environment between two looks (a daemon that forks twice) is "
    "not known at the second; Linux gives it to the launcher, which is a subreaper"
)

ZOMBIES = (
    "orphans go to the system's first process, which is the owner here and waits for none of them: "
    "dead as they are, they stay in the table; on Linux the launcher gets and reaps them"
)

FORKED = (
    "what a worker forks without exec shows the environment of whoever was exec'd last, and under "
    "fork that is the owner: it is known by its parents alone, if a look came while they lived"
)

UNREADABLE = "a process that made itself undumpable shows no mark; Linux needs none to find it"

SLOW = (
    "a pool that is dropped keeps its descriptors until two looks have shown that its workers' "
    "trees are gone, a tenth of a second; 40 pools in a second are too many for 64 descriptors"
)

LETTING_GO = (
    "the portable backend lets no process go (safepool.detached, strays='spare'): it could not "
    "tell from a stray what that starts; on Linux a tag says so"
)

ABSENT = {
    "*/test_containment.py::*": "keeps workers in a cgroup, which only Linux has",
    "*/test_escapes.py::*": (
        "says which of Linux's layers finds a stray; the portable backend has parents and mark"
    ),
    "*/real/test_detached.py::*": LETTING_GO,
    "*/api/test_detached.py::test_tag_and_mark_say_that_it_left*": LETTING_GO,
    "*/api/test_detached.py::test_without_a_registry*": LETTING_GO,
    "*/api/test_detached.py::test_a_hard_limit_below_the_tag*": LETTING_GO,
    "*/test_policies.py::test_spared_strays_stay*": LETTING_GO,
    "*/test_policies.py::test_strays_of_any_other_end_are_swept*": LETTING_GO,
    "*/test_sweeping.py::test_a_dry_run_reports_what_the_sweep_then_does": LETTING_GO,
    "*/test_sweeping.py::test_two_dead_runs_are_swept_side_by_side": LETTING_GO,
    "*/test_sweeping.py::test_it_does_not_end_its_caller": LETTING_GO,
    "*/test_next_start.py::test_the_next_start_ends_what_is_left*": (
        "some of its strays bear the tag alone, which only Linux has"
    ),
    "*/test_doctor.py::test_here_every_promise_holds": "the portable backend promises less",
    "*/test_doctor.py::test_a_bound_tag*": "the portable backend has no tag",
    "*/test_doctor.py::test_a_registry_in_the_way*": "the portable backend misses more layers",
    "*/test_reference.py::test_every_json_key*": "the portable backend promises less",
}
"""Patterns of node IDs of tests that have no meaning there, each with the reason."""

TESTS = {
    "*/test_threads_forks_namespaces.py::test_an_owner_that_is_pid_1*": ZOMBIES,
}
"""Patterns of node IDs, each with the reason. They always fail."""

MATTERS_OF_LUCK = {
    "*/test_portable.py::test_a_daemon_that_hides_all_at_once": HIDING,
    "*/test_demo.py::test_it_shows_that_nothing_is_left_of_safepool_and_much_without*": HIDING,
    "*/test_trees.py::test_background_jobs_of_shells?close?": HIDING,
    "*/test_deathsig_pitfalls.py::test_workers_that_disarm*-owner-and-launcher?": HIDING,
    "*/test_trees.py::test_multiprocessing_inside_a_task_ends_with_its_worker?fork*": FORKED,
    "*/test_policies.py::test_strays_are_ended_by_default": HIDING,
    "*/cli/test_run.py::test_what_the_command_leaves_behind*": HIDING,
    "*/test_trees.py::test_daemons_whose_marks_nobody_may_read*": UNREADABLE,
    "*/test_descriptors_and_shared_memory.py::test_pools_that_are_dropped*?fork?": SLOW,
}
"""The same for tests that pass when a look happens to fall into the right moment."""


def mark_for(node_id: str) -> pytest.MarkDecorator | None:
    """The mark for a test that cannot pass with the portable backend; None if it must."""
    for pattern, reason in ABSENT.items():
        if fnmatchcase("/" + node_id, pattern):
            return pytest.mark.skip(reason=reason)
    for patterns, strict in ((TESTS, True), (MATTERS_OF_LUCK, False)):
        for pattern, reason in patterns.items():
            if fnmatchcase("/" + node_id, pattern):
                return pytest.mark.xfail(reason=reason, strict=strict)
    return None
