"""Where the registry lies, and that it is this user's alone.

Its files say which processes may be ended. Whoever can write there can have
processes of this user ended, and whoever can read there sees command lines. So the
directory is made with mode 0700 and verified at every use, by descriptor: it is a
real directory, it is ours, and its mode is still 0700. Anything else is refused.

Called by: the other modules of the registry; by the owner once per run.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from safepool.errors import ProtectionError

# What makes a base directory one that is not meant for us; anything else is an error to be told.
_UNUSABLE = {errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS}
_ADVICE = {
    errno.ENOSPC: "make room there, or set XDG_RUNTIME_DIR to another directory of yours",
    errno.EDQUOT: "make room there, or set XDG_RUNTIME_DIR to another directory of yours",
    errno.EMFILE: "close some files, or raise the limit (ulimit -n)",
    errno.ENFILE: "the whole system has too many open files",
    errno.ENOLCK: "its file system has no locks; set XDG_RUNTIME_DIR to a local directory",
}


def directory(env: Mapping[str, str] = os.environ) -> str:
    """Return the path of this user's registry; make it if need be, and verify it.

    The choices in order: ``$XDG_RUNTIME_DIR/safepool``, ``$XDG_STATE_HOME/safepool``,
    ``safepool-UID`` in ``$TMPDIR`` or ``/tmp``. A base that is missing, read-only or
    somebody else's is passed over: ``su`` and ``sudo -E`` hand down the variables of
    another user, and that must not keep programs from running. But a registry that
    exists already and is not private to us is refused: somebody put it there.

    Raises:
        ProtectionError: the registry is no directory, a symbolic link, another
            user's or open to others, or none can be made; the message says what to do.
    """
    problem = "no base directory is usable"
    for base, name in _choices(env):
        path = os.path.join(base, name)
        try:
            _make(path)
            with verified(path):
                if os.access(path, os.W_OK | os.X_OK):
                    return path
                # Ours and 0700: then it lies in a file system that is mounted read-only.
                problem = f"{path} cannot be written"
        except OSError as error:
            if error.errno not in _UNUSABLE:
                raise protection_error("make the registry of runs", base, error) from error
            problem = f"{base}: {error.strerror}"
    raise ProtectionError(
        f"no place for safepool's registry of runs: {problem}; "
        "set XDG_RUNTIME_DIR to a directory of your own that can be written"
    )


def existing_directory(env: Mapping[str, str] = os.environ) -> str | None:
    """Return the path that :func:`directory` would, if it is there already; make nothing.

    Raises:
        ProtectionError: there is one, and it is not private to this user.
    """
    for base, name in _choices(env):
        path = os.path.join(base, name)
        try:
            with verified(path):
                return path
        except FileNotFoundError:
            if os.access(base, os.W_OK | os.X_OK):
                return None  # here it would be made, so there are no records
        except OSError as error:
            if error.errno not in _UNUSABLE:
                raise protection_error("read the registry of runs", base, error) from error
    return None


@contextmanager
def verified(path: str) -> Iterator[int]:
    """Open the registry as a descriptor, for the block; its privacy is verified first.

    Raises:
        ProtectionError: it is not private to this user.
        OSError: it does not exist or cannot be opened.
    """
    # Before the open as well, which tells a stranger's closed directory from a missing one.
    _check(path, os.lstat(path))
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _check(path, os.fstat(fd))
        yield fd
    finally:
        os.close(fd)


def protection_error(doing: str, path: str, error: OSError) -> ProtectionError:
    """Say that the registry could not do its part, with the system's reason and the next step."""
    otherwise = "set XDG_RUNTIME_DIR to a directory of your own that can be written"
    advice = _ADVICE.get(error.errno or 0, otherwise)
    return ProtectionError(f"cannot {doing} in {path}: {error.strerror or error}; {advice}")


def _choices(env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The base directories in order, each with the name of the registry in it."""
    for variable in ("XDG_RUNTIME_DIR", "XDG_STATE_HOME"):
        base = env.get(variable, "")
        # The XDG specification says that a relative path is to be ignored.
        if os.path.isabs(base) and _is_ours(base):
            yield base, "safepool"
    for base in (env.get("TMPDIR", ""), "/tmp"):
        if os.path.isabs(base):
            yield base, f"safepool-{os.geteuid()}"


def _is_ours(base: str) -> bool:
    """Tell whether a base directory exists and belongs to this user."""
    try:
        return os.stat(base).st_uid == os.geteuid()
    except OSError:
        return False  # missing, or in a place where we may not even look: the next choice


def _make(path: str) -> None:
    """Make the directory with mode 0700 unless something is there already."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        return
    if stat.S_IMODE(os.lstat(path).st_mode) & 0o777 != 0o700:
        os.chmod(path, 0o700)  # the umask took bits away from the owner


def _check(path: str, found: os.stat_result) -> None:
    """Raise ProtectionError unless this is a directory of ours with mode 0700."""
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISDIR(found.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "not a directory"
        reason = f"it is {kind}"
    elif found.st_uid != os.geteuid():
        reason = f"it belongs to user {found.st_uid}, not to {os.geteuid()}"
    elif mode & 0o777 != 0o700:
        reason = f"its mode is {mode:04o}, not 0700"
    else:
        return
    raise ProtectionError(
        f"safepool's registry of runs {path} is refused: {reason}. Its files say which processes "
        "may be ended, so it must be yours alone. Look at it, remove it and start again; or set "
        "XDG_RUNTIME_DIR to a directory of your own"
    )
