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
from safepool.core.policy import LONGEST_GRACE
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
ARGV_ITEMS = 64
ARGV_ITEM_LENGTH = 256
PID_MAX = 2**31 - 1


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
    if not 1 < int(pid) <= PID_MAX:
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
        "argv": [item[:ARGV_ITEM_LENGTH] for item in record.argv[:ARGV_ITEMS]],
        "cwd": record.cwd,
        "started_ticks": record.started_ticks,
        "started_wall": record.started_wall,
        "grace": record.grace,
    }
    if record.cgroup.path:
        body["container"] = {"path": record.cgroup.path, "inode": record.cgroup.inode}
    body["checksum"] = checksum(body)
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
        if stated != checksum(body):
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
    foreign = foreignness(record, here)
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


def why_kept(
    record: RunRecord | Unreadable, here: Here, *, lock_held: bool | None, is_local_disk: bool
) -> str:
    """Why a record may not be forgotten, as a sentence for people; "" if it may be.

    It may be only if no process of the run can be alive: it is from an earlier boot of
    this very host. Host names come twice, so the file has to lie where no other host
    can have written it.

    Args:
        record: the run's record.
        here: where the reader stands.
        lock_held: whether any process holds the run's lock; False if there is no lock
            file any more, None if that cannot be told.
        is_local_disk: no other running kernel can write to the file system.
    """
    if isinstance(record, Unreadable):
        return f"its record cannot be used ({record.reason}), so nothing is proven about it"
    if record.host != here.host:
        return f"it was written on host {record.host!r}; only there it can be told what is left"
    if record.uid != here.uid:
        return f"it was written by user {record.uid}"
    if not record.boot_id or not here.boot_id:
        return "the boot that it was written in is not known"
    if record.boot_id == here.boot_id:
        return "it was written in this boot; what a dead run left is ended by the next start"
    if lock_held is not False:
        held = "a living process holds" if lock_held else "it cannot be told whether anybody holds"
        return f"{held} the run's lock"
    if not is_local_disk:
        return (
            "its file system may be shared with other machines, and one of the same name may "
            "have written it"
        )
    return ""


def foreignness(record: RunRecord | Here, here: Here) -> str:
    """Why a record, or the place where one was written, is none of this place's; "" if it is."""
    if record.host != here.host:
        return f"it was written on host {record.host!r}"
    if record.boot_id != here.boot_id:
        return "it was written before the last boot, or on another machine of this name"
    if record.pid_namespace != here.pid_namespace:
        return "it was written in another pid namespace (a container)"
    if record.uid != here.uid:
        return f"it was written by user {record.uid}"
    return ""


def checksum(body: dict[str, Any]) -> str:
    """The checksum over all fields but itself, however they are laid out."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return f"{crc32(text.encode('ascii')):08x}"


def _build(body: dict[str, Any]) -> RunRecord:
    """Make the record of a parsed object, or raise what :func:`parse_record` catches."""
    owner = body["owner"]
    argv = body["argv"]
    if not isinstance(owner, dict) or not isinstance(argv, list):
        raise TypeError("owner or argv")
    pid = count_in(owner, "pid")
    if not 1 <= pid <= PID_MAX:  # an owner may be pid 1: in a container
        raise ValueError("pid")
    run_id = text_in(body, "run_id")
    if not is_run_id(run_id):
        raise ValueError("run_id")
    return RunRecord(
        run_id=run_id,
        lineage=text_in(body, "lineage"),
        host=text_in(body, "host"),
        boot_id=text_in(body, "boot_id"),
        pid_namespace=count_in(body, "pid_namespace"),
        uid=count_in(body, "uid"),
        owner=Incarnation(pid, count_in(owner, "start")),
        argv=tuple(item for item in argv if isinstance(item, str)),
        cwd=text_in(body, "cwd"),
        started_ticks=count_in(body, "started_ticks"),
        started_wall=duration_in(body, "started_wall"),
        grace=duration_in(body, "grace", LONGEST_GRACE),
        cgroup=_cgroup(body.get("container")),
    )


def _cgroup(named: object) -> CgroupName:
    """The name of the run's cgroup; records of runs without one, and older ones, have none."""
    if named is None:
        return CgroupName()
    if not isinstance(named, dict):
        raise TypeError("container")
    return CgroupName(text_in(named, "path"), count_in(named, "inode"))


def _is_count(value: object) -> bool:
    """True for a whole number from 0; bool is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def count_in(body: dict[str, Any], key: str) -> int:
    """The whole number from 0 under ``key``; KeyError or ValueError if there is none."""
    value = body[key]
    if not _is_count(value):
        raise ValueError(key)
    return int(value)


def text_in(body: dict[str, Any], key: str) -> str:
    """The text under ``key``; KeyError or TypeError if there is none."""
    value = body[key]
    if not isinstance(value, str):
        raise TypeError(key)
    return value


def duration_in(body: dict[str, Any], key: str, most: float = math.inf) -> float:
    """The number of seconds under ``key``; KeyError, TypeError or ValueError if there is none."""
    value = body[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(key)
    if not 0 <= value <= most:  # NaN is not either
        raise ValueError(key)
    return float(value)
