"""What is written down about a run, and what may be concluded from it later.

A *record* is one JSON object per run; a *member* is one process of the run that
safepool itself made, written down as the name of an empty file. Both are read by
other processes, perhaps after a crash, a reboot, on another machine that shares
the home directory, or by an older safepool. So:

* Reading never raises. Bytes that are not a whole record of a known version
  become :class:`Unreadable` with the reason, and carry a checksum so that one
  changed digit is noticed.
* :func:`judge` says DEAD only if everything is proven: same host, boot, pid
  namespace and user, the owner's incarnation is not there, and nobody holds the
  run's lock. Whatever is less than proof is LIVE, FOREIGN or UNKNOWN, and only
  DEAD may be acted upon.

Decides; reads and writes no file. Called by: the registry.
"""

from __future__ import annotations

import json
import math
import re
from binascii import crc32
from enum import Enum
from typing import Any, Literal

from safepool.core.identity import CgroupName, Incarnation, Sameness
from safepool.core.values import dataclass

VERSION = 1
"""The version of the record that this code writes, and the newest that it reads."""

Kind = Literal["sidecar", "launcher", "worker"]

_RUN_ID = re.compile(r"[0-9a-f]{32}")
_MEMBER_NAME = re.compile(
    r"([0-9a-f]{32})\.m\.([1-9]\d{0,9})-([1-9]\d{0,18})-(sidecar|launcher|worker)-(0|[1-9]\d{0,9})",
    re.ASCII,
)
# The arguments are kept for people. A command line may be megabytes long; the record stays small.
_ARGV_ITEMS = 64
_ARGV_ITEM_LENGTH = 256
_PID_MAX = 2**31 - 1


@dataclass(frozen=True)
class RunRecord:
    """One run, as its owner wrote it down before the first worker.

    ``lineage`` is the mark in the owner's own environment ("" outside any run);
    ``started_ticks`` is when the run began, in clock ticks since boot;
    ``started_wall`` is the same in seconds since 1970, for people only; ``grace``
    is in seconds. ``argv`` may have been shortened. ``cgroup`` is that of the run; an
    empty name: it has none.
    """

    run_id: str
    lineage: str
    host: str
    boot_id: str
    pid_namespace: int
    uid: int
    owner: Incarnation
    argv: tuple[str, ...]
    cwd: str
    started_ticks: int
    started_wall: float
    grace: float
    version: int = VERSION
    cgroup: CgroupName = CgroupName()


@dataclass(frozen=True, order=True)
class Member:
    """A process that safepool made for a run; ``worker`` is its number (0 for the others)."""

    kind: Kind
    incarnation: Incarnation
    worker: int = 0


@dataclass(frozen=True)
class Unreadable:
    """A record that cannot be used, and why. It is left where it is and reported."""

    reason: str


@dataclass(frozen=True)
class Here:
    """Where the reader of a record stands."""

    host: str
    boot_id: str
    pid_namespace: int
    uid: int


class Verdict(Enum):
    """What a record says about its run; only DEAD may be acted upon."""

    LIVE = "live"
    DEAD = "dead"
    FOREIGN = "foreign"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Judgement:
    """A verdict and the reason for it, as a sentence for people."""

    verdict: Verdict
    reason: str


def is_run_id(text: str) -> bool:
    """Tell whether ``text`` has the form of a run ID: 32 lower-case hexadecimal digits."""
    return _RUN_ID.fullmatch(text) is not None


def member_name(run_id: str, member: Member) -> str:
    """The file name that stands for a member of a run."""
    inc = member.incarnation
    return f"{run_id}.m.{inc.pid}-{inc.start}-{member.kind}-{member.worker}"


def parse_member_name(name: str) -> tuple[str, Member] | None:
    """Return the run ID and the member that a file name stands for, else None.

    A member without a known start time or with pid 1 is none: it could not be
    told from a stranger.
    """
    match = _MEMBER_NAME.fullmatch(name)
    if match is None:
        return None
    run_id, pid, start, kind, number = match.groups()
    if not 1 < int(pid) <= _PID_MAX:
        return None
    known: dict[str, Kind] = {"sidecar": "sidecar", "launcher": "launcher", "worker": "worker"}
    return run_id, Member(known[kind], Incarnation(int(pid), int(start)), int(number))


def format_record(record: RunRecord) -> bytes:
    """Return the bytes of the record's file: ASCII JSON with a checksum."""
    body: dict[str, Any] = {
        "version": record.version,
        "run_id": record.run_id,
        "lineage": record.lineage,
        "host": record.host,
        "boot_id": record.boot_id,
        "pid_namespace": record.pid_namespace,
        "uid": record.uid,
        "owner": {"pid": record.owner.pid, "start": record.owner.start},
        "argv": [item[:_ARGV_ITEM_LENGTH] for item in record.argv[:_ARGV_ITEMS]],
        "cwd": record.cwd,
        "started_ticks": record.started_ticks,
        "started_wall": record.started_wall,
        "grace": record.grace,
    }
    if record.cgroup.path:
        body["container"] = {"path": record.cgroup.path, "inode": record.cgroup.inode}
    body["checksum"] = _checksum(body)
    return (json.dumps(body, indent=1) + "\n").encode("ascii")


def parse_record(data: bytes, run_id: str) -> RunRecord | Unreadable:
    """Read a record whose file is named after ``run_id``; never raises.

    Keys that this version does not know are ignored, so that a later one may add some.
    """
    if not data.strip(b"\0 \t\r\n"):
        return Unreadable("it is empty")
    try:
        body = json.loads(data.decode("ascii"))
    except (ValueError, RecursionError):
        return Unreadable("it is not whole: the text does not parse as JSON")
    if not isinstance(body, dict):
        return Unreadable("it is not a record: no JSON object")
    version = body.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        return Unreadable("its version is missing or makes no sense")
    if version > VERSION:
        return Unreadable(f"a newer safepool wrote it (version {version}, known up to {VERSION})")
    try:
        stated = body.pop("checksum", None)
        if stated != _checksum(body):
            return Unreadable("its checksum does not fit: the text was changed")
        record = _build(body)
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        return Unreadable(f"a field is missing or makes no sense: {error}")
    if record.run_id != run_id:
        return Unreadable("it names another run than its file does")
    return record


def judge(record: RunRecord, here: Here, owner: Sameness, *, lock_held: bool | None) -> Judgement:
    """Say what has become of the run.

    Args:
        record: the run's record.
        here: where the reader stands.
        owner: whether the owner's incarnation is alive: SAME if so, OTHER if its pid
            is free, a zombie or another process now, UNKNOWN if that cannot be told.
        lock_held: whether any process holds the run's lock; None if that cannot be
            told, also because the file is missing.
    """
    foreign = _foreignness(record, here)
    if foreign:
        return Judgement(Verdict.FOREIGN, foreign)
    if not record.boot_id:
        return Judgement(Verdict.UNKNOWN, "the boot that it was written in is not known")
    pid = record.owner.pid
    if owner is Sameness.SAME:
        if lock_held is False:
            # Nothing but exec or a stray close() frees the lock of a living owner.
            why = f"process {pid} lives but no longer holds the run's lock (exec?)"
            return Judgement(Verdict.UNKNOWN, why)
        return Judgement(Verdict.LIVE, f"its owner, process {pid}, lives")
    if lock_held:
        # A dead owner's sweeper holds the lock too; either way somebody looks after the run.
        return Judgement(Verdict.UNKNOWN, "a living process holds the run's lock")
    if owner is Sameness.UNKNOWN:
        why = f"it cannot be told whether process {pid} is still the owner"
        return Judgement(Verdict.UNKNOWN, why)
    if lock_held is None:
        why = f"its owner, process {pid}, is not there, but its lock could not be examined"
        return Judgement(Verdict.UNKNOWN, why)
    return Judgement(Verdict.DEAD, f"its owner, process {pid}, is gone and its lock is free")


def _foreignness(record: RunRecord, here: Here) -> str:
    """Why the record is none of this place's; "" if it is."""
    if record.host != here.host:
        return f"it was written on host {record.host!r}"
    if record.boot_id != here.boot_id:
        return "it was written before the last boot, or on another machine of this name"
    if record.pid_namespace != here.pid_namespace:
        return "it was written in another pid namespace (a container)"
    if record.uid != here.uid:
        return f"it was written by user {record.uid}"
    return ""


def _checksum(body: dict[str, Any]) -> str:
    """The checksum over all fields but itself, however they are laid out."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return f"{crc32(text.encode('ascii')):08x}"


def _build(body: dict[str, Any]) -> RunRecord:
    """Make the record of a parsed object, or raise what :func:`parse_record` catches."""
    owner = body["owner"]
    argv = body["argv"]
    if not isinstance(owner, dict) or not isinstance(argv, list):
        raise TypeError("owner or argv")
    pid = _count(owner, "pid")
    if not 1 <= pid <= _PID_MAX:  # an owner may be pid 1: in a container
        raise ValueError("pid")
    run_id = _text(body, "run_id")
    if not is_run_id(run_id):
        raise ValueError("run_id")
    return RunRecord(
        run_id=run_id,
        lineage=_text(body, "lineage"),
        host=_text(body, "host"),
        boot_id=_text(body, "boot_id"),
        pid_namespace=_count(body, "pid_namespace"),
        uid=_count(body, "uid"),
        owner=Incarnation(pid, _count(owner, "start")),
        argv=tuple(item for item in argv if isinstance(item, str)),
        cwd=_text(body, "cwd"),
        started_ticks=_count(body, "started_ticks"),
        started_wall=_duration(body, "started_wall"),
        grace=_duration(body, "grace"),
        cgroup=_cgroup(body.get("container")),
    )


def _cgroup(named: object) -> CgroupName:
    """The name of the run's cgroup; records of runs without one, and older ones, have none."""
    if named is None:
        return CgroupName()
    if not isinstance(named, dict):
        raise TypeError("container")
    return CgroupName(_text(named, "path"), _count(named, "inode"))


def _is_count(value: object) -> bool:
    """True for a whole number from 0; bool is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _count(body: dict[str, Any], key: str) -> int:
    value = body[key]
    if not _is_count(value):
        raise ValueError(key)
    return int(value)


def _text(body: dict[str, Any], key: str) -> str:
    value = body[key]
    if not isinstance(value, str):
        raise TypeError(key)
    return value


def _duration(body: dict[str, Any], key: str) -> float:
    value = body[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(key)
    if math.isnan(value) or value < 0:
        raise ValueError(key)
    return float(value)
