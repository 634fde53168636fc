"""Giving another process a tag: what is promised, on the real kernel."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from safepool.core.identity import Incarnation
from safepool.core.lineage import detached_tag, is_detached_tag, tag_of
from safepool.core.membership import Target
from safepool.host.linux import LinuxHost
from safepool.host.release import put_tag, working_directory
from safepool.registry import detached_incarnations
from safepool.sparing import Sparing
from tests.kit import truth

RUN = "ab" * 16
TAG = detached_tag(RUN)
RTTIME = resource.RLIMIT_RTTIME


class AnotherAfterwards(LinuxHost):
    """A host on which the pid is handed out again while the tag is set."""

    def __init__(self, name: Incarnation) -> None:
        super().__init__()
        self.answers = [name, Incarnation(name.pid, name.start + 1)]

    def incarnation(self, pid: int) -> Incarnation | None:
        return self.answers.pop(0)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that answers each line with a child of its own, which ends with it."""
    program = (
        "import os, subprocess, sys\n"
        "reader, writer = os.pipe()\n"
        "for line in sys.stdin:\n"
        "    print(subprocess.Popen(['cat'], stdin=reader).pid, flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd="/",
    ) as process:
        yield process
        process.communicate(timeout=30)


def name_of(process: subprocess.Popen[bytes]) -> Incarnation:
    name = LinuxHost().incarnation(process.pid)
    assert name is not None
    return name


def start_one(process: subprocess.Popen[bytes]) -> int:
    """Have it start a child; returns that one's pid."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"\n")
    process.stdin.flush()
    return int(process.stdout.readline())


def test_the_tag_is_the_process_own_and_is_handed_down(child: subprocess.Popen[bytes]) -> None:
    """It bears the tag, and what it starts afterwards too; the hard limit stays."""
    _, hard = resource.prlimit(child.pid, RTTIME)
    assert put_tag(LinuxHost(), name_of(child), TAG)
    assert resource.prlimit(child.pid, RTTIME) == (TAG, hard)
    assert LinuxHost().read_tag(start_one(child)) == TAG
    assert working_directory(child.pid) == "/"


def test_another_process_gets_back_what_it_had(child: subprocess.Popen[bytes]) -> None:
    """The pid was handed out again in between: False, and nothing has changed."""
    before = resource.prlimit(child.pid, RTTIME)
    name = name_of(child)
    assert not put_tag(AnotherAfterwards(name), name, TAG)
    assert resource.prlimit(child.pid, RTTIME) == before
    assert not put_tag(LinuxHost(), Incarnation(child.pid, name.start + 1), TAG)
    assert resource.prlimit(child.pid, RTTIME) == before


def test_a_lower_hard_limit_is_not_touched(child: subprocess.Popen[bytes]) -> None:
    """An administrator's bound stays: no tag, no error."""
    resource.prlimit(child.pid, RTTIME, (5, 10**9))
    assert not put_tag(LinuxHost(), name_of(child), TAG)
    assert resource.prlimit(child.pid, RTTIME) == (5, 10**9)


def test_a_process_that_is_gone() -> None:
    """False, and no error."""
    with subprocess.Popen(["true"]) as process:
        name = name_of(process)
    assert not put_tag(LinuxHost(), name, TAG)
    assert working_directory(process.pid) == ""


def test_a_tree_is_let_go_with_its_records(child: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """Each member gets the tag, or where that cannot be set the record alone; the helpers and
    workers of an inner run are none of its business."""
    host = LinuxHost()
    folder = tmp_path / "registry"
    folder.mkdir(mode=0o700)
    put_tag(host, name_of(child), tag_of(RUN, 1))
    bounded, inner = start_one(child), start_one(child)
    resource.prlimit(bounded, RTTIME, (10**9, 10**9))
    inner_tag = tag_of("cd" * 16, 1)
    resource.prlimit(inner, RTTIME, (inner_tag, resource.prlimit(inner, RTTIME)[1]))

    sparing = Sparing(host, RUN, str(folder), lambda: host.look_subtree(os.getpid(), RUN))
    released = sparing.let_go(Target(roots=frozenset({name_of(child)}), run_id=RUN))
    assert released.is_all
    assert {name.pid for name in released.names} == {child.pid, bounded}
    assert is_detached_tag(host.read_tag(child.pid))
    assert resource.prlimit(bounded, RTTIME) == (10**9, 10**9)
    assert host.read_tag(inner) == inner_tag
    assert sparing.on_record() == detached_incarnations(str(folder), host) == released.names.keys()
    assert truth.is_alive(child.pid)
