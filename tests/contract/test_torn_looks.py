"""A look is read piece by piece, while the world moves on: who moves on is seen all the same.

A runner hands over to a successor at the worst instant of a look, again and again. That a
runner can be faster than any look is known; docs/what-can-escape.md names it.
"""

from __future__ import annotations

import os
import re
import resource
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from safepool.core.identity import Snapshot
from safepool.core.lineage import tag_of
from safepool.host.linux import LinuxHost
from tests.kit import truth

TAG = tag_of("0123456789abcdef0123456789abcdef", 7)
LINE = re.compile(r"/proc/(\d+)/stat")


class Runner:
    """A child of the test with a tag; ``hand_over`` starts the next, under another pid."""

    def __init__(self) -> None:
        self.pids: list[int] = []
        self._unreaped: set[int] = set()
        self._start()

    @property
    def pid(self) -> int:
        return self.pids[-1]

    def hand_over(self, *, is_reaped: bool = True) -> None:
        before = self.pid
        self._start()
        self._end(before)
        if is_reaped:
            self._reap(before)

    def close(self) -> None:
        self._end(self.pid)
        for pid in list(self._unreaped):
            self._reap(pid)

    def _start(self) -> None:
        pid = os.posix_spawn("/bin/sleep", ["sleep", "120"], {})
        self.pids.append(pid)
        self._unreaped.add(pid)
        resource.prlimit(pid, resource.RLIMIT_RTTIME, (TAG, resource.RLIM_INFINITY))

    @staticmethod
    def _end(pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        assert truth.wait_gone(pid)

    def _reap(self, pid: int) -> None:
        os.waitpid(pid, 0)
        self._unreaped.remove(pid)


@pytest.fixture
def runner() -> Iterator[Runner]:
    """In company of a younger one, whose line is read after the first of the runner."""
    runner, other = Runner(), Runner()
    yield runner
    runner.close()
    other.close()


class Readings:
    """Calls ``before`` with what is read of which pid, "line" or "tag", each time before it is."""

    def __init__(self) -> None:
        self.before: Callable[[str, int], None] | None = None
        self._open, self._prlimit = os.open, resource.prlimit

    def open(self, path: str, *arguments: int, **more: int) -> int:
        line = LINE.fullmatch(str(path))
        if line:
            self._tell("line", int(line[1]))
        return self._open(path, *arguments, **more)

    def prlimit(self, pid: int, *arguments: Any) -> tuple[int, int]:
        self._tell("tag", pid)
        return self._prlimit(pid, *arguments)

    def _tell(self, what: str, pid: int) -> None:
        call, self.before = self.before, None
        if call is not None:
            # What is called reads such things itself.
            call(what, pid)
            self.before = call


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Readings]:
    readings = Readings()
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", readings.open)
        patch.setattr(resource, "prlimit", readings.prlimit)
        yield readings
        readings.before = None


LOOKS: dict[str, Callable[[LinuxHost], Snapshot]] = {
    "all": lambda host: host.look_all(tags=True),
    "subtree": lambda host: host.look_subtree(os.getpid()),
}


@pytest.mark.parametrize("kind", LOOKS)
def test_who_moves_on_before_its_line_is_read_is_seen(
    kind: str, runner: Runner, readings: Readings
) -> None:
    """It was listed under a number that nobody has any more: the list is read again."""

    def hand_over(what: str, pid: int) -> None:
        if what == "line" and pid == runner.pids[0] == runner.pid:
            runner.hand_over()

    readings.before = hand_over
    rows = LOOKS[kind](LinuxHost()).rows
    assert len(runner.pids) == 2
    assert runner.pids[0] not in rows
    assert rows[runner.pid].tag == TAG


@pytest.mark.parametrize("kind", LOOKS)
def test_who_moves_on_right_after_its_line_was_read_has_shown_its_tag(
    kind: str, runner: Runner, readings: Readings
) -> None:
    """Line and tag are read together: of tags that are read after all lines it shows none."""
    seen: set[int] = set()

    def hand_over(what: str, pid: int) -> None:
        if runner.pid in seen and pid != runner.pid:
            runner.hand_over()
        if what == "line":
            seen.add(pid)

    readings.before = hand_over
    rows = LOOKS[kind](LinuxHost()).rows
    assert len(runner.pids) > 1, "nobody was read after it"
    tags = {rows[pid].tag for pid in runner.pids if pid in rows}
    assert TAG in tags


def test_who_leaves_zombies_behind_is_seen_below_its_subreaper(
    runner: Runner, readings: Readings
) -> None:
    """Each list shows it, and each line says that it is dead by now: the list is read again."""

    def hand_over(what: str, pid: int) -> None:
        if what == "line" and pid == runner.pid and len(runner.pids) < 3:
            runner.hand_over(is_reaped=False)

    readings.before = hand_over
    rows = LinuxHost().look_subtree(os.getpid()).rows
    assert [rows[pid].is_alive for pid in runner.pids] == [False, False, True]
