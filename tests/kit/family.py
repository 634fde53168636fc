"""Families of processes that are built from a plan: fast, by fork alone.

A plan is a list of :class:`Relative`. ``build`` forks those without a parent (the
*workers*), each forks its children, and so on; 30 of them take some 30 ms. All are
there, armed and (where the plan says so) stopped when it returns.

Everyone wears a *badge*, which only the tests know of: the soft limit RLIMIT_MSGQUEUE,
inherited by all that it forks or execs. So the kernel can say at any moment which
worker a process comes from, or that it was let go, whatever became of its parents.

Called by: sweeping.py. No safepool in here.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from tests.kit import truth

BADGE = 700_000
"""The badge of worker n is this much plus n; below the usual soft limit of 819,200."""

RELEASED = BADGE + 50_000
"""The badge of a process that was let go, and of all below it."""

LIFE = 90
"""Seconds after which every member of a family ends by itself, whatever the test does."""


@dataclass(frozen=True)
class Relative:
    """One process of a family, and how it behaves.

    ``parent``: its place in the list, of an earlier one; -1 for a worker. ``is_orphan``:
    forked through a process in between, which ends at once. ``session``: "" keeps its
    parent's, "group" makes a process group, "own" a session. ``manner``, when SIGTERM
    comes: "willing" dies of it, "ignoring" does not, "late" ends ``delay`` seconds
    after it, "draining" when its own children have ended. ``is_scrubbed``: has exec'd
    with an empty environment. ``forks``: starts short-lived children all the time.
    ``is_released``: bears the tag of a detached process.
    """

    parent: int = -1
    is_orphan: bool = False
    session: str = ""
    manner: str = "willing"
    delay: float = 0.0
    is_stopped: bool = False
    is_scrubbed: bool = False
    forks: bool = False
    is_released: bool = False


@dataclass(frozen=True)
class Tags:
    """The soft limits RLIMIT_RTTIME by which safepool knows workers and the released."""

    workers: Sequence[int]
    released: int


def badge(pid: int) -> int:
    """The badge of a process; 0 for one of no family or one that is gone."""
    with contextlib.suppress(ProcessLookupError):
        limit = resource.prlimit(pid, resource.RLIMIT_MSGQUEUE)[0]
        return limit if BADGE <= limit <= RELEASED else 0
    return 0


def build(plan: Sequence[Relative], tags: Tags) -> list[int]:
    """Start the family; returns the pids in the order of the plan."""
    reader, writer = os.pipe()
    workers = [place for place, one in enumerate(plan) if one.parent < 0]
    for number, place in enumerate(workers):
        if os.fork() == 0:
            _begin(plan, place, tags, writer, number)
    os.close(writer)
    try:
        pids = _hear(reader, len(plan))
    finally:
        os.close(reader)
    for pid, one in zip(pids, plan, strict=True):
        # Not before all are there: the end of a process in between may orphan a process
        # group, and the kernel then wakes those of it who are stopped (SIGHUP, SIGCONT).
        if one.is_stopped:
            os.kill(pid, signal.SIGSTOP)
            truth.until(lambda pid=pid: truth.state(pid) == "T", "it does not stop")  # type: ignore[misc]
        if one.is_scrubbed:
            truth.until(lambda pid=pid: "sleep" in truth.command_line(pid), "no exec")  # type: ignore[misc]
    return pids


def _hear(reader: int, count: int) -> list[int]:
    """Wait until all have said that they are there."""
    said, limit = b"", time.monotonic() + truth.PATIENCE
    while said.count(b"\n") < count:
        if not select.select([reader], [], [], max(0.0, limit - time.monotonic()))[0]:
            raise AssertionError(f"only some of the family of {count} came up: {said!r}")
        said += os.read(reader, 65536)
    words = [line.split() for line in said.splitlines()]
    places = {int(place): int(pid) for place, pid in words}
    return [places[place] for place in range(count)]


def _begin(plan: Sequence[Relative], place: int, tags: Tags, writer: int, number: int) -> NoReturn:
    """The life of a worker."""
    try:
        resource.setrlimit(resource.RLIMIT_MSGQUEUE, (BADGE + number + 1, _hard("MSGQUEUE")))
        resource.setrlimit(resource.RLIMIT_RTTIME, (tags.workers[number], _hard("RTTIME")))
        _live(plan, place, tags, writer)
    finally:
        os._exit(1)


def _hard(name: str) -> int:
    return resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[1]


def _live(plan: Sequence[Relative], place: int, tags: Tags, writer: int) -> None:
    """Be the process at ``place``: take its ways on, start its children, wait for the end."""
    me = plan[place]
    signal.alarm(LIFE)
    if me.is_released:
        resource.setrlimit(resource.RLIMIT_MSGQUEUE, (RELEASED, _hard("MSGQUEUE")))
        resource.setrlimit(resource.RLIMIT_RTTIME, (tags.released, _hard("RTTIME")))
    if me.session == "own":
        os.setsid()
    elif me.session == "group":
        os.setpgid(0, 0)
    for child, one in enumerate(plan):
        if one.parent == place:
            _start(plan, child, tags, writer)
    _take_on(me)
    os.write(writer, b"%d %d\n" % (place, os.getpid()))
    os.close(writer)
    if me.is_scrubbed:
        os.execve("/bin/sleep", ["sleep", str(LIFE)], {})
    while True:
        if me.forks:
            _fork_once()
        else:
            signal.pause()


def _start(plan: Sequence[Relative], child: int, tags: Tags, writer: int) -> None:
    first = os.fork()
    if first == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if plan[child].is_orphan and os.fork() != 0:
            os._exit(0)
        _live(plan, child, tags, writer)
    if plan[child].is_orphan:
        os.waitpid(first, 0)


def _take_on(me: Relative) -> None:
    """Set up what SIGTERM does."""

    def end(number: int, frame: FrameType | None) -> None:
        if me.manner == "late":
            time.sleep(me.delay)
        else:
            with contextlib.suppress(ChildProcessError):
                while True:
                    os.waitpid(-1, 0)
        os._exit(0)

    if me.manner == "ignoring":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif me.manner in ("late", "draining"):
        signal.signal(signal.SIGTERM, end)


def _fork_once() -> None:
    """Start a child that lives for a moment, and reap those that are over."""
    if os.fork() == 0:
        time.sleep(0.03)
        os._exit(0)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    time.sleep(0.003)
