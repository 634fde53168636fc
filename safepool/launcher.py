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

Called by: :mod:`safepool.launcher_start`.
"""

from __future__ import annotations

import errno
import gc
import math
import os
import socket
import time
from contextlib import suppress
from typing import Any, NoReturn

from safepool import loop, registry
from safepool.bootstrap import (
    Parentage,
    StartRequest,
    WorkerMain,
    arm,
    nets,
    raise_open_files,
    read_oom_score,
    write_oom_score,
)
from safepool.census import Census
from safepool.core.identity import Incarnation, Snapshot
from safepool.core.policy import StopPolicy
from safepool.core.wire import (
    Failed,
    WireError,
    decode,
    encode,
)
from safepool.host import choose, own, title
from safepool.launcher_config import LauncherConfig
from safepool.launcher_container import LauncherContainer
from safepool.roster import Roster, send_status
from safepool.sparing import Sparing
from safepool.sweeper import Sweep, advance_together
from safepool.telling import describe

HEAD_START = 0.025
"""Seconds between the owner's end and the first SIGTERM: a worker that waits for its
``parent_process()`` may finish by itself."""

_OOM_SCORE = "-900"


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
        self._control = control
        self._hears_owner = True
        self._reports = reports
        self._owner_pidfd = owner_pidfd
        self._watches_owner = True
        self.workers_collect = True
        self._worker_main = worker_main
        self._children = children
        self._host = choose.host()
        self._nets = nets()
        self._idle_since = time.monotonic()
        self._ending: Sweep | None = None
        self._ending_at: float | None = None
        self._leave_at = math.inf
        self._finished = False
        self._seen: Snapshot | None = None
        me = self._host.incarnation(os.getpid())
        if me is None:
            raise RuntimeError("/proc does not show this process; is it mounted?")
        self._me = me
        self._owner = Incarnation(config.owner_pid, config.owner_start)
        self._census = Census(self._host, self._owner)
        files, self._own_end = None, None
        if not own.keeps_orphans():
            files = registry.RunFiles.attach(config.registry, config.run_id)
            self._own_end = own.OwnEnd()
        self._sparing = Sparing(self._host, config.run_id, config.registry, self._look)
        self._roster = Roster(
            self._host,
            me,
            config.run_id,
            config.policy,
            self._look,
            self._tell,
            self._sparing,
            self._census,
            files,
        )
        self._container = LauncherContainer(
            config.cgroup, config.launcher_id, stays_out=config.one_shot
        )
        oom_score = read_oom_score()
        was_lowered = oom_score is not None and write_oom_score(_OOM_SCORE)
        self._parentage = Parentage(
            launcher_pid=me.pid,
            run_id=config.run_id,
            owner_mark=config.owner_mark,
            owner_pidfd=owner_pidfd,
            oom_score=oom_score if was_lowered else None,
            title=title.read(),
            open_files=raise_open_files() if config.open_files is None else config.open_files,
            lifeline=None if self._own_end is None else self._own_end.fd,
        )
        words = ["safepool-launcher", f"run={config.run_id}", f"owner={config.owner_pid}"]
        title.write(title.Title("safepool-launch", "\0".join(words).encode()))

    def run(self) -> None:
        """Serve until the work is over."""
        while not self._finished:
            ready = self._children.wait(self._watched(), self._wake_at())
            self._note_deaths()
            self._census.take(self._roster.incarnations())
            if self._owner_pidfd in ready or (self._watches_owner and self._census.owner_is_gone):
                self._watches_owner = False
                self._owner_ended()
            if self._hears_owner and self._control.fileno() in ready:
                self._take_request()
            self._advance()

    # -- waiting -----------------------------------------------------------------------

    def _sweeps(self) -> list[Sweep]:
        sweeps = list(self._roster.sweeps())
        return sweeps if self._ending is None else [*sweeps, self._ending]

    def _watched(self) -> list[int]:
        fds = [fd for sweep in self._sweeps() for fd in sweep.watched]
        if self._watches_owner:
            fds.append(self._owner_pidfd)
        if self._hears_owner:
            fds.append(self._control.fileno())
        return fds

    def _wake_at(self) -> float | None:
        times = [sweep.wake_at for sweep in self._sweeps() if sweep.wake_at is not None]
        times.append(self._census.wake_at)
        if self._container.enter_at is not None:
            times.append(self._container.enter_at)
        if self._ending_at is not None:
            if self._ending is None:
                times.append(self._ending_at)
        elif self._config.idle_after is not None and not self._roster:
            times.append(self._idle_since + self._config.idle_after)
        return min(times)

    # -- requests ----------------------------------------------------------------------

    def _take_request(self) -> bool:
        """Read one request, if there is one; its end means that the owner has ended, or
        wants no more."""
        packet = loop.receive(self._control)
        if packet is None:
            return False
        data, fds = packet
        if not data:
            self._hears_owner = False
            self._owner_ended()
            return False
        try:
            word, *fields = decode(data)
        except WireError as error:
            loop.close_all(fds)
            self._tell("error", f"a request was not understood: {error}")
            return True
        if word == "start":
            self._start(fields, fds)
        elif word == "retiring":
            self._roster.note_retiring(*fields)
        elif word == "end":
            number, grace = fields
            if self._ending is None:
                self._roster.end(number, grace)
        elif word == "flush":
            self._children.discard_pending(*fields)
        return True

    def _start(self, fields: list[Any], fds: list[int]) -> None:
        try:
            request = StartRequest.received(fields, fds[1:])
        except ValueError:
            for status_fd in fds[:1]:
                send_status(status_fd, Failed(errno.EMFILE))
            loop.close_all(fds)
            return
        status_fd = fds[0]
        if self._ending_at is not None:
            self._refuse(errno.ECANCELED, status_fd, request)
            return
        try:
            pid = self._children.fork()
        except OSError as error:
            self._refuse(error.errno or 0, status_fd, request)
            return
        if pid == 0:
            self._be_worker(request, status_fd)
        self._roster.add(request.number, loop.name_of(self._host, pid), status_fd)
        self._container.note_worker(time.monotonic())
        loop.close_all(request.descriptors())
        if self._config.one_shot:
            # It forks nobody else, so a worker that closes its pipes closes them for the reader.
            loop.let_go_of_stdio()

    def _refuse(self, number: int, status_fd: int, request: StartRequest) -> None:
        send_status(status_fd, Failed(number))
        loop.close_all([status_fd, *request.descriptors()])

    def _be_worker(self, request: StartRequest, status_fd: int) -> NoReturn:
        """Leave all that is the launcher's, arm, and run the user's code."""

        def main() -> None:
            self._close_own(status_fd)
            arm(request.number, self._parentage, self._container.take_in)
            gc.unfreeze()
            if self.workers_collect:
                gc.enable()
            self._children.leave_in_child()
            self._worker_main(request, self._parentage)

        loop.end_with(main)

    def _close_own(self, status_fd: int) -> None:
        """Close the launcher's descriptors in a worker, so that ends are seen as ends."""
        os.close(status_fd)
        self._roster.close_in_child()
        self._reports.close()
        self._control.close()

    # -- ends --------------------------------------------------------------------------

    def _look(self) -> Snapshot:
        if own.keeps_orphans():
            return self._host.look_subtree(self._me.pid, self._config.run_id)
        if self._seen is None:
            # It is dear, so all sweeps of one turn of the loop share it.
            self._seen = self._host.look_all(tags=True)
        return self._seen

    def _note_deaths(self) -> None:
        dead = loop.reap()
        if dead and self._config.policy.spares:
            # Whether a worker was sent away has been said before it died.
            while self._hears_owner and self._take_request():
                pass
        for pid, code in dead:
            self._roster.note_death(pid, code, sweeps=self._ending is None)

    def _owner_ended(self) -> None:
        if "launcher" in self._nets:
            if self._ending_at is None:
                self._ending_at = time.monotonic() + HEAD_START
        elif "deathsig" in self._nets:
            self._finished = True

    def _end_all(self) -> None:
        target = self._roster.everything(spare=self._sparing.on_record() | {self._me, self._owner})
        grace = self._config.policy.last_grace
        if not self._owner_is_gone() and not loop.has_hung_up(self._control):
            # It lives and has not exec'd: it has closed the pool.
            grace = self._config.policy.grace
            target = self._roster.spare_rest(target)
        policy, within = StopPolicy(grace), self._container.for_sweep()
        self._ending = Sweep(self._host, target, policy, self._look, None, self._me, within)
        self._leave_at = time.monotonic() + grace / 2

    def _advance(self) -> None:
        now = time.monotonic()
        is_time = self._ending_at is not None and (now >= self._ending_at or not self._roster)
        if is_time and self._ending is None:
            self._end_all()
        if self._ending is not None and now >= self._leave_at:
            self._container.leave()
        self._container.advance(now)
        self._seen = None
        advance_together(self._sweeps(), self._look)
        self._note_deaths()
        if self._roster.settle():
            self._idle_since = now
        if self._ending is not None:
            if self._ending.report is not None:
                for level, text in describe(self._ending, self._why(), asked=False):
                    self._tell(level, text)
                self._finish()
        elif self._ending_at is None and not self._roster and self._is_idle(now):
            self._finish()

    def _is_idle(self, now: float) -> bool:
        idle_after = self._config.idle_after
        if idle_after is not None and now >= self._idle_since + idle_after:
            return True
        return self._config.one_shot and self._roster.has_had_any

    def _finish(self) -> None:
        self._roster.finish()
        self._container.remove()
        farewell = encode("retired", self._config.launcher_id)
        self._report(farewell)
        # The owner may be gone, or may have let go: then nobody needs it.
        with suppress(OSError):
            self._control.send(farewell, socket.MSG_DONTWAIT)
        self._finished = True

    # -- telling -----------------------------------------------------------------------

    def _owner_is_gone(self) -> bool:
        return self._census.owner_is_gone or loop.is_dead(self._owner_pidfd)

    def _why(self) -> str:
        owner = self._config.owner_pid
        if self._owner_is_gone():
            return f"owner {owner} is gone"
        return f"owner {owner} let go of its workers (closed the pool or its descriptors, or exec)"

    def _tell(self, level: str, text: str) -> None:
        self._report(encode("told", self._config.launcher_id, level, text[:4000]))

    def _report(self, data: bytes) -> None:
        """Send to the sidecar if it can be done at once: no telling may stop a sweep."""
        with suppress(OSError):
            self._reports.send(data, socket.MSG_DONTWAIT)
