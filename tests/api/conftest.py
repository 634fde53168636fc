"""What the tests of this folder share: launchers that stay while a file's tests run.

Bare processes of spawn and forkserver share a launcher that leaves half a second after
the last of them. A test would have to wait for that, or leave the descriptor that leads
to it; so one process of each method keeps it until the file is through.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

import safepool
from tests.api import work
from tests.kit import truth


@pytest.fixture(scope="module", autouse=True)
def launchers_stay(private_registry: None) -> Iterator[None]:
    """Keep the shared launchers, and what their first use opens in this process."""
    with ExitStack() as keepers:
        for method in ("spawn", "forkserver"):
            context = safepool.get_context(method)
            ready = context.Event()
            process = context.Process(target=work.last, args=(ready,), daemon=True)
            process.start()
            keepers.callback(process.join, 30)
            keepers.callback(process.terminate)
            assert ready.wait(30)
            context.Value("i")  # the heap behind shared values keeps its first page for ever
        yield


@pytest.fixture(autouse=True)
def launchers_leave(launchers_stay: None, nothing_is_left: None) -> Iterator[None]:
    """A launcher for processes of another grace leaves soon, and its descriptor with it."""
    before = truth.open_files()
    yield
    gc.collect()
    truth.until(
        lambda: all(before.get(fd) == file for fd, file in truth.open_files().items()),
        "descriptors are left",
        10,
    )
