"""Owner deaths that people have reported with other pools, each played again.

What tests/real covers in general (every signal, every kind of worker) is not repeated:
here are the circumstances in which the reports were made, such as a killer that takes the
whole process group, a worker in the middle of a slow import, or a lock that only the dead
still hold.
"""

from __future__ import annotations

import os
import select
import signal
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.kit import truth
from tests.kit.jail import Jail, Owner

BOUND = 10.5
METHODS = ("fork", "spawn", "forkserver")

BUSY = """
    from safepool import get_context

    def burn(_):
        os.nice(19)
        if sys.argv[2] == "own-group":
            os.setpgid(0, 0)
        say("ready")
        while True:
            pass

    if __name__ == "__main__":
        pool = get_context(sys.argv[1]).Pool(2, grace=0.5)
        say("owner")
        pool.map(burn, range(2), 1)
"""


@pytest.mark.parametrize("groups", ["one-group", "own-group"])
def test_a_kill_of_the_whole_process_group(method: str, groups: str, jail: Jail) -> None:
    """SIGKILL to owner, launcher and workers at once; busy workers in groups of their own go, too.

    Seen in the wild: https://github.com/ros/ros_comm/issues/2069
    """
    owner = jail.script(BUSY, method, groups)
    jail.hear("ready", 2)
    owner.send_to_group(signal.SIGKILL)
    jail.assert_empty("the owner's group killed", BOUND)


def test_an_owner_that_timeout_kills(method: str, jail: Jail) -> None:
    """``timeout -s KILL`` ends a program whose workers spin: none spins on for days.

    Seen in the wild: https://github.com/hw-native-sys/simpler/issues/1493
    """
    owner = jail.script(BUSY, method, "", before=["timeout", "-s", "KILL", "180"])
    jail.hear("ready", 2)
    owner.send(signal.SIGALRM)  # to timeout(1): its time is up now
    jail.assert_empty("owner under timeout -s KILL", BOUND)


def test_a_graceful_end_that_is_cut_short(jail: Jail) -> None:
    """SIGINT, and SIGKILL while the owner is still cleaning up, as package runners do it.

    Seen in the wild: https://github.com/triggerdotdev/trigger.dev/pull/3481
    """
    owners = [jail.script(BUSY, method, "") for method in METHODS]
    jail.hear("ready", 2 * len(METHODS))
    for owner in owners:
        owner.send(signal.SIGINT)
    select.select([], [], [], 0.05)  # the moment itself is what is tried here
    for owner in owners:
        owner.send(signal.SIGKILL)
    jail.assert_empty("SIGINT, then SIGKILL", BOUND)


FLOOD = """
    from safepool import get_context

    if __name__ == "__main__":
        with get_context(sys.argv[1]).Pool(2, grace=0.5) as pool:
            results = [pool.apply_async(abs, (-n,)) for n in range(1000)]
            assert results[20].get(30) == 20
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_an_owner_killed_among_a_thousand_submitted_tasks(jail: Jail) -> None:
    """No lock or queue that died with the owner keeps a worker from leaving.

    Seen in the wild: https://github.com/joblib/loky/pull/360
    """
    owners = [jail.script(FLOOD, method) for method in METHODS]
    for owner in owners:
        assert owner.wait() == -signal.SIGKILL, owner.errors()
    jail.assert_empty("killed among tasks", BOUND)


SLOW_MODULE = """
    import fcntl, os, time
    lock = open("database.lock", "w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    with open(os.environ["TELL"], "a") as tell:
        tell.write(f"importing {os.getpid()} \\n")
    time.sleep(180)
    def use(): pass
"""

SLOW_IMPORT = """
    from safepool import get_context

    def work():
        import slow

    if __name__ == "__main__":
        process = get_context(sys.argv[1]).Process(target=work)
        process.start()
        process.join()
"""

NEXT = """
    import fcntl
    lock = open("database.lock", "w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    say("locked")
"""


def test_an_owner_killed_during_a_workers_slow_import(method: str, jail: Jail) -> None:
    """The half-started worker goes, and the exclusive lock that it took is free for the next.

    Seen in the wild: https://github.com/sgl-project/sglang/pull/38218
    """
    (jail.folder / "slow.py").write_text(textwrap.dedent(SLOW_MODULE))
    owner = jail.script(SLOW_IMPORT, method)
    jail.hear("importing")
    following = jail.script(NEXT)
    owner.send(signal.SIGKILL)
    jail.hear("locked", seconds=BOUND)
    assert following.wait() == 0, following.errors()
    jail.assert_empty("killed during an import", BOUND)


SLOW_INITIALIZER = """
    import subprocess
    from safepool import get_context
    from tests.kit import villains

    def initialize():
        subprocess.Popen(villains.SLEEP, start_new_session=True)
        villains.double_fork(villains.nothing_to_know_it_by())
        say("initializing")
        time.sleep(180)

    if __name__ == "__main__":
        pool = get_context(sys.argv[1]).Pool(2, initialize, grace=0.5)
        sys.stdin.readline()
        pool.terminate()
        pool.join()
        say("ended")
        sys.stdin.readline()
"""


@pytest.mark.parametrize("end", ["terminate", "sigterm"])
def test_an_end_during_a_workers_slow_initializer(method: str, end: str, jail: Jail) -> None:
    """A start that is given up takes along what initializers have started so far.

    Seen in the wild: https://github.com/vllm-project/vllm/pull/44751
    """
    owner = jail.script(SLOW_INITIALIZER, method)
    jail.hear("initializing", 2)
    if end == "sigterm":
        owner.send(signal.SIGTERM)
        jail.assert_empty("SIGTERM during the initializers", BOUND)
        return
    owner.go()
    jail.hear("ended")
    assert not [line for line in jail.living() if "/bin/sleep" in line], jail.living()
    owner.go()
    assert owner.wait() == 0, owner.errors()


HOLDING = """
    import fcntl, socket
    from safepool import get_context
    from tests.kit import villains

    if __name__ == "__main__":
        lock = open("device", "w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        listener = socket.create_server(("127.0.0.1", 0))
        pool = get_context(sys.argv[1]).Pool(2, grace=0.5)
        results = [pool.apply_async(villains.ignores_term) for _ in range(2)]
        say("holding", str(listener.getsockname()[1]))
        results[0].get()
"""

TAKING = """
    import fcntl, socket
    fcntl.flock(open("device", "w"), fcntl.LOCK_EX)
    end = time.monotonic() + 30
    while True:
        try:
            socket.create_server(("127.0.0.1", int(sys.argv[1])))
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.01)
        else:
            break
    say("taken")
"""


def test_what_only_the_owner_held_is_free_after_its_death(method: str, jail: Jail) -> None:
    """Forked workers hold copies of the owner's lock and listening socket; not for long.

    Seen in the wild: https://github.com/Lightning-AI/pytorch-lightning/issues/9894
    """
    owner = jail.script(HOLDING, method)
    port = jail.hear("holding")[0].text
    jail.hear("ready", 2)
    following = jail.script(TAKING, port)
    owner.send(signal.SIGKILL)
    jail.hear("taken", seconds=BOUND)
    assert following.wait() == 0, following.errors()


class Terminal(NamedTuple):
    """The two ends of a pseudo-terminal."""

    master: int
    slave: int


@pytest.fixture
def terminal(jail: Jail) -> Iterator[Terminal]:
    """A terminal for one owner; the test may have closed its master."""
    opened = Terminal(*os.openpty())
    files = truth.open_files()
    yield opened
    jail.clear()
    os.close(opened.slave)
    if truth.open_files().get(opened.master) == files[opened.master]:
        os.close(opened.master)


WRAPPED = """
    import subprocess
    from safepool import get_context

    SHELL = '"$0" -S -E server.py & wait'

    def serve():
        subprocess.run(["sh", "-c", SHELL, sys.executable])

    if __name__ == "__main__":
        context = get_context(sys.argv[1])
        for _ in range(2):
            context.Process(target=serve, daemon=True).start()
        sys.stdin.readline()
"""


SERVER = """
import os, time
with open(os.environ["TELL"], "a") as tell:
    tell.write(f"serving {os.getpid()} \\n")
time.sleep(180)
"""


@pytest.mark.parametrize("end", ["hang-up", "kill", "return"])
def test_servers_behind_wrappers_when_the_terminal_session_ends(
    end: str, jail: Jail, terminal: Terminal
) -> None:
    """Window closed, session killed or left by the book: no wrapper is a hiding place.

    Seen in the wild: https://github.com/anthropics/claude-code/issues/26658
    """
    (jail.folder / "server.py").write_text(SERVER)
    owner = jail.script(WRAPPED, "fork", terminal=terminal.slave)
    jail.hear("serving", 2)
    if end == "hang-up":
        os.close(terminal.master)
    elif end == "kill":
        owner.send(signal.SIGKILL)
    else:
        os.write(terminal.master, b"\n")
    jail.assert_empty(end, BOUND)


FOREIGN = """
    from safepool import get_context

    TEXT = 'echo "running $$ " >> "$TELL"; trap "" HUP; while :; do sleep 1; done'

    def become_a_shell():
        os.execv("/bin/sh", ["sh", "-c", TEXT])

    if __name__ == "__main__":
        process = get_context(sys.argv[1]).Process(target=become_a_shell)
        process.start()
        sys.stdin.readline()
        assert process.is_alive() and process.exitcode is None
        say("same", str(process.pid))
        process.join()
"""


def test_a_process_that_has_become_another_program(method: str, jail: Jail) -> None:
    """A worker that execs a program without Python lives on as such, and ends with its owner.

    Seen in the wild: https://github.com/dora-rs/dora/pull/3018
    """
    owner = jail.script(FOREIGN, method)
    (shell,) = jail.hear("running")
    owner.go()
    assert int(jail.hear("same")[0].text) == shell.pid
    assert truth.is_alive(shell.pid)
    owner.send(signal.SIGKILL)
    jail.assert_empty("a shell's owner killed", BOUND)


MANAGER = """
    import multiprocessing
    from safepool import get_context

    def hold(_):
        import multiprocessing
        stock = multiprocessing.get_context("spawn" if sys.argv[1] == "spawn" else "fork").Manager()
        stock.dict()["worker"] = 1
        say("ready")
        time.sleep(180)

    if __name__ == "__main__":
        context = get_context(sys.argv[1])
        manager = context.Manager()
        shared = manager.dict()
        shared["data"] = bytes(1000)
        semaphore = context.Semaphore()
        pool = context.Pool(1, grace=0.5)
        pool.map(hold, [shared], 1)
"""


@pytest.mark.parametrize("death", ["SIGKILL", "SIGTERM"])
def test_manager_servers_end_with_the_owner(death: str, jail: Jail) -> None:
    """The server of a Manager, with all its data, is gone; so is the one of a worker's Manager.

    Seen in the wild: https://github.com/mloda-ai/mloda/issues/1323
    """
    owners: list[Owner] = [jail.script(MANAGER, method) for method in METHODS]
    jail.hear("ready", len(METHODS))
    for owner in owners:
        owner.send(getattr(signal, death))
    jail.assert_empty("owner of a Manager killed", BOUND)
