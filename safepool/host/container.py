"""A run's cgroup as a whole: who is in it, and frozen, thawed, killed, removed.

Never a cgroup that the run did not make: its name holds the run's 128-bit ID, and
whoever opens it compares the inode of the directory with the one on record. From
then on everything goes through that descriptor, which means no other directory.

Methods answer False or None for what the kernel refuses; they raise no OSError,
since a sweep goes on by signals then.

Does, decides nothing. Called by: the sweeper, which acts upon it; launcher, sidecar
and the start-up sweep, which open and remove it.
"""

from __future__ import annotations

import errno
import os
import select
import time
from contextlib import suppress

from safepool.core.containment import Listing
from safepool.core.identity import CgroupName
from safepool.host.cgroup import write
from safepool.host.own import ticks

PATIENCE = 1.0
"""Seconds that the last of the dead may take to leave a cgroup, when nobody waits."""

_NEXT_TRY = 0.005
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Container:
    """A cgroup of a run, held by a descriptor of its directory. Close it."""

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self.fd = fd

    @classmethod
    def open(cls, name: CgroupName) -> Container | None:
        """Open the very cgroup of that name; None when it is gone, or is another."""
        if not name.inode:
            return None
        try:
            fd = os.open(name.path, _DIRECTORY)
        except OSError:
            return None
        if os.fstat(fd).st_ino != name.inode:
            os.close(fd)
            return None
        return cls(name.path, fd)

    def close(self) -> None:
        """Let go of the descriptor. Closing twice does nothing."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def listing(self) -> Listing | None:
        """Everybody in it and below; None when that cannot be told for sure."""
        begun_at = ticks()
        try:
            pids = frozenset(pid for path in _tree(self.fd) for pid in _pids_in(path, self.fd))
        except (OSError, ValueError):
            return None
        return Listing(pids, begun_at)

    def freeze(self) -> bool:
        """Stop everybody inside, and whoever is born there."""
        return write("cgroup.freeze", b"1", self.fd) is None

    def thaw(self) -> bool:
        """Let everybody inside go on, also in what was frozen below."""
        try:
            errors = [write(f"{path}/cgroup.freeze", b"0", self.fd) for path in _tree(self.fd)]
        except OSError:
            return False
        return not any(errors)

    def kill(self) -> bool:
        """End everybody inside, the frozen and the just born as well (Linux 5.14)."""
        return write("cgroup.kill", b"1", self.fd) is None

    def remove(self, patience: float) -> bool:
        """Remove it with all that is below, once nobody lives in it; True when it is gone.

        Waits ``patience`` seconds at most for the last to be taken down.
        """
        until = time.monotonic() + patience
        try:
            while not self._is_removed():
                left = until - time.monotonic()
                if left <= 0:
                    return False
                self._wait_empty(left)
        except FileNotFoundError:
            return True
        except OSError as error:
            # ENODEV: somebody else has removed what we hold. EACCES and the like last.
            return error.errno == errno.ENODEV
        return True

    def _is_removed(self) -> bool:
        if b"populated 1" in _read("cgroup.events", self.fd):
            return False
        try:
            for path in reversed(_tree(self.fd)[1:]):
                with suppress(FileNotFoundError):
                    os.rmdir(path, dir_fd=self.fd)
            if os.stat(self.path).st_ino == os.fstat(self.fd).st_ino:
                os.rmdir(self.path)
        except OSError as error:
            if error.errno == errno.EBUSY:
                return False
            raise
        return True

    def _wait_empty(self, patience: float) -> None:
        fd = os.open("cgroup.events", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.fd)
        try:
            poll = select.poll()
            poll.register(fd, select.POLLPRI)
            if b"populated 1" in os.read(fd, 4096):
                poll.poll(patience * 1000)
                return
        finally:
            os.close(fd)
        # Empty, but not to be removed yet: the kernel has no event for that.
        select.select([], [], [], min(patience, _NEXT_TRY))


def make_for_launcher(run: CgroupName, launcher_id: int) -> None:
    """Make the cgroup for the workers of a launcher, in that of the run, if it is allowed."""
    container = Container.open(run)
    if container is not None:
        with suppress(OSError):
            os.mkdir(f"launcher-{launcher_id}", dir_fd=container.fd)
        container.close()


def of_launcher(run: CgroupName, launcher_id: int) -> Container | None:
    """Open the cgroup for the workers of a launcher; None where there is none.

    The caller closes it.
    """
    container = Container.open(run)
    if container is None:
        return None
    try:
        name = f"launcher-{launcher_id}"
        fd = os.open(name, _DIRECTORY, dir_fd=container.fd)
        return Container(f"{run.path}/{name}", fd)
    except OSError:
        return None
    finally:
        container.close()


def remove(name: CgroupName, patience: float = PATIENCE) -> bool:
    """Remove a run's cgroup, when nobody lives in it any more; True when there is none.

    Waits ``patience`` seconds at most for the last to be taken down.
    """
    container = Container.open(name)
    if container is not None:
        try:
            return container.remove(patience)
        finally:
            container.close()
    if name.path and not name.inode:
        # It was just being made. In use by anybody, it stays: rmdir takes empty ones only.
        with suppress(OSError):
            os.rmdir(name.path)
    return not _is_there(name)


def _is_there(name: CgroupName) -> bool:
    try:
        found = os.stat(name.path)
    except FileNotFoundError:
        return False
    return not name.inode or found.st_ino == name.inode


def _read(name: str, directory: int) -> bytes:
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    try:
        parts = []
        while data := os.read(fd, 1 << 16):
            parts.append(data)
        return b"".join(parts)
    finally:
        os.close(fd)


def _tree(directory: int) -> list[str]:
    """The cgroup and all below it, by path from the directory, parents first."""
    paths = ["."]
    for path in paths:
        try:
            fd = os.open(path, _DIRECTORY, dir_fd=directory)
        except FileNotFoundError:
            continue  # removed meanwhile, so nobody is in it
        try:
            with os.scandir(fd) as entries:
                paths += [
                    f"{path}/{entry.name}"
                    for entry in entries
                    if entry.is_dir(follow_symlinks=False)
                ]
        finally:
            os.close(fd)
    return paths


def _pids_in(path: str, directory: int) -> list[int]:
    """Raises ValueError when somebody inside has no pid here: another pid namespace."""
    try:
        pids = [int(word) for word in _read(f"{path}/cgroup.procs", directory).split()]
    except OSError as error:
        # Removed meanwhile, or threaded: then its processes are listed further up.
        if error.errno in (errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP):
            return []
        raise
    if 0 in pids:
        raise ValueError("a process without a pid in this namespace")
    return pids
