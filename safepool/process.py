"""SafeProcess: multiprocessing.Process whose whole tree ends with its owner.

The classes are multiprocessing's own ``BaseProcess``; only what stands behind
``start()`` differs. It asks a launcher for the worker, so the worker is the
launcher's child, not the owner's.

* fork: a launcher is forked for each process, since the process must see the owner
  as it is at ``start()``.
* spawn, forkserver: one launcher of the sidecar serves all.

The exit code arrives through a pipe of the process's own, when the process *and
what it started* are gone. So ``join()`` means that its ports, locks and memory are
free. ``terminate()`` ends the whole tree: SIGTERM, the grace, SIGKILL. ``kill()``
does so without grace.

Called by: :mod:`safepool.context`, users.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from multiprocessing import context as mp_context
from multiprocessing import get_start_method, spawn, util
from multiprocessing import process as mp_process
from multiprocessing.connection import wait as wait_for_objects
from typing import TYPE_CHECKING, Any, ClassVar

from safepool import payload, run, surroundings
from safepool.bootstrap import InheritedDescriptor, StartRequest, write_blob
from safepool.core.policy import DEFAULT_GRACE, checked_policy
from safepool.core.wire import Exited
from safepool.launcher_link import LauncherLink, LauncherLostError, StartedWorker, read_status
from safepool.worker_life import change_environment

if TYPE_CHECKING:
    from safepool.worker_source import WorkerSource

_ATTEMPTS = 5

_LOST_CODE = -9
"""Exit code of a worker whose launcher was killed: PDEATHSIG sent it SIGKILL."""


class SafePopen:
    """What ``BaseProcess`` keeps of a started process; the interface is multiprocessing's."""

    method: ClassVar[str]
    DupFd = InheritedDescriptor

    def __init__(self, process: SafeBase) -> None:
        util._flush_std_streams()  # type: ignore[attr-defined]
        self.returncode: int | None = None
        self.sentinel = -1
        self._fds: list[int] = []
        self._lock = threading.Lock()
        self._owner_pid = os.getpid()
        self._source = process._source
        self._policy = checked_policy(process.grace, process.on_owner_death)
        self._own_link = False
        self._kept: object = None
        self._run = run.current()
        self._link, self._worker = self._launch(process)
        self.pid = self._worker.incarnation.pid
        self.sentinel = self._worker.status_fd
        close = util.close_fds  # type: ignore[attr-defined]
        self.finalizer = util.Finalize(self, close, (self.sentinel,))

    def _launch(self, process: SafeBase) -> tuple[LauncherLink, StartedWorker]:
        raise AssertionError("each start method has its own")

    def duplicate_for_child(self, fd: int) -> int:
        """Take a descriptor along; called by multiprocessing's reducers while pickling."""
        self._fds.append(fd)
        return len(self._fds) - 1

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """Return the exit code if the process and its tree are gone, else None."""
        return self._await(None if flag == 0 else 0.0)

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the process and its tree, ``timeout`` seconds at most."""
        return self._await(timeout)

    def _await(self, timeout: float | None) -> int | None:
        if self.returncode is None and self._owner_pid == os.getpid():
            if not wait_for_objects([self.sentinel], timeout):
                return None
            with self._lock:
                if self.returncode is None:
                    self._settle()
        return self.returncode

    def _settle(self) -> None:
        """Take the exit code; without one the launcher was killed, which the monitor handles."""
        status = read_status(self.sentinel, 0)
        if not isinstance(status, Exited):
            self.returncode = _LOST_CODE
            return
        self.returncode = status.code
        self._kept = None
        self._link.numbers.discard(self._worker.number)
        if self._own_link:
            self._run.monitor.release(self._link)

    def terminate(self) -> None:
        """End the whole tree: SIGTERM, then the grace, then SIGKILL."""
        self._end(self._policy.grace)

    def kill(self) -> None:
        """End the whole tree at once."""
        self._end(0.0)

    def _end(self, grace: float) -> None:
        if self.returncode is None and self._owner_pid == os.getpid():
            self._link.end(self._worker.number, grace)

    def note_retiring(self) -> None:
        """Tell the launcher that a pool is about to send this worker away."""
        self._link.note_retiring(self._worker.number)

    def close(self) -> None:
        """Let go of the descriptor."""
        self.finalizer()


class ForkSafePopen(SafePopen):
    """fork: a launcher of its own, forked now; or the pool's, forked with the pool."""

    method = "fork"

    def _launch(self, process: SafeBase) -> tuple[LauncherLink, StartedWorker]:
        number = self._run.next_number()
        if self._source is not None:
            link = self._source.link()
            return link, link.start(number, process.name, inherited=self._source.inherited)

        def make(request: StartRequest) -> mp_process.BaseProcess:
            return process

        link = self._run.fork_launcher(make, self._policy, one_shot=True)
        self._own_link = True
        try:
            return link, link.start(number, process.name)
        except BaseException:
            self._run.monitor.release(link)
            raise


class SpawnSafePopen(SafePopen):
    """spawn: a fresh interpreter, exec'd by a launcher of the sidecar."""

    method = "spawn"

    def _launch(self, process: SafeBase) -> tuple[LauncherLink, StartedWorker]:
        # Semaphores among the arguments are unlinked when the last reference here is gone; the
        # worker has to find them first.
        self._kept = (process._target, process._args, process._kwargs)
        self._run.protect(wait=False)
        preparation = payload.preparation_data(process.name)
        by_value = not payload.main_is_importable(self.method)
        mp_context.set_spawning_popen(self)  # type: ignore[arg-type]
        try:
            pickled = payload.dumps(preparation) + payload.dumps(process, by_value=by_value)
        finally:
            mp_context.set_spawning_popen(None)
        arguments = [
            os.fsdecode(spawn.get_executable()),
            *util._args_from_interpreter_flags(),  # type: ignore[attr-defined]
        ]
        tracker = self._run.tracker.descriptor()
        # A pool's worker takes no Ctrl-C before its task loop has said what that means.
        blocked = () if self._source is None else (signal.SIGINT,)
        around = surroundings.gather(blocked)
        environment = dict(os.environ)
        if self._source is not None:
            change_environment(environment, self._source.environment)
        blob = write_blob(environment, arguments, around, pickled)
        try:
            return self._start(process.name, blob, tracker)
        finally:
            os.close(blob)

    def _start(self, name: str, blob: int, tracker: int) -> tuple[LauncherLink, StartedWorker]:
        """Start through the pool's or the shared launcher; that one may be leaving just now."""
        for attempt in range(1, _ATTEMPTS + 1):
            if self._source is not None:
                link = self._source.link()
            else:
                link = self._run.shared_launcher(self.method, self._policy)
            try:
                worker = link.start(
                    self._run.next_number(),
                    name,
                    stdio=True,
                    blob=blob,
                    tracker=tracker,
                    inherited=tuple(self._fds),
                )
            except LauncherLostError:
                link.is_lost = True
                if attempt == _ATTEMPTS:
                    raise
            else:
                return link, worker
        raise AssertionError("the last attempt returns or raises")


class ForkServerSafePopen(SpawnSafePopen):
    """forkserver: a fork of a launcher that has imported the main module."""

    method = "forkserver"


class SafeBase(mp_process.BaseProcess):
    """What the process classes of all start methods share."""

    grace: float = DEFAULT_GRACE
    """Seconds between SIGTERM and SIGKILL when the tree is ended; set it before ``start``."""

    on_owner_death: str = "terminate"
    """What its tree gets when the owner has ended: "terminate", SIGTERM and the grace, or
    "kill", SIGKILL at once; set it before ``start``."""

    _source: WorkerSource | None = None

    # What multiprocessing.process.BaseProcess keeps; the stubs do not name it.
    _popen: SafePopen | None
    _sentinel: int
    _parent_pid: int
    _config: dict[str, Any]
    _target: Any
    _args: Any
    _kwargs: Any
    _check_closed: Callable[[], None]
    _Popen: Callable[[SafeBase], SafePopen]

    def start(self) -> None:
        """Start the process, with its protection.

        As ``multiprocessing.Process.start``, but daemonic processes may have
        children, too: they cannot outlive it. Raises ProtectionError when the run
        cannot be protected, ValueError or TypeError when ``grace`` or
        ``on_owner_death`` makes no sense; nothing of the user's code has run then.
        Safe in threads; the process does not end with the thread.
        """
        self._check_closed()
        if self._popen is not None:
            raise AssertionError("cannot start a process twice")
        if self._parent_pid != os.getpid():
            raise AssertionError("can only start a process object created by current process")
        mp_process._cleanup()  # type: ignore[attr-defined]
        self._popen = popen = self._Popen(self)
        self._sentinel = popen.sentinel
        # The process object must not keep alive what only the worker needs (bpo-30775).
        del self._target, self._args, self._kwargs
        if self._source is None:
            # A pool's workers are not among them: the interpreter's exit joins all of them
            # without a bound, and the pool has ended its own within one.
            mp_process._children.add(self)  # type: ignore[attr-defined]

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state.pop("_source", None)
        return state


class SafeProcess(SafeBase):
    """A process that cannot outlive its owner, nor can anything it starts.

    Drop-in for ``multiprocessing.Process`` with the current start method, to be
    subclassed with ``run`` in the same way.

    Example::

        from safepool import SafeProcess

        if __name__ == "__main__":
            process = SafeProcess(target=print, args=("hello",))
            process.start()
            process.join()
    """

    _start_method = None

    @staticmethod
    def _Popen(process: SafeBase) -> SafePopen:  # noqa: N802 - multiprocessing's name
        popen: SafePopen = PROCESSES[get_start_method()]._Popen(process)
        return popen


class ForkSafeProcess(SafeBase):
    """SafeProcess with the start method fork."""

    _start_method = "fork"

    @staticmethod
    def _Popen(process: SafeBase) -> SafePopen:  # noqa: N802 - multiprocessing's name
        return ForkSafePopen(process)


class SpawnSafeProcess(SafeBase):
    """SafeProcess with the start method spawn."""

    _start_method = "spawn"

    # What the main module has made when it was imported is this process's own, to be
    # finalized at its end (https://github.com/python/cpython/issues/90549).
    _after_fork = staticmethod(mp_context.SpawnProcess._after_fork)  # type: ignore[attr-defined]

    @staticmethod
    def _Popen(process: SafeBase) -> SafePopen:  # noqa: N802 - multiprocessing's name
        return SpawnSafePopen(process)


class ForkServerSafeProcess(SafeBase):
    """SafeProcess with the start method forkserver."""

    _start_method = "forkserver"

    @staticmethod
    def _Popen(process: SafeBase) -> SafePopen:  # noqa: N802 - multiprocessing's name
        return ForkServerSafePopen(process)


PROCESSES: dict[str, Any] = {
    "fork": ForkSafeProcess,
    "spawn": SpawnSafeProcess,
    "forkserver": ForkServerSafeProcess,
}


def __getattr__(name: str) -> Any:
    """What else ``multiprocessing.process`` has: ``mp.process`` is one module for the user."""
    return getattr(mp_process, name)
