"""Where a pool gets its workers from: one launcher, replaced if it is killed.

The seam between the engine, which knows tasks, and the run, which knows processes.

Called by: :mod:`safepool.context`; the engine's crew starts and closes.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from multiprocessing import process as mp_process
from multiprocessing import spawn
from typing import Any

from safepool import run, surroundings
from safepool.bootstrap import StartRequest
from safepool.core.policy import EndPolicy
from safepool.errors import ProtectionError
from safepool.host import own
from safepool.launcher_link import LauncherLink, LauncherLostError
from safepool.process import PROCESSES, SafeBase


class WorkerSource:
    """Where a pool gets its workers from: one launcher, replaced if it is killed.

    ``target(conn, *args)`` is what each worker runs. With fork the launcher is
    forked here and now, so workers see the owner as it is at this moment.
    ``environment``: what spawned workers have otherwise than the owner, from the start.
    """

    def __init__(
        self, method: str, target: Callable[..., None], args: tuple[Any, ...], policy: EndPolicy
    ) -> None:
        self.method = method
        self.policy = policy
        self.inherited: tuple[int, ...] = ()
        self.environment: tuple[tuple[str, str | None], ...] = ()
        self._target = target
        self._args = args
        self._count = 0
        self._run = run.current()
        if policy.spares and not own.keeps_orphans():
            raise ProtectionError(
                "strays='spare' needs the linux backend: the portable one knows a process by its "
                "parents and its environment alone, so later it could not tell what a spared one "
                "starts from a stray"
            )
        if method != "fork":
            spawn._check_not_importing_main()  # type: ignore[attr-defined]
        self._link: LauncherLink | None = self._new_link()

    def link(self) -> LauncherLink:
        """The launcher to use now. After a kill it is a new one, once the old one's
        leavings are gone: ports and locks are free again before a worker needs them."""
        link = self._link
        if link is None:
            raise ProtectionError("the pool is over: its launcher was closed")
        if link.is_lost:
            self._run.wait_until_swept(link)
            link = self._link = self._new_link()
        elif self.method != "fork" and link.credentials != surroundings.credentials():
            link = self._link = self._new_link()
        return link

    def _new_link(self) -> LauncherLink:
        if self.method == "fork":
            return self._run.fork_launcher(self._make, self.policy)
        return self._run.sidecar_launcher(self.method, self.policy)

    def _make(self, request: StartRequest) -> mp_process.BaseProcess:
        """In the forked worker: build its process object around the descriptor it got."""
        conn = socket.socket(fileno=request.inherited[0])
        return self._process(request.name, (conn, *self._args))

    def _process(self, name: str, args: tuple[Any, ...]) -> SafeBase:
        process: SafeBase = PROCESSES[self.method](target=self._target, args=args, name=name)
        return process

    def start(self, conn: socket.socket) -> SafeBase:
        """Start one worker at the other end of ``conn``, a socket; return its process.

        The worker is no daemon to itself, so that tasks may use pools of their own;
        to the owner it is, so that nobody waits for it at exit.
        """
        self._run.check()
        self._count += 1
        name = f"{_TITLES[self.method]}PoolWorker-{self._count}"
        for attempt in (1, 2):
            args = () if self.method == "fork" else (conn, *self._args)
            process = self._process(name, args)
            process._source = self
            process.grace = self.policy.grace
            process.on_owner_death = self.policy.on_owner_death
            self.inherited = (conn.fileno(),)
            process._config["daemon"] = False
            try:
                process.start()
            except LauncherLostError:
                if attempt == 2:
                    raise
                self._note_lost()
            else:
                process._config["daemon"] = True
                return process
        raise AssertionError("the last attempt returns or raises")

    def check(self) -> None:
        """Raise ProtectionError once it is known that workers run without protection."""
        self._run.check()

    def retiring(self, process: Any) -> None:
        """Before a worker is told to leave: its strays may be spared, and no others.

        An idle worker leaves as well when its owner has been killed; so the exit status
        alone would not say that the end was in order.
        """
        if self.policy.spares:
            process._popen.note_retiring()

    def _note_lost(self) -> None:
        if self._link is not None:
            self._link.is_lost = True

    def close(self) -> None:
        """Dismiss the launcher; it ends whatever is left below it."""
        link, self._link = self._link, None
        if link is not None:
            self._run.monitor.release(link)


_TITLES = {"fork": "Fork", "spawn": "Spawn", "forkserver": "ForkServer"}
