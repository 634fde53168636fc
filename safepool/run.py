"""The owner's side of a run: its record, its sidecar, its launchers.

One run per process, made at first use; a forked copy of the owner begins without
one. Order, so that protection stands before the first worker: record (with its
lock), then for fork the launcher, which watches from its first instruction, and the
sidecar beside it; for spawn and forkserver the sidecar, which has said "armed", then
the launcher.

One monitor thread hears the sidecar and sees launchers end. It logs what they tell
(logger ``safepool``), and replaces a sidecar that was killed. It is started with
``_thread``, since it is no thread of the program's: nobody should find it in
``threading.enumerate()`` or wait for it.

Safe in threads. Not for signal handlers. After a fork the child's first use makes a
new run.

Called by: :mod:`safepool.process`, :mod:`safepool.context`, :mod:`safepool.pool`.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from multiprocessing import process as mp_process
from multiprocessing import util
from typing import NoReturn

from safepool import at_exit, in_flight, launcher_start, loop, registry, run_container
from safepool.bootstrap import (
    Parentage,
    StartRequest,
    can_carry,
    read_tag,
    run_process,
    set_tag,
)
from safepool.core.identity import CgroupName
from safepool.core.lineage import MARK_VARIABLE, helper_tag, tag_of
from safepool.core.policy import DEFAULT_GRACE, EndPolicy
from safepool.core.record import RunRecord
from safepool.errors import ProtectionError
from safepool.host import choose, container, own
from safepool.host.base import Host
from safepool.launcher_config import LauncherConfig
from safepool.launcher_link import LauncherLink
from safepool.layers import Protection
from safepool.monitor import Monitor
from safepool.preload import gather_settings, write_settings
from safepool.sidecar_keeper import tolerates_degraded
from safepool.tracker import LazyTracker, share_tracker

ARM_TIMEOUT = 30.0
"""Seconds that a sidecar may take to say that it watches."""

_RETIRE_TIMEOUT = 3.0
_SWEPT_MARGIN = 2.0

MakeProcess = Callable[[StartRequest], mp_process.BaseProcess]


class Run:
    """Everything that belongs to this owner process."""

    def __init__(self) -> None:
        own.prepare()
        in_flight.occupy_stdio()
        host = choose.host()
        if not host.sees_own_namespace():
            raise ProtectionError(
                "/proc shows another pid namespace than this process is in, so no process can be "
                "told from a stranger; mount a fresh one (unshare --mount-proc, mount -t proc)"
            )
        owner = host.incarnation(os.getpid())
        if owner is None:
            raise ProtectionError("/proc does not show this process; is it mounted?")
        self.run_id = os.urandom(16).hex()
        self.mark = os.environ.get(MARK_VARIABLE, "")
        self.owner = owner
        self.cgroup = run_container.find(self.run_id)
        self.began = own.ticks()
        with ExitStack() as undo:
            try:
                with in_flight.gate.lock:
                    self._end = own.OwnEnd()
                undo.callback(self._end.close)
                self.reports, self.reporters = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
                undo.callback(self.reports.close)
                undo.callback(self.reporters.close)
                self.tracker = LazyTracker()
                undo.callback(self.tracker.close)
                self.monitor = Monitor(self)
                undo.callback(self.monitor.forget)
            except OSError as error:
                raise ProtectionError(f"the run cannot be watched: {error}") from error
            self.files, self.cgroup = self._write_record(host)
            undo.pop_all()
        self._numbers = itertools.count(1)
        self._launcher_ids = itertools.count(1)
        self._lock = threading.Lock()
        self._shared: dict[tuple[str, EndPolicy], LauncherLink] = {}
        self._is_over = False
        at_exit.register(_shut_down)

    def _write_record(self, host: Host) -> tuple[registry.RunFiles, CgroupName]:
        here = registry.here(host)
        record = RunRecord(
            run_id=self.run_id,
            lineage=self.mark,
            host=here.host,
            boot_id=here.boot_id,
            pid_namespace=here.pid_namespace,
            uid=here.uid,
            owner=self.owner,
            argv=tuple(sys.argv),
            cwd=_cwd(),
            started_ticks=self.began,
            started_wall=time.time(),
            grace=DEFAULT_GRACE,
            cgroup=self.cgroup,
        )
        return run_container.write_down(registry.directory(), record)

    # -- protection ----------------------------------------------------------------------

    def protect(self, *, wait: bool) -> None:
        """See to it that a sidecar runs; with ``wait``, that it has said it watches.

        Raises ProtectionError with the reason.
        """
        self.monitor.ensure_sidecar()
        if wait and not self.monitor.sidecar.armed.wait(ARM_TIMEOUT):
            raise ProtectionError(
                f"the sidecar did not answer within {ARM_TIMEOUT:g} s; is it stopped, or the "
                "machine overloaded? The next start tries again"
            )
        self.check()

    def check(self) -> None:
        """Raise ProtectionError if the run is known to be unprotected."""
        reason = self.monitor.sidecar.failure
        if reason and not tolerates_degraded():
            raise ProtectionError(reason)

    @property
    def end_fd(self) -> int:
        """Readable, for whoever has a copy, when this process is gone."""
        return self._end.fd

    @property
    def protection(self) -> Protection:
        """What protects the run now."""
        reason = self.monitor.sidecar.failure
        watched, tag = self.monitor.sidecar.is_watched, can_carry(tag_of(self.run_id, 1))
        cgroup, backend = bool(self.cgroup.inode), choose.name()
        return Protection(watched, True, reason, tag=tag, cgroup=cgroup, backend=backend)

    # -- launchers -----------------------------------------------------------------------

    def next_number(self) -> int:
        """A worker number that no other worker of the run has."""
        return next(self._numbers)

    def fork_launcher(
        self, make: MakeProcess, policy: EndPolicy, *, one_shot: bool = False
    ) -> LauncherLink:
        """Fork a launcher whose workers see the owner as it is now."""
        self._check_not_over()
        launcher_id = next(self._launcher_ids)
        run_container.prepare(self.cgroup, launcher_id)
        # What the owner has not written out yet, each worker would write as well.
        util._flush_std_streams()  # type: ignore[attr-defined]
        config = LauncherConfig(
            launcher_id,
            self.run_id,
            self.owner.pid,
            self.mark,
            self.files.directory,
            policy,
            one_shot=one_shot,
            cgroup=self.cgroup,
            owner_start=self.owner.start,
        )
        with in_flight.gate.lock, ExitStack() as undo:
            ours, theirs = loop.packet_pair()
            undo.enter_context(ours)
            with theirs:
                link = self._fork_into(config, ours, theirs, make)
            undo.pop_all()
        try:
            self.protect(wait=False)
        except BaseException:
            self.monitor.release(link)
            raise
        self.monitor.attach(link)
        return link

    def _fork_into(
        self,
        config: LauncherConfig,
        ours: socket.socket,
        theirs: socket.socket,
        make: MakeProcess,
    ) -> LauncherLink:
        """Fork; the child is the launcher and never returns. The link is watched already."""
        with ExitStack() as undo:
            pidfd = os.dup(self._end.fd)
            undo.callback(os.close, pidfd)
            reporters = undo.enter_context(self.reporters.dup())
            tracker = os.dup(self.tracker.descriptor())
            undo.callback(os.close, tracker)
            old_mask = undo.enter_context(loop.signals_blocked())
            # A pool's worker takes no Ctrl-C before its task loop has said what that means.
            mask = old_mask if config.one_shot else old_mask | {signal.SIGINT}
            with self.monitor.quiet():
                pid = in_flight.fork()
                if pid == 0:
                    # Here, not further out: the child must not leave any block of the owner's.
                    loop.end_with(
                        lambda: _be_launcher(
                            config, ours, theirs, reporters, pidfd, tracker, make, mask
                        )
                    )
            link = LauncherLink(config.launcher_id, ours, config.policy, pid)
            link.incarnation = loop.name_of(choose.host(), pid)
            self.monitor.watch(link)
        return link

    def sidecar_launcher(
        self, method: str, policy: EndPolicy, *, idle_after: float | None = None
    ) -> LauncherLink:
        """Have the sidecar fork a launcher for spawn or forkserver."""
        self._check_not_over()
        self.monitor.sidecar.check()
        self.protect(wait=True)
        if self.monitor.sidecar.failure:
            raise ProtectionError(
                f"{self.monitor.sidecar.failure}; workers of {method} come from the sidecar, so "
                "there are none without it; fork can go on with degraded protection"
            )
        launcher_id = next(self._launcher_ids)
        run_container.prepare(self.cgroup, launcher_id)
        with ExitStack() as undo, in_flight.gate.lock:
            blob = write_settings(gather_settings(method, idle_after))
            undo.callback(os.close, blob)
            ours, theirs = loop.packet_pair()
            undo.enter_context(theirs)
            link = LauncherLink(launcher_id, ours, policy, None)
            self.monitor.watch(link)
            self.monitor.launch(link, method, theirs.fileno(), blob)
        return link

    def shared_launcher(self, method: str, policy: EndPolicy) -> LauncherLink:
        """The launcher for bare processes; it leaves by itself when it has none."""
        with self._lock:
            link = self._shared.get((method, policy))
        if link is None or not link.is_usable():
            link = self.sidecar_launcher(method, policy, idle_after=_SHARED_IDLE)
            with self._lock:
                self._shared[method, policy] = link
        return link

    def _check_not_over(self) -> None:
        if self._is_over:
            raise ProtectionError("the run is over: this process is about to exit")

    def wait_until_swept(self, link: LauncherLink) -> None:
        """Wait, within bounds, until what a killed launcher left is gone."""
        link.swept.wait(link.policy.grace + _SWEPT_MARGIN)

    # -- the end -------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End the run in order: close the launchers, dismiss the sidecar, wait for it."""
        global _current
        if os.getpid() != self.owner.pid:
            return
        with _lock:
            if _current is self:
                _current = None
        self._is_over = True
        self.monitor.shut_down(_RETIRE_TIMEOUT)
        self.tracker.close()
        # There was no sidecar that could have done so. With the one the other stays.
        if self.monitor.sidecar.failure and container.remove(self.cgroup):
            self.files.retire()
        self.files.close()
        self.reports.close()
        self.reporters.close()
        self._end.close()

    def forget(self) -> None:
        """In a forked child: let go of all that is the owner's, and touch nothing."""
        self.monitor.forget()
        self.tracker.forget()
        self.files.close()
        self.reports.close()
        self.reporters.close()
        self._end.close()


_SHARED_IDLE = 0.5
"""Seconds that the launcher for bare processes stays without one."""

_current: Run | None = None
_is_making = False
_lock = threading.RLock()


def current() -> Run:
    """The run of this process, made at first use. Raises ProtectionError."""
    global _current, _is_making
    with _lock:
        if _is_making:
            raise ProtectionError(
                "the run is just being made in this very thread; a signal handler, a finalizer "
                "or a logging handler came in between. Start the process outside of it"
            )
        if _current is None:
            _is_making = True
            try:
                _current = Run()
            finally:
                _is_making = False
        return _current


def _shut_down() -> None:
    if _current is not None:
        _current.shutdown()


at_exit.register(_shut_down)


def _forget_in_child() -> None:
    global _current, _is_making, _lock
    _lock = threading.RLock()
    _is_making = False
    run, _current = _current, None
    if run is not None:
        run.forget()


os.register_at_fork(
    before=in_flight.close_gate,
    after_in_parent=in_flight.open_gate,
    after_in_child=in_flight.renew_gate,
)
os.register_at_fork(after_in_child=_forget_in_child)


def _cwd() -> str:
    try:
        return os.getcwd()
    except OSError:
        return ""  # the folder was removed; the record is for people


def _be_launcher(
    config: LauncherConfig,
    owner_end: socket.socket,
    control: socket.socket,
    reporters: socket.socket,
    pidfd: int,
    tracker: int,
    make: MakeProcess,
    owner_mask: Iterable[int],
) -> None:
    """In the fork: be the launcher."""

    def be_worker(request: StartRequest, parentage: Parentage) -> NoReturn:
        share_tracker(tracker)
        run_process(make(request), os.dup(parentage.owner_pidfd))

    owner_end.close()
    in_flight.forget_gate()
    if sys.stdin is not None:
        # A thread of the owner that reads from it holds its lock, here for ever; and
        # multiprocessing closes it in every worker, which waits for that lock.
        sys.stdin = open(os.devnull, encoding="utf-8")
    children = loop.ChildLoop(worker_mask=owner_mask)
    set_tag(helper_tag(read_tag(), config.run_id))
    launcher_start.serve(config, control, reporters, pidfd, be_worker, children)
