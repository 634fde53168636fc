"""What may be concluded from a run's record: nothing that is not proven."""

from __future__ import annotations

import json
from binascii import crc32
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safepool.core import values
from safepool.core.identity import Incarnation, Sameness
from safepool.core.policy import LONGEST_GRACE
from safepool.core.record import (
    VERSION,
    Here,
    Member,
    RunRecord,
    Unreadable,
    Verdict,
    format_record,
    judge,
    member_name,
    parse_member_name,
    parse_record,
    why_kept,
)

RUN = "0123456789abcdef0123456789abcdef"
HERE = Here(host="here", boot_id="boot", pid_namespace=4026531836, uid=1000)
RECORD = RunRecord(
    run_id=RUN,
    lineage="",
    host="here",
    boot_id="boot",
    pid_namespace=4026531836,
    uid=1000,
    owner=Incarnation(4711, 987654),
    argv=("python", "train.py"),
    cwd="/home/me",
    started_ticks=987700,
    started_wall=1.7e9,
    grace=5.0,
)

counts = st.integers(0, 2**63 - 1)
texts = st.text(st.characters(), max_size=40)  # lone surrogates too: argv and cwd may have them
records = st.builds(
    RunRecord,
    run_id=st.just(RUN),
    lineage=texts,
    host=texts,
    boot_id=texts,
    pid_namespace=counts,
    uid=counts,
    owner=st.builds(Incarnation, pid=st.integers(1, 2**31 - 1), start=counts),
    argv=st.lists(texts, max_size=10).map(tuple),
    cwd=texts,
    started_ticks=counts,
    started_wall=st.floats(0, 1e12),
    grace=st.floats(0, LONGEST_GRACE),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)


def rewritten(**changes: Any) -> bytes:
    """The bytes of RECORD with some fields changed and a checksum that fits."""
    body = json.loads(format_record(RECORD))
    del body["checksum"]
    body.update(changes)
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return json.dumps({**body, "checksum": f"{crc32(text.encode()):08x}"}).encode()


@given(records)
def test_a_record_is_read_as_it_was_written(record: RunRecord) -> None:
    """Nothing is lost or changed on the way through the file."""
    assert parse_record(format_record(record), RUN) == record


@given(st.integers(0, len(format_record(RECORD)) - 3))
def test_a_record_that_was_cut_short_is_unreadable(length: int) -> None:
    """A half-written file is never taken for a record."""
    assert isinstance(parse_record(format_record(RECORD)[:length], RUN), Unreadable)


@given(st.integers(0, len(format_record(RECORD)) - 1), st.integers(1, 255))
def test_a_record_in_which_a_byte_was_changed_is_unreadable(place: int, change: int) -> None:
    """A wrong pid, start time or boot cannot arise from a damaged file."""
    data = bytearray(format_record(RECORD))
    data[place] ^= change
    parsed = parse_record(bytes(data), RUN)
    assert isinstance(parsed, Unreadable) or parsed == RECORD  # white space may have changed


@given(st.binary(max_size=200) | json_values.map(lambda value: json.dumps(value).encode()))
def test_what_is_no_record_is_unreadable(data: bytes) -> None:
    """Foreign files never raise and never pass for a record."""
    parsed = parse_record(data, RUN)
    assert isinstance(parsed, Unreadable)
    assert parsed.reason


@given(st.sampled_from(sorted(json.loads(format_record(RECORD)))), json_values)
def test_a_field_of_the_wrong_kind_never_raises(field: str, value: object) -> None:
    """A record by another program with our checksum is read or refused, no more."""
    parsed = parse_record(rewritten(**{field: value}), RUN)
    assert isinstance(parsed, (RunRecord, Unreadable))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"version": VERSION + 1}, "newer"),
        ({"version": True}, "version"),
        ({"version": "1"}, "version"),
        ({"owner": {"pid": 0, "start": 1}}, "pid"),
        ({"owner": {"pid": 2**31, "start": 1}}, "pid"),
        ({"owner": {"pid": True, "start": 1}}, "pid"),
        ({"owner": {"pid": 5}}, "start"),
        ({"owner": {"pid": 5, "start": -1}}, "start"),
        ({"grace": -1}, "grace"),
        ({"grace": float("inf")}, "grace"),
        ({"grace": 1e9}, "grace"),
        ({"started_wall": float("nan")}, "started_wall"),
        ({"started_wall": 10**400}, "field"),
        ({"run_id": RUN.upper()}, "run_id"),
        ({"run_id": "f" * 32}, "another run"),
    ],
)
def test_a_record_that_makes_no_sense_says_why(changes: dict[str, Any], word: str) -> None:
    """The reason names what is wrong, for the person who finds the file."""
    parsed = parse_record(rewritten(**changes), RUN)
    assert isinstance(parsed, Unreadable)
    assert word in parsed.reason


def test_deeply_nested_text_is_unreadable() -> None:
    """Not even text that breaks the JSON parser's recursion raises."""
    assert isinstance(parse_record(b"[" * 200_000, RUN), Unreadable)


def test_keys_that_a_later_version_adds_are_ignored() -> None:
    """A record with more in it is still read by this version."""
    assert parse_record(rewritten(cgroup="/user.slice", notes=[1]), RUN) == RECORD


def test_a_long_command_line_leaves_the_record_small() -> None:
    """A command line of megabytes is shortened, and the record is still whole."""
    record = values.replace(RECORD, argv=tuple("x" * 100_000 for _ in range(1000)))
    data = format_record(record)
    assert len(data) < 50_000
    parsed = parse_record(data, RUN)
    assert isinstance(parsed, RunRecord)
    assert parsed.owner == record.owner


places = st.builds(
    Here,
    host=st.sampled_from(["here", "elsewhere"]),
    boot_id=st.sampled_from(["boot", "earlier", ""]),
    pid_namespace=st.sampled_from([4026531836, 4026532000, 0]),
    uid=st.sampled_from([1000, 0]),
)


@given(places, st.sampled_from(Sameness), st.sampled_from([True, False, None]))
def test_dead_means_that_everything_is_proven(
    here: Here, owner: Sameness, lock_held: bool | None
) -> None:
    """DEAD exactly if place and user fit, the owner is gone and the lock is free."""
    proven = here == HERE and owner is Sameness.OTHER and lock_held is False
    judgement = judge(RECORD, here, owner, lock_held=lock_held)
    assert (judgement.verdict is Verdict.DEAD) == proven
    assert (judgement.verdict is Verdict.FOREIGN) == (here != HERE)
    assert judgement.reason


@pytest.mark.parametrize(
    ("owner", "lock_held", "verdict"),
    [
        (Sameness.SAME, True, Verdict.LIVE),
        (Sameness.SAME, None, Verdict.LIVE),
        (Sameness.SAME, False, Verdict.UNKNOWN),
        (Sameness.OTHER, True, Verdict.UNKNOWN),
        (Sameness.OTHER, None, Verdict.UNKNOWN),
        (Sameness.OTHER, False, Verdict.DEAD),
        (Sameness.UNKNOWN, True, Verdict.UNKNOWN),
        (Sameness.UNKNOWN, False, Verdict.UNKNOWN),
    ],
)
def test_two_witnesses_that_disagree_prove_nothing(
    owner: Sameness, lock_held: bool | None, verdict: Verdict
) -> None:
    """LIVE and DEAD need witnesses that agree; otherwise the run is kept and reported."""
    assert judge(RECORD, HERE, owner, lock_held=lock_held).verdict is verdict


def test_a_boot_that_is_not_known_proves_nothing() -> None:
    """Where the boot cannot be named, pids and start times of two boots could be mixed up."""
    nowhere = values.replace(HERE, boot_id="")
    record = values.replace(RECORD, boot_id="")
    assert judge(record, nowhere, Sameness.OTHER, lock_held=False).verdict is Verdict.UNKNOWN


@given(places, st.sampled_from([True, False, None]), st.booleans())
def test_a_record_is_forgotten_only_if_its_processes_must_be_dead(
    here: Here, lock_held: bool | None, is_local_disk: bool
) -> None:
    """An earlier boot of this very host, on its own disk, and nobody holds the lock."""
    is_earlier = here.boot_id == "earlier"
    is_ours = here.host == "here" and here.uid == 1000
    proven = is_earlier and is_ours and lock_held is False and is_local_disk
    why = why_kept(RECORD, here, lock_held=lock_held, is_local_disk=is_local_disk)
    assert (why == "") == proven


def test_what_cannot_be_read_is_not_forgotten() -> None:
    """Nothing is proven about a damaged record; the reason says what is wrong with it."""
    earlier = values.replace(HERE, boot_id="another")
    why = why_kept(Unreadable("it is empty"), earlier, lock_held=False, is_local_disk=True)
    assert "it is empty" in why
    unnamed = values.replace(RECORD, boot_id="")
    assert "boot" in why_kept(unnamed, HERE, lock_held=False, is_local_disk=True)


members = st.builds(
    Member,
    kind=st.sampled_from(["sidecar", "launcher", "worker"]),
    incarnation=st.builds(Incarnation, pid=st.integers(2, 2**31 - 1), start=st.integers(1, 2**62)),
    worker=st.integers(0, 2**31),
)


@given(members)
def test_a_member_is_read_as_it_was_written(member: Member) -> None:
    """The name of the file says all."""
    assert parse_member_name(member_name(RUN, member)) == (RUN, member)


@pytest.mark.parametrize(
    "name",
    [
        "",
        f"{RUN}.m.",
        f"{RUN}.run",
        f"{RUN}.m.1-5-worker-1",
        f"{RUN}.m.0-5-worker-1",
        f"{RUN}.m.-7-5-worker-1",
        f"{RUN}.m.7-0-worker-1",
        f"{RUN}.m.07-5-worker-1",
        f"{RUN}.m.7-5-stray-1",
        f"{RUN}.m.7-5-worker-1.bak",
        f"{RUN}.m.7-5-worker-1\n",
        f"{RUN}.m.4294967297-5-worker-1",
        f"{RUN}.m.\u0667-5-worker-1",
        f"{RUN[:-1]}.m.7-5-worker-1",
    ],
)
def test_other_names_stand_for_no_member(name: str) -> None:
    """A file that somebody else put there names no process, least of all pid 1 or 0."""
    assert parse_member_name(name) is None
