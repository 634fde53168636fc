"""The launcher: the process that forks workers and stands above all they start.

It is a child subreaper (prctl(2), PR_SET_CHILD_SUBREAPER): whatever a worker's tree
does (double fork, setsid, empty environment, a parent killed), every orphan of it
arrives here. So a sweep is a walk of one tree, and nothing has to be guessed. It has
one thread that lives as long as the process, so the workers' PDEATHSIG is exact. It
reaps every child, adopted orphans as well: no user's exit status is waited for here.

::

    owner ──control──▶ launcher ──status pipe──▶ owner      one pipe per worker
                          │ └───told (datagrams)──▶ sidecar
                          ├── worker ── stray …
                          └── orphan (its tag says whose it was)

Life of a worker: start request → fork → arm → STARTED … death → its tree is swept →
EXITED. So whoever waits for a worker waits for its tree as well.

The owner's end is any of: its pidfd is readable; the control socket is at its end
(exec closes it, and so does anything that the owner does to its descriptors). Then
everything below is swept, politely first, and the launcher leaves.

Called by: :mod:`safepool.run` in a fork of the owner (fork), the sidecar in a fork
of itself (spawn, forkserver).
"""

from __future__ import annotations

import errno
import gc
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

from safepool import loop
from safepool.bootstrap import (
    Parentage,
    StartRequest,
    WorkerMain,
    arm,
    nets,
    read_oom_score,
    write_oom_score,
)
from safepool.core.identity import Incarnation, Snapshot
from safepool.core.planner import Target
from safepool.core.policy import StopPolicy
from safepool.core.wire import (
    Exited,
    Failed,
    Started,
    Status,
    WireError,
    decode,
    encode,
    encode_status,
)
from safepool.host import prctl
from safepool.host.linux import LinuxHost
from safepool.sweeper import Sweep
from safepool.telling import describe

HEAD_START = 0.025
"""Seconds between the owner's end and the first SIGTERM: a worker that waits for its
``parent_process()`` may finish by itself."""

_OOM_SCORE = "-900"


@dataclass(frozen=True)
class LauncherConfig:
    """What a launcher is told when it is made.

    ``idle_after``: seconds without a worker after which it leaves; None: it waits
    for the owner's word. ``one_shot``: it leaves after its first worker.
    """

    launcher_id: int
    run_id: str
    owner_pid: int
    owner_mark: str
    grace: float
    idle_after: float | None = None
    one_shot: bool = False


@dataclass
class _Worker:
    number: int
    incarnation: Incarnation
    status_fd: int
    code: int | None = None
    sweep: Sweep | None = None
    asked: bool = False


@dataclass
class _Doing:
    """What is under way."""

    workers: dict[int, _Worker] = field(default_factory=dict)
    ending: Sweep | None = None
    ending_at: float | None = None
    finished: bool = False
    idle_since: float = 0.0
    started_any: bool = False


def serve(
    config: LauncherConfig,
    control: socket.socket,
    reports: socket.socket,
    owner_pidfd: int,
    worker_main: WorkerMain,
    children: loop.ChildLoop,
) -> NoReturn:
    """Be the launcher, in the process that was forked to be one; never returns."""

    def main() -> None:
        gc.disable()
        gc.freeze()
        prctl.set_child_subreaper()
        Launcher(config, control, reports, owner_pidfd, worker_main, children).run()

    loop.end_with(main)


class Launcher:
    """The loop of one launcher process."""

    def __init__(
        self,
        config: LauncherConfig,
        control: socket.socket,
        reports: socket.socket,
        owner_pidfd: int,
        worker_main: WorkerMain,
        children: loop.ChildLoop,
    ) -> None:
        self._config = config
        self._control: socket.socket | None = control
        self._reports = reports
        self._owner_pidfd = owner_pidfd
        self._watches_owner = True
        self._worker_main = worker_main
        self._children = children
        self._host = LinuxHost()
        self._nets = nets()
        self._doing = _Doing(idle_since=time.monotonic())
        me = self._host.incarnation(os.getpid())
        if me is None:
            raise RuntimeError("/proc does not show this process; is it mounted?")
        self._me = me
        oom_score = read_oom_score()
        was_lowered = oom_score is not None and write_oom_score(_OOM_SCORE)
        self._parentage = Parentage(
            launcher_pid=me.pid,
            run_id=config.run_id,
            owner_mark=config.owner_mark,
            owner_pidfd=owner_pidfd,
            oom_score=oom_score if was_lowered else None,
        )

    def run(self) -> None:
        """Serve until the work is over."""
        control = self._control
        while not self._doing.finished:
            ready = self._children.wait(self._watched(), self._wake_at())
            for pid, code in loop.reap():
                self._note_death(pid, code)
            if self._owner_pidfd in ready:
                self._watches_owner = False
                self._owner_ended()
            if control is not None and control.fileno() in ready and not self._take_request():
                control = None
            self._advance()

    # -- waiting -----------------------------------------------------------------------

    def _sweeps(self) -> list[Sweep]:
        sweeps = [w.sweep for w in self._doing.workers.values() if w.sweep is not None]
        return [*sweeps, self._doing.ending] if self._doing.ending is not None else sweeps

    def _watched(self) -> list[int]:
        fds = [fd for sweep in self._sweeps() for fd in sweep.watched]
        if self._watches_owner:
            fds.append(self._owner_pidfd)
        if self._control is not None:
            fds.append(self._control.fileno())
        return fds

    def _wake_at(self) -> float | None:
        times = [s.wake_at for s in self._sweeps() if s.report is None and s.wake_at is not None]
        idle_after = self._config.idle_after
        if self._doing.ending_at is not None:
            if self._doing.ending is None:
                times.append(self._doing.ending_at)
        elif idle_after is not None and not self._doing.workers:
            times.append(self._doing.idle_since + idle_after)
        return min(times, default=None)

    # -- requests ----------------------------------------------------------------------

    def _take_request(self) -> bool:
        """Read one request; False when the owner's end of the socket is gone."""
        assert self._control is not None
        packet = loop.receive(self._control)
        if packet is None:
            return True
        data, fds = packet
        if not data:
            self._control.close()
            self._control = None
            self._owner_ended()
            return False
        try:
            word, *fields = decode(data)
        except WireError as error:
            _close_all(fds)
            self._tell("error", f"a request was not understood: {error}")
            return True
        if word == "start":
            self._start(fields, fds)
        elif word == "end":
            self._end_worker(*fields)
        return True

    def _start(self, fields: list[Any], fds: list[int]) -> None:
        status_fd, *rest = fds
        request = StartRequest.received(fields, rest)
        if self._doing.ending_at is not None:
            _send_status(status_fd, Failed(errno.ECANCELED))
            _close_all([status_fd, *request.descriptors()])
            return
        try:
            pid = self._children.fork()
        except OSError as error:
            _send_status(status_fd, Failed(error.errno or 0))
            _close_all([status_fd, *request.descriptors()])
            return
        if pid == 0:
            self._be_worker(request, status_fd)
        incarnation = self._host.incarnation(pid) or Incarnation(pid, 0)
        worker = _Worker(request.number, incarnation, status_fd)
        self._doing.workers[request.number] = worker
        self._doing.started_any = True
        _send_status(status_fd, Started(pid, incarnation.start))
        _close_all(request.descriptors())

    def _be_worker(self, request: StartRequest, status_fd: int) -> NoReturn:
        """Leave all that is the launcher's, arm, and run the user's code."""

        def main() -> None:
            self._close_own(status_fd)
            arm(request.number, self._parentage)
            gc.unfreeze()
            gc.enable()
            self._children.leave_in_child()
            self._worker_main(request, self._parentage)

        loop.end_with(main)

    def _close_own(self, status_fd: int) -> None:
        """Close the launcher's descriptors in a worker, so that ends are seen as ends."""
        for sweep in self._sweeps():
            sweep.close()
        _close_all([status_fd, *(w.status_fd for w in self._doing.workers.values())])
        self._reports.close()
        if self._control is not None:
            self._control.close()

    # -- ends --------------------------------------------------------------------------

    def _tree_of(self, worker: _Worker) -> Target:
        return Target(
            roots=frozenset({worker.incarnation}),
            run_id=self._config.run_id,
            workers=frozenset({worker.number}),
            born_from=worker.incarnation.start,
            spare=self._spared(),
        )

    def _spared(self) -> frozenset[Incarnation]:
        return frozenset({self._me})

    def _look(self) -> Snapshot:
        return self._host.look_subtree(self._me.pid, self._config.run_id)

    def _begin(self, worker: _Worker, grace: float) -> None:
        if worker.sweep is not None:
            worker.sweep.close()
        worker.sweep = Sweep(self._host, self._tree_of(worker), StopPolicy(grace), self._look)

    def _end_worker(self, number: int, grace: float) -> None:
        worker = self._doing.workers.get(number)
        if worker is None or self._doing.ending is not None:
            return
        worker.asked = True
        self._begin(worker, grace)

    def _note_death(self, pid: int, code: int) -> None:
        for worker in self._doing.workers.values():
            if worker.incarnation.pid == pid and worker.code is None:
                worker.code = code
                if worker.sweep is None and self._doing.ending is None:
                    self._begin(worker, self._config.grace)

    def _owner_ended(self) -> None:
        if "launcher" in self._nets:
            if self._doing.ending_at is None:
                self._doing.ending_at = time.monotonic() + HEAD_START
        elif "deathsig" in self._nets:
            self._doing.finished = True

    def _end_all(self) -> None:
        target = Target(
            roots=frozenset(w.incarnation for w in self._doing.workers.values()),
            subtree_of=self._me,
            spare=self._spared(),
        )
        policy = StopPolicy(self._config.grace)
        self._doing.ending = Sweep(self._host, target, policy, self._look)

    def _advance(self) -> None:
        now = time.monotonic()
        ending_at = self._doing.ending_at
        is_time = ending_at is not None and (now >= ending_at or not self._doing.workers)
        if is_time and self._doing.ending is None:
            self._end_all()
        for sweep in self._sweeps():
            if sweep.report is None:
                sweep.advance()
        for pid, code in loop.reap():
            self._note_death(pid, code)
        for worker in list(self._doing.workers.values()):
            if worker.sweep is not None and worker.sweep.report is not None:
                self._settle(worker, now)
        ending = self._doing.ending
        if ending is not None and ending.report is not None:
            self._tell_ends(ending, self._why(), asked=False)
            self._finish()
        elif not self._doing.workers and ending is None and ending_at is None:
            idle_after = self._config.idle_after
            is_idle = idle_after is not None and now >= self._doing.idle_since + idle_after
            if is_idle or (self._config.one_shot and self._doing.started_any):
                self._finish()

    def _settle(self, worker: _Worker, now: float) -> None:
        """Tell that a worker's tree is gone; one that is stuck stays until it dies."""
        assert worker.sweep is not None
        if worker.code is None:
            return
        how = f"signal {-worker.code}" if worker.code < 0 else f"exit status {worker.code}"
        why = "asked to" if worker.asked else f"worker {worker.incarnation.pid} ended ({how})"
        self._tell_ends(worker.sweep, why, worker.asked)
        worker.sweep.close()
        _send_status(worker.status_fd, Exited(worker.code))
        _close_all([worker.status_fd])
        del self._doing.workers[worker.number]
        self._doing.idle_since = now

    def _finish(self) -> None:
        for worker in self._doing.workers.values():
            if worker.code is not None:
                _send_status(worker.status_fd, Exited(worker.code))
            _close_all([worker.status_fd])
        farewell = encode("retired", self._config.launcher_id)
        self._report(farewell)
        if self._control is not None:
            with suppress(OSError):
                self._control.send(farewell, socket.MSG_DONTWAIT)
        self._doing.finished = True

    # -- telling -----------------------------------------------------------------------

    def _tell_ends(self, sweep: Sweep, why: str, asked: bool) -> None:
        for level, text in describe(sweep, why, asked=asked):
            self._tell(level, text)

    def _why(self) -> str:
        owner = self._config.owner_pid
        if loop.is_dead(self._owner_pidfd):
            return f"owner {owner} is gone"
        return f"owner {owner} let go of its workers (closed the pool or its descriptors, or exec)"

    def _tell(self, level: str, text: str) -> None:
        self._report(encode("told", self._config.launcher_id, level, text[:4000]))

    def _report(self, data: bytes) -> None:
        """Send to the sidecar if it can be done at once: no telling may stop a sweep."""
        with suppress(OSError):
            self._reports.send(data, socket.MSG_DONTWAIT)


def _send_status(fd: int, status: Status) -> None:
    """Write a status record; an owner that is gone needs none (EPIPE)."""
    try:
        os.write(fd, encode_status(status))
    except OSError:
        return


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
