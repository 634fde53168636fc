"""What the owner learns of a worker that was killed: where it was, and whether memory ran out."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import safepool
from safepool.errors import WorkerLostError
from safepool.host.quota import cgroup_folders
from safepool.pool import SafePool
from tests.kit.jail import Jail
from tests.pool import tasks

BOUND = 60

# Programs of their own: pytest uses faulthandler itself, and what is enabled is left alone.
PROGRAM = """
    import ctypes, faulthandler, os, pickle, signal, sys
    from safepool import SafePool, WorkerLostError

    def crash_here(n):
        if n == 2:
            faulthandler._sigsegv()

    def crash_in_a_fork():
        pid = os.fork()
        if not pid:
            faulthandler._sigsegv()
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGSEGV
        faulthandler.disable()
        os.kill(os.getpid(), signal.SIGSEGV)

    def close_all_and_crash(path):
        # A worker that cannot answer any more is asked to end: not before it is through here.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        os.closerange(3, 200)
        with open(path, "wb", buffering=0) as file:
            file.write(b"precious")
            for number in range(4, 100):
                os.dup2(file.fileno(), number)
            faulthandler._sigsegv()

    def lost(pool, function, *args):
        try:
            pool.apply(function, args)
        except WorkerLostError as error:
            return error
        raise AssertionError("the worker lives")

    if __name__ == "__main__":
        method = sys.argv[1]
        if sys.argv[2:] == ["own"]:
            faulthandler.enable()
        with SafePool(1, context=method, grace=5) as pool:
"""


def run(jail: Jail, method: str, body: str, *arguments: str) -> str:
    """Run the program with this end; what it wrote."""
    source = textwrap.dedent(PROGRAM) + textwrap.indent(textwrap.dedent(body), " " * 8)
    (jail.folder / "program.py").write_text(source)
    owner = jail.start([sys.executable, "program.py", method, *arguments])
    assert owner.wait() == 0, owner.errors()
    return owner.errors()


def test_a_segfault_says_where_it_was(method: str, jail: Jail) -> None:
    """The error has the traceback, in its message too, up to the task and no further."""
    body = """
        error = None
        try:
            pool.map(crash_here, range(4), 4)
        except WorkerLostError as caught:
            error = caught
        assert "SIGSEGV" in str(error) and "(item 2)" in str(error), error
        assert error.traceback in str(error)
        first, *_ = error.traceback.splitlines()
        assert "Segmentation fault" in first, error.traceback
        assert "in crash_here" in error.traceback, error.traceback
        assert "safepool" not in error.traceback.replace(os.getcwd(), ""), error.traceback
        assert pickle.loads(pickle.dumps(error)).traceback == error.traceback
        assert pool.apply(abs, (-1,)) == 1
    """
    run(jail, method, body)


def test_a_fork_of_the_worker_leaves_nothing_there(jail: Jail) -> None:
    """The traceback of a process that the task has forked is not taken for the worker's."""
    body = """
        error = lost(pool, crash_in_a_fork)
        assert error.exitcode == -signal.SIGSEGV and error.traceback == "", error
    """
    run(jail, "fork", body)


def test_a_file_of_the_task_never_gets_the_traceback(jail: Jail) -> None:
    """Who closes all descriptors and opens files again finds in them what was written there."""
    run(jail, "fork", "assert lost(pool, close_all_and_crash, 'precious').exitcode < 0")
    assert (jail.folder / "precious").read_bytes() == b"precious"


def test_a_program_that_uses_faulthandler_keeps_it(jail: Jail) -> None:
    """Its traceback goes where the program wants it, and nowhere else."""
    text = run(jail, "fork", "assert lost(pool, crash_here, 2).traceback == ''", "own")
    assert "in crash_here" in text


def test_other_deaths_have_no_traceback() -> None:
    """SIGKILL leaves no time for last words, and nothing is made up."""
    with SafePool(1, context=safepool.get_context("spawn")) as pool:
        with pytest.raises(WorkerLostError) as caught:
            pool.apply_async(tasks.kill_self).get(BOUND)
        assert caught.value.traceback == ""
        assert "memory" not in str(caught.value), "nothing was ended for lack of memory"
        assert pickle.loads(pickle.dumps(caught.value)).traceback == ""


@pytest.fixture
def narrow_cgroup() -> Iterator[Path]:
    """A cgroup with 64 MiB of memory, below this process's own."""
    for folder, is_v2 in cgroup_folders("/proc/self", "memory"):
        made = Path(folder) / f"safepool-test-{os.getpid()}"
        limit = "memory.max" if is_v2 else "memory.limit_in_bytes"
        try:
            made.mkdir()
        except OSError:
            continue
        try:
            (made / limit).write_text(str(64 << 20))
        except OSError:
            made.rmdir()
            continue
        yield made
        made.rmdir()
        return
    pytest.skip("needs a cgroup that may limit memory (root, and the controller memory)")


def eat(folder: str) -> int:
    """Take more memory than the cgroup has."""
    (Path(folder) / "cgroup.procs").write_text(str(os.getpid()))
    return len(bytearray(os.urandom(1 << 20)) * 512)


def test_a_worker_that_the_oom_killer_has_ended(narrow_cgroup: Path) -> None:
    """The message says that memory ran out; the other tasks and the pool go on."""
    with SafePool(1, context=safepool.get_context("fork")) as pool:
        with pytest.raises(WorkerLostError, match="since memory ran out") as caught:
            pool.apply_async(eat, (str(narrow_cgroup),)).get(BOUND)
        assert caught.value.exitcode == -signal.SIGKILL
        assert pool.apply(abs, (-1,)) == 1
        with pytest.raises(WorkerLostError) as caught:
            pool.apply_async(tasks.kill_self).get(BOUND)
        assert "memory" not in str(caught.value), "that one was ours"
