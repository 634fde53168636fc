"""A launcher's roster: what the owner is told of a worker, and when, on a made-up host."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from safepool.core import lineage
from safepool.core.identity import Incarnation, ProcessRow
from safepool.core.membership import find_members
from safepool.core.planner import Sig, Target
from safepool.core.policy import EndPolicy
from safepool.core.values import replace
from safepool.core.wire import STATUS_SIZE, Exited, Started, Status, decode_status
from safepool.roster import Roster, send_status
from safepool.sparing import Released, Sparing
from tests.unit.test_sweeper import Stand

RUN = "ab" * 16
LAUNCHER = Incarnation(5, 5)


class StandInSparing(Sparing):
    """Gives the tag to the rows of a made-up host; ``follows`` False: it cannot keep up."""

    def __init__(self, host: Stand) -> None:
        self.host = host
        self.let = 0
        self.follows = True

    def on_record(self) -> frozenset[Incarnation]:
        return frozenset()

    def let_go(self, target: Target) -> Released:
        self.let += 1
        names = {}
        for found in find_members(target, (), self.host.look()):
            names[found.row.incarnation] = "sleep 60"
            tag = lineage.detached_tag(RUN)
            self.host.rows[found.row.pid] = replace(found.row, tag=tag)
        return Released(names, is_all=self.follows)


class Launcher:
    """A roster with one worker (pid 10, number 1), its pipe, and what was told."""

    def __init__(self, strays: str = "kill") -> None:
        self.host = Stand(10)
        self.sparing = StandInSparing(self.host)
        self.host.rows[10] = ProcessRow(10, 10, 5, tag=lineage.tag_of(RUN, 1))
        self.told: list[tuple[str, str]] = []
        self.roster = Roster(
            self.host,
            LAUNCHER,
            RUN,
            EndPolicy(1.0, strays=strays),
            self.host.look,
            lambda *line: self.told.append(line),
            self.sparing,
        )
        self.reader, writer = os.pipe()
        os.set_blocking(self.reader, False)
        self.roster.add(1, Incarnation(10, 10), writer)

    def heard(self) -> list[Status]:
        """What the owner has been told since it was last asked."""
        try:
            data = os.read(self.reader, 4096)
        except BlockingIOError:
            return []
        return [decode_status(data[n : n + STATUS_SIZE]) for n in range(0, len(data), STATUS_SIZE)]

    def die(self, code: int) -> None:
        """The worker dies and is reaped."""
        self.host.end(10)
        self.roster.note_death(10, code, sweeps=True)

    def add_stray(self, pid: int) -> None:
        """An orphan of the worker, known by its tag."""
        self.host.rows[pid] = ProcessRow(pid, pid, 5, tag=lineage.tag_of(RUN, 1))

    def turn(self, times: int = 8) -> None:
        """Let the launcher's loop turn, half a second each time."""
        for _ in range(times):
            for sweep in list(self.roster.sweeps()):
                sweep.advance()
            self.roster.settle()
            self.host.clock += 0.5


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    made = Launcher()
    yield made
    made.roster.finish()
    os.close(made.reader)


@pytest.fixture
def sparing() -> Iterator[Launcher]:
    """The launcher of a pool that spares strays."""
    made = Launcher("spare")
    yield made
    made.roster.finish()
    os.close(made.reader)


def test_strays_of_a_worker_that_was_sent_away_are_spared(sparing: Launcher) -> None:
    """Nobody is signalled, EXITED does not wait for them, and one line names them."""
    sparing.heard()
    sparing.add_stray(20)
    sparing.roster.note_retiring(1)
    sparing.die(0)
    sparing.turn()
    assert sparing.heard() == [Exited(0)]
    assert sparing.host.sent == []
    assert 20 in sparing.host.rows
    ((level, text),) = sparing.told
    assert level == "info"
    assert "spared 20 (sleep 60)" in text


@pytest.mark.parametrize(
    ("sent_away", "code", "asked"),
    [(False, 0, False), (True, 1, False), (True, -9, False), (True, 0, True)],
)
def test_strays_of_any_other_end_are_not_spared(
    sparing: Launcher, sent_away: bool, code: int, asked: bool
) -> None:
    """It left by itself (its owner is gone), failed, was killed, or its end was asked for."""
    sparing.add_stray(20)
    if sent_away:
        sparing.roster.note_retiring(1)
    if asked:
        sparing.roster.end(1, 1.0)
    sparing.die(code)
    sparing.turn()
    assert sparing.sparing.let == 0
    assert 20 not in sparing.host.rows
    everything = Target(subtree_of=LAUNCHER)
    assert sparing.roster.spare_rest(everything) == everything


def test_the_policy_is_the_pools(launcher: Launcher) -> None:
    """A pool that spares nothing ends the strays of those that it sends away, too."""
    launcher.add_stray(20)
    launcher.roster.note_retiring(1)
    launcher.die(0)
    launcher.turn()
    assert 20 not in launcher.host.rows
    assert launcher.sparing.let == 0


def test_strays_that_cannot_be_followed_are_left_alone(sparing: Launcher) -> None:
    """They are not signalled instead: a warning says so, and the worker's end is told."""
    sparing.heard()
    sparing.sparing.follows = False
    sparing.add_stray(20)
    sparing.roster.note_retiring(1)
    sparing.die(0)
    sparing.turn()
    assert sparing.heard() == [Exited(0)]
    assert sparing.host.sent == []
    assert [level for level, _ in sparing.told] == ["info", "warning"]


def test_what_nobody_can_be_named_for_is_spared_at_the_close(sparing: Launcher) -> None:
    """After workers that all ended in order the rest of the subtree goes free as well."""
    sparing.host.rows[5] = ProcessRow(5, 5, 1)
    sparing.roster.note_retiring(1)
    sparing.die(0)
    sparing.turn()
    sparing.host.rows[30] = ProcessRow(30, 30, 5)
    target = sparing.roster.spare_rest(Target(subtree_of=LAUNCHER))
    assert Incarnation(30, 30) in target.spare


def test_a_worker_that_ends_is_told_once(launcher: Launcher) -> None:
    """STARTED at once, EXITED with its code when it is gone, then the pipe ends."""
    assert launcher.heard() == [Started(10, 10)]
    assert len(launcher.roster) == 1
    assert launcher.roster.incarnations() == {Incarnation(10, 10)}
    launcher.die(3)
    launcher.turn()
    assert launcher.heard() == [Exited(3)]
    assert os.read(launcher.reader, 1) == b""
    assert len(launcher.roster) == 0
    assert launcher.told == []
    assert launcher.host.sent == []


def test_the_end_is_told_when_the_tree_is_gone_and_not_before(launcher: Launcher) -> None:
    """A stray that ignores SIGTERM delays EXITED until it was killed; the worker's code stays."""
    launcher.heard()
    launcher.add_stray(20)
    launcher.die(0)
    launcher.turn(1)
    assert (20, Sig.TERM) in launcher.host.sent
    assert launcher.heard() == []
    launcher.turn()
    assert launcher.heard() == [Exited(0)]
    assert 20 not in launcher.host.rows
    ((level, text),) = launcher.told
    assert level == "warning"
    assert "worker 10 ended (exit status 0)" in text
    assert "20" in text


def test_a_signal_is_named_as_the_cause(launcher: Launcher) -> None:
    """What killed the worker is told, even if the owner asks for its end afterwards."""
    launcher.add_stray(20)
    launcher.die(-9)
    launcher.turn(1)
    launcher.roster.end(1, 0.0)
    launcher.turn()
    assert [text for _, text in launcher.told if "worker 10 ended (signal 9)" in text]
    assert not [text for _, text in launcher.told if "as asked" in text]


def test_an_end_that_was_asked_for(launcher: Launcher) -> None:
    """SIGTERM, the grace, SIGKILL; told quietly, and EXITED after the worker was reaped."""
    launcher.heard()
    launcher.roster.end(1, 1.0)
    launcher.turn(1)
    assert launcher.host.sent == [(10, Sig.TERM)]
    launcher.turn()
    assert (10, Sig.KILL) in launcher.host.sent
    assert launcher.heard() == []
    launcher.roster.note_death(10, -9, sweeps=True)
    launcher.turn()
    assert launcher.heard() == [Exited(-9)]
    ((level, text),) = launcher.told
    assert level == "debug"
    assert text.startswith("as asked: ended worker 10")


def test_a_shorter_end_overtakes_a_longer_one(launcher: Launcher) -> None:
    """``kill`` after ``terminate`` does not wait for the longer grace."""
    launcher.roster.end(1, 1000.0)
    launcher.turn(1)
    launcher.roster.end(1, 0.0)
    launcher.turn(4)
    assert (10, Sig.KILL) in launcher.host.sent


def test_unknown_numbers_and_deaths_are_nobodys(launcher: Launcher) -> None:
    """An end for a worker that is gone, and the death of an adopted orphan, change nothing."""
    launcher.heard()
    launcher.roster.end(99, 0.0)
    launcher.roster.note_death(77, 1, sweeps=True)
    launcher.turn(2)
    assert launcher.heard() == []
    assert launcher.host.sent == []
    assert len(launcher.roster) == 1


def test_a_launcher_that_leaves_tells_what_it_knows(launcher: Launcher) -> None:
    """The code of the dead is told; of the living nothing, so that the end of file speaks."""
    launcher.heard()
    reader, writer = os.pipe()
    launcher.roster.add(2, Incarnation(11, 11), writer)
    launcher.roster.note_death(10, 4, sweeps=False)
    launcher.roster.finish()
    assert launcher.heard() == [Exited(4)]
    assert decode_status(os.read(reader, 4096)) == Started(11, 11)
    assert os.read(reader, 1) == b""
    os.close(reader)
    assert len(launcher.roster) == 0


def test_an_owner_that_is_gone_is_no_error() -> None:
    """EPIPE: there is nobody to tell."""
    reader, writer = os.pipe()
    os.close(reader)
    send_status(writer, Exited(0))
    os.close(writer)
