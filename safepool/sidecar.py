"""The sidecar: one small process per run that watches the owner and tells what was ended.

It is exec'd by the owner before the first worker, in a process group of its own and
the owner's session. It is a child subreaper and the parent of the launchers for
spawn and forkserver, so what a killed launcher leaves arrives here. It stays until
the owner ends; then it gives the launchers the first word, ends what is left, and
retires the record.

Boring on purpose: few imports, one thread, deaf to terminal signals, no I/O that
could stop a sweep. Its own stderr is the owner's, so a sweep is written there only
when it is over, in pieces that a pipe takes at once.

Descriptors that it is born with: see :mod:`safepool.core.wire`. 0 and 1 are
/dev/null, 2 is the owner's stderr.

Called by: :mod:`safepool.run`, through the interpreter's command line.
"""

from __future__ import annotations

import os
import socket
import time
from enum import Enum
from functools import partial
from typing import Any, NoReturn

from safepool import launcher_start, loop, registry
from safepool.bootstrap import (
    nets,
    raise_open_files,
    read_tag,
    set_tag,
    write_oom_score,
)
from safepool.core import wire
from safepool.core.identity import CgroupName, Incarnation
from safepool.core.lineage import helper_tag
from safepool.core.policy import EndPolicy
from safepool.core.record import Member
from safepool.host import choose, container, own
from safepool.launcher import HEAD_START
from safepool.launcher_config import LauncherConfig
from safepool.launcher_watch import LauncherWatch
from safepool.leftovers import SweepTask, start_up_sweeps
from safepool.run_sweeps import LATER, RunSweeps
from safepool.telling import describe, write_gently

_HEAD_START = HEAD_START + 0.025
"""Seconds that launchers get to sweep their own trees before the sidecar looks."""

_OOM_SCORE = "-950"


def main(backend: str) -> NoReturn:
    """Be the sidecar; the command line that the owner execs ends here."""
    choose.use(backend)

    def be_sidecar() -> None:
        try:
            Sidecar(loop.ChildLoop(worker_mask=())).run()
        except _NoOwnerError:
            return

    loop.end_with(be_sidecar)


class _Phase(Enum):
    """How far the run has come, as the sidecar knows it.

    YIELDED: a successor takes its place. DEAF is for tests only: this net is switched
    off and must not act.
    """

    WATCHING = "watching"
    RETIRING = "retiring"
    OWNERLESS = "ownerless"
    YIELDED = "yielded"
    DEAF = "deaf"
    FINISHED = "finished"


class _NoOwnerError(Exception):
    """The owner died before it said what the run is: there is nothing to protect."""


class Sidecar:
    """The loop of the sidecar process."""

    def __init__(self, children: loop.ChildLoop) -> None:
        own.adopt_orphans()
        own.set_name("safepool-sidecar")
        self._children = children
        self._host = choose.host()
        self._control: socket.socket | None = socket.socket(fileno=wire.CONTROL)
        self._reports = socket.socket(fileno=wire.REPORTS)
        self._reporters = socket.socket(fileno=wire.REPORTERS)
        for fd in (wire.CONTROL, wire.OWNER, wire.REPORTS, wire.REPORTERS):
            os.set_inheritable(fd, False)
        self._watches_owner = True
        self._tasks: list[SweepTask] = []
        self._lines: list[str] = []
        self._phase = _Phase.WATCHING
        self._patient_until: float | None = None
        self._hurried: SweepTask | None = None
        self._final: SweepTask | None = None
        self._beat_at = 0.0
        self._hear_hello()

    def _hear_hello(self) -> None:
        assert self._control is not None
        data = self._control.recv(wire.MAX_MESSAGE)
        if not data:
            raise _NoOwnerError
        word, *fields = wire.decode(data)
        if word != "hello":
            raise wire.WireError(f"expected hello, got {word!r}")
        run_id, mark, owner_pid, owner_start, folder, grace, began, *named = fields
        self._cgroup = CgroupName(*named)
        self._run_id, self._mark = run_id, mark
        self._owner = Incarnation(owner_pid, owner_start)
        me = self._host.incarnation(os.getpid())
        if me is None:
            raise RuntimeError("/proc does not show this process; is it mounted?")
        self._me = me
        set_tag(helper_tag(read_tag(), run_id))
        write_oom_score(_OOM_SCORE)
        self._open_files = raise_open_files()
        self._files = registry.RunFiles.attach(folder, run_id)
        self._launchers = LauncherWatch(self._host, self._files, grace, self._owner, self._cgroup)
        self._sweeps = RunSweeps(
            self._host, self._files, self._launchers, me, self._owner, began, self._cgroup
        )
        problem = self._files.add_member(Member("sidecar", me))
        self._say("armed", me.pid, me.start, "" if problem is None else str(problem))

    def run(self) -> None:
        """Watch until the run is over, and sweep."""
        mention = partial(self._say, "log", "debug")
        spare = self._sweeps.spared()
        self._tasks += start_up_sweeps(self._files, self._host, spare, self._note, mention)
        self._beat()
        while self._phase not in (_Phase.FINISHED, _Phase.YIELDED):
            ready = self._children.wait(self._watched(), self._wake_at())
            loop.reap()
            if self._control is not None and wire.CONTROL in ready:
                self._take_requests()
            if wire.OWNER in ready or self._launchers.census.owner_is_gone:
                self._watches_owner = False
                self._owner_ended()
            self._hear_reports()
            self._launchers.note_dead(ready)
            self._advance()
            if time.monotonic() >= self._beat_at:
                self._beat()
        self._leave()

    # -- waiting -----------------------------------------------------------------------

    def _watched(self) -> list[int]:
        fds = self._launchers.fds()
        fds += [fd for task in self._all_tasks() for fd in task.sweep.watched]
        fds.append(wire.REPORTS)
        if self._watches_owner:
            fds.append(wire.OWNER)
        if self._control is not None:
            fds.append(wire.CONTROL)
        return fds

    def _beat(self) -> None:
        """Leave a sign of life, by which the next start knows when this run ended."""
        self._files.give_sign_of_life()
        self._beat_at = time.monotonic() + registry.HEARTBEAT

    def _all_tasks(self) -> list[SweepTask]:
        return [*self._tasks, self._final] if self._final is not None else list(self._tasks)

    def _wake_at(self) -> float | None:
        sweeps = [task.sweep for task in self._all_tasks() if task.sweep.report is None]
        times = [sweep.wake_at for sweep in sweeps if sweep.wake_at is not None]
        if self._patient_until is not None and self._final is None:
            times.append(self._patient_until)
        return min([*times, self._beat_at, self._launchers.census.wake_at])

    # -- the owner's words ---------------------------------------------------------------

    def _take_requests(self) -> None:
        """Read all that the owner has sent; at the end of the socket it has ended."""
        while self._control is not None:
            packet = loop.receive(self._control)
            if packet is None:
                return
            data, fds = packet
            if not data:
                self._control.close()
                self._control = None
                self._owner_ended()
                return
            try:
                word, *fields = wire.decode(data)
            except wire.WireError as error:
                self._note("error", f"a request was not understood: {error}")
                continue
            self._obey(word, fields, fds)

    def _obey(self, word: str, fields: list[Any], fds: list[int]) -> None:
        if word == "launch":
            self._launch(fds, *fields)
        elif word == "attach":
            launcher_id, pid, start, policy = fields
            self._launchers.attach(launcher_id, Incarnation(pid, start), EndPolicy(*policy))
        elif word == "lost":
            self._sweep_lost(*fields)
        elif word == "yield" and self._phase is _Phase.WATCHING:
            self._phase = _Phase.YIELDED
        elif word == "retire" and self._phase is _Phase.WATCHING:
            self._phase = _Phase.RETIRING
            self._patient_until = time.monotonic() + self._launchers.grace + LATER

    def _launch(self, fds: list[int], launcher_id: int, method: str, fields: Any) -> None:
        """Fork a launcher from here, and tell the owner."""
        policy = EndPolicy(*fields)
        try:
            pid = self._children.fork()
        except OSError as error:
            self._say("launched", launcher_id, 0, error.errno or 0)
            loop.close_all(fds)
            return
        if pid == 0:
            self._be_launcher(launcher_id, method, policy, fds)
        loop.close_all(fds)
        incarnation = loop.name_of(self._host, pid)
        self._launchers.attach(launcher_id, incarnation, policy)
        self._say("launched", launcher_id, incarnation.pid, incarnation.start)

    def _be_launcher(
        self, launcher_id: int, method: str, policy: EndPolicy, fds: list[int]
    ) -> NoReturn:
        """In the fork: leave what is the sidecar's, and be a launcher."""

        def be_launcher() -> None:
            self._close_own()
            self._children.leave_in_child()
            launcher_start.serve_from_sidecar(
                LauncherConfig(
                    launcher_id,
                    self._run_id,
                    self._owner.pid,
                    self._mark,
                    self._files.directory,
                    policy,
                    open_files=self._open_files,
                    cgroup=self._cgroup,
                    owner_start=self._owner.start,
                ),
                method,
                socket.socket(fileno=fds[0]),
                self._reporters,
                wire.OWNER,
                fds[1],
                self._me.pid,
            )

        loop.end_with(be_launcher)

    def _close_own(self) -> None:
        """Close the sidecar's descriptors in a launcher."""
        for task in self._all_tasks():
            task.sweep.close()
        self._launchers.close_in_child()
        self._reports.close()
        if self._control is not None:
            self._control.close()

    # -- launchers -----------------------------------------------------------------------

    def _hear_reports(self) -> None:
        while True:
            try:
                word, launcher_id, *rest = wire.decode(
                    self._reports.recv(wire.MAX_MESSAGE, socket.MSG_DONTWAIT)
                )
            except BlockingIOError:
                return
            except (OSError, wire.WireError) as error:
                self._note("error", f"a report was lost: {error}")
                return
            if word == "retired":
                self._launchers.note_retired(launcher_id)
            elif word == "told":
                self._note(*rest)

    def _sweep_lost(self, launcher_id: int, numbers: list[int]) -> None:
        """A launcher was killed: end what its workers had started, wherever it is now."""
        self._launchers.lost_any = True
        sweep = self._sweeps.lost(launcher_id, numbers)
        why = "its launcher was killed"
        self._tasks.append(SweepTask(sweep, why, lambda _: self._say("swept", launcher_id)))

    # -- the end -------------------------------------------------------------------------

    def _owner_ended(self) -> None:
        """Give the launchers, which have noticed as well, a head start."""
        if self._phase not in (_Phase.WATCHING, _Phase.RETIRING):
            return
        self._phase = _Phase.OWNERLESS
        # So that no other start sweeps the same run; without it both do, which is harmless.
        self._files.claim()
        delay = self._launchers.census.delay + (LATER if self._launchers.impatient() else 0.0)
        self._patient_until = time.monotonic() + _HEAD_START + delay
        if "sidecar" not in nets():
            self._phase = _Phase.FINISHED if nets() & {"launcher", "deathsig"} else _Phase.DEAF

    def _begin_last_sweep(self) -> None:
        closed = self._phase is _Phase.RETIRING
        why = "the run was closed" if closed else f"owner {self._owner.pid} is gone"
        if not closed and self._hurried is None:
            sweep = self._sweeps.hurried()
            if sweep is not None:
                self._hurried = SweepTask(sweep, why, lambda _: None)
                self._tasks.append(self._hurried)
                self._patient_until = None
                return
        sweep = self._sweeps.last(owner_lives=closed)
        self._final = SweepTask(sweep, why, lambda _: None)

    def _advance(self) -> None:
        for task in self._all_tasks():
            if task.sweep.report is None:
                task.sweep.advance()
            if task.sweep.report is not None:
                self._settle(task)
        if self._phase in (_Phase.RETIRING, _Phase.OWNERLESS) and self._final is None:
            self._consider_the_end()

    def _consider_the_end(self) -> None:
        """Leave at once after an orderly end; else look for what is left."""
        is_orderly = self._phase is _Phase.RETIRING and not self._launchers.lost_any
        if is_orderly and not self._launchers:
            if not self._tasks:
                self._phase = _Phase.FINISHED
        elif self._hurried not in self._tasks and (
            not self._launchers or time.monotonic() >= (self._patient_until or 0.0)
        ):
            self._begin_last_sweep()

    def _settle(self, task: SweepTask) -> None:
        for level, text in describe(task.sweep, task.why, asked=False):
            self._note(level, text)
        task.sweep.close()
        task.done(task.sweep)
        if task is self._final:
            self._hear_reports()
            self._phase = _Phase.FINISHED
        else:
            self._tasks.remove(task)

    def _leave(self) -> None:
        """Retire the record after a clean end, and say what was done."""
        try:
            self._retire()
        finally:
            for task in self._all_tasks():
                task.sweep.give_up()
            # Else Python's development mode complains of them on the owner's stderr.
            self._close_own()
            self._reporters.close()

    def _retire(self) -> None:
        if self._phase is _Phase.YIELDED:
            self._files.remove_member(Member("sidecar", self._me))
            return
        report = self._final.sweep.report if self._final is not None else None
        is_over = "sidecar" in nets() and (report is None or report.is_clean)
        if is_over and container.remove(self._cgroup):
            self._files.retire()
        if self._lines:
            self._lines.append(f"safepool: this is on record in {self._files.log_path}")
            write_gently(2, self._lines)

    # -- telling -------------------------------------------------------------------------

    def _say(self, *message: Any) -> None:
        """Tell the owner, if it can be done at once; it may be gone or stopped."""
        if self._control is None:
            return
        try:
            self._control.send(wire.encode(*message), socket.MSG_DONTWAIT)
        except OSError:
            # A full or closed socket: the log file has it as well.
            return

    def _note(self, level: str, text: str) -> None:
        """Write to the run's log, and to the owner or, after its end, to stderr."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        self._files.append_log(f"{stamp} {level.upper()} {text}\n")
        if self._phase in (_Phase.WATCHING, _Phase.RETIRING):
            self._say("log", level, text)
        elif level != "debug":
            self._lines.append(f"safepool: {text}")
