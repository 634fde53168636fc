"""``safepool.detached``: a task lets a process go, and it survives whatever ends.

Every story has a stray beside it that was started with ``subprocess``: that one has to
go, which shows that the sweep took place.
"""

from __future__ import annotations

import os
import signal

import pytest

from tests.kit import truth
from tests.kit.jail import Jail

METHODS = ("fork", "spawn", "forkserver")
BOUND = 20.0

OWNER = """
    import subprocess
    import safepool
    from tests.kit import villains

    # Starts a child, and a daemon whose environment is empty, then stays itself.
    SERVER = "from tests.kit import villains; import subprocess;" \\
        "subprocess.Popen(villains.SLEEP); villains.daemon_empty_env()"

    def serve(words):
        stray = subprocess.Popen(["/bin/cat", os.environ["FOREVER"]], start_new_session=True)
        process = safepool.detached([sys.executable, "-c", SERVER])
        say("served", f"{process.pid} {stray.pid} {os.getppid()}")
        if "hold" in words:
            time.sleep(180)

    def nest(words):
        with safepool.get_context("fork").Pool(1, grace=0.5) as inner:
            inner.apply(serve, (words,))
        if "hold" in words:
            time.sleep(180)

    if __name__ == "__main__":
        pool = safepool.get_context(sys.argv[1]).Pool(1, grace=0.5)
        for line in sys.stdin:
            words = line.split()
            if words[0] == "renew":
                pool = safepool.get_context(sys.argv[1]).Pool(1, grace=0.5)
            elif words[0] in ("close", "terminate"):
                getattr(pool, words[0])()
                pool.join()
            else:
                try:
                    pool.apply(globals()[words[0]], (words,))
                except safepool.WorkerLostError:
                    pass
            say("done")
"""


class Story:
    """One owner in a jail, and the servers that its tasks have let go."""

    def __init__(self, jail: Jail, method: str) -> None:
        self.jail = jail
        self.served = 0
        self.done = 0
        self.free: list[int] = []
        forever = jail.folder / "forever"
        os.mkfifo(forever)
        self.owner = jail.script(OWNER, method, environment={"FOREVER": str(forever)})

    def tell(self, line: str) -> None:
        """Have the owner do something."""
        assert self.owner.process.stdin is not None
        self.owner.process.stdin.write(f"{line}\n".encode())
        self.owner.process.stdin.flush()

    def ask(self, line: str) -> None:
        """Have it do something, and wait until it is done."""
        self.tell(line)
        self.await_done()

    def await_done(self) -> None:
        self.done += 1
        self.jail.hear("done", self.done)

    def hear_of_server(self) -> tuple[int, int, int]:
        """A server runs: the worker, the stray beside it, and the launcher."""
        self.served += 1
        said = self.jail.hear("served", self.served)[-1]
        server, stray, launcher = map(int, said.text.split())
        self.jail.hear("ready", self.served)  # its daemon runs
        sleepers = [pid for pid in self.jail.pids() if truth.command_line(pid).startswith("/bin/")]
        self.free += [server, *(p for p in sleepers if p not in self.free and p != stray)]
        assert len(self.free) == 3 * self.served, self.jail.living()
        return said.pid, stray, launcher

    def assert_free(self, what: str) -> None:
        """All that was let go lives, and bears no mark in its environment."""
        gone = [pid for pid in self.free if not truth.is_alive(pid)]
        assert not gone, f"{what}: {gone} of {self.free}; {self.owner.errors()}"

    def end(self) -> None:
        """The test ends them, by pidfd: they are its own."""
        for pid in self.free:
            fd = os.pidfd_open(pid)
            signal.pidfd_send_signal(fd, signal.SIGKILL)
            os.close(fd)
        self.jail.assert_empty("ended by the test", BOUND)


@pytest.mark.parametrize("method", METHODS)
def test_it_survives_each_end_within_a_run(method: str, jail: Jail) -> None:
    """The end of its task and of the pool, and the deaths of worker, launcher and sidecar."""
    story = Story(jail, method)
    story.tell("serve hold")
    worker, stray, _ = story.hear_of_server()
    os.kill(worker, signal.SIGKILL)
    story.await_done()
    assert not truth.is_alive(stray)
    story.assert_free("worker killed")

    story.ask("serve")
    _, stray, launcher = story.hear_of_server()
    os.kill(launcher, signal.SIGKILL)
    assert truth.wait_gone(stray, BOUND)
    (sidecar,) = truth.sidecars(story.owner.pid)
    os.kill(sidecar, signal.SIGKILL)
    story.ask("serve")
    story.hear_of_server()
    story.ask("terminate")
    story.assert_free("launcher and sidecar killed, pool terminated")

    story.ask("renew")
    story.ask("serve")
    _, stray, _ = story.hear_of_server()
    story.ask("close")  # with join: it returns although the server runs
    assert not truth.is_alive(stray)
    story.owner.process.stdin.close()  # type: ignore[union-attr]
    assert story.owner.wait() == 0, story.owner.errors()
    jail.assert_empty("owner ended", BOUND, besides=story.free)
    story.assert_free("owner ended in order")
    story.end()


@pytest.mark.parametrize("method", METHODS)
def test_it_survives_the_owner_and_the_next_start(method: str, jail: Jail) -> None:
    """The owner is SIGKILLed, alone or with its sidecar and launchers at once; then the next
    start ends the stray that this left, and nothing else."""
    story = Story(jail, method)
    story.tell("serve hold")
    _, stray, launcher = story.hear_of_server()
    helpers = [story.owner.pid, launcher, *truth.sidecars(story.owner.pid)]
    jail.kill_at_once(helpers)
    jail.assert_empty("all three killed", BOUND, besides=[*story.free, stray])
    assert truth.is_alive(stray)
    os.remove(jail.folder / "forever")

    after = Story(jail, method)
    after.ask("close")
    assert truth.wait_gone(stray, BOUND), "the next start has not swept"
    story.assert_free("next start")
    after.served = story.served
    after.free = story.free
    after.ask("renew")
    after.tell("serve hold")
    after.hear_of_server()
    after.owner.send(signal.SIGKILL)
    jail.assert_empty("owner killed", BOUND, besides=after.free)
    after.assert_free("owner killed")
    after.end()


@pytest.mark.parametrize("how", ["inner", "outer"])
def test_it_survives_from_a_pool_in_a_worker(how: str, jail: Jail) -> None:
    """The inner pool ends, or the outer owner is SIGKILLed while all are at work."""
    story = Story(jail, "fork")
    story.tell("nest" if how == "inner" else "nest hold")
    _, stray, _ = story.hear_of_server()
    if how == "inner":
        story.await_done()
        assert not truth.is_alive(stray)
        story.ask("terminate")
    story.owner.send(signal.SIGKILL)
    jail.assert_empty("owner killed", BOUND, besides=story.free)
    story.assert_free("owner killed")
    story.end()


POOL_OF_ITS_OWN = """
    import subprocess
    import safepool

    def task(role):
        subprocess.Popen(["/bin/sleep", "180"], start_new_session=True)
        say(role)
        time.sleep(180)

    def start():
        process = safepool.detached([sys.executable, *sys.orig_argv[1:-1], "detached"])
        say("outer", str(os.getppid()))

    if __name__ == "__main__":
        pool = safepool.get_context("fork").Pool(1, grace=0.5)
        if sys.argv[1] == "detached":
            say("owner")
            pool.apply(task, ("inner",))
        pool.apply(start)
        sys.stdin.readline()
        pool.terminate()
        say("over")
        sys.stdin.readline()
"""


def test_a_detached_owner_has_a_run_of_its_own(jail: Jail) -> None:
    """A detached process with a pool: the outer run's ends spare all of it; its own end, also
    with its launcher stopped, takes all of it."""
    outer = jail.script(POOL_OF_ITS_OWN, "outer")
    jail.hear("inner")
    inner = jail.hear("owner")[0].pid
    outer.go()
    jail.hear("over")
    outer.send(signal.SIGKILL)
    assert truth.wait_gone(outer.pid)
    own = {inner, *truth.descendants(inner)}
    assert len(own) >= 5, jail.living()  # sidecar, launcher, worker, stray
    jail.assert_empty("outer owner killed", BOUND, besides=own)
    assert all(truth.is_alive(pid) for pid in own), jail.living()
    launcher = truth.parent(jail.hear("inner")[0].pid)
    os.kill(launcher, signal.SIGSTOP)
    os.kill(inner, signal.SIGKILL)
    jail.assert_empty("the detached owner killed", BOUND)
