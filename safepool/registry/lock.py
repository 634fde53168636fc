"""The lock of a run: a witness that somebody looks after it.

The owner holds it while it lives; after its death whoever sweeps the run. It is a
POSIX record lock: a forked child does not inherit it, whatever descriptors it keeps,
and the kernel frees it when its holder ends or execs. There are two prices:

* **Closing any descriptor of the file drops the lock of the whole process.** So
  nothing but this module opens the file, and :func:`is_held` never opens it in a
  process that holds it.
* It does not hold between threads of one process; the table below does that.

Only a plain file of this user is a lock. A pipe, a device or somebody else's file of
that name says nothing: the kernel would call it free.

Called by: the other modules of the registry.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import sys

# The locks of this process: run ID -> pid that took it, and the file. A fork copies the table,
# not the locks.
_held: dict[str, tuple[int, tuple[int, int]]] = {}


class RunLock:
    """The lock of one run, held or not, as one process sees it."""

    def __init__(self, path: str, run_id: str) -> None:
        self._path = path
        self._run_id = run_id
        self._fd = -1
        self._taken_by = 0
        self._file = (0, 0)

    def create(self) -> None:
        """Make the file and lock it; FileExistsError if there is one, OSError otherwise."""
        # The sticky bit asks tidy-up programs to leave a file alone however old it gets (XDG
        # base directory specification); on a plain file it means nothing else.
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(self._path, flags, 0o1600)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(fd)
            os.unlink(self._path)
            raise
        self._keep(fd)

    def take(self) -> bool:
        """Lock the existing file if nobody has; False also if it is missing."""
        if holds(self._run_id):
            return self._fd >= 0 and self._taken_by == os.getpid()
        try:
            fd = _open(self._path, None)
        except OSError:
            return False
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            return False
        self._keep(fd)
        return True

    def release(self) -> None:
        """Let go; in a forked copy, which has no lock, close the inherited descriptor."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        if self._taken_by == os.getpid():
            _held.pop(self._run_id, None)
        elif not self._is_lock_file(fd):
            return  # the child closed what it inherited, and this number means something else now
        os.close(fd)

    def _is_lock_file(self, fd: int) -> bool:
        """Tell whether the descriptor still is that of the file that was locked."""
        try:
            return _file_of(os.fstat(fd)) == self._file
        except OSError:
            return False

    def _keep(self, fd: int) -> None:
        self._fd = fd
        self._taken_by = os.getpid()
        self._file = _file_of(os.fstat(fd))
        _held[self._run_id] = (self._taken_by, self._file)


def holds(run_id: str) -> bool:
    """Tell whether this very process holds the lock of the run."""
    return _held.get(run_id, (0, (0, 0)))[0] == os.getpid()


def is_held(directory_fd: int, name: str, run_id: str) -> bool | None:
    """Tell whether any process holds the lock; None if that cannot be told.

    ``name`` is that of the lock file in the directory. A missing file is None: what
    was removed may still be locked.
    """
    if holds(run_id):
        return True
    try:
        fd = _open(name, directory_fd)
    except OSError:
        return None
    try:
        return _ask(fd)
    except OSError:
        return None
    finally:
        os.close(fd)


def is_unlocked(directory_fd: int, name: str, run_id: str) -> bool | None:
    """Tell whether nobody holds the lock of a run that is over or never began; None if unsure.

    Such a run may have lost its lock file already: then nobody does.
    """
    held = is_held(directory_fd, name, run_id)
    if held is not None:
        return not held
    try:
        os.lstat(name, dir_fd=directory_fd)
    except FileNotFoundError:
        return True
    except OSError:
        return None
    return None  # there is something that cannot be examined


def _open(path: str, directory_fd: int | None) -> int:
    """Open a lock file; OSError unless it is a plain file of ours that this process has not locked.

    It is looked at before it is opened: under a second name it could be a file that this
    process has locked, and closing that again would drop the lock.
    """
    found = os.stat(path, dir_fd=directory_fd, follow_symlinks=False)
    ours = {file for pid, file in _held.values() if pid == os.getpid()}
    is_plain = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
    if not is_plain or _file_of(found) in ours:
        raise OSError(errno.EINVAL, "not a lock file that can be examined", path)
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory_fd)
    if _file_of(os.fstat(fd)) != _file_of(found):  # replaced in between
        os.close(fd)
        raise OSError(errno.EAGAIN, "the lock file has just been replaced", path)
    return fd


def _file_of(found: os.stat_result) -> tuple[int, int]:
    """What names a file whatever it is called."""
    return found.st_dev, found.st_ino


def _ask(fd: int) -> bool:
    """Tell whether another process has locked the file."""
    if sys.platform == "linux" and sys.maxsize > 2**32:
        # F_GETLK takes no lock itself, so any number of readers may ask at once. The layout is
        # that of struct flock on every 64-bit Linux: fcntl(2).
        layout = "hhqqi4x"
        question = struct.pack(layout, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        answer = fcntl.fcntl(fd, fcntl.F_GETLK, question)
        return bool(struct.unpack(layout, answer)[0] != fcntl.F_UNLCK)
    # Elsewhere a trial; two that try at once may each take the other for a holder, which spares.
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True
    return False
