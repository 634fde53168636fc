"""Unusual places for an owner: threads that end, forks, PID 1, under a foreign subreaper."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

import pytest

from tests.kit import truth
from tests.kit.cage import KEEPER
from tests.kit.console import Console
from tests.kit.jail import Jail

BOUND = 10.5

THREAD = """
    import concurrent.futures, threading
    from safepool import get_context

    def wait_for_end_of(thread_id):
        # Joining a thread returns a moment before the kernel's thread is gone.
        end = time.monotonic() + 20
        while os.path.exists(f"/proc/self/task/{thread_id}"):
            assert time.monotonic() < end
            time.sleep(0.005)

    def make(context, made):
        pool = context.Pool(1)
        process = context.Process(target=time.sleep, args=(180,), daemon=True)
        process.start()
        made.extend([pool, process, pool.apply(os.getpid), threading.get_native_id()])

    if __name__ == "__main__":
        context = get_context(sys.argv[1])
        made = []
        if sys.argv[2] == "thread":
            thread = threading.Thread(target=make, args=(context, made))
            thread.start()
            thread.join()
        else:
            with concurrent.futures.ThreadPoolExecutor(1) as executor:
                executor.submit(make, context, made).result()
        pool, process, worker, thread_id = made
        wait_for_end_of(thread_id)
        for _ in range(3):
            assert pool.apply(os.getpid) == worker, "the worker was replaced"
            process.join(0.2)
            assert process.is_alive(), process.exitcode
        process.terminate()
        pool.terminate()
        process.join()
        pool.join()
        say("done")
"""


@pytest.mark.parametrize("kind", ["thread", "executor"])
def test_workers_outlive_the_thread_that_made_them(method: str, kind: str, jail: Jail) -> None:
    """A pool or process made in a thread that has ended goes on living, and can be ended."""
    owner = jail.script(THREAD, method, kind)
    jail.hear("done")
    assert owner.wait() == 0, owner.errors()
    jail.assert_empty("made in a thread", BOUND)


FORKED = """
    from safepool import ForeignPoolError, get_context

    def use_inherited(pool, context):
        for use in (
            lambda: pool.apply(abs, (1,)),
            lambda: pool.apply_async(abs, (1,)),
            lambda: pool.map(abs, [1]),
            lambda: pool.map_async(abs, [1]),
            lambda: list(pool.imap(abs, [1])),
            lambda: list(pool.imap_unordered(abs, [1])),
            lambda: pool.starmap(pow, [(1, 1)]),
            lambda: pool.close(),
            lambda: pool.terminate(),
            lambda: pool.join(),
        ):
            began = time.monotonic()
            try:
                use()
            except ForeignPoolError as error:
                assert time.monotonic() - began < 2
                assert str(error)
            else:
                raise AssertionError("the inherited pool was used")
        with context.Pool(1) as own:
            assert own.apply(abs, (-3,)) == 3
        say("child-done")

    if __name__ == "__main__":
        method, end = sys.argv[1:]
        context = get_context(method)
        pool = context.Pool(1, grace=0.5)
        worker = pool.apply(os.getpid)
        child = os.fork()
        if child == 0:
            use_inherited(pool, context)
            if end == "os_exit":
                os._exit(0)
            if end == "sigkill":
                os.kill(os.getpid(), signal.SIGKILL)
            sys.exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert pool.apply(os.getpid) == worker, "the child's end has touched the pool"
        say("parent-done", str(status))
        sys.stdin.readline()
        assert pool.apply(os.getpid) == worker, "the child's end has touched the pool"
        pool.close()
        pool.join()
"""


@pytest.mark.parametrize("end", ["sys_exit", "os_exit", "sigkill"])
def test_a_forked_copy_of_the_owner(method: str, end: str, jail: Jail) -> None:
    """The child's use of the pool fails at once, its own pool works, its end touches nothing."""
    owner = jail.script(FORKED, method, end)
    jail.hear("child-done")
    status = jail.hear("parent-done")[0].text
    assert status == ("-9" if end == "sigkill" else "0"), owner.errors()
    owner.go()
    assert owner.wait() == 0, owner.errors()
    jail.assert_empty("owner and its forked copy", BOUND)


LIVING_CHILD = """
    from safepool import get_context
    if __name__ == "__main__":
        pool = get_context(sys.argv[1]).Pool(2, grace=0.5)
        pool.map(abs, range(4))
        if os.fork() == 0:
            say("child")
            time.sleep(180)
        say("ready")
        time.sleep(180)
"""


def test_a_forked_copy_keeps_nothing_alive(method: str, jail: Jail) -> None:
    """The owner is SIGKILLed while its forked copy lives on: workers go, the copy is spared."""
    owner = jail.script(LIVING_CHILD, method)
    jail.hear("ready")
    (child,) = jail.hear("child")
    owner.send(signal.SIGKILL)
    jail.assert_empty("owner killed, its copy lives", BOUND, {child.pid})
    assert truth.is_alive(child.pid)


READER = """
    import threading
    from safepool import get_context

    def is_reading(thread_id):
        with open(f"/proc/self/task/{thread_id}/syscall") as file:
            return file.read().startswith("0 0x0 ")

    def make(context, reader):
        end = time.monotonic() + 20
        while not is_reading(reader):
            assert time.monotonic() < end
        with context.Pool(1, grace=0.5) as pool:
            say("answer", str(pool.apply(abs, (-7,))))

    if __name__ == "__main__":
        context = get_context(sys.argv[1])
        thread = threading.Thread(target=make, args=(context, threading.get_native_id()))
        thread.start()
        sys.stdin.readline()
        thread.join()
"""


def test_a_pool_that_is_made_while_another_thread_reads_standard_input(
    method: str, jail: Jail
) -> None:
    """That thread holds the lock of sys.stdin, which a worker closes as it begins."""
    owner = jail.script(READER, method)
    assert jail.hear("answer")[0].text == "7"
    owner.go()
    assert owner.wait() == 0, owner.errors()


def can_unshare_pids() -> bool:
    """Tell whether a pid namespace can be made here."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "-pf", "true"], capture_output=True).returncode == 0


needs_namespaces = pytest.mark.skipif(not can_unshare_pids(), reason="namespaces need root")
NAMESPACE = ["unshare", "-pf", "--mount-proc", "--kill-child"]

FIRST = """
    from safepool import WorkerLostError, get_context
    from tests.kit import villains

    def everybody():
        return {int(name) for name in os.listdir("/proc") if name.isdigit()}

    if __name__ == "__main__":
        method = sys.argv[1]
        assert os.getpid() == 1
        context = get_context(method)
        with context.Pool(2, grace=0.5) as pool:
            assert pool.map(abs, range(-9, 0)) == list(range(9, 0, -1))
            task = ("stray_of_killed_worker", "safepool", method, 0.5)
            try:
                pool.apply_async(villains.play, task).get(60)
            except WorkerLostError:
                say("lost")
            assert pool.map(abs, range(-9, 0)) == list(range(9, 0, -1))
            pool.apply_async(villains.play, ("daemon_empty_env", "safepool", method, 0.5))
            sys.stdin.readline()
        process = context.Process(target=time.sleep, args=(180,))
        process.start()
        process.terminate()
        process.join(30)
        assert process.exitcode == -15, process.exitcode
        end = time.monotonic() + 5
        while len(everybody()) > 2 and time.monotonic() < end:
            time.sleep(0.01)
        say("left", str(len(everybody())))
"""


@needs_namespaces
def test_an_owner_that_is_pid_1(method: str, jail: Jail) -> None:
    """In a container without an init the owner is PID 1 and all works: work, death, clean-up."""
    owner = jail.script(FIRST, method, before=NAMESPACE)
    jail.hear("lost")
    jail.hear("ready", 2)
    owner.go()
    # Itself and its sidecar: no worker, no stray, no zombie.
    assert int(jail.hear("left")[0].text) <= 2
    assert owner.wait() == 0, owner.errors()
    jail.assert_empty("after PID 1", BOUND)


@needs_namespaces
def test_an_owner_below_a_shell_that_is_pid_1(method: str, jail: Jail) -> None:
    """In a container whose PID 1 reaps nothing, a SIGKILLed owner leaves nothing alive."""
    before = [*NAMESPACE, sys.executable, "-S", "-E", "-c", PID_1]
    console = Console(jail, method, before=before)
    for villain in ("daemon_empty_env", "ignores_term"):
        console.ask(f"hold {villain}")
    jail.hear("ready", 2)
    (first,) = truth.children(console.owner.pid)
    (owner,) = [pid for pid in truth.children(first) if "console.py" in truth.command_line(pid)]
    os.kill(owner, signal.SIGKILL)
    spared = {first, console.owner.pid}
    jail.assert_empty("owner in a namespace killed", BOUND, spared)


PID_1 = """
import os, signal, sys
if os.fork() == 0:
    os.execv(sys.argv[1], sys.argv[1:])
signal.pause()
"""
"""A PID 1 that never waits: what is killed below it stays a zombie for ever."""


def test_an_owner_under_a_foreign_subreaper(method: str, jail: Jail) -> None:
    """Orphans of the owner go to a subreaper that is not PID 1: nothing is left all the same."""
    before = [sys.executable, "-S", "-E", str(KEEPER)]
    console = Console(jail, method, before=before, processes=3)
    for villain in ("new_session", "daemon", "daemon_empty_env"):
        console.ask(f"hold {villain}")
    jail.hear("ready", 3)
    keeper = next(pid for pid in jail.pids() if "keeper.py" in truth.command_line(pid))
    owner = truth.children(keeper)[0]
    os.kill(owner, signal.SIGKILL)
    jail.assert_empty("owner under a subreaper killed", BOUND)
