"""The portable backend, forced: what has to hold without pidfds, subreapers, prctl and tags.

In every owner here, and in all that it starts, a call of what only Linux has raises and
is written down. The whole suite can be run so as well: see tests/portable.py.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests import portable
from tests.kit import truth
from tests.kit.console import Console
from tests.kit.jail import Jail

BOUND = 10.5

FORBID = """
import os, resource, signal, sys
from safepool.host import prctl

def forbid(owner, name):
    def refuse(*arguments):
        with open({told!r}, "a") as file:
            file.write(f"{{name}} was called by {{sys.argv}}\\n")
        raise OSError(38, f"{{name}}: not on this system")
    setattr(owner, name, refuse)

for owner, name in (
    (os, "pidfd_open"), (os, "memfd_create"), (signal, "pidfd_send_signal"),
    (resource, "prlimit"), (prctl, "load"), (prctl, "set_name"), (prctl, "get_name"),
):
    forbid(owner, name)
"""


class Portable:
    """Starts owners with the portable backend, and hears of forbidden calls."""

    def __init__(self, jail: Jail) -> None:
        self.jail = jail
        self._told = jail.folder / "forbidden"
        folder = jail.folder / "site"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(FORBID.format(told=str(self._told)))
        path = os.pathsep.join([str(folder), jail.environment["PYTHONPATH"]])
        self.environment = {"SAFEPOOL_BACKEND": "portable", "PYTHONPATH": path}

    def console(self, method: str, processes: int = 2, **environment: str) -> Console:
        return Console(
            self.jail, method, processes=processes, environment={**self.environment, **environment}
        )

    def forbidden(self) -> str:
        """The forbidden calls so far, one a line."""
        return self._told.read_text() if self._told.exists() else ""


@pytest.fixture
def system(jail: Jail) -> Portable:
    return Portable(jail)


def sleepers(jail: Jail) -> list[int]:
    """The strays that are there."""
    return [pid for pid in jail.pids() if truth.command_line(pid).startswith("/bin/sleep")]


PROTECTED = """
    from safepool import SafePool
    if __name__ == "__main__":
        with SafePool(2, context=sys.argv[1]) as pool:
            assert pool.map(abs, range(-5, 0)) == [5, 4, 3, 2, 1]
            say("backend", pool.protection.backend)
"""


def test_a_pool_works_and_says_which_backend_it_has(method: str, system: Portable) -> None:
    """Nothing that only Linux has is called, and nothing is left at the end."""
    owner = system.jail.script(PROTECTED, method, environment=system.environment)
    assert system.jail.hear("backend")[0].text == "portable"
    assert owner.wait() == 0, owner.errors()
    system.jail.assert_empty("after the pool", BOUND)
    assert system.forbidden() == ""


def test_the_forbidden_calls_would_be_noticed(system: Portable) -> None:
    """Negative control: with the linux backend the same owner is refused, or complains."""
    environment = {**system.environment, "SAFEPOOL_BACKEND": "linux"}
    owner = system.jail.script(PROTECTED, "fork", environment=environment)
    assert owner.wait() != 0
    assert "pidfd_open is refused" in owner.errors()
    assert "pidfd_open" in system.forbidden()


def test_where_linux_refuses_the_backend_is_chosen_by_itself(system: Portable) -> None:
    """A container's filter forbids pidfds: a pool works all the same, without being asked to."""
    environment = {**system.environment, "SAFEPOOL_BACKEND": "auto"}
    owner = system.jail.script(PROTECTED, "spawn", environment=environment)
    assert system.jail.hear("backend")[0].text == "portable"
    assert owner.wait() == 0, owner.errors()
    calls = {line.split()[0] for line in system.forbidden().splitlines()}
    assert calls == {"pidfd_open"}, "asked once, and never again"
    assert len(system.forbidden().splitlines()) == 1


def test_nothing_survives_the_owner(method: str, system: Portable) -> None:
    """The owner is SIGKILLed: workers, one of which holds the GIL, a session and a daemon go."""
    console = system.console(method, processes=4)
    for villain in ("gil_held", "new_session", "daemon", "stubborn_subprocess"):
        console.ask(f"hold {villain}")
    system.jail.hear("ready", 4)
    console.owner.send(signal.SIGKILL)
    system.jail.assert_empty("owner killed", BOUND)
    assert system.forbidden() == ""


def test_a_dead_workers_tree_is_gone_before_its_task_has_failed(
    method: str, system: Portable
) -> None:
    """A session and a daemon that it had started; the pool goes on."""
    console = system.console(method)
    console.ask("hold stray_of_killed_worker")
    assert console.ask("settle") == "WorkerLostError"
    assert sleepers(system.jail) == []
    console.ask("map")
    console.owner.send(signal.SIGKILL)
    system.jail.assert_empty("owner killed", BOUND)


def test_killed_helpers_are_replaced_and_take_their_own_along(
    method: str, system: Portable
) -> None:
    """First the sidecar, then the launcher: workers die with it, one in a C call; strays go."""
    console = system.console(method, processes=3)
    workers = console.meet()
    (sidecar,) = truth.until(lambda: truth.sidecars(console.owner.pid), "no sidecar")
    os.kill(sidecar, signal.SIGKILL)
    truth.until(
        lambda: [pid for pid in truth.sidecars(console.owner.pid) if pid != sidecar],
        "the sidecar is not replaced",
    )
    for villain in ("gil_held", "daemon"):
        console.ask(f"hold {villain}")
    system.jail.hear("ready", 2)
    for launcher in {parent for _, parent in workers}:
        os.kill(launcher, signal.SIGKILL)
    for pid in [*[pid for pid, _ in workers], *sleepers(system.jail)]:
        assert truth.wait_gone(pid, BOUND), truth.describe(pid)
    assert console.ask("settle") == "WorkerLostError WorkerLostError"
    assert len(console.meet()) == 3
    console.owner.send(signal.SIGKILL)
    system.jail.assert_empty("owner killed", BOUND)
    assert system.forbidden() == ""


COPIED = """
    import ctypes
    from safepool import SafePool
    if __name__ == "__main__":
        pool = SafePool(1, context="fork", grace=0.5)
        pool.apply_async(time.sleep, (180,))
        # A fork that Python does not see: the copy has all descriptors, the lifeline as well.
        copy = ctypes.CDLL(None).fork()
        if copy == 0:
            signal.pause()
        say("copied", str(copy))
        signal.pause()
"""


def test_a_copy_of_the_owner_that_lives_on_does_not_hide_its_death(system: Portable) -> None:
    """Whoever holds the other ends of all pipes: the owner itself is looked for."""
    owner = system.jail.script(COPIED, environment=system.environment)
    copy = int(system.jail.hear("copied")[0].text)
    owner.send(signal.SIGKILL)
    system.jail.assert_empty("owner killed", BOUND, {copy})
    assert system.jail.pids() == [copy], "and the copy is nobody's to end"


@pytest.mark.xfail(reason=portable.HIDING, strict=False)
def test_a_daemon_that_hides_all_at_once(system: Portable) -> None:
    """With luck a look falls into the milliseconds between its two forks; it is no promise."""
    console = system.console("fork", TRULY_EMPTY="1")
    console.ask("hold daemon_empty_env")
    system.jail.hear("ready")
    console.owner.send(signal.SIGKILL)
    system.jail.assert_empty("owner killed", 3)


HIDES = """
    from safepool import get_context
    from tests.kit.villains import SLEEP

    def hide(gate):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execve(SLEEP[0], SLEEP, {})
            open(gate).close()  # waits for the test
            os._exit(0)
        say("ready", str(os.getppid()))
        os.wait()
        say("hidden")
        time.sleep(180)

    if __name__ == "__main__":
        get_context("fork").Pool(1, grace=0.5).apply(hide, sys.argv[1:])
"""


def test_one_that_a_look_has_seen_cannot_hide_afterwards(system: Portable) -> None:
    """An orphan without environment, session and parent of ours is remembered."""
    gate = system.jail.folder / "gate"
    os.mkfifo(gate)
    owner = system.jail.script(HIDES, str(gate), environment=system.environment)
    launcher = int(system.jail.hear("ready")[0].text)
    wait_for_looks(launcher)
    gate.write_text("")
    system.jail.hear("hidden")
    wait_for_looks(launcher)  # at which it is an orphan
    (daemon,) = sleepers(system.jail)
    assert truth.parent(daemon) not in (launcher, owner.pid)
    owner.send(signal.SIGKILL)
    system.jail.assert_empty("owner killed", BOUND)


def wait_for_looks(launcher: int) -> None:
    """Wait for the next looks: nothing else wakes a launcher that has nothing to do."""
    before = wakings(launcher)
    truth.until(lambda: wakings(launcher) >= before + 3, "the launcher does not look")


def wakings(pid: int) -> int:
    """How often a process has gone to sleep by itself."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


LETTING_GO = """
    import safepool

    def let_go():
        safepool.detached(["/bin/sleep", "180"])

    if __name__ == "__main__":
        context = safepool.get_context("fork")
        with context.Pool(1, grace=0.5) as pool:
            try:
                pool.apply(let_go)
            except safepool.ProtectionError as error:
                say("refused", str(error))
        try:
            context.Pool(1, strays="spare")
        except safepool.ProtectionError as error:
            say("refused", str(error))
        free = safepool.detached(["/bin/sleep", "180"])
        say("free", str(free.pid))
"""


def test_nobody_is_let_go_who_could_not_be_told_from_a_stray(system: Portable) -> None:
    """Refused with the reason within a run; outside of it no sweep comes near."""
    owner = system.jail.script(LETTING_GO, environment=system.environment)
    assert all("portable" in line.text for line in system.jail.hear("refused", 2))
    free = int(system.jail.hear("free")[0].text)
    assert owner.wait() == 0, owner.errors()
    system.jail.assert_empty("owner ended", BOUND, besides=[free])
    assert truth.is_alive(free)
    os.kill(free, signal.SIGKILL)
    assert not system.forbidden()


def test_the_lifeline_alone_ends_a_killed_launchers_workers(method: str, system: Portable) -> None:
    """The sidecar is no net here, and owner and launcher are SIGKILLed: busy workers go."""
    console = system.console(method, SAFEPOOL_TEST_NETS="deathsig")
    for _ in range(2):
        console.ask("hold sleeper")
    workers = [line.pid for line in system.jail.hear("ready", 2)]
    for launcher in {truth.parent(pid) for pid in workers}:
        os.kill(launcher, signal.SIGKILL)
    console.owner.send(signal.SIGKILL)
    for pid in workers:
        assert truth.wait_gone(pid, BOUND), truth.describe(pid)
