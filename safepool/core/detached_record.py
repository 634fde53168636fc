"""What is written down about a detached process: one that a user let go on purpose.

One JSON object in a file that is named after the process' incarnation, not after a
run: it has to stay when the run is retired. Read as carefully as the record of a run,
and for the same reasons: reading never raises, and what was written in another place
(host, boot, pid namespace, user) says nothing here.

Decides; reads and writes no file. Called by: the registry.
"""

from __future__ import annotations

import json
import re
from typing import Any

from safepool.core.identity import Incarnation
from safepool.core.record import (
    ARGV_ITEM_LENGTH,
    ARGV_ITEMS,
    PID_MAX,
    Unreadable,
    checksum,
    count_in,
    duration_in,
    is_run_id,
    text_in,
)
from safepool.core.values import dataclass

VERSION = 1
"""The version that this code writes, and the newest that it reads."""

_NAME = re.compile(r"detached\.([1-9]\d{0,9})\.([1-9]\d{0,18})\.json", re.ASCII)


@dataclass(frozen=True)
class DetachedRecord:
    """A process that no sweep touches, nor what it starts.

    ``run_id`` is the innermost run that it was started in, "" for none.
    ``started_wall`` is in seconds since 1970, for people only. ``argv`` may have been
    shortened. ``is_stray`` says that it was not started as detached, but spared when
    its worker ended.
    """

    process: Incarnation
    run_id: str
    host: str
    boot_id: str
    pid_namespace: int
    uid: int
    argv: tuple[str, ...]
    cwd: str
    started_wall: float
    is_stray: bool = False
    version: int = VERSION


def detached_name(process: Incarnation) -> str:
    """The name of the file that stands for a detached process."""
    return f"detached.{process.pid}.{process.start}.json"


def parse_detached_name(name: str) -> Incarnation | None:
    """Return the process that a file name stands for, else None."""
    match = _NAME.fullmatch(name)
    if match is None or not 1 < int(match[1]) <= PID_MAX:
        return None
    return Incarnation(int(match[1]), int(match[2]))


def format_detached(record: DetachedRecord) -> bytes:
    """Return the bytes of the record's file: ASCII JSON with a checksum."""
    body: dict[str, Any] = {
        "version": record.version,
        "pid": record.process.pid,
        "start": record.process.start,
        "run_id": record.run_id,
        "host": record.host,
        "boot_id": record.boot_id,
        "pid_namespace": record.pid_namespace,
        "uid": record.uid,
        "argv": [item[:ARGV_ITEM_LENGTH] for item in record.argv[:ARGV_ITEMS]],
        "cwd": record.cwd,
        "started_wall": record.started_wall,
        "is_stray": record.is_stray,
    }
    body["checksum"] = checksum(body)
    return (json.dumps(body, indent=1) + "\n").encode("ascii")


def parse_detached(data: bytes, process: Incarnation) -> DetachedRecord | Unreadable:
    """Read a record whose file is named after ``process``; never raises."""
    try:
        body = json.loads(data.decode("ascii"))
        if not isinstance(body, dict):
            return Unreadable("it is not a record: no JSON object")
        version = count_in(body, "version")
        if version > VERSION:
            return Unreadable(f"a newer safepool wrote it (version {version})")
        if body.pop("checksum", None) != checksum(body):
            return Unreadable("its checksum does not fit: the text was changed")
        record = _build(body)
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        return Unreadable(f"it is not whole, or a field makes no sense: {error}")
    if record.process != process:
        return Unreadable("it names another process than its file does")
    return record


def _build(body: dict[str, Any]) -> DetachedRecord:
    """Make the record of a parsed object, or raise what :func:`parse_detached` catches."""
    run_id = text_in(body, "run_id")
    if run_id and not is_run_id(run_id):
        raise ValueError("run_id")
    argv = body["argv"]
    if not isinstance(argv, list):
        raise TypeError("argv")
    return DetachedRecord(
        process=Incarnation(count_in(body, "pid"), count_in(body, "start")),
        run_id=run_id,
        host=text_in(body, "host"),
        boot_id=text_in(body, "boot_id"),
        pid_namespace=count_in(body, "pid_namespace"),
        uid=count_in(body, "uid"),
        argv=tuple(item for item in argv if isinstance(item, str)),
        cwd=text_in(body, "cwd"),
        started_wall=duration_in(body, "started_wall"),
        is_stray=body.get("is_stray") is True,
    )
