"""What every test shares: the start methods, a watch for leaks, a limit of time.

* ``method``: the test runs once for each start method.
* ``jail``: a fresh :class:`tests.kit.jail.Jail`, empty at the end whatever happens.
* After every test: no new child of the test run and no new descriptor is left. The one
  sidecar that a run keeps is allowed, and what comes with it.
* A test that takes longer than ``LIMIT`` seconds fails with a traceback where it stood,
  and is cleaned up as any failing test.

The registry of runs that tests make in this process is a private folder.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import hypothesis
import pytest

ROOT = str(Path(__file__).resolve().parents[1])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

from tests import portable  # noqa: E402  the line above makes it importable
from tests.kit import truth  # noqa: E402
from tests.kit.jail import Jail  # noqa: E402
from tests.kit.terminal import Terminal  # noqa: E402

METHODS = ("fork", "spawn", "forkserver")
LIMIT = 240
ALLOWED = ("safepool-sidecar", "multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Command lines of children that stay by design: one per process, not one per test."""

hypothesis.settings.register_profile("tests", deadline=None, print_blob=True)
hypothesis.settings.load_profile("tests")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With the portable backend, expect to fail what only the kernel can promise."""
    for item in items if portable.IS_PORTABLE else ():
        mark = portable.mark_for(item.nodeid)
        if mark is not None:
            item.add_marker(mark)


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    """The start method."""
    return str(request.param)


@pytest.fixture
def jail(tmp_path: Path) -> Iterator[Jail]:
    """A jail of the test's own."""
    folder = tmp_path / "jail"
    folder.mkdir()
    with Jail(folder) as opened:
        yield opened


@pytest.fixture
def terminal(jail: Jail) -> Iterator[Terminal]:
    """A terminal that is closed after the test; its users are gone by then or made to go."""
    opened = Terminal()
    yield opened
    jail.clear()
    opened.close()


@pytest.fixture(scope="session", autouse=True)
def private_registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the records of this process' runs out of the user's own registry."""
    folder = tmp_path_factory.mktemp("registry")
    folder.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        yield


def lasting_children() -> set[int]:
    """The children that stay by design."""
    return {
        pid
        for pid in truth.children(os.getpid())
        if any(word in truth.command_line(pid) for word in ALLOWED)
    }


def leftovers(before: set[int]) -> list[int]:
    """The children that a test has left, zombies as well."""
    multiprocessing.active_children()  # reaps those that have ended
    return [
        pid
        for pid in set(truth.children(os.getpid())) - before - lasting_children()
        if truth.state(pid)
    ]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Fail a test that leaves a child or a descriptor behind."""
    children = set(truth.children(os.getpid()))
    lasting = lasting_children()
    files = truth.open_files()
    yield
    gc.collect()

    def gone() -> bool:
        return not leftovers(children)

    try:
        truth.until(gone, "children are left", 5)
    except AssertionError:
        left = [truth.describe(pid) for pid in leftovers(children)]
        pytest.fail(f"children are left: {left}")
    if lasting_children() != lasting:
        return  # the first use of a run or of a tracker opens descriptors that stay

    def new_files() -> dict[int, str]:
        return {fd: file for fd, file in truth.open_files().items() if files.get(fd) != file}

    try:
        # The last ones go when the ends of their launchers have been seen.
        truth.until(lambda: not new_files(), "descriptors are left", 5)
    except AssertionError:
        pytest.fail(f"descriptors are left: {new_files()}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Interrupt a test that takes too long, so that its fixtures clean up after it."""

    def too_long(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"{item.nodeid} took more than {LIMIT} s")

    previous = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(LIMIT)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
