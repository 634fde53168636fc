"""The first instructions of a worker, and its three ways into the user's code.

Order, in every worker: (1) arm PDEATHSIG towards the launcher (with the portable
backend: a thread that holds a lifeline to it), (2) verify that the
launcher is still the parent, by the number that it handed down: a parent that died
between fork and (1) would never be noticed, since the signal is not retroactive
(prctl(2)); parents 0 and 1 are ordinary in containers and mean nothing, (3) enter the
run's cgroup, where there is one, (4) set tag and mark. Only then anything of the user's
may run.

* fork: the process object is there, in memory; run it.
* forkserver: unpickle it in a fork of the launcher.
* spawn: exec a fresh interpreter that unpickles it. The arming survives the exec.

Called by: the launcher, in the child that it just forked; ``spawned_main`` by the
command line of a spawned interpreter.
"""

from __future__ import annotations

import _thread
import atexit
import fcntl
import marshal
import os
import resource
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from safepool import loop, surroundings
from safepool.core.lineage import MARK_VARIABLE, extend, tag_of
from safepool.core.values import dataclass
from safepool.host import choose, own, title

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

NETS_VARIABLE = "SAFEPOOL_TEST_NETS"
ALL_NETS = "launcher,deathsig,sidecar,lifeline,cgroup"
"""All but the last hold alone; the cgroup is what sweeps of the launcher and the sidecar use."""

_LOST = 70
"""Exit status of a worker whose launcher died before it could arm (EX_SOFTWARE)."""


def nets() -> frozenset[str]:
    """The nets that are on: all, but for a test that shows that each holds alone."""
    return frozenset(os.environ.get(NETS_VARIABLE, ALL_NETS).split(","))


@dataclass(frozen=True)
class Parentage:
    """What a launcher hands down to each of its workers, never sampled by the worker.

    ``owner_pidfd`` polls as readable when the owner is gone, ``lifeline`` when the
    launcher is; both may be pipes (see :class:`safepool.host.own.OwnEnd`).
    """

    launcher_pid: int
    run_id: str
    owner_mark: str
    owner_pidfd: int
    oom_score: str | None
    title: title.Title
    open_files: tuple[int, int]
    lifeline: int | None = None


@dataclass(frozen=True)
class StartRequest:
    """One worker to start: its number and name, and the descriptors sent with it.

    ``stdio`` maps 0, 1, 2 to the owner's own; a number that is missing was closed
    there. ``blob`` holds environment, interpreter arguments and the pickled process
    (not for fork).
    """

    number: int
    name: str
    stdio: dict[int, int]
    blob: int | None
    tracker: int | None
    inherited: tuple[int, ...]

    @classmethod
    def received(cls, fields: Sequence[Any], fds: list[int]) -> StartRequest:
        """Put the fields and the descriptors of a message together again.

        Raises ValueError when descriptors are missing: the kernel drops those that
        the receiver has no room for.
        """
        number, name, stdio, has_blob, has_tracker, more = fields
        rest = list(fds)
        if len(rest) != len(stdio) + has_blob + has_tracker + more:
            raise ValueError("descriptors were lost on the way")
        return cls(
            number=number,
            name=name,
            stdio={n: rest.pop(0) for n in stdio},
            blob=rest.pop(0) if has_blob else None,
            tracker=rest.pop(0) if has_tracker else None,
            inherited=tuple(rest),
        )

    def descriptors(self) -> list[int]:
        """All descriptors of the request, for whoever has to close them."""
        optional = [fd for fd in (self.blob, self.tracker) if fd is not None]
        return [*self.stdio.values(), *optional, *self.inherited]


WorkerMain = Callable[[StartRequest, Parentage], NoReturn]
"""Runs in the forked child, after the arming; never returns."""


def arm(number: int, parentage: Parentage, go_in: Callable[[], None]) -> None:
    """Tie this process to its launcher and mark it; the first thing a worker does.

    ``go_in`` takes this process into the run's cgroup, where there is one.
    """
    rearm(parentage.launcher_pid)
    if parentage.lifeline is not None and "deathsig" in nets():
        hold_lifeline(parentage.lifeline)
    go_in()
    set_tag(tag_of(parentage.run_id, number))
    os.environ[MARK_VARIABLE] = extend(parentage.owner_mark, parentage.run_id, number)
    title.write(parentage.title)
    resource.setrlimit(resource.RLIMIT_NOFILE, parentage.open_files)
    if parentage.oom_score is not None:
        write_oom_score(parentage.oom_score)


def rearm(launcher_pid: int) -> None:
    """Arm PDEATHSIG again: the kernel drops it when a process changes its user (prctl(2)),
    and an initializer is where workers drop privileges."""
    if "deathsig" in nets():
        own.follow_parent()
        if os.getppid() != launcher_pid:
            os._exit(_LOST)


def hold_lifeline(fd: int) -> None:
    """End this process as soon as the launcher, which has the other end of this pipe, is dead.

    A thread does so where no PDEATHSIG can: it needs the interpreter, so a call that keeps
    that to itself is waited for. Like PDEATHSIG it is for this process alone: no fork has it.
    """
    found = os.fstat(fd)

    def wait() -> None:
        try:
            # Nobody ever writes. One reading: the number may be another file's later.
            os.read(fd, 1)
            now = os.fstat(fd)
        except OSError:
            return  # closed by the user's code; the other nets are left
        if (now.st_dev, now.st_ino) == (found.st_dev, found.st_ino):
            os._exit(_LOST)

    with loop.signals_blocked():
        _thread.start_new_thread(wait, ())


def set_tag(tag: int) -> None:
    """Carry the tag, for this process and all that it starts.

    Where an administrator has bounded RLIMIT_RTTIME below the tag it cannot be set;
    the mark and the parentage remain. So it is with the portable backend.
    """
    if can_carry(tag):
        _, hard = resource.getrlimit(resource.RLIMIT_RTTIME)
        resource.setrlimit(resource.RLIMIT_RTTIME, (tag, hard))


def can_carry(tag: int) -> bool:
    """May this process, and what it starts, carry the tag?"""
    if choose.is_portable():
        return False
    _, hard = resource.getrlimit(resource.RLIMIT_RTTIME)
    return hard == resource.RLIM_INFINITY or hard >= tag


def read_tag() -> int:
    """The soft limit in which the tag is kept, of this process; -1 where there is none."""
    if choose.is_portable():
        return -1
    return resource.getrlimit(resource.RLIMIT_RTTIME)[0]


def raise_open_files() -> tuple[int, int]:
    """Allow this process as many descriptors as it may have; return the limits of before.

    A sweep needs some, and a launcher begins with all that its owner has open.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft, hard


def read_oom_score() -> str | None:
    """This process's oom_score_adj, None where there is no such file."""
    try:
        with open("/proc/self/oom_score_adj") as file:
            return file.read().strip()
    except OSError:
        return None


def write_oom_score(score: str) -> bool:
    """Set oom_score_adj; lowering needs a privilege, so the answer may be False."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write(score)
    except OSError:
        return False
    return True


# -- fork ------------------------------------------------------------------------------


def run_process(process: BaseProcess, sentinel: int) -> NoReturn:
    """Run a process object to its end, with its exit functions, and end with its code."""
    _run_and_exit(lambda: process._bootstrap(parent_sentinel=sentinel))  # type: ignore[attr-defined]


def _run_and_exit(main: Callable[[], int]) -> NoReturn:
    """End this process with what ``main`` returns; the owner's exit functions are not ours."""
    from multiprocessing import util

    code = 1
    try:
        atexit._clear()
        atexit.register(util._exit_function)  # type: ignore[attr-defined]
        code = main()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        try:
            atexit._run_exitfuncs()
            util._flush_std_streams()  # type: ignore[attr-defined]
        finally:
            os._exit(code)


# -- forkserver and spawn --------------------------------------------------------------


def write_blob(
    environment: dict[str, str],
    arguments: list[str],
    around: tuple[Any, ...],
    pickled: bytes,
) -> int:
    """Return a descriptor that holds all that a worker is made from.

    An unnamed file: it cannot block on a reader, and vanishes with its last descriptor.
    """
    head = marshal.dumps((environment, arguments, around))
    fd = own.unnamed_file("safepool-worker")
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(len(head).to_bytes(8, "little"))
            file.write(head)
            file.write(pickled)
        os.lseek(fd, 0, os.SEEK_SET)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _read_head(fd: int) -> tuple[dict[str, str], list[str]]:
    """Put the owner's surroundings on and return environment and arguments.

    The descriptor is left at the pickled process.
    """
    size = int.from_bytes(os.read(fd, 8), "little")
    data = bytearray()
    while len(data) < size:
        part = os.read(fd, size - len(data))
        if not part:
            raise EOFError("the description of the worker is cut short")
        data += part
    environment, arguments, around = marshal.loads(data)
    surroundings.put_on(around)
    return environment, arguments


def _take_stdio(stdio: dict[int, int]) -> None:
    """Give this process the owner's standard descriptors, as they were at the start."""
    for number in (0, 1, 2):
        if number in stdio:
            os.dup2(stdio[number], number)
        else:
            # Not closed: the next descriptor of ours would get the number.
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, number)
            if null > 2:
                os.close(null)


def run_unpickled(request: StartRequest, parentage: Parentage) -> NoReturn:
    """forkserver: become the pickled process, in a fork of the launcher."""
    _run_and_exit(lambda: _unpickle_and_run(request, parentage))


def _unpickle_and_run(request: StartRequest, parentage: Parentage) -> int:
    assert request.blob is not None
    words = ["safepool-worker", f"{request.number}", f"run={parentage.run_id}"]
    title.write(title.Title("safepool-worker", "\0".join(words).encode()))
    environment, _ = _read_head(request.blob)
    mark = os.environ[MARK_VARIABLE]
    os.environ.clear()
    os.environ.update(environment)
    os.environ[MARK_VARIABLE] = mark
    _take_stdio(request.stdio)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if number not in request.stdio:
            setattr(sys, name, None)
    if sys.stdout is not None:
        # The launcher's own stdout is /dev/null, so it chose its buffering for that.
        sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    for fd in request.stdio.values():
        os.close(fd)
    sentinel = fcntl.fcntl(parentage.owner_pidfd, fcntl.F_DUPFD_CLOEXEC, 3)
    return _become(request.blob, sentinel, request.tracker, request.inherited)


def exec_spawned(request: StartRequest, parentage: Parentage) -> NoReturn:
    """spawn: exec an interpreter that becomes the pickled process."""
    assert request.blob is not None
    environment, arguments = _read_head(request.blob)
    environment[MARK_VARIABLE] = os.environ[MARK_VARIABLE]
    _take_stdio(request.stdio)
    # Not among the standard descriptors: one that the owner had closed stays closed.
    sentinel = fcntl.fcntl(parentage.owner_pidfd, fcntl.F_DUPFD_CLOEXEC, 3)
    lifeline = parentage.lifeline
    for fd in [request.blob, sentinel, request.tracker, *request.inherited, lifeline]:
        if fd is not None:
            os.set_inheritable(fd, True)
    program = _SPAWNED.format(
        folder=os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
        backend=choose.name(),
        fds=(request.blob, sentinel, request.tracker, request.inherited, lifeline),
    )
    executable = arguments[0]
    os.execve(executable, [*arguments, "-c", program, "--multiprocessing-fork"], environment)


_SPAWNED = (
    "import sys; folder = {folder!r}; folder in sys.path or sys.path.append(folder); "
    "from safepool.bootstrap import spawned_main; spawned_main({backend!r}, *{fds!r})"
)


def spawned_main(
    backend: str,
    blob: int,
    sentinel: int,
    tracker: int | None,
    inherited: tuple[int, ...],
    lifeline: int | None,
) -> NoReturn:
    """The main function of a spawned interpreter."""
    choose.use(backend)
    for fd in [blob, sentinel, tracker, *inherited, lifeline]:
        if fd is not None:
            os.set_inheritable(fd, False)
    if lifeline is not None and "deathsig" in nets():
        hold_lifeline(lifeline)
    sys.exit(_become(blob, sentinel, tracker, inherited))


def _become(blob: int, sentinel: int, tracker: int | None, inherited: tuple[int, ...]) -> int:
    """Unpickle the process object, run it, and return its exit code."""
    from multiprocessing import resource_tracker, spawn

    global _inherited
    _inherited = inherited
    tracker_link: Any = resource_tracker._resource_tracker
    tracker_link._fd = tracker
    return int(spawn._main(blob, sentinel))


_inherited: tuple[int, ...] = ()


class InheritedDescriptor:
    """Stands for a descriptor inside a pickled process; ``detach`` yields it there."""

    def __init__(self, index: int) -> None:
        self.index = index

    def detach(self) -> int:
        """Return the descriptor's number in this worker."""
        return _inherited[self.index]
