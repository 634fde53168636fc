"""What a launcher of the sidecar is told by the owner, and what it imports beforehand.

A forkserver launcher imports the owner's main module (as ``__mp_main__``) and what
``multiprocessing.set_forkserver_preload`` named, once, so that its workers find all
that imported. The settings travel in an unnamed file.

Called by: :mod:`safepool.run` (writes), :mod:`safepool.sidecar` (reads, imports).
"""

from __future__ import annotations

import marshal
import os
import sys
from contextlib import suppress

from safepool.core.values import dataclass
from safepool.host import own


@dataclass(frozen=True)
class LauncherSettings:
    """``idle_after``: seconds without a worker until it leaves, None for never. The
    other fields matter to forkserver only."""

    idle_after: float | None
    modules: tuple[str, ...] = ()
    main_path: str | None = None
    sys_path: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    arguments: tuple[str, ...] = ()


def gather_settings(method: str, idle_after: float | None) -> LauncherSettings:
    """In the owner: what a launcher for this start method has to know."""
    if method != "forkserver":
        return LauncherSettings(idle_after)
    from multiprocessing import forkserver

    from safepool import payload

    data = payload.preparation_data("")
    return LauncherSettings(
        idle_after,
        modules=tuple(forkserver._forkserver._preload_modules),  # type: ignore[attr-defined]
        main_path=data.get("init_main_from_path"),
        # Some programs put Path objects there; CPython 3.14 stumbles over them.
        sys_path=tuple(os.fspath(entry) for entry in data["sys_path"]),
        environment=tuple(os.environ.items()),
        arguments=tuple(sys.argv),
    )


def write_settings(settings: LauncherSettings) -> int:
    """Return a descriptor from which the settings can be read."""
    fields = (
        settings.idle_after,
        settings.modules,
        settings.main_path,
        settings.sys_path,
        settings.environment,
        settings.arguments,
    )
    fd = own.unnamed_file("safepool-launcher")
    try:
        with open(fd, "wb", closefd=False) as file:
            marshal.dump(fields, file)
        os.lseek(fd, 0, os.SEEK_SET)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_settings(fd: int) -> LauncherSettings:
    """Read the settings and close the descriptor."""
    with open(fd, "rb") as file:
        return LauncherSettings(*marshal.load(file))


def preload(settings: LauncherSettings) -> None:
    """Import what was asked for. What fails here fails again in the worker, where the
    user sees it; a launcher that it could end would be no protection."""
    from multiprocessing import process, spawn

    sys.path[:] = settings.sys_path
    os.environ.update(settings.environment)
    sys.argv[:] = settings.arguments
    if "__main__" in settings.modules and settings.main_path is not None:
        current = process.current_process()
        current._inheriting = True  # type: ignore[attr-defined]
        with suppress(BaseException):
            spawn.import_main_path(settings.main_path)
        del current._inheriting  # type: ignore[attr-defined]
    for name in settings.modules:
        if name != "__main__":
            with suppress(BaseException):
                __import__(name)
