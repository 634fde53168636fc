"""What a pool's options say of its processes, done to real ones.

``on_owner_death="kill"``: no SIGTERM and no grace once the owner has ended.
``strays="spare"``: what a worker leaves that ended in order lives on; after any other
end it is swept as ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit import truth
from tests.kit.jail import Jail, Owner

METHODS = ("fork", "spawn", "forkserver")
BOUND = 20.0

OWNER_DEATH = """
    import threading
    from safepool import get_context

    def stubborn():
        # Says that it was asked to end, and stays.
        signal.signal(signal.SIGTERM, lambda *_: say("asked"))
        say("ready", str(os.getppid()))
        time.sleep(180)

    if __name__ == "__main__":
        method, face, policy, grace = sys.argv[1:]
        if face == "pool":
            pool = get_context(method).Pool(1, grace=float(grace), on_owner_death=policy)
            pool.apply_async(stubborn)
        else:
            process = get_context(method).Process(target=stubborn)
            process.grace, process.on_owner_death = float(grace), policy
            process.start()
        threading.Event().wait()
"""


@pytest.mark.parametrize("face", ["pool", "process"])
def test_kill_gives_no_grace_when_the_owner_has_died(method: str, face: str, jail: Jail) -> None:
    """The owner is SIGKILLed: with a grace of a minute nobody is asked, all are gone at once."""
    owner = jail.script(OWNER_DEATH, method, face, "kill", "60")
    jail.hear("ready")
    owner.send(signal.SIGKILL)
    jail.assert_empty("owner killed", BOUND)
    assert jail.told("asked") == []


@pytest.mark.parametrize("face", ["pool", "process"])
def test_terminate_asks_first_when_the_owner_has_died(face: str, jail: Jail) -> None:
    """The same with "terminate": the worker is asked, and ended when the grace is over."""
    owner = jail.script(OWNER_DEATH, "fork", face, "terminate", "0.5")
    jail.hear("ready")
    owner.send(signal.SIGKILL)
    jail.hear("asked")
    jail.assert_empty("owner killed", BOUND)


TWO_POOLS = """
    import subprocess, threading
    from safepool import get_context

    def stubborn(name):
        signal.signal(signal.SIGTERM, lambda *_: say(f"asked-{name}"))
        if name == "hurried":
            stray = subprocess.Popen(
                ["/bin/sh", "-c", "trap 'echo asked-hurried $$ stray >> $TELL' TERM; echo;"
                 "while :; do sleep 180; done"], start_new_session=True, stdout=subprocess.PIPE)
            stray.stdout.readline()
        say(name, str(os.getppid()))
        time.sleep(180)

    if __name__ == "__main__":
        context = get_context(sys.argv[1])
        patient = context.Pool(1, grace=60)
        hurried = context.Pool(1, grace=60, on_owner_death="kill")
        patient.apply_async(stubborn, ("patient",))
        hurried.apply_async(stubborn, ("hurried",))
        threading.Event().wait()
"""


def wedge(pid: int) -> None:
    """Hold a process so that SIGCONT does not free it, as a debugger does; it can be killed."""
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    seize, interrupt = 0x4206, 0x4207
    for request in (seize, interrupt):
        if ptrace(request, pid, None, None) != 0:
            pytest.skip(f"ptrace is not permitted: {os.strerror(ctypes.get_errno())}")
    truth.until(lambda: truth.state(pid) == "t", "the launcher is not held")


@pytest.mark.parametrize(("method", "how"), [("fork", "wedged"), ("spawn", "stopped")])
def test_a_stopped_launcher_is_no_way_to_a_grace(method: str, how: str, jail: Jail) -> None:
    """Its launcher cannot act, so the sidecar ends the tree of the hurried pool: it is asked
    for nothing and goes at once, while the other pool has its grace."""
    owner = jail.script(TWO_POOLS, method)
    patient, hurried = jail.hear("patient")[0], jail.hear("hurried")[0]
    launcher = int(hurried.text)
    stray = next(pid for pid in jail.pids() if truth.command_line(pid).startswith("/bin/sh"))
    if how == "wedged":
        wedge(launcher)
    else:
        os.kill(launcher, signal.SIGSTOP)
    owner.send(signal.SIGKILL)
    jail.hear("asked-patient")
    for pid in (hurried.pid, launcher, stray):
        assert truth.wait_gone(pid, BOUND), truth.describe(pid)
    if how == "wedged":
        os.waitpid(launcher, 0)  # whoever holds it reaps it first
    assert jail.told("asked-hurried") == []
    assert truth.is_alive(patient.pid)


STRAYS = """
    import subprocess
    from safepool import get_context
    from tests.kit import villains

    def leave(how=""):
        # A session of its own, and a daemon that has nothing but the tag.
        subprocess.Popen(villains.SLEEP, start_new_session=True)
        villains.double_fork({})
        say("left", str(os.getppid()))
        if how == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit0":
            os._exit(0)

    if __name__ == "__main__":
        method, strays, end = sys.argv[1:]
        lifetime = 1 if end == "retire" else None
        pool = get_context(method).Pool(1, maxtasksperchild=lifetime, grace=0.5, strays=strays)
        if end in ("crash", "exit0"):
            try:
                pool.apply(leave, (end,))
            except Exception as error:
                say(type(error).__name__)
        else:
            pool.apply(leave)
        if end == "launcher":
            sys.stdin.readline()  # it is killed meanwhile
        if end in ("retire", "crash", "exit0", "launcher"):
            pool.apply(abs, (1,))  # a replacement is at work
        if end in ("close", "retire"):
            pool.close()
            pool.join()
        if end == "terminate":
            pool.terminate()
        say("over")
        sys.stdin.readline()
"""


Started = list[tuple[str, Jail, Owner]]


@contextlib.contextmanager
def owners(tmp_path: Path, method: str, strays: str, ends: list[str]) -> Iterator[Started]:
    """An owner for each end, side by side, each in a jail of its own."""
    with contextlib.ExitStack() as stack:
        started = []
        for end in ends:
            folder = tmp_path / f"{method}-{end}"
            folder.mkdir()
            jail = stack.enter_context(Jail(folder))
            started.append((end, jail, jail.script(STRAYS, method, strays, end)))
        yield started


def sleepers(jail: Jail) -> list[int]:
    """The strays that live."""
    return [pid for pid in jail.pids() if truth.command_line(pid).startswith("/bin/sleep")]


def end_by_pidfd(pids: list[int]) -> None:
    """The test ends what was to stay, and nobody else that might have got the number."""
    for pid in pids:
        fd = os.pidfd_open(pid)
        try:
            assert truth.command_line(pid).startswith("/bin/sleep")
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        finally:
            os.close(fd)


NEXT_START = """
    from safepool import get_context
    if __name__ == "__main__":
        with get_context("spawn").Pool(1) as pool:  # its sidecar has looked for dead runs
            pool.apply(abs, (1,))
        say("next")
"""


@pytest.mark.parametrize("method", METHODS)
def test_spared_strays_stay(method: str, tmp_path: Path) -> None:
    """After ``close`` and after ``maxtasksperchild`` they live; also when the owner exits, or is
    SIGKILLed, and when the next run has started. ``join`` and exit do not wait for them."""
    with owners(tmp_path, method, "spare", ["close", "retire"]) as started:
        for end, jail, owner in started:
            jail.hear("over")
            left = sleepers(jail)
            assert len(left) == 2, (end, jail.living(), owner.errors())
            if end == "close":
                owner.go()
                assert owner.wait() == 0, owner.errors()
            else:
                owner.send(signal.SIGKILL)
            jail.assert_empty(f"{end}: all but the spared", BOUND, besides=left)
            jail.script(NEXT_START)
            jail.hear("next")
            jail.assert_empty(f"{end}: next start", BOUND, besides=left)
            assert sleepers(jail) == left, jail.living()
            names = os.listdir(jail.folder / "run" / "safepool")
            assert {int(n.split(".")[1]) for n in names if n.startswith("detached.")} == set(left)
            end_by_pidfd(left)
            jail.assert_empty(f"{end}: ended by the test", BOUND)


@pytest.mark.parametrize("method", METHODS)
def test_strays_of_any_other_end_are_swept(method: str, tmp_path: Path) -> None:
    """``strays="spare"`` is for ends in order: ``terminate``, a crash (also with status 0), a
    killed launcher and the owner's SIGKILL leave nothing."""
    ends = ["terminate", "crash", "exit0", "launcher", "owner"]
    with owners(tmp_path, method, "spare", ends) as started:
        for end, jail, owner in started:
            (said,) = jail.hear("left")
            if end == "launcher":
                os.kill(int(said.text), signal.SIGKILL)
                assert truth.wait_gone(said.pid, BOUND)
                owner.go()
            jail.hear("over")
            if end == "owner":
                owner.send(signal.SIGKILL)
            else:
                assert sleepers(jail) == [], end
                owner.go()
            jail.assert_empty(end, BOUND)


def test_strays_are_ended_by_default(tmp_path: Path) -> None:
    """Negative control: with "kill" the ends in order leave none either."""
    with owners(tmp_path, "fork", "kill", ["close", "retire"]) as started:
        for end, jail, owner in started:
            jail.hear("over")
            assert sleepers(jail) == [], end
            owner.go()
            jail.assert_empty(end, BOUND)
