"""Mistaken identity: somebody is ended who should live, or is spared who should go.

Pids that come again after a restart, a shell that has inherited a dead run's mark, a
program that replaces itself, a worker that is only slow. tests/real has the general
cases; these are circumstances from the field.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.kit import truth
from tests.kit.console import Console
from tests.kit.jail import Jail

BOUND = 10.5
METHODS = ("fork", "spawn", "forkserver")
REPEATED = 60.0
"""Seconds within which a sidecar repeats its sign of life; see safepool/registry/files.py."""


def can_unshare_pids() -> bool:
    """Tell whether a pid namespace can be made here."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "-pf", "true"], capture_output=True).returncode == 0


needs_namespaces = pytest.mark.skipif(not can_unshare_pids(), reason="namespaces need root")
CONTAINER = ["unshare", "-pf", "--mount-proc", "--kill-child"]


@needs_namespaces
def test_a_container_that_is_restarted_with_the_same_pids(method: str, jail: Jail) -> None:
    """After a kill of the container its records are still there, and all its pids come again.

    Seen in the wild: https://github.com/wazuh/wazuh/pull/38733
    """
    for number in range(2):
        console = Console(jail, method, name=f"start{number}", before=CONTAINER)
        before = console.meet()
        console.ask("hold daemon_empty_env")
        assert console.ask("map") == str(list(range(10, 0, -1)))
        assert set(console.meet()) < set(before), "a worker was replaced"
        (first,) = truth.children(console.owner.pid)
        os.kill(first, signal.SIGKILL)
        jail.assert_empty("the container killed", BOUND)
    console = Console(jail, method, name="last", before=CONTAINER)
    before = console.meet()
    assert console.meet() == before


@needs_namespaces
def test_two_containers_that_share_a_registry(method: str, jail: Jail) -> None:
    """Same user, same folder, same pids, other namespace: neither touches the other's run.

    Seen in the wild: https://github.com/cri-o/cri-o/pull/5943
    """
    steady = Console(jail, method, name="steady", before=CONTAINER)
    other = Console(jail, method, name="other", before=CONTAINER)
    before = steady.meet()
    other.ask("hold daemon_empty_env")
    jail.hear("ready")
    os.kill(truth.children(other.owner.pid)[0], signal.SIGKILL)
    next_one = Console(jail, method, name="next", before=CONTAINER)
    next_one.ask("map")
    assert steady.meet() == before


RECYCLED = """
    import json, subprocess
    from tests.kit import truth, villains
    from tests.kit.villains import make_pool

    def run_owner(method):
        pool = make_pool("safepool", method, 1, 0.5)
        result = pool.apply_async(villains.play, ("daemon_empty_env", "safepool", method, 0.5))
        result.get()

    def take_pid(wanted):
        '''Have a new process that gets exactly this pid.'''
        for _ in range(50):
            with open("/proc/sys/kernel/ns_last_pid", "w") as last:
                last.write(str(wanted - 1))
            stranger = subprocess.Popen(villains.SLEEP)
            if stranger.pid == wanted:
                return stranger
            stranger.kill()
            stranger.wait()
        raise AssertionError("the pid cannot be had")

    def sleepers():
        return {pid for pid in truth.everybody() if "/bin/sleep" in truth.command_line(pid)}

    if __name__ == "__main__":
        method = sys.argv[1]
        if sys.argv[2:] == ["owner"]:
            run_owner(method)
        if sys.argv[2:] == ["next"]:
            with make_pool("safepool", method, 1, 0.5) as pool:
                assert pool.apply(abs, (-1,)) == 1
                sys.stdin.readline()
            sys.exit()
        assert os.getpid() == 1
        owner = subprocess.Popen([sys.executable, __file__, method, "owner"])
        truth.until(sleepers, "no daemon")
        (daemon,) = sleepers()
        doomed = [pid for pid in truth.everybody() if pid not in (1, daemon)]
        for pid in doomed:
            os.kill(pid, signal.SIGSTOP)  # nobody may sweep before all are dead
        for pid in doomed:
            os.kill(pid, signal.SIGKILL)
        owner.wait()
        assert truth.is_alive(daemon)
        stranger = take_pid(owner.pid)
        follower = subprocess.Popen(
            [sys.executable, __file__, method, "next"], stdin=subprocess.PIPE)
        truth.until(lambda: not truth.is_alive(daemon), "the daemon is spared")
        follower.communicate(b"go\\n", 30)
        say("verdict", f"{stranger.poll()} {follower.returncode}")
"""


@needs_namespaces
def test_a_stranger_with_the_very_pid_of_the_dead_owner(method: str, jail: Jail) -> None:
    """It is not ended for its number, and it does not make the dead run's daemon look owned.

    Seen in the wild: https://github.com/kunchenguid/no-mistakes/pull/121
    """
    owner = jail.script(RECYCLED, method, before=CONTAINER)
    assert jail.hear("verdict")[0].text == "None 0", owner.errors()
    owner.wait()


SHELLS = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
def say(word):
    with open(os.environ["TELL"], "a") as tell:
        tell.write(f"{word} {os.getpid()} \\n")
say("server")
server = os.getpid()
while not os.path.exists("open-a-shell"):
    time.sleep(0.01)
if os.fork() == 0:
    os.setsid()
    if os.fork() != 0:
        os._exit(0)  # what is still a child of a stray belongs to it
    while os.getppid() == server:
        time.sleep(0.01)
    say("shell")
time.sleep(180)
"""

LAUNDRY = """
    import subprocess
    from safepool import get_context

    def start_server(path):
        subprocess.Popen([sys.executable, "-S", path], start_new_session=True)

    if __name__ == "__main__":
        pool = get_context(sys.argv[1]).Pool(1, grace=0.5)
        pool.apply(start_server, (sys.argv[2],))
        say("started")
        time.sleep(180)
"""


def test_a_shell_that_a_dead_runs_server_opens_later(method: str, jail: Jail) -> None:
    """A stray hands a dead run's marks to a shell days later: the next start ends the stray alone.

    Seen in the wild: https://github.com/Frayo44/agent-view/pull/20
    """
    path = jail.folder / "server.py"
    path.write_text(SHELLS)
    owner = jail.script(LAUNDRY, method, str(path))
    (server,) = jail.hear("server")
    jail.hear("started")
    doomed = [pid for pid in jail.pids() if pid != server.pid]
    for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first: nobody may sweep
        for pid in doomed:
            with contextlib.suppress(ProcessLookupError):  # a worker may go with its launcher
                os.kill(pid, number)
    owner.wait()
    jail.start(["sleep", "180"])  # a jail without a living owner listens to nobody
    # As if the sidecar had said its last sign of life one interval before it died.
    (lock,) = (jail.folder / "run").glob("safepool/*.lock")
    os.utime(lock, (time.time() - REPEATED,) * 2)
    truth.until(lambda: next_tick(server.pid), "the clock stands still")
    (jail.folder / "open-a-shell").touch()
    (shell,) = jail.hear("shell")
    Console(jail, method, name="next").ask("map")
    assert truth.wait_gone(server.pid, BOUND), "the server was born in the run and is its stray"
    assert truth.is_alive(shell.pid), "a shell that was opened after the run is nobody's stray"


def next_tick(pid: int) -> bool:
    """Tell whether start times are by now larger than that of this process, by half a second."""
    ticks = time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK")
    return ticks > truth.started(pid) + 50


REEXEC = """
    from safepool import get_context

    def work(stage):
        say(stage)
        if stage == "first":
            source = "import sys; sys.path[:0] = sys.argv[1:]; import reexec; reexec.second()"
            os.execv(sys.executable, [sys.executable, "-S", "-E", "-c", source, os.getcwd()])

    if __name__ == "__main__":
        process = get_context(sys.argv[1]).Process(target=work, args=("first",))
        process.start()
        process.join(60)
        say("ended", f"{process.pid} {process.exitcode}")
"""

SECOND = """
import os, sys
def second():
    with open(os.environ["TELL"], "a") as tell:
        tell.write(f"second {os.getpid()} \\n")
    sys.stdout.flush()
    os._exit(23)
"""


def test_a_process_that_starts_itself_again(method: str, jail: Jail) -> None:
    """A worker that execs itself is the same worker: it is left alone, its exit code arrives.

    Seen in the wild: https://github.com/apache/airflow/issues/17507
    """
    (jail.folder / "reexec.py").write_text(SECOND)
    owner = jail.script(REEXEC, method)
    ended = jail.hear("ended")[0].text
    assert ended == f"{jail.hear('second')[0].pid} 23", owner.errors()
    assert jail.hear("first")[0].pid == jail.hear("second")[0].pid
    assert owner.wait() == 0, owner.errors()


SLOW = """
    from safepool import get_context

    def initialize():
        say("initializing")
        time.sleep(5)

    if __name__ == "__main__":
        with get_context(sys.argv[1]).Pool(1, initialize) as pool:
            say("result", str(pool.apply(abs, (-1,))))
"""


def test_a_worker_that_is_only_slow_to_start(jail: Jail) -> None:
    """No hidden limit ends a worker whose initializer takes seconds: each starts once.

    Seen in the wild: https://github.com/attevon-llc/OpenTranscribe/pull/761
    """
    owners = [jail.script(SLOW, method) for method in METHODS]
    assert {line.text for line in jail.hear("result", len(METHODS))} == {"1"}
    assert len(jail.hear("initializing", len(METHODS))) == len(METHODS)
    for owner in owners:
        assert owner.wait() == 0, owner.errors()


INNER = """
import os, signal, sys
from safepool import get_context
from tests.kit import villains

if __name__ == "__main__":
    pool = get_context(sys.argv[1]).Pool(2, grace=0.5)
    pool.apply_async(villains.daemon_empty_env)
    result = pool.apply(abs, (-5,))
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    pool.terminate()
    pool.join()
    sys.exit(result)
"""

OUTER = """
    import subprocess
    from safepool import get_context

    def run_inner(end):
        command = [sys.executable, "inner.py", sys.argv[1], end]
        return os.getpid(), subprocess.run(command).returncode

    if __name__ == "__main__":
        with get_context(sys.argv[1]).Pool(2, grace=0.5) as pool:
            for end, code in (("killed", -9), ("returned", 5), ("returned", 5)):
                answers = pool.map(run_inner, [end] * 2, 1)
                assert {answer[1] for answer in answers} == {code}, answers
                say("workers", str(sorted({answer[0] for answer in answers})))
"""


def test_a_program_that_uses_a_pool_within_a_task(method: str, jail: Jail) -> None:
    """Its clean-up, its death and its look for dead runs leave the run around it untouched.

    Seen in the wild: https://github.com/vybestack/llxprt-code/issues/2469
    """
    Path(jail.folder, "inner.py").write_text(INNER)
    owner = jail.script(OUTER, method)
    assert owner.wait() == 0, owner.errors()
    assert "WorkerLost" not in owner.errors()
    workers = {line.text for line in jail.hear("workers", 3)}
    assert len({pid for text in workers for pid in text.strip("[]").split(", ")}) <= 2, workers
    jail.assert_empty("after both runs", BOUND)


HELPERS = """
    import subprocess
    from safepool import get_context

    def helper(_):
        subprocess.run([sys.executable, "-S", "-E", sys.argv[2], "--stay"])

    if __name__ == "__main__":
        pool = get_context(sys.argv[1]).Pool(1, grace=0.5)
        pool.map(helper, range(1))
"""


def test_the_same_helper_program_in_two_runs(method: str, jail: Jail) -> None:
    """Two runs use one program; when one owner is killed, the other's helper gets no signal.

    Seen in the wild: https://github.com/openwpm/OpenWPM/pull/787
    """
    stranger = str(Path(__file__).parents[1] / "kit" / "stranger.py")
    first = jail.script(HELPERS, method, stranger)
    (doomed,) = jail.hear("stranger")
    second = jail.script(HELPERS, method, stranger)
    spared = next(line for line in jail.hear("stranger", 2) if line.pid != doomed.pid)
    ours = {second.pid, *truth.descendants(second.pid)}
    first.send(signal.SIGKILL)
    jail.assert_empty("the first owner killed", BOUND, ours)
    assert truth.is_alive(spared.pid)
    assert {line.pid for line in jail.heard if line.word == "signalled"} <= {doomed.pid}
    assert sys.executable in truth.command_line(spared.pid)
