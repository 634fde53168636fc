"""Tries each mechanism that safepool relies on, on this machine and as this user.

Nothing is concluded from a version number: each probe does the thing itself, in
throw-away children where it would stick. Such a child waits at a pipe whose other end
this process holds, so it cannot outlive it, and every wait has a bound.

Called by: ``safepool doctor``.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from safepool import registry, run_container
from safepool.bootstrap import read_tag, set_tag, write_oom_score
from safepool.core.lineage import tag_of
from safepool.core.planner import Sig
from safepool.core.values import dataclass
from safepool.errors import SafePoolError
from safepool.host import cgroup, choose, container, prctl
from safepool.host.base import NoHandle
from safepool.host.linux import LinuxHost
from safepool.host.own import reap_child

_PATIENCE = 10.0
_RUN_ID = "d0c" * 10 + "d0"


@dataclass(frozen=True)
class Finding:
    """One mechanism: does it work, what was seen, and what would improve it ("" if it works).

    ``is_extra``: no promise depends on it.
    """

    mechanism: str
    what: str
    works: bool
    detail: str
    improvement: str = ""
    is_extra: bool = False


class _FailedError(Exception):
    """The mechanism does not work, because of this."""


def examine(host: LinuxHost) -> list[Finding]:
    """Try them all. Takes about a third of a second, some ten seconds each where one hangs."""
    prctl.load()
    return [_try(*probe, host) for probe in _PROBES]


def _try(
    mechanism: str,
    what: str,
    probe: Callable[[LinuxHost], str],
    improvement: str,
    is_extra: bool,
    host: LinuxHost,
) -> Finding:
    try:
        detail = probe(host)
    except (_FailedError, OSError, SafePoolError) as error:
        return Finding(mechanism, what, False, str(error), improvement, is_extra)
    return Finding(mechanism, what, True, detail, "", is_extra)


@contextmanager
def _child(work: Callable[[], str]) -> Iterator[tuple[int, str]]:
    """A child that has done ``work`` and waits; yields its pid and the answer.

    Raises _FailedError with the child's reason. It is gone after the block.
    """
    said, say = os.pipe()
    hold, let_go = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(let_go)
            try:
                answer = f"+{work()}"
            except BaseException as error:
                answer = f"-{error}"
            os.write(say, answer.encode("utf-8", "backslashreplace"))
            os.read(hold, 1)
        finally:
            os._exit(0)
    os.close(say)
    os.close(hold)
    try:
        answer = _hear(said)
        if answer[:1] != "+":
            raise _FailedError(answer[1:] or "the child that tried it died")
        yield pid, answer[1:]
    finally:
        os.close(let_go)
        os.close(said)
        reap_child(pid, _PATIENCE)


def _hear(fd: int) -> str:
    """What is written to a pipe, "" at its end; _FailedError if nothing comes."""
    if not select.select([fd], [], [], _PATIENCE)[0]:
        raise _FailedError(f"no answer in {_PATIENCE:g} s")
    return os.read(fd, 4096).decode()


# -- the probes ----------------------------------------------------------------------------


def _pidfd(host: LinuxHost) -> str:
    """A child is named, signalled through its pidfd, and dies of that signal."""
    if not hasattr(os, "pidfd_open"):
        raise _FailedError("this Python was built without pidfd_open")
    with _child(lambda: "") as (pid, _):
        name = host.incarnation(pid)
        handle = NoHandle.UNKNOWN if name is None else host.open(name)
        if isinstance(handle, NoHandle):
            raise _FailedError("a pidfd of a child cannot be opened or verified")
        try:
            host.send(handle, Sig.KILL)
            if not select.select([handle.fd], [], [], _PATIENCE)[0]:
                raise _FailedError("a process that was killed is not seen to end")
        finally:
            handle.close()
        if reap_child(pid, _PATIENCE) != -signal.SIGKILL:
            raise _FailedError("the signal did not arrive")
    return "a process is signalled and seen to end by its pidfd"


def _subreaper(host: LinuxHost) -> str:
    """An orphan goes to its grandparent."""

    def adopt() -> str:
        prctl.set_child_subreaper()
        said, say = os.pipe()
        hold, _let_go = os.pipe()
        if os.fork() == 0:
            try:
                if os.fork() == 0:
                    os.close(_let_go)
                    os.write(say, b"%d" % os.getpid())
                    os.read(hold, 1)
            finally:
                os._exit(0)
        orphan = int(_hear(said))
        os.waitpid(-1, 0)  # its parent: the orphan itself waits at the pipe
        row = host.row(orphan)
        if row is None or row.ppid != os.getpid():
            raise _FailedError("an orphan did not come to the process that asked for orphans")
        return ""

    with _child(adopt):
        return "orphans come to the launcher"


def _deathsig(host: LinuxHost) -> str:
    """A grandchild dies with its parent, though the pipe at which it waits stays open."""
    ended, life = os.pipe()
    hold, let_go = os.pipe()

    def tie() -> str:
        said, say = os.pipe()
        me = os.getpid()
        os.close(let_go)
        if os.fork() == 0:
            try:
                prctl.set_parent_death_signal(signal.SIGKILL)
                if os.getppid() == me:
                    os.write(say, b"armed")
                    os.read(hold, 1)
            finally:
                os._exit(0)
        os.close(life)
        return _hear(said)

    try:
        with _child(tie):
            os.close(life)
            life = -1
        # Only the grandchild has the other end now.
        if not select.select([ended], [], [], _PATIENCE)[0]:
            raise _FailedError("a process did not die with its parent")
    finally:
        for fd in (ended, hold, let_go, life):
            if fd >= 0:
                os.close(fd)
    return "workers die with their launcher"


def _proc(host: LinuxHost) -> str:
    if not host.sees_own_namespace():
        raise _FailedError("/proc is missing, or shows another pid namespace than this process's")
    own = os.getpid()
    if not os.access(f"/proc/{own}/task/{own}/children", os.R_OK):
        return "/proc is read whole at each look: the kernel has no lists of children"
    return "/proc shows this pid namespace, with lists of children"


def _hidepid(host: LinuxHost) -> str:
    with open("/proc/self/mounts") as mounts:
        for line in mounts:
            _, point, kind, options, *_ = line.split(" ")
            hidden = [o for o in options.split(",") if o.startswith("hidepid=")]
            if (point, kind) == ("/proc", "proc") and hidden and hidden[0] not in _SHOWS_ALL:
                raise _FailedError(f"/proc is mounted with {hidden[0]}")
    return "all of this user's processes can be seen"


_SHOWS_ALL = ("hidepid=0", "hidepid=off")


def _environ(host: LinuxHost) -> str:
    with open("/proc/self/environ", "rb") as file:
        file.read(1)
    return "environments can be read"


def _tag(host: LinuxHost) -> str:
    """A child sets the tag, and it can be read from here."""
    if choose.is_portable():
        raise _FailedError("the portable backend carries none")
    tag = tag_of(_RUN_ID, 1)

    def carry() -> str:
        set_tag(tag)
        if read_tag() != tag:
            raise _FailedError("the hard limit of RLIMIT_RTTIME is lower than the tag")
        return ""

    with _child(carry) as (pid, _):
        if host.read_tag(pid) != tag:
            raise _FailedError("the limits of another process cannot be read")
    return "carried in RLIMIT_RTTIME and read from outside"


def _boot(host: LinuxHost) -> str:
    if not host.boot_id():
        raise _FailedError("the name of this boot cannot be read")
    host.pid_namespace()
    return "boot and pid namespace have names"


def _interpreter(host: LinuxHost) -> str:
    from safepool.sidecar_link import executable

    program = executable()
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    code = "import sys; sys.path.append(sys.argv[1]); import safepool.sidecar"
    try:
        ran = subprocess.run(
            [program, "-c", code, folder],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _FailedError(f"{program!r} did not end in {_PATIENCE:g} s") from None
    if ran.returncode:
        lines = ran.stdout.decode(errors="replace").strip().splitlines()
        raise _FailedError(f"{program!r} failed: {lines[-1] if lines else ran.returncode}")
    return f"{program} can be the sidecar"


def _registry(host: LinuxHost) -> str:
    return registry.directory()


def _lock(host: LinuxHost) -> str:
    path = os.path.join(registry.directory(), f".doctor-{os.getpid()}")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(fd)
        os.unlink(path)
    return "its file system has record locks"


def _cgroup(host: LinuxHost) -> str:
    if not run_container.is_wanted():
        raise _FailedError(
            "this one was not delegated to you; set "
            f"{run_container.CGROUP_VARIABLE}=on to make one in it all the same, where you can"
        )
    name = cgroup.make(cgroup.place(os.urandom(16).hex()))
    if not name.inode:
        raise _FailedError("this user can make none here; it needs a delegated cgroup v2")
    try:
        if not os.path.exists(f"{name.path}/cgroup.kill"):
            raise _FailedError("the kernel has no cgroup.kill (Linux 5.14)")
    finally:
        container.remove(name, 0.0)
    return "one can be made"


def _oom(host: LinuxHost) -> str:
    def lower() -> str:
        if not write_oom_score("-900"):
            raise _FailedError("oom_score_adj may not be lowered")
        return ""

    with _child(lower):
        return "sidecar and launchers are the last that the kernel ends for want of memory"


_KERNEL = "run it on Linux 5.3 or later; in a container, let its seccomp profile permit the call"
_Probe = tuple[str, str, Callable[[LinuxHost], str], str, bool]
_PROBES: tuple[_Probe, ...] = (
    ("pidfd", "pidfd_open, pidfd_send_signal", _pidfd, _KERNEL, False),
    ("subreaper", "PR_SET_CHILD_SUBREAPER", _subreaper, _KERNEL, False),
    ("deathsig", "PR_SET_PDEATHSIG", _deathsig, _KERNEL, False),
    ("proc", "/proc of this pid namespace", _proc, "mount -t proc, or unshare --mount-proc", False),
    ("hidepid", "/proc shows all of this user's processes", _hidepid,
     "mount /proc with hidepid=0: what made itself undumpable is not seen otherwise", True),
    ("environ", "/proc/PID/environ", _environ, "let the system permit it", False),
    ("tag", "RLIMIT_RTTIME", _tag, "raise the hard limit (limits.conf: rttime unlimited)", False),
    ("boot", "the name of this boot", _boot, "mount /proc/sys readable", False),
    ("interpreter", "the sidecar's interpreter", _interpreter,
     "multiprocessing.set_executable(path of a Python that can import safepool)", False),
    ("registry", "the registry of runs", _registry,
     "set XDG_RUNTIME_DIR to a directory of your own that can be written", False),
    ("lock", "the lock of a run", _lock, "set XDG_RUNTIME_DIR to a local directory", False),
    ("cgroup", "a cgroup v2 of the run's own", _cgroup, "", True),
    ("oom", "oom_score_adj", _oom, "CAP_SYS_RESOURCE; the promises hold without it", True),
)  # fmt: skip


def versions() -> dict[str, str]:
    """What runs here, for reports."""
    system = os.uname()
    return {
        "system": f"{system.sysname} {system.release} {system.machine}",
        "python": sys.version.split()[0],
        "user": str(os.geteuid()),
    }
