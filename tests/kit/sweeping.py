"""A process that builds families and sweeps them, and records every signal at its moment.

    sweeping.py RUN_ID

It is the subreaper above its families. Each line on its standard input is an
:class:`Order`; the answer is ``swept`` and a :class:`Record`. Then it waits for a line
before it ends whom the sweep has left and takes the next order.

What it records of a signal is read from the kernel in the instant before it is sent:
who has that pid now, who its parent and its children are, and what badges they wear.

Called by: the tests of the kill order, through a jail.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from safepool.core.identity import Incarnation, Snapshot
from safepool.core.lineage import detached_tag, tag_of
from safepool.core.membership import Target
from safepool.core.planner import Sig
from safepool.core.policy import StopPolicy
from safepool.host import prctl
from safepool.host.base import Handle, Host, NoHandle, Sending
from safepool.host.linux import LinuxHost
from safepool.host.own import ticks
from safepool.sweeper import Sweep, advance_together
from tests.kit import family, truth
from tests.kit.family import Relative, Tags

KILL_TIMEOUT = 20.0


@dataclass(frozen=True)
class Order:
    """What to build and how to sweep it.

    ``aim``: "subtree" as a launcher does when its owner is gone; "worker" for the first
    worker alone; "each" with a sweep for every worker, as the end of a pool has; "table"
    by tag in the table of all processes, as a sidecar does. ``graces``: so many sweeps of
    each target, all at once. ``cut``: the first one is given up after so many rounds, and
    another begins in its place; 0: it is not.
    """

    plan: list[Relative]
    aim: str
    graces: list[float]
    cut: int = 0


@dataclass(frozen=True)
class Person:
    """One process at one moment. ``is_known``: the sweep in question has seen it."""

    pid: int
    start: int
    ppid: int
    state: str
    badge: int
    is_known: bool

    @property
    def is_alive(self) -> bool:
        return self.state not in ("", "Z", "X")

    def __str__(self) -> str:
        known = "known" if self.is_known else "not known"
        return f"{self.pid} ({self.state}, parent {self.ppid}, badge {self.badge}, {known})"


@dataclass(frozen=True)
class Shot:
    """One signal of one sweep: to whom it was meant, and who was there."""

    sweep: int
    at: float
    pid: int
    start: int
    sig: str
    outcome: str
    target: Person
    parent: Person
    children: list[Person]

    def __str__(self) -> str:
        children = ", ".join(map(str, self.children))
        return (
            f"{self.at:.4f} sweep {self.sweep} SIG{self.sig} {self.outcome} to {self.target}, "
            f"below {self.parent}, above [{children}]"
        )


@dataclass
class Trace:
    """What one sweep did; instants are monotonic. ``worker``: the one it swept; 0: all."""

    worker: int
    grace: float
    began: float
    looks: list[float] = field(default_factory=list)
    opened: list[Person] = field(default_factory=list)
    ended: dict[str, str | None] = field(default_factory=dict)
    stuck: dict[str, str] = field(default_factory=dict)
    finished: float | None = None


@dataclass
class Record:
    """All that happened: ``pids`` in the order of the plan, ``before`` what they were.

    ``looks``: how often the table was read; ``traces`` have the looks of each sweep, which
    may have been the same ones. ``open_files``: their number before and after.
    """

    me: int
    pids: list[int]
    before: list[Person]
    traces: list[Trace]
    shots: list[Shot]
    looks: int
    open_files: list[int]

    @staticmethod
    def read(text: str) -> Record:
        """From what the sweeping process has said."""
        raw = json.loads(text)
        return Record(
            raw["me"],
            raw["pids"],
            [Person(**one) for one in raw["before"]],
            [Trace(**{**one, "opened": [Person(**p) for p in one["opened"]]})
             for one in raw["traces"]],
            [Shot(**{**one, "target": Person(**one["target"]), "parent": Person(**one["parent"]),
                     "children": [Person(**p) for p in one["children"]]})
             for one in raw["shots"]],
            raw["looks"],
            raw["open_files"],
        )  # fmt: skip


class Recorder(LinuxHost):
    """The real host of one sweep, with a witness beside it."""

    def __init__(self, number: int, trace: Trace, shots: list[Shot]) -> None:
        super().__init__()
        self._number = number
        self._trace = trace
        self._shots = shots
        self.sweep: Sweep | None = None

    def open(self, incarnation: Incarnation) -> Handle | NoHandle:
        handle = super().open(incarnation)
        if not isinstance(handle, NoHandle):
            self._trace.opened.append(self._person(incarnation.pid))
        return handle

    def send(self, handle: Handle, sig: Sig | int) -> Sending:
        assert isinstance(sig, Sig), f"no sweep sends the number {sig}"
        pid, start = handle.incarnation.pid, handle.incarnation.start
        target = self._person(pid)
        parent = self._person(target.ppid)
        children = [self._person(child) for child in _children(pid)]
        at = time.monotonic()
        outcome = super().send(handle, sig)
        self._shots.append(
            Shot(self._number, at, pid, start, sig.name, outcome.name, target, parent, children)
        )
        return outcome

    def _person(self, pid: int) -> Person:
        known = {} if self.sweep is None else self.sweep.command_lines
        return person(pid, known)


def person(pid: int, known: object = ()) -> Person:
    # The badge first: one that ends in between is told as gone, not as one without a badge.
    badge, stat = family.badge(pid), truth.fields(pid)
    if not stat:
        return Person(pid, 0, 0, "", 0, is_known=False)
    start = int(stat[19])
    is_known = Incarnation(pid, start) in known  # type: ignore[operator]
    return Person(pid, start, int(stat[1]), stat[0], badge, is_known)


def _children(pid: int) -> list[int]:
    """The children of a process with one thread."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


class Clock:
    """A host that notes what time it has told."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.told: list[float] = []

    def now(self) -> float:
        self.told.append(self._host.now())
        return self.told[-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)


class Watched(Sweep):
    """A real sweep that notes at which instants it has decided something."""

    trace: Trace

    def step(self, look: Callable[[], Snapshot]) -> None:
        host, clock = self._host, Clock(self._host)
        self._host = clock
        try:
            super().step(look)
        finally:
            self._host = host
        # The last is when all was done. Between look and decision there may be a long while.
        self.trace.looks.append(clock.told[-2])


class Stage:
    """The families and sweeps of this process, one order after the other."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._host = LinuxHost()
        self._me = Incarnation(os.getpid(), truth.started(os.getpid()))
        self._shots: list[Shot] = []
        self._looks = 0

    def obey(self, order: Order) -> Record:
        """Build and sweep."""
        born_from = ticks()
        workers = sum(one.parent < 0 for one in order.plan)
        tags = Tags(
            [tag_of(self._run_id, number + 1) for number in range(workers)],
            detached_tag(self._run_id),
        )
        pids = family.build(order.plan, tags)
        before = [person(pid) for pid in pids]
        self._shots = []
        self._looks = 0
        files = len(truth.open_files())
        targets = self._targets(order, pids, born_from)
        traces = self._sweep(order, targets)
        open_files = [files, len(truth.open_files())]
        return Record(self._me.pid, pids, before, traces, self._shots, self._looks, open_files)

    def _targets(self, order: Order, pids: list[int], born_from: int) -> dict[int, Target]:
        """What to sweep, by worker; 0 stands for all of them."""
        if order.aim == "subtree":
            return {0: Target(subtree_of=self._me)}
        if order.aim == "table":
            return {0: Target(run_id=self._run_id, born_from=born_from)}
        workers = [pid for pid, one in zip(pids, order.plan, strict=True) if one.parent < 0]
        names = [Incarnation(pid, truth.started(pid)) for pid in workers]
        targets = {
            number: Target(
                roots=frozenset([name]),
                run_id=self._run_id,
                workers=frozenset([number]),
                born_from=name.start,
            )
            for number, name in enumerate(names, 1)
        }
        return targets if order.aim == "each" else {1: targets[1]}

    def _look(self, order: Order, target: Target) -> Snapshot:
        self._looks += 1
        if order.aim == "table":
            return self._host.look_all(tags=True, since=target.oldest_birth())
        return self._host.look_subtree(self._me.pid, self._run_id)

    def _sweep(self, order: Order, targets: dict[int, Target]) -> list[Trace]:
        """Carry all sweeps out, side by side, as a launcher does."""
        traces: list[Trace] = []
        sweeps: list[Watched] = []
        look = partial(self._look, order, next(iter(targets.values())))

        def begin(worker: int, grace: float) -> None:
            trace = Trace(worker, grace, time.monotonic())
            host = Recorder(len(traces), trace, self._shots)
            policy = StopPolicy(grace, KILL_TIMEOUT)
            sweep = Watched(host, targets[worker], policy, look, start=trace.began, own=self._me)
            sweep.trace, host.sweep = trace, sweep
            traces.append(trace)
            sweeps.append(sweep)

        for worker in targets:
            for grace in order.graces:
                begin(worker, grace)
        rounds = 0
        while any(sweep.report is None for sweep in sweeps):
            advance_together(sweeps, look)
            _reap()
            rounds += 1
            if rounds == order.cut:
                given_up = sweeps.pop(0)
                given_up.close()
                begin(given_up.trace.worker, given_up.trace.grace)
            _wait([sweep for sweep in sweeps if sweep.report is None])
        for sweep in sweeps:
            _tell(sweep)
        return traces


def _wait(sweeps: list[Watched]) -> None:
    """Wait for what the sweeps wait for."""
    poll = select.poll()
    for sweep in sweeps:
        for fd in sweep.watched:
            poll.register(fd, select.POLLIN)
    until = min((s.wake_at for s in sweeps if s.wake_at is not None), default=None)
    if until is not None:
        poll.poll(max(0.0, until - time.monotonic()) * 1000)


def _tell(sweep: Watched) -> None:
    trace, report = sweep.trace, sweep.report
    assert report is not None
    trace.finished = report.finished_at
    for one in report.ended:
        last = one.last_signal
        trace.ended[str(one.incarnation.pid)] = None if last is None else last.name
    trace.stuck.update((str(one.incarnation.pid), one.reason) for one in report.stuck)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def clean() -> None:
    """End whom the sweep has left on purpose.

    Only children are killed, which nobody else reaps: their pids cannot be handed out
    again. What was below them arrives here.
    """

    def gone() -> bool:
        children = truth.children(os.getpid())
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        _reap()
        return not children

    truth.until(gone, "the families do not end")


def main() -> None:
    prctl.set_child_subreaper()
    stage = Stage(sys.argv[1])
    while line := sys.stdin.readline():
        raw = json.loads(line)
        plan = [Relative(**one) for one in raw.pop("plan")]
        try:
            record: dict[str, Any] = asdict(stage.obey(Order(plan, **raw)))
            with open(os.environ["TELL"], "a") as tell:
                tell.write(f"swept {os.getpid()} {json.dumps(record)}\n")
            sys.stdin.readline()
        finally:
            clean()
        with open(os.environ["TELL"], "a") as tell:
            tell.write(f"clean {os.getpid()} \n")


if __name__ == "__main__":
    main()
