"""What is written down about a detached process: it comes back whole, or not at all."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safepool.core.detached_record import (
    DetachedRecord,
    detached_name,
    format_detached,
    parse_detached,
    parse_detached_name,
)
from safepool.core.identity import Incarnation
from safepool.core.record import PID_MAX, Unreadable, checksum

NAME = Incarnation(4711, 123456)
RECORD = DetachedRecord(
    NAME, "ab" * 16, "box", "boot", 4026531836, 1000, ("server", "--port", "80"), "/srv", 1.5, True
)
counts = st.integers(1, 2**62)


@given(
    st.builds(
        DetachedRecord,
        process=st.builds(Incarnation, st.integers(2, PID_MAX), counts),
        run_id=st.just("") | st.text("0123456789abcdef", min_size=32, max_size=32),
        host=st.text(max_size=20),
        boot_id=st.text(max_size=20),
        cwd=st.text(max_size=20),
        argv=st.lists(st.text(max_size=20), max_size=5).map(tuple),
        started_wall=st.floats(0, 1e12),
        is_stray=st.booleans(),
        pid_namespace=counts,
        uid=counts,
        version=st.just(1),
    )
)
def test_what_was_written_is_read(record: DetachedRecord) -> None:
    """The record comes back, and its file's name gives the process."""
    assert parse_detached(format_detached(record), record.process) == record
    assert parse_detached_name(detached_name(record.process)) == record.process


@given(st.integers(0), st.integers(0, 255))
def test_a_changed_byte_is_noticed(place: int, byte: int) -> None:
    """It gives the same record or none; it never raises."""
    data = bytearray(format_detached(RECORD))
    data[place % len(data)] = byte
    read = parse_detached(bytes(data), NAME)
    assert read == RECORD or isinstance(read, Unreadable)


@given(st.binary(max_size=60))
def test_anything_may_lie_there(data: bytes) -> None:
    """Whatever it is, it is unreadable with a reason."""
    read = parse_detached(data, NAME)
    assert isinstance(read, Unreadable)
    assert read.reason


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"version": 2}, "newer"),
        ({"version": "1"}, "version"),
        ({"run_id": "zz"}, "run_id"),
        ({"argv": "sleep"}, "argv"),
        ({"pid": 4712}, "another process"),
        ({"start": 1}, "another process"),
        ({"host": None}, "host"),
        ({"started_wall": -1}, "started_wall"),
    ],
)
def test_fields_that_make_no_sense(change: dict[str, Any], word: str) -> None:
    """The reason names the field; a version that is not known is not guessed at."""
    body = {**json.loads(format_detached(RECORD)), **change}
    del body["checksum"]
    body["checksum"] = checksum(body)
    read = parse_detached(json.dumps(body).encode(), NAME)
    assert isinstance(read, Unreadable)
    assert word in read.reason


@pytest.mark.parametrize(
    "name",
    [
        "detached.1.5.json", "detached.0.5.json", "detached.5.0.json", "detached.5.json",
        "detached.05.5.json", f"detached.{PID_MAX + 1}.5.json", "detached.5.5.json.part",
        ".detached.5.5.json.part", "ab.run", "detached.-5.5.json", "detached.5.5.JSON",
    ],
)  # fmt: skip
def test_other_names_stand_for_nobody(name: str) -> None:
    """Pid 1, no start time, half-written files and files of runs are no detached process."""
    assert parse_detached_name(name) is None


def test_a_long_command_line_is_cut() -> None:
    """The record stays small however much was passed."""
    record = DetachedRecord(NAME, "", "", "", 0, 0, ("x" * 10**6,) * 1000, "", 0.0)
    assert len(format_detached(record)) < 30_000
