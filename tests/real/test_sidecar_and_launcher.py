"""What happens when safepool's own processes cannot start, or are killed.

A sidecar that cannot start is an error with the reason, not a pool without protection.
A sidecar that is killed is replaced and the pool works on. A launcher that is killed
takes its workers with it; their strays are swept and the pool goes on with a new one.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.kit import truth
from tests.kit.console import Console
from tests.kit.jail import Jail

BOUND = 10.5

FIRST_USE = """
    import multiprocessing
    from safepool import ProtectionError, get_context
    if __name__ == "__main__":
        method, executable = sys.argv[1:]
        if executable:
            sys.executable = executable
            multiprocessing.set_executable(executable)
        limit = time.monotonic() + 30
        try:
            pool = get_context(method).Pool(2, grace=0.5)
            while time.monotonic() < limit:
                pool.map(abs, range(4))
        except ProtectionError as error:
            say("refused", str(error).replace("\\n", " "))
        else:
            say("ran")
"""
"""Under fork the sidecar comes up beside the launcher, so a later map may be what fails."""


def refusal(jail: Jail, method: str, executable: str = "", **how: object) -> str:
    """Run an owner that cannot be protected; returns what it was told."""
    owner = jail.script(FIRST_USE, method, executable, **how)  # type: ignore[arg-type]
    said = jail.hear("refused", seconds=40)[0].text
    assert owner.wait() == 0, owner.errors()
    jail.assert_empty("after a refused start", BOUND)
    return said


@pytest.mark.parametrize("interpreter", ["false", "missing", "directory", "not_executable"])
def test_a_broken_interpreter_is_a_protection_error(
    method: str, interpreter: str, jail: Jail
) -> None:
    """No pool without protection: the error says what could not be started."""
    plain = jail.folder / "plain"
    plain.write_text("no program\n")
    path = {
        "false": shutil.which("false") or "/bin/false",
        "missing": str(jail.folder / "missing"),
        "directory": str(jail.folder),
        "not_executable": str(plain),
    }[interpreter]
    said = refusal(jail, method, path)
    assert "sidecar" in said, said
    assert len(said) > len("sidecar"), "the reason is missing"


def test_a_file_where_the_registry_belongs_is_a_protection_error(method: str, jail: Jail) -> None:
    """The registry cannot be made: the error names the place."""
    place = jail.folder / "run" / "safepool"
    place.write_text("in the way")
    assert str(place) in refusal(jail, method)
    assert place.read_text() == "in the way"


def test_a_registry_that_others_can_write_is_a_protection_error(method: str, jail: Jail) -> None:
    """What others can write is not trusted, and not repaired silently."""
    place = jail.folder / "run" / "safepool"
    place.mkdir()
    place.chmod(0o777)
    assert str(place) in refusal(jail, method)


def can_mount() -> bool:
    """Tell whether a private mount namespace can be made here."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0


needs_mounts = pytest.mark.skipif(not can_mount(), reason="mounts need root")


@needs_mounts
def test_a_full_disk_is_a_protection_error(method: str, jail: Jail) -> None:
    """No space for the run's record: the error says so."""
    run = jail.folder / "run"
    fill = (
        f"mount -t tmpfs -o size=4k,mode=700 none {run} && "
        f'head -c 4096 /dev/zero > {run}/full && exec "$@"'
    )
    said = refusal(jail, method, before=["unshare", "-m", "sh", "-c", fill, "sh"])
    assert "No space left" in said, said


@needs_mounts
def test_nowhere_to_write_is_a_protection_error(method: str, jail: Jail) -> None:
    """Every place for the registry is read-only: the error says what to do."""
    places = {"/tmp", "/dev/shm", str(jail.folder)}
    lock = " && ".join(
        f"mount --bind {place} {place} && mount -o remount,bind,ro {place}"
        for place in sorted(places)
    )
    before = ["unshare", "-m", "sh", "-c", f'{lock} && exec "$@"', "sh"]
    said = refusal(jail, method, before=before)
    assert "XDG_RUNTIME_DIR" in said, said


def test_a_killed_sidecar_is_replaced_and_the_pool_works_on(method: str, jail: Jail) -> None:
    """SIGKILL of the sidecar: a warning, a new one, the same workers; the promise still holds."""
    console = Console(jail, method)
    before = console.meet()
    (sidecar,) = truth.until(lambda: truth.sidecars(console.owner.pid), "no sidecar")
    os.kill(sidecar, signal.SIGKILL)
    said = console.owner.wait_for_error("WARNING safepool")
    assert "sidecar" in said, said
    (new,) = truth.until(
        lambda: [pid for pid in truth.sidecars(console.owner.pid) if pid != sidecar],
        "the sidecar is not replaced",
    )
    assert new != sidecar
    if method == "fork":
        assert console.meet() == before, "the workers have nothing to do with the sidecar"
    console.ask("map")
    for villain in ("new_session", "daemon_empty_env"):
        console.ask(f"hold {villain}")
    jail.hear("ready", 2)
    console.owner.send(signal.SIGKILL)
    jail.assert_empty("owner killed after its sidecar was", BOUND)


def test_sidecar_and_owner_killed_at_once_leave_nothing(method: str, jail: Jail) -> None:
    """The launcher is enough when the sidecar goes with the owner."""
    console = Console(jail, method, processes=3)
    for villain in ("daemon_empty_env", "ignores_term", "stubborn_subprocess"):
        console.ask(f"hold {villain}")
    jail.hear("ready", 3)
    (sidecar,) = truth.until(lambda: truth.sidecars(console.owner.pid), "no sidecar")
    os.kill(sidecar, signal.SIGKILL)
    console.owner.send(signal.SIGKILL)
    jail.assert_empty("owner and sidecar killed", BOUND)


def test_a_sidecar_killed_again_and_again_is_replaced(jail: Jail) -> None:
    """Five times in a row; the pool works on each time."""
    console = Console(jail, "spawn")
    console.ask("map")
    old = 0
    for _ in range(5):
        (sidecar,) = truth.until(
            lambda old=old: [p for p in truth.sidecars(console.owner.pid) if p != old],  # type: ignore[misc]
            "no sidecar",
        )
        # One that is killed before it watches counts as one that cannot be started.
        console.ask("watched")
        os.kill(sidecar, signal.SIGKILL)
        assert truth.wait_gone(sidecar)
        old = sidecar
        console.ask("map")
    console.owner.send(signal.SIGKILL)
    jail.assert_empty("owner killed", BOUND)


def test_a_killed_launcher_takes_its_workers_and_the_pool_goes_on(method: str, jail: Jail) -> None:
    """SIGKILL of a launcher: workers die, strays are swept, the log says so, new workers work."""
    console = Console(jail, method, processes=4)
    workers = console.meet()
    launchers = {parent for _, parent in workers}
    assert console.owner.pid not in launchers
    for villain in ("new_session", "daemon", "daemon_empty_env"):
        console.ask(f"hold {villain}")
    jail.hear("ready", 3)
    strays = [pid for pid in jail.pids() if truth.command_line(pid).startswith("/bin/sleep")]
    assert len(strays) == 3, jail.living()
    for launcher in launchers:
        os.kill(launcher, signal.SIGKILL)
    for pid, _ in workers:
        assert truth.wait_gone(pid, 5), truth.describe(pid)
    for pid in strays:
        assert truth.wait_gone(pid, BOUND), truth.describe(pid)
    assert console.ask("settle").split() == ["WorkerLostError"] * 3
    renewed = console.meet()
    assert len(renewed) == 4
    assert not {pid for pid, _ in renewed} & {pid for pid, _ in workers}
    said = console.owner.wait_for_error("WARNING safepool")
    assert "launcher" in said, said
    console.owner.send(signal.SIGKILL)
    jail.assert_empty("owner killed after its launcher was", BOUND)


def test_launcher_and_sidecar_killed_leave_nothing_after_the_owner(method: str, jail: Jail) -> None:
    """Both of safepool's processes are killed and then the owner: still nothing is left."""
    console = Console(jail, method, processes=3)
    workers = console.meet()
    for villain in ("daemon", "daemon_empty_env"):
        console.ask(f"hold {villain}")
    jail.hear("ready", 2)
    for pid in {parent for _, parent in workers} | set(truth.sidecars(console.owner.pid)):
        os.kill(pid, signal.SIGKILL)
    console.owner.wait_for_error("WARNING safepool")
    console.ask("map")
    console.owner.send(signal.SIGKILL)
    jail.assert_empty("all three killed in turn", BOUND)


LOCKS = """
    import threading
    import traceback
    import safepool
    from safepool import in_flight, run

    class Gate:
        \"\"\"The gate's lock, which notes who waits for it with a lock of the run in hand.\"\"\"

        def __init__(self):
            self.lock = threading.RLock()
            self.wrong = []

        def acquire(self, *how, **named):
            known = run._current
            if known is not None and not self.lock._is_owned():
                locks = known.monitor._lock, known.monitor.sidecar._lock
                if any(lock._is_owned() for lock in locks):
                    self.wrong.append("".join(traceback.format_stack()))
            return self.lock.acquire(*how, **named)

        def __enter__(self):
            return self.acquire()

        def __exit__(self, *reason):
            self.lock.release()

        def release(self):
            self.lock.release()

    if __name__ == "__main__":
        in_flight.gate.lock = gate = Gate()
        pool = safepool.get_context(sys.argv[1]).Pool(2, grace=0.5)
        for line in sys.stdin:
            if line.strip() == "parents":
                say("parents", str(pool.apply(os.getppid)))
            pool.map(abs, range(4))
            say("worked")
        say("wrong", " ".join(gate.wrong).replace(chr(10), " "))
"""


def test_nobody_waits_for_the_gate_with_a_lock_of_the_run(method: str, jail: Jail) -> None:
    """A thread that hands a descriptor to the sidecar holds the gate and then needs the run's
    locks; whoever comes the other way round stands against it for ever (it did, seldom)."""
    owner = jail.script(LOCKS, method)
    stdin = owner.process.stdin
    assert stdin is not None
    stdin.write(b"parents\n")
    stdin.flush()
    launcher = int(jail.hear("parents")[0].text)
    (sidecar,) = truth.until(lambda: truth.sidecars(owner.pid), "no sidecar")
    jail.hear("worked")
    for number, pid in enumerate((sidecar, launcher), 2):
        os.kill(pid, signal.SIGKILL)
        owner.wait_for_error(str(pid))
        stdin.write(b"map\n")
        stdin.flush()
        jail.hear("worked", number)
    truth.until(lambda: [p for p in truth.sidecars(owner.pid) if p != sidecar], "not replaced")
    stdin.close()
    assert jail.hear("wrong")[0].text == ""
    assert owner.wait() == 0, owner.errors()


BETWEEN = """
    import safepool
    if __name__ == "__main__":
        context = safepool.get_context(sys.argv[1])
        with context.Pool(1, grace=0.5) as pool:
            pool.map(abs, range(4))
        limit = time.monotonic() + 10
        while len(os.listdir("/proc/self/task")) > 1 and time.monotonic() < limit:
            time.sleep(0.01)
        say("closed", str(len(os.listdir("/proc/self/task"))))
        sys.stdin.readline()
        pool = context.Pool(1, grace=0.5)
        say("worker", str(pool.apply(os.getpid)))
        sys.stdin.readline()
"""


def test_a_sidecar_that_dies_while_no_pool_is_open_is_replaced_for_the_next(
    method: str, jail: Jail
) -> None:
    """Nobody watches it then, since there is nothing to protect."""
    owner = jail.script(BETWEEN, method)
    stdin = owner.process.stdin
    assert stdin is not None
    assert jail.hear("closed")[0].text == "1", "a thread still watches"
    (sidecar,) = truth.sidecars(owner.pid)
    os.kill(sidecar, signal.SIGKILL)
    stdin.write(b"go on\n")
    stdin.flush()
    worker = int(jail.hear("worker")[0].text)
    truth.until(lambda: [p for p in truth.sidecars(owner.pid) if p != sidecar], "not replaced")
    assert truth.is_alive(worker)
    owner.send(signal.SIGKILL)
    jail.assert_empty("owner killed", BOUND)


def test_a_full_disk_or_closed_stderr_stops_no_sweep(method: str, jail: Jail) -> None:
    """The sidecar's own output cannot be written: the sweep does its work all the same."""
    before = ["sh", "-c", 'exec "$@" >/dev/full 2>/dev/full', "sh"]
    console = Console(jail, method, before=before)
    for villain in ("daemon_empty_env", "stubborn_subprocess"):
        console.ask(f"hold {villain}")
    jail.hear("ready", 2)
    console.owner.send(signal.SIGKILL)
    jail.assert_empty("owner killed, standard error full", BOUND)


def test_no_helper_outlives_a_closed_pool(method: str, jail: Jail) -> None:
    """Launchers leave within a second of their last duty; the sidecar stays with its owner."""
    console = Console(jail, method)
    console.ask("map")
    console.ask("close")
    owner = console.owner.pid

    def only_two() -> bool:
        return set(jail.pids()) == {owner, *truth.sidecars(owner)}

    truth.until(only_two, f"more than owner and sidecar: {jail.living()}", 3)
    assert len(truth.sidecars(owner)) == 1
    assert console.owner.process.stdin is not None
    console.owner.process.stdin.close()
    assert console.owner.wait() == 0, console.owner.errors()
    jail.assert_empty("after a closed pool", 3)


def test_log_names_what_was_ended(jail: Jail, tmp_path: Path) -> None:
    """After the owner's death the run's log names what was ended, and by which signal."""
    console = Console(jail, "fork")
    console.ask("hold daemon_empty_env")
    jail.hear("ready")
    (stray,) = [pid for pid in jail.pids() if truth.command_line(pid).startswith("/bin/sleep")]
    console.owner.send(signal.SIGKILL)
    jail.assert_empty("owner killed", BOUND)
    logs = "".join(path.read_text() for path in (jail.folder / "run").glob("safepool/*.log"))
    assert str(stray) in logs + console.owner.errors()
    assert "SIGTERM" in logs, f"{logs!r}"
    assert str(stray) in logs, f"{logs!r}"
