"""Trees of processes that people could not get rid of, ended with their worker.

Wrappers, background jobs whose leader is gone, children that ignore what their parent
obeys, stopped ones, pools within pools. The owner lives on in most of these; ``join()``
means that the whole tree is gone.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap

import pytest

from tests.kit import truth
from tests.kit.jail import Jail

BOUND = 10.5

THREE_LEVELS = """
    from safepool import get_context
    from tests.kit import villains

    def middle(method):
        pool = get_context(method).Pool(2, grace=0.5)
        results = [pool.apply_async(villains.daemon_empty_env) for _ in range(2)]
        say("middle")
        results[0].get()

    if __name__ == "__main__":
        process = get_context(sys.argv[1]).Process(target=middle, args=(sys.argv[1],))
        process.start()
        process.join()
        say("ended", str(process.exitcode))
        sys.stdin.readline()
"""


@pytest.mark.parametrize("killed", ["top", "middle"])
def test_three_levels_when_one_is_killed(method: str, killed: str, jail: Jail) -> None:
    """Owner, process and the pool in it: a killed middle takes all below it, and only that.

    Seen in the wild: https://github.com/vllm-project/vllm/issues/55510
    """
    owner = jail.script(THREE_LEVELS, method)
    (middle,) = jail.hear("middle")
    jail.hear("ready", 2)
    os.kill(owner.pid if killed == "top" else middle.pid, signal.SIGKILL)
    if killed == "middle":
        assert jail.hear("ended")[0].text == "-9"
        assert not [line for line in jail.living() if "/bin/sleep" in line], jail.living()
        owner.go()
        assert owner.wait() == 0, owner.errors()
    jail.assert_empty(f"{killed} killed", BOUND)


NESTS = """
    import multiprocessing
    from safepool import WorkerLostError, get_context

    def rest(word):
        say(word)
        time.sleep(180)

    def nest(_):
        stock = multiprocessing.get_context("fork")
        stock.Process(target=rest, args=("child",)).start()
        pool = stock.Pool(2)
        assert pool.map(abs, [-1, -2]) == [1, 2]
        pool.map_async(rest, ["child"] * 2, 1)
        assert stock.Manager().list([1])[0] == 1
        with get_context(sys.argv[1]).Pool(2, grace=0.5) as inner:
            assert inner.map(abs, [-1, -2]) == [1, 2]
        rest("nest")

    if __name__ == "__main__":
        with get_context(sys.argv[1]).Pool(1, grace=0.5) as pool:
            result = pool.apply_async(nest, (1,))
            try:
                result.get(60)
            except WorkerLostError:
                say("lost")
            pool.apply(say, ("next",))
            sys.stdin.readline()
"""


def test_multiprocessing_inside_a_task_ends_with_its_worker(method: str, jail: Jail) -> None:
    """Process, Pool, Manager and SafePool work in a task; a kill of the worker ends them all first.

    Seen in the wild: https://github.com/ray-project/ray/issues/42861
    """
    owner = jail.script(NESTS, method)
    (worker,) = jail.hear("nest")
    offspring = [pid for pid in truth.descendants(worker.pid) if truth.is_alive(pid)]
    assert len(offspring) >= 4, jail.living()
    os.kill(worker.pid, signal.SIGKILL)
    jail.hear("next")
    left = [truth.describe(pid) for pid in offspring if truth.is_alive(pid)]
    assert not left, left
    owner.go()
    assert owner.wait() == 0, owner.errors()
    jail.assert_empty("after the nest", BOUND)


SERVED = """
    import fcntl, socket, subprocess
    from safepool import get_context

    def serve(port):
        subprocess.run(["sh", "-c", '"$0" -S -E server.py "$1"; true', sys.executable, str(port)])

    if __name__ == "__main__":
        context = get_context(sys.argv[1])
        port = socket.create_server(("127.0.0.1", 0)).getsockname()[1]
        for turn in range(5):
            process = context.Process(target=serve, args=(port,))
            process.grace = 0.5
            process.start()
            sys.stdin.readline()
            (process.terminate if turn % 2 else process.kill)()
            process.join()
            # As a server does: in TIME_WAIT the port may be had again, in use it may not.
            socket.create_server(("127.0.0.1", port)).close()
            fcntl.flock(open("server.lock", "w"), fcntl.LOCK_EX | fcntl.LOCK_NB)
            say("free")
"""

SERVER = """
import fcntl, os, socket, sys, time
lock = open("server.lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
with open(os.environ["TELL"], "a") as tell:
    tell.write(f"serving {os.getpid()} \\n")
time.sleep(180)
"""


def test_port_and_lock_behind_a_wrapper_are_free_after_join(method: str, jail: Jail) -> None:
    """``join()`` of an ended process waits for the server behind its shell, five times in a row.

    Seen in the wild: https://github.com/PrefectHQ/fastmcp/pull/3070
    """
    (jail.folder / "server.py").write_text(SERVER)
    owner = jail.script(SERVED, method)
    for turn in range(1, 6):
        jail.hear("serving", turn)
        owner.go()
        jail.hear("free", turn)
    assert owner.wait() == 0, owner.errors()


JOBS = {
    # The leader of a session has left its job behind.
    "leader-gone": 'setsid sh -c \'echo "job $$ " >> "$TELL"; sleep 180 & exit\'; sleep 180',
    # The shell obeys SIGTERM, its job does not and changes parents on that occasion.
    "job-ignores": '(trap \'\' TERM HUP; echo "job 0 " >> "$TELL"; sleep 180) & wait',
    # Everything in between obeys, the innermost does not.
    "deep": "sh -c 'sh -c \"(trap : TERM; echo job 0 x >> $TELL; sleep 180); :\"; :'; :",
    # An empty environment and a session of its own.
    "scrubbed": 'echo "job 0 " >> "$TELL"; exec env -i setsid sleep 180',
}

SHELLS = """
    import subprocess
    from safepool import get_context

    def run(text):
        subprocess.run(["sh", "-c", text])

    def background(text):
        subprocess.Popen(["sh", "-c", text], stdout=sys.stdout)
        return "at once"

    if __name__ == "__main__":
        method, text, way = sys.argv[1:]
        context = get_context(method)
        pool = context.Pool(1, grace=0.5)
        process = context.Process(target=run, args=(text,))
        process.grace = 0.5
        if way == "process":
            process.start()
        else:
            say("result", pool.apply_async(background, (text,)).get(20))
        sys.stdin.readline()
        if way == "process":
            process.terminate()
            process.join()
        elif way == "close":
            pool.close()
        else:
            pool.terminate()
        if way != "process":
            pool.join()
        say("ended")
        sys.stdin.readline()
"""


@pytest.mark.parametrize("way", ["process", "close", "terminate"])
def test_background_jobs_of_shells(way: str, jail: Jail) -> None:
    """A job whose leader is gone, or that ignores what its shell obeys, ends with its worker.

    Seen in the wild: https://github.com/alexgreensh/outsourcerer/pull/15
    """
    owners = [jail.script(SHELLS, "fork", text, way) for text in JOBS.values()]
    jail.hear("job", len(JOBS))
    for owner in owners:
        owner.go()
    jail.hear("ended", len(JOBS))
    assert not [line for line in jail.living() if "sleep 180" in line], jail.living()
    for owner in owners:
        owner.go()
        assert owner.wait() == 0, owner.errors()


CAPTURED = """
    import os, subprocess, sys
    from safepool import get_context

    def leave_a_daemon(_):
        subprocess.Popen(["sleep", "180"], close_fds=False)
        return "done"

    if __name__ == "__main__":
        with get_context(sys.argv[1]).Pool(2, grace=0.5) as pool:
            print(pool.map(leave_a_daemon, range(2), 1), flush=True)
        if sys.argv[2] == "killed":
            pool = get_context(sys.argv[1]).Pool(1, grace=0.5)
            pool.apply(leave_a_daemon, (1,))
            os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("end", ["returned", "killed"])
def test_who_reads_the_owners_output_gets_its_end(method: str, end: str, jail: Jail) -> None:
    """A daemon that holds the inherited output holds up neither a result nor a waiting reader.

    Seen in the wild: https://github.com/bazelbuild/bazel/issues/8005
    """
    path = jail.folder / "captured.py"
    path.write_text(textwrap.dedent(CAPTURED))
    done = subprocess.run(
        [sys.executable, path, method, end],
        env=jail.environment,
        capture_output=True,
        text=True,
        timeout=BOUND,
    )
    assert done.stdout == "['done', 'done']\n", done
    assert done.returncode == (-9 if end == "killed" else 0), done


HOLDER = """
    import subprocess
    from safepool import WorkerLostError, get_context

    def hold(_):
        subprocess.Popen(["sleep", "180"], close_fds=False, start_new_session=True)
        say("holding")
        time.sleep(180)

    if __name__ == "__main__":
        with get_context(sys.argv[1]).Pool(2, grace=0.5) as pool:
            result = pool.apply_async(hold, (1,))
            try:
                result.get(60)
            except WorkerLostError:
                say("noticed")
"""


def test_a_killed_worker_is_noticed_though_its_descriptors_live_on(method: str, jail: Jail) -> None:
    """A daemon that inherited every descriptor of its worker does not make it look alive.

    Seen in the wild: https://github.com/pytest-dev/pytest-xdist/issues/110
    """
    owner = jail.script(HOLDER, method)
    os.kill(jail.hear("holding")[0].pid, signal.SIGKILL)
    jail.hear("noticed", seconds=BOUND)
    assert owner.wait() == 0, owner.errors()
    jail.assert_empty("after the pool", BOUND)


STOPPED = """
    from safepool import get_context
    from tests.kit import villains

    def hold(_):
        child = os.fork()
        if child == 0:
            os.setsid()
        say("held")
        time.sleep(180)

    if __name__ == "__main__":
        pool = get_context(sys.argv[1]).Pool(2, grace=0.5)
        pool.map_async(hold, range(2), 1)
        sys.stdin.readline()
        pool.terminate()
        pool.join()
        say("ended")
"""


@pytest.mark.parametrize("end", ["terminate", "kill"])
def test_stopped_workers_and_their_stopped_children(method: str, end: str, jail: Jail) -> None:
    """What a debugger or a signal has stopped does not hear SIGTERM: it goes all the same.

    Seen in the wild: https://github.com/aristanetworks/bst/pull/16
    """
    owner = jail.script(STOPPED, method)
    for line in jail.hear("held", 4):
        os.kill(line.pid, signal.SIGSTOP)
        truth.until(lambda pid=line.pid: truth.state(pid) == "T", "it does not stop")  # type: ignore[misc]
    if end == "kill":
        owner.send(signal.SIGKILL)
    else:
        owner.go()
        jail.hear("ended")
        assert owner.wait() == 0, owner.errors()
    jail.assert_empty("with stopped workers", BOUND)


STUBBORN = """
    from safepool import get_context
    from tests.kit import villains

    if __name__ == "__main__":
        pool = get_context(sys.argv[1]).Pool(4, grace=2)
        results = [pool.apply_async(villains.ignores_term) for _ in range(4)]
        sys.stdin.readline()
        began = time.monotonic()
        pool.terminate()
        pool.join()
        say("took", str(time.monotonic() - began))
"""


def test_stubborn_workers_share_one_grace(jail: Jail) -> None:
    """Four workers that ignore SIGTERM cost one grace of 2 s, not four.

    Seen in the wild: https://github.com/bazelbuild/bazel/issues/1437
    """
    owner = jail.script(STUBBORN, "fork")
    jail.hear("ready", 4)
    owner.go()
    assert 2 <= float(jail.hear("took")[0].text) < 5
    assert owner.wait() == 0, owner.errors()


UNSEEN = """
    import ctypes, subprocess
    from safepool import get_context

    PR_SET_DUMPABLE = 4

    def hide(_):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
                if os.fork() == 0:
                    say("unseen", readable(os.getppid()))
                time.sleep(180)
            os._exit(0)
        os.wait()
        time.sleep(180)

    def readable(pid):
        try:
            open(f"/proc/{pid}/environ").read()
        except OSError as error:
            return type(error).__name__
        return "yes"

    if __name__ == "__main__":
        pool = get_context(sys.argv[1]).Pool(2, grace=0.5)
        pool.map(hide, range(2), 1)
"""


def can_drop_capabilities() -> bool:
    """Tell whether root can be made to see no more than a user."""
    return os.geteuid() == 0 and shutil.which("setpriv") is not None


BLIND = 'mount -t proc -o hidepid=2,gid=4242 proc /proc && exec "$@"'
AS_A_USER = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]


@pytest.mark.skipif(not can_drop_capabilities(), reason="needs root and setpriv")
def test_daemons_whose_marks_nobody_may_read(method: str, jail: Jail) -> None:
    """Like an agent that is set-group-ID: environment and limits are closed to others. It goes.

    Seen in the wild: https://github.com/actions/runner/issues/4601
    """
    owner = jail.script(UNSEEN, method, before=AS_A_USER)
    assert {line.text for line in jail.hear("unseen", 2)} == {"PermissionError"}
    owner.send(signal.SIGKILL)
    jail.assert_empty("owner of closed daemons killed", BOUND)


HIDDEN = """
    from safepool import get_context
    from tests.kit import villains

    if __name__ == "__main__":
        assert not os.path.exists("/proc/1"), "strangers are to be invisible"
        pool = get_context(sys.argv[1]).Pool(3, grace=0.5)
        assert pool.map(abs, range(-4, 0), 1) == [4, 3, 2, 1]
        for villain in (villains.daemon_empty_env, villains.new_session, villains.ignores_term):
            pool.apply_async(villain)
        sys.stdin.readline()
"""


@pytest.mark.skipif(not can_drop_capabilities(), reason="needs root and setpriv")
@pytest.mark.parametrize("killed", ["owner", "owner-and-launcher"])
def test_where_only_ones_own_processes_can_be_seen(method: str, killed: str, jail: Jail) -> None:
    """On a shared machine with hidepid all works: pool, owner's death, sweep.

    Seen in the wild: https://github.com/podman-container-tools/podman/pull/5550
    """
    # PID 1 and the test are root's as well; they have capabilities, so they stay hidden.
    hide = ["unshare", "-m", "sh", "-c", BLIND, "sh"]
    owner = jail.script(HIDDEN, method, before=[*hide, *AS_A_USER])
    workers = [line.pid for line in jail.hear("ready", 3)]
    launchers = {truth.parent(pid) for pid in workers}
    owner.send(signal.SIGKILL)
    if killed == "owner-and-launcher":
        for pid in launchers:
            os.kill(pid, signal.SIGKILL)
    jail.assert_empty(f"{killed} killed", BOUND)


WRAPPER = """#!/bin/sh
"{python}" "$@"
exit $?
"""

WRAPPED = """
    import subprocess
    from safepool import get_context

    def hold(_):
        say("held")
        time.sleep(180)

    if __name__ == "__main__":
        context = get_context(sys.argv[1])
        context.set_executable(os.path.abspath("wrapper"))
        pool = context.Pool(2, grace=0.5)
        assert pool.map(abs, range(-4, 0), 1) == [4, 3, 2, 1]
        pool.map_async(hold, range(2), 1)
        sys.stdin.readline()
        if sys.argv[2] == "terminate":
            pool.terminate()
            pool.join()
            say("ended")
            sys.stdin.readline()
        time.sleep(180)
"""


@pytest.mark.parametrize("end", ["terminate", "kill"])
def test_an_interpreter_that_is_a_wrapper(end: str, jail: Jail) -> None:
    """The worker is the child of a script that stands for Python: both are ended.

    Seen in the wild: https://github.com/Kludex/uvicorn/issues/239
    """
    wrapper = jail.folder / "wrapper"
    wrapper.write_text(WRAPPER.format(python=sys.executable))
    wrapper.chmod(0o755)
    owner = jail.script(WRAPPED, "spawn", end)
    jail.hear("held", 2)
    if end == "kill":
        owner.send(signal.SIGKILL)
    else:
        owner.go()
        jail.hear("ended")
        assert not [line for line in jail.living() if "--multiprocessing-fork" in line], (
            jail.living()
        )
        owner.send(signal.SIGKILL)
    jail.assert_empty("workers behind a wrapper", BOUND)


GROUP = """
    from safepool import get_context
    from tests.kit import villains

    if __name__ == "__main__":
        pool = get_context(sys.argv[1]).Pool(2, grace=0.5)
        results = [pool.apply_async(villains.daemon_empty_env) for _ in range(2)]
        results[0].get()
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGQUIT"])
def test_a_signal_for_the_whole_foreground_group(method: str, name: str, jail: Jail) -> None:
    """What the terminal or a shell sends to owner, launcher and workers at once saves no daemon.

    Seen in the wild: https://github.com/obsidiansystems/gargoyle/issues/15
    """
    owner = jail.script(GROUP, method)
    jail.hear("ready", 2)
    owner.send_to_group(getattr(signal, name))
    jail.assert_empty(f"{name} for the group", BOUND)
