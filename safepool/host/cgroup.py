"""Where a run's own cgroup v2 can be: found, made, entered, left.

::

    …/the owner's own cgroup/safepool-RUN        made by the owner
                             └── launcher-N      made for launcher N; its workers live here

Where none can be made (no cgroup2 mount, read-only, no permission, a threaded
cgroup) ``place`` and ``make`` say so by an empty name, and nothing changes. What is
done to it later is in :mod:`safepool.host.container`.

Does, decides nothing; raises no OSError. Safe after fork. Called by: the owner's side
of a run, workers; ``leave`` by whoever lets a process go.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress

from safepool.core.identity import CgroupName

_OURS = re.compile(r"safepool-[0-9a-f]{32}")


def place(run_id: str) -> CgroupName:
    """Where a run that is owned by this process can have its cgroup; an empty name: nowhere."""
    own = directory_of()
    if own is None or not os.access(f"{own}/cgroup.procs", os.W_OK, effective_ids=True):
        return CgroupName()
    return CgroupName(f"{own}/safepool-{run_id}")


def is_delegated() -> bool:
    """May this process make cgroups of its own, by the word of whoever made the one that it is in?

    So it is in a run's own, in one that was handed to this user, and in one that systemd
    has marked (Delegate=yes sets the attribute; systemd's CGROUP_DELEGATION.md). Root
    can make them anywhere, but a supervisor that was not asked does not expect them.
    """
    own = directory_of()
    if own is None:
        return False
    if any(_OURS.fullmatch(part) for part in own.split("/")):
        return True
    try:
        if os.geteuid() and os.stat(own).st_uid == os.geteuid():
            return True
    except OSError:
        return False
    for name in ("trusted.delegate", "user.delegate"):
        # No such attribute, or none may be read.
        with suppress(OSError):
            if os.getxattr(own, name) == b"1":
                return True
    return False


def make(name: CgroupName) -> CgroupName:
    """Make the cgroup; the full name of it, or an empty one where the kernel refuses."""
    if not name.path:
        return name
    try:
        os.mkdir(name.path)
        # Below a threaded cgroup it is "domain invalid", and takes no process.
        with open(f"{name.path}/cgroup.type") as file:
            kind = file.read().strip()
        if kind != "domain":
            os.rmdir(name.path)
            return CgroupName()
        return CgroupName(name.path, os.stat(name.path).st_ino)
    except OSError:
        return CgroupName()


def threads_above(name: CgroupName) -> str:
    """The file that lists the threads of the cgroup in which that one is."""
    return f"{os.path.dirname(name.path)}/cgroup.threads"


def directory_of(pid: int | str = "self") -> str | None:
    """The directory of the cgroup v2 that a process is in, None where that cannot be told."""
    try:
        with open(f"/proc/{pid}/cgroup", encoding="utf-8", errors="surrogateescape") as file:
            lines = [line.rstrip("\n") for line in file]
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            mounts = [line for line in file if " - cgroup2 " in line]
    except OSError:
        return None
    paths = [line[3:] for line in lines if line.startswith("0::/")]
    for mount in mounts if paths else ():
        # proc_pid_mountinfo(5): the fourth field is what of the hierarchy is mounted at the fifth.
        root, point = (_unescaped(field) for field in mount.split()[3:5])
        directory = _in_mount(paths[0], root, point)
        if directory is not None and os.path.isdir(directory):
            return directory
    return None


def _in_mount(path: str, root: str, point: str) -> str | None:
    """Where a path of the hierarchy is, if what is mounted holds it."""
    prefix = root.rstrip("/")
    # Beyond the root of the cgroup namespace of this process.
    is_foreign = ".." in [*path.split("/"), *root.split("/")]
    if is_foreign or not f"{path}/".startswith(f"{prefix}/"):
        return None
    return f"{point.rstrip('/')}{path[len(prefix) :]}".rstrip("/")


def way_out(pid: int | str = "self") -> str | None:
    """The file by which a process leaves every run that it is in: write its pid, or "0", to it.

    None: it is in no run's cgroup. Look it up before a fork, and the child has one
    ``open`` and one ``write`` to do.
    """
    own = directory_of(pid)
    parts = own.split("/") if own is not None else []
    for position, part in enumerate(parts):
        if _OURS.fullmatch(part):
            return "/".join([*parts[:position], "cgroup.procs"])
    return None


def enter(directory: int) -> OSError | None:
    """Move this process into the cgroup of an open directory; return what went wrong.

    The first in a while waits for the kernel, some milliseconds; those right after it do not.
    """
    return write("cgroup.procs", b"0", directory)


def enter_above(directory: int, levels: int) -> OSError | None:
    """Move this process into the cgroup ``levels`` above that of an open directory."""
    return write(f"{'../' * levels}cgroup.procs", b"0", directory)


def write(name: str, data: bytes, directory: int | None = None) -> OSError | None:
    """Write to a file of a cgroup; return what went wrong, if anything did."""
    try:
        fd = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=directory)
        try:
            os.write(fd, data)
        finally:
            os.close(fd)
    except OSError as error:
        return error
    return None


def _unescaped(field: str) -> str:
    """A path of mountinfo: blanks and the like are written as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
