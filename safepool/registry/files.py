"""Writing: the files of one run, from its start to its retirement.

Order matters, since any of these processes may be killed between two steps:

* start: lock, then record. Whoever sees a record can rely on its lock.
* end: record, members, then lock. What a killed process leaves half done is a lock
  or a member without a record; it names no run and is removed when it is old.

Called by: the owner (create), the sidecar and launchers (attach), later runs and the
command line (attach, claim).
"""

from __future__ import annotations

import errno
import os
import time

from safepool.core.record import (
    Member,
    RunRecord,
    format_record,
    is_run_id,
    member_name,
    parse_member_name,
)
from safepool.errors import ProtectionError
from safepool.registry import lock, place

KEPT_LOGS = 50
"""How many logs of ended runs are kept, at most."""
KEPT_LOG_AGE = 30 * 86400.0
"""How long the log of an ended run is kept, in seconds."""
DEBRIS_AGE = 3600.0
"""After how many seconds files without a record are taken for left-overs."""
HEARTBEAT = 60.0
"""Within how many seconds the sidecar repeats its sign of life."""

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_ADD = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
# Private, and sticky so that tidy-up programs leave it alone; see the lock.
_MODE = 0o1600


class RunFiles:
    """The files of one run, as its owner, its sidecar, a launcher or a later sweeper sees them.

    A copy in a forked child works like an attached one; it does not hold the lock.
    Not for use by two threads at once.
    """

    def __init__(self, directory: str, run_id: str) -> None:
        if not is_run_id(run_id):
            raise ValueError(f"a run ID is 32 hexadecimal digits, not {run_id!r}")
        self.directory = directory
        self.run_id = run_id
        self._lock = lock.RunLock(self._path("lock"), run_id)

    @classmethod
    def create(cls, directory: str, record: RunRecord) -> RunFiles:
        """Write a new run down and take its lock, in the process that is its owner.

        Raises:
            ProtectionError: it cannot be written (full disk, no permission, too many
                open files, a file system without locks); nothing is left behind.
        """
        files = cls(directory, record.run_id)
        try:
            with place.verified(directory):
                files._lock.create()
            try:
                write_whole(files._path("run"), format_record(record))
            except BaseException:
                files.retire()
                raise
        except OSError as error:
            raise place.protection_error("write the run down", directory, error) from error
        return files

    def write_again(self, record: RunRecord) -> OSError | None:
        """Replace the record as a whole; return what went wrong: then the old one stays."""
        try:
            write_whole(self._path("run"), format_record(record))
        except OSError as error:
            return error
        return None

    @classmethod
    def attach(cls, directory: str, run_id: str) -> RunFiles:
        """Refer to the files of a run that another process created; opens nothing yet."""
        return cls(directory, run_id)

    def claim(self) -> bool:
        """Take the lock of a run whose owner is gone; True if this process has it now.

        Whoever has it sweeps and retires the run, alone: of two that claim in the same
        instant one gets False. The kernel frees it when the claimer ends, so the claim
        of one that was killed is simply taken over. False also when the run lives, was
        retired meanwhile, or cannot be locked. Do not call it in the owner.
        """
        if not self._lock.take():
            return False
        # Between our open and our lock another may have swept and retired the run.
        if os.path.lexists(self._path("run")):
            return True
        self._lock.release()
        return False

    def add_member(self, member: Member) -> OSError | None:
        """Write a process of the run down; return what went wrong, if anything did."""
        try:
            os.close(os.open(self._member_path(member), _NEW, _MODE))
        except FileExistsError:
            return None
        except OSError as error:
            return error
        return None

    def remove_member(self, member: Member) -> OSError | None:
        """Strike a process off once it is known to be gone; return what went wrong."""
        return unlink(self._member_path(member))

    def members(self) -> tuple[Member, ...]:
        """The processes that are written down now; none if the directory cannot be read."""
        try:
            names = os.listdir(self.directory)
        except OSError:
            return ()
        return members_by_run(names).get(self.run_id, ())

    @property
    def log_path(self) -> str:
        """Where :meth:`append_log` writes."""
        return self._path("log")

    def give_sign_of_life(self) -> OSError | None:
        """Note that the run lives now; the sidecar calls it every ``HEARTBEAT`` seconds."""
        # The wall clock may be set between this and its reading. So the time of the last access,
        # which nobody needs, tells it in seconds since boot; it is never read otherwise.
        try:
            os.utime(self._path("lock"), ns=(int(_since_boot() * 1e9), time.time_ns()))
        except OSError as error:
            return error
        return None

    def last_sign_of_life(self, now: int) -> int:
        """Until when the run may have lived at the latest; this and ``now`` in clock ticks.

        ``now`` is the instant of the call, in the unit of process start times.

        What bears the run's mark but started later was not started by the run: a
        server that a task left behind hands the mark to shells opened days later.
        Without a lock file 0, after which everything has started.
        """
        try:
            found = os.stat(self._path("lock"))
        except OSError:
            return 0
        age = _since_boot() - found.st_atime_ns / 1e9
        if age < 0:  # no sign was given yet, or a program has read the file: that is wall time
            age = time.time() - found.st_mtime
        age = max(0.0, age - HEARTBEAT)
        return max(0, now - int(age * os.sysconf("SC_CLK_TCK")))

    def append_log(self, text: str) -> OSError | None:
        """Add ``text`` to the run's log in one write; return what went wrong."""
        data = text.encode("utf-8", "backslashreplace")
        try:
            fd = os.open(self.log_path, _ADD, _MODE)
            try:
                written = os.write(fd, data)
            finally:
                os.close(fd)
        except OSError as error:
            return error
        if written < len(data):
            return OSError(errno.ENOSPC, "the log entry was cut short", self.log_path)
        return None

    def retire(self) -> OSError | None:
        """Remove the run from the registry and let go of its lock. A log that says something stays.

        After a clean sweep, by whoever swept. May be called again. Returns the first
        error, if any; the rest is removed all the same.
        """
        errors = [unlink(self._path("run"))]
        errors += [unlink(self._member_path(member)) for member in self.members()]
        if _is_empty(self.log_path):
            errors.append(unlink(self.log_path))
        errors.append(unlink(self._path("lock")))
        self.close()
        prune(self.directory)
        return next((error for error in errors if error is not None), None)

    def close(self) -> None:
        """Let go of the lock; the run stays on record. May be called again."""
        self._lock.release()

    def _path(self, suffix: str) -> str:
        return os.path.join(self.directory, f"{self.run_id}.{suffix}")

    def _member_path(self, member: Member) -> str:
        return os.path.join(self.directory, member_name(self.run_id, member))


def members_by_run(names: list[str]) -> dict[str, tuple[Member, ...]]:
    """The members that the names of a registry's files stand for, by run ID."""
    found: dict[str, list[Member]] = {}
    for name in names:
        parsed = parse_member_name(name)
        if parsed is not None:
            found.setdefault(parsed[0], []).append(parsed[1])
    return {run_id: tuple(sorted(members)) for run_id, members in found.items()}


def prune(directory: str) -> None:
    """Remove logs of ended runs that are too many or too old, and what unfinished starts left.

    Nothing of a run that has a record is touched. Errors are passed over: tidying is
    never worth a failure.
    """
    try:
        with place.verified(directory) as fd:
            names = set(os.listdir(fd))
            # Ages are by the wall clock, since that is what the file system writes.
            now = time.time()
            logs: list[tuple[float, str]] = []
            for name in names:
                run_id, _, suffix = name.removeprefix(".").partition(".")
                if not is_run_id(run_id) or f"{run_id}.run" in names:
                    continue
                age = _age(name, fd, now)
                if suffix == "log":
                    logs.append((age, name))
                elif age > DEBRIS_AGE and lock.is_unlocked(fd, f"{run_id}.lock", run_id):
                    unlink(os.path.join(directory, name))
            for rank, (age, name) in enumerate(sorted(logs)):
                if rank >= KEPT_LOGS or age > KEPT_LOG_AGE:
                    unlink(os.path.join(directory, name))
    except (OSError, ProtectionError):
        return


def write_whole(path: str, data: bytes) -> None:
    """Make the file appear at ``path`` with all of ``data``, or not at all."""
    base, name = os.path.split(path)
    part = os.path.join(base, f".{name}.part")
    fd = os.open(part, _NEW, _MODE)
    try:
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(fd, rest) :]
        finally:
            os.close(fd)
        os.rename(part, path)
    except BaseException:
        unlink(part)
        raise


def _since_boot() -> float:
    """Now, by the clock that start times are counted in: it goes on while the machine sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _age(name: str, fd: int, now: float) -> float:
    """The age of a file in the directory, in seconds; 0 if it is just gone."""
    try:
        return now - os.lstat(name, dir_fd=fd).st_mtime
    except OSError:
        return 0.0


def _is_empty(path: str) -> bool:
    """Tell whether a file is there and empty."""
    try:
        return os.stat(path).st_size == 0
    except OSError:
        return False


def unlink(path: str) -> OSError | None:
    """Remove a file; one that is not there is removed. Return any other error."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        return error
    return None
