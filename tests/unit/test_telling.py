"""The words of a finished sweep, how loud they are, and that telling never holds anybody up."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

from safepool.core.identity import Incarnation
from safepool.core.planner import EndedProcess, Sig, StuckProcess, SweepReport
from safepool.telling import describe, write_gently

WORKER, STRAY, OTHER = Incarnation(10, 100), Incarnation(20, 200), Incarnation(30, 300)


class Finished:
    """What is read of a sweep."""

    def __init__(self, *ended: EndedProcess, stuck: tuple[StuckProcess, ...] = ()) -> None:
        self.report: SweepReport | None = SweepReport(ended, stuck, 0.0, 1.0)
        self.command_lines = {WORKER: "python job.py", STRAY: "sleep 60"}


def told(sweep: Finished, *, asked: bool = False) -> list[tuple[str, str]]:
    stand_in: Any = sweep
    return list(describe(stand_in, "because", asked=asked))


def ended(who: Incarnation, how: str, sig: Sig | None) -> EndedProcess:
    return EndedProcess(who, how, sig, 0.0)


def test_a_sweep_that_could_not_look_says_so() -> None:
    """Otherwise silence would mean that nothing was left."""
    sweep = Finished()
    sweep.report = SweepReport((), (), 0.0, 1.0, is_blind=True)
    ((level, text),) = told(sweep)
    assert level == "error"
    assert "could not be" in text


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("sig", [Sig.TERM, Sig.KILL])
def test_a_stray_is_a_warning_whoever_asked(sig: Sig, asked: bool) -> None:
    """Cause, pid, command line, signal, and how to spare it: all in one line."""
    ((level, text),) = told(Finished(ended(STRAY, "tag", sig)), asked=asked)
    assert level == "warning"
    for part in ("because", "stray 20 (sleep 60)", "tag", sig.value, "safepool.detached"):
        assert part in text
    assert "\n" not in text


@pytest.mark.parametrize(("asked", "level"), [(True, "debug"), (False, "info")])
def test_a_worker_is_no_warning(asked: bool, level: str) -> None:
    """Workers end as a matter of course; one that nobody asked to end is told a bit louder."""
    ((got, text),) = told(Finished(ended(WORKER, "named", Sig.TERM)), asked=asked)
    assert got == level
    assert "worker 10 (python job.py)" in text
    assert "safepool.detached" not in text


def test_what_went_by_itself_is_not_told() -> None:
    """No signal, no line; nor is there one while a sweep is under way."""
    assert told(Finished(ended(WORKER, "named", None), ended(STRAY, "tag", None))) == []
    unfinished = Finished()
    unfinished.report = None
    assert told(unfinished) == []


def test_each_process_has_a_line_of_its_own() -> None:
    """Also one whose command line could not be read, by its pid; what is stuck is an error."""
    stuck = (StuckProcess(STRAY, "no permission to signal it"),)
    lines = told(
        Finished(ended(WORKER, "named", Sig.KILL), ended(OTHER, "x", Sig.KILL), stuck=stuck)
    )
    assert [level for level, _ in lines] == ["info", "warning", "error"]
    assert "stray 30," in lines[1][1]
    assert "could not end 20 (sleep 60): no permission to signal it" in lines[2][1]


def test_lines_are_written_whole() -> None:
    """While there is room everything arrives, characters that no text may have as well."""
    lines = [f"{n}: " + "ä" * 400 + "\udc80" for n in range(50)]
    reader, writer = os.pipe()
    write_gently(writer, lines)
    os.close(writer)
    with open(reader, "rb") as file:
        got = file.read().decode()
    assert got == "".join(line.replace("\udc80", "\\udc80") + "\n" for line in lines)


def test_a_reader_that_does_not_read_holds_up_nobody() -> None:
    """A full pipe: what fits is written, the rest is left out, at once."""
    reader, writer = os.pipe()
    try:
        thread = threading.Thread(target=write_gently, args=(writer, ["x" * 1000] * 1000))
        thread.start()
        thread.join(30)
        assert not thread.is_alive()
    finally:
        os.close(reader)
        os.close(writer)


def test_a_reader_that_is_gone_is_no_error() -> None:
    """EPIPE and a descriptor that was closed are passed over."""
    reader, writer = os.pipe()
    os.close(reader)
    write_gently(writer, ["to nobody"])
    os.close(writer)
    write_gently(writer, ["to no descriptor at all"])
