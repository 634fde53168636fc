"""What a sweep costs, in looks and in files read, never in seconds.

Times depend on the machine; the measured ones are in docs/design-notes.md. What is
asserted here is what they rest on: a look at a subtree reads two small files for each
process in it and nothing of anybody else, and sweeps that run side by side share looks.
"""

from __future__ import annotations

import json
import os
import re
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

import pytest

from safepool.core.lineage import tag_of
from safepool.host.linux import LinuxHost
from tests.kit import truth
from tests.kit.family import Relative
from tests.kit.jail import ROOT, Jail
from tests.kit.sweeping import Order, Record

CROWD = """
import resource
limit = resource.RLIMIT_RTTIME
resource.setrlimit(limit, ({tag}, resource.getrlimit(limit)[1]))
for _ in range({count}):
    if os.fork() == 0:
        time.sleep(120)
say("crowd")
time.sleep(120)
"""


@contextmanager
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The paths that are opened in the block."""
    paths: list[str] = []
    real = os.open

    def noting(path: str, *arguments: int) -> int:
        paths.append(str(path))
        return real(path, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", noting)
        yield paths


def crowd(jail: Jail, count: int) -> int:
    """Start that many sleepers below one process, all with a tag; returns its pid."""
    before = len([line for line in jail.heard if line.word == "crowd"])
    owner = jail.script(CROWD.format(count=count, tag=tag_of(uuid.uuid4().hex, 1)))
    jail.hear("crowd", before + 1)
    return owner.pid


def files_of(paths: list[str]) -> list[str]:
    """The same without the pids."""
    return sorted(re.sub(r"\d+", "N", path) for path in paths)


def test_strangers_do_not_cost_a_subtree_anything(
    jail: Jail, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one file more is opened with 300 processes beside the subtree."""
    host, top = LinuxHost(), crowd(jail, 40)
    with opened(monkeypatch) as alone:
        assert len(host.look_subtree(top).rows) == 41
    crowd(jail, 300)
    with opened(monkeypatch) as in_company:
        assert len(host.look_subtree(top).rows) == 41
    assert sorted(in_company) == sorted(alone)


def test_a_look_reads_two_files_of_each_process(
    jail: Jail, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its line of the table and its list of children, once each; the top's list once more."""
    count = 40
    host, top = LinuxHost(), crowd(jail, count)
    with opened(monkeypatch) as paths:
        host.look_subtree(top)
    of_the_top = [path for path in paths if f"/{top}/" in path]
    rest = [path for path in paths if path not in of_the_top]
    assert len(rest) == len(set(rest))
    assert files_of(rest) == ["/proc/N/stat"] * count + ["/proc/N/task/N/children"] * count
    assert files_of(of_the_top) == ["/proc/N/stat"] + ["/proc/N/task/N/children"] * 2


def test_the_environments_of_elders_are_not_read(
    jail: Jail, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look at everything asks those for their witnesses that can be of the run, no others."""
    host, elders = LinuxHost(), crowd(jail, 40)
    start = truth.started(elders)
    truth.until(lambda: truth.started(crowd(jail, 0)) > start + 1, "time stands still")
    young = crowd(jail, 20)
    since = truth.started(young)
    with opened(monkeypatch) as paths:
        rows = host.look_all(tags=True, since=since).rows
    asked = {int(path.split("/")[2]) for path in paths if path.endswith("environ")}
    # Not of all of them: one in state D is never asked, and a fork may wait in it for a moment.
    assert asked & {young, *truth.descendants(young)}
    assert all(rows[pid].start >= since for pid in asked)
    assert not asked & {elders, *truth.descendants(elders)}
    with opened(monkeypatch) as paths:
        host.look_all(tags=False)
    assert not [path for path in paths if path.endswith("environ")]


def sweep(jail: Jail, order: Order) -> Record:
    """Have a family built and swept."""
    argv = [sys.executable, str(ROOT / "tests/kit/sweeping.py"), uuid.uuid4().hex]
    stdin = jail.start(argv).process.stdin
    assert stdin is not None
    stdin.write(json.dumps(asdict(order)).encode() + b"\n\n")
    stdin.flush()
    (line,) = jail.hear("swept")
    jail.hear("clean")
    return Record.read(line.text)


def test_the_end_of_many_workers_shares_looks(jail: Jail) -> None:
    """40 workers with a child each, a sweep for each: the first look is one for all of them."""
    workers = 40
    plan = [Relative() for _ in range(workers)]
    plan += [Relative(parent=place) for place in range(workers)]
    record = sweep(jail, Order(plan, "each", [30.0]))
    assert len(record.traces) == workers
    of_each = sum(len(trace.looks) for trace in record.traces)
    assert record.looks <= of_each - (workers - 1)
    assert all(trace.looks[0] <= min(t.looks[1] for t in record.traces) for trace in record.traces)


@pytest.mark.parametrize("manner", ["willing", "ignoring"])
def test_a_sweep_of_a_hundred_needs_few_looks(jail: Jail, manner: str) -> None:
    """Not one for each process: deaths in a row are one look, and the waits between grow."""
    plan = [Relative(manner=manner)]
    plan += [Relative(parent=0, manner=manner) for _ in range(100)]
    grace = 30.0 if manner == "willing" else 0.0
    record = sweep(jail, Order(plan, "subtree", [grace]))
    (trace,) = record.traces
    assert len(trace.ended) == 101
    assert len(trace.looks) < 50
