"""How a fork of the owner or of the sidecar becomes a launcher.

Called by: :mod:`safepool.run` in a fork of the owner (fork), the sidecar in a fork
of itself (spawn, forkserver).
"""

from __future__ import annotations

import gc
import os
import socket
from contextlib import suppress
from typing import NoReturn

from safepool import loop
from safepool.bootstrap import WorkerMain, exec_spawned, run_unpickled
from safepool.core.values import replace
from safepool.host import own
from safepool.launcher import Launcher
from safepool.launcher_config import LauncherConfig
from safepool.preload import preload, read_settings


def serve(
    config: LauncherConfig,
    control: socket.socket,
    reports: socket.socket,
    owner_pidfd: int,
    worker_main: WorkerMain,
    children: loop.ChildLoop,
) -> NoReturn:
    """Be the launcher, in the process that was forked to be one; never returns."""
    collects = gc.isenabled()

    def main() -> None:
        # The owner's objects are not this process's to finalize, nor their pages to touch.
        gc.disable()
        gc.freeze()
        own.adopt_orphans()
        launcher = Launcher(config, control, reports, owner_pidfd, worker_main, children)
        launcher.workers_collect = collects
        launcher.run()

    loop.end_with(main)


def serve_from_sidecar(
    config: LauncherConfig,
    method: str,
    control: socket.socket,
    reports: socket.socket,
    owner_pidfd: int,
    settings_fd: int,
    sidecar_pid: int,
) -> None:
    """Be a launcher for spawn or forkserver, in a fork of the sidecar; returns if that is gone.

    Back in the owner's process group, so that job control works as users know it.
    Signals have their default actions while modules are imported: a main module that
    never ends must not make the launcher deaf.
    """
    # The owner or its group may just have gone; then its terminal is no matter.
    with suppress(OSError):
        os.setpgid(0, os.getpgid(config.owner_pid))
    settings = read_settings(settings_fd)
    main: WorkerMain = exec_spawned
    if method == "forkserver":
        # The user's imports may take for ever, and nobody watches meanwhile.
        own.follow_parent()
        if os.getppid() != sidecar_pid:
            return
        preload(settings)
        own.follow_parent(0)
        main = run_unpickled
    config = replace(config, idle_after=settings.idle_after)
    serve(config, control, reports, owner_pidfd, main, loop.ChildLoop())
