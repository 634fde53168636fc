"""What only the Linux kernel can promise: the tests that cannot hold with the portable backend.

    SAFEPOOL_BACKEND=portable python -m pytest

runs everything with nothing but psutil. Each entry below names tests by a pattern and says
why they need the kernel. They are expected to fail, and one that passes is an error, so
that the list stays true.

One villain is changed instead, since it plays in forty tests: ``daemon_empty_env`` keeps
its environment. That the real one gets away is in the list: real/test_portable.py.

Used by: conftest.py (marks the tests).
"""

from __future__ import annotations

import os
from fnmatch import fnmatchcase

IS_PORTABLE = os.environ.get("SAFEPOOL_BACKEND") == "portable"

HIDING = (
    "a daemon that forks twice at once and empties its environment has neither a parent of ours "
    "nor a mark at the next look; Linux gives it to the launcher, which is a subreaper"
)

ZOMBIES = (
    "orphans go to the system's first process, which is the owner here and waits for none of them: "
    "dead as they are, they stay in the table; on Linux the launcher gets and reaps them"
)

TESTS: dict[str, str] = {
    "*/test_threads_forks_namespaces.py::test_an_owner_that_is_pid_1*": ZOMBIES,
}
"""Patterns of node IDs, each with the reason."""


def reason_to_fail(node_id: str) -> str:
    """Why this test cannot pass with the portable backend; "" if it must."""
    if IS_PORTABLE:
        for pattern, reason in TESTS.items():
            if fnmatchcase(node_id, pattern):
                return reason
    return ""
