"""Detached processes: started by a task, and meant to stay.

A process leaves a run by two signs, both given before its program runs: the mark is
not in its environment, and its tag is that of a detached process, which it hands down.
So whatever ends, it and all that it starts are passed over by every sweep, and nobody
waits for them. A record in the registry tells people of it, and is a second witness.

Called by: users, as ``safepool.detached``.
"""

from __future__ import annotations

import logging
import os
import resource
import subprocess
from collections.abc import Callable, Mapping
from typing import Any

from safepool import registry
from safepool.core.identity import Incarnation
from safepool.core.lineage import MARK_VARIABLE, detached_tag, innermost
from safepool.core.record import is_run_id
from safepool.errors import ProtectionError, SafePoolError
from safepool.host import cgroup, choose

_log = logging.getLogger("safepool")


class DetachedPopen(subprocess.Popen[Any]):
    """``subprocess.Popen`` for a process that may outlive its run, with all that it starts.

    No sweep touches it: it survives the end of its task, of its worker, of the pool
    (``terminate``, too), the owner's SIGKILL and whatever else ends, and the sweep of
    the next start. Pools and ``join`` do not wait for it. It is on record until it is
    gone (``safepool.registry.detached_processes``). To end it is up to you.

    To be used where ``subprocess.Popen`` is, in an owner, in a worker, also of a
    pool within a worker, and in a process that has nothing to do with safepool.

    Args:
        args, bufsize, ...: those of ``subprocess.Popen``, in its order; ``env`` loses
            the variable ``SAFEPOOL_RUN``, and ``preexec_fn`` runs after our own.
        start_new_session: True here, so that a Ctrl-C at the terminal and its closing
            do not end the process. Left out if ``process_group`` is given.

    Raises:
        ProtectionError: in a worker, if an administrator has bounded RLIMIT_RTTIME
            below the tag, by its hard limit, and with the portable backend: no sweep
            could tell the process from a stray. Nothing was started.
        Whatever ``subprocess.Popen`` raises.

    If the registry cannot be written the process is started all the same, and a
    warning of the logger ``safepool`` says that it is not on record.

    Safe in threads as far as ``preexec_fn`` is, since it is made with one: "NOT SAFE to
    use in the presence of threads ...: the child process could deadlock before exec is
    called" (docs.python.org/3/library/subprocess.html). Ours makes one system call and
    takes no lock; what is registered with ``os.register_at_fork`` runs as well. So the
    danger is that of ``os.fork`` in a program with threads. Not for signal handlers.

    What it cannot do: a detached program that sets RLIMIT_RTTIME itself loses the tag
    for what it starts; and other supervisors (a container, systemd, a terminal) end
    what they please.

    Example::

        def task():
            server = safepool.detached(["my-server", "--port", "8080"])
            return server.pid
    """

    _record: tuple[str, Incarnation] | None = None

    def __init__(
        self,
        args: Any,
        bufsize: int = -1,
        executable: Any = None,
        stdin: Any = None,
        stdout: Any = None,
        stderr: Any = None,
        preexec_fn: Callable[[], Any] | None = None,
        close_fds: bool = True,
        shell: bool = False,
        cwd: Any = None,
        env: Mapping[Any, Any] | None = None,
        universal_newlines: bool | None = None,
        startupinfo: Any = None,
        creationflags: int = 0,
        restore_signals: bool = True,
        start_new_session: bool = True,
        pass_fds: Any = (),
        **options: Any,
    ) -> None:
        run_id = _current_run()
        if options.get("process_group") not in (None, -1):
            start_new_session = False  # the leader of a session cannot change its group
        super().__init__(
            args,
            bufsize,
            executable,
            stdin,
            stdout,
            stderr,
            _leave_then(preexec_fn, run_id),
            close_fds,
            shell,
            cwd,
            _without_mark(os.environ if env is None else env),
            universal_newlines,
            startupinfo,
            creationflags,
            restore_signals,
            start_new_session,
            pass_fds,
            **options,
        )
        self._note(run_id, os.getcwd if cwd is None else lambda: os.fsdecode(cwd))

    def poll(self) -> int | None:
        """Return the exit status if the process has ended, else None."""
        super().poll()
        return self._noted_end()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return the exit status; see ``subprocess.Popen.wait``."""
        code = super().wait(timeout)
        self._noted_end()
        return code

    def __del__(self) -> None:
        # Without the warning of subprocess that it still runs: that is what it is for.
        super().__del__(_warn=_say_nothing)  # type: ignore[call-arg]

    def _note(self, run_id: str, cwd: Callable[[], str]) -> None:
        """Put the process on record."""
        host = choose.host()
        words = [self.args] if isinstance(self.args, (str, bytes, os.PathLike)) else self.args
        problem: Exception | None
        try:
            name = host.incarnation(self.pid)
            if name is None:
                return  # reaped by somebody else already
            directory = registry.directory()
            argv = [os.fsdecode(word) for word in words]
            problem = registry.note_detached(directory, host, name, run_id, argv, cwd())
            self._record = directory, name
        except (OSError, SafePoolError, TypeError) as error:
            problem = error
        if problem is not None:
            _log.warning("process %d is detached, but not on record: %s", self.pid, problem)

    def _noted_end(self) -> int | None:
        """Strike it off the record once it is reaped."""
        if self.returncode is not None and self._record is not None:
            record, self._record = self._record, None
            registry.strike_off_detached(*record)
        return self.returncode


def _say_nothing(*_: object, **__: object) -> None:
    """Stands in for ``warnings.warn``."""


def _current_run() -> str:
    """The innermost run that this process belongs to, as its mark says; "" for none."""
    run_id = innermost(os.environ.get(MARK_VARIABLE))
    return run_id if is_run_id(run_id) else ""


def _without_mark(env: Mapping[Any, Any]) -> dict[Any, Any]:
    return {name: env[name] for name in env if os.fsencode(name) != MARK_VARIABLE.encode()}


def _leave_then(preexec_fn: Callable[[], Any] | None, run_id: str) -> Callable[[], Any] | None:
    """What the child calls before its program runs: take on the tag, then the user's own."""
    if choose.is_portable():
        if run_id:
            raise ProtectionError(
                "no process can be detached within a run of the portable backend: it knows a "
                "process by its parents and its environment alone, so a sweep could not tell what "
                "it starts from a stray. Start it outside of the pool"
            )
        return preexec_fn
    # A process outside of any run needs no tag, but does not harm anybody with one.
    tag = detached_tag(run_id or "0" * 32)
    _, hard = resource.getrlimit(resource.RLIMIT_RTTIME)
    if hard != resource.RLIM_INFINITY and hard < tag:
        if run_id:
            raise ProtectionError(
                f"no process can be detached here: the hard limit RLIMIT_RTTIME is {hard}, and the "
                "tag by which sweeps spare a process needs more. Raise it (ulimit -HR unlimited) "
                "before the program starts, or start the process outside of the pool"
            )
        return preexec_fn

    door = cgroup.way_out()

    def leave() -> None:
        resource.setrlimit(resource.RLIMIT_RTTIME, (tag, hard))
        if door is not None:
            # Refused, it stays inside: then no sweep uses that cgroup as a whole.
            cgroup.write(door, b"0")
        if preexec_fn is not None:
            preexec_fn()

    return leave


detached = DetachedPopen
