"""``safepool.sweep``: what dead runs have left is ended on request, or only reported."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path

import pytest

import safepool
from tests.kit import truth
from tests.kit.jail import Jail

BOUND = 20.0

OWNER = """
    import subprocess
    import safepool
    from tests.kit import villains

    def task(role):
        if role == "shell":
            stray = subprocess.Popen([sys.executable, "shell.py"])
        else:
            stray = subprocess.Popen(villains.SLEEP, start_new_session=True)
        free = safepool.detached(villains.SLEEP)
        villains.double_fork({})
        say("started", f"{stray.pid} {free.pid} {os.getppid()}")
        time.sleep(180)

    if __name__ == "__main__":
        safepool.get_context("fork").Pool(1).apply(task, (sys.argv[1],))
"""

SHELL = """
import os, safepool, subprocess, sys, time
if not sys.argv[1:]:
    with open("line", "rb", buffering=0) as line:
        line.read(1)
    subprocess.run([sys.executable, "shell.py", "command"])
    time.sleep(180)
result = safepool.sweep(grace=1)
with open(os.environ["TELL"], "a") as tell:
    tell.write(f"swept {os.getpid()} {[p.outcome for p in result.processes]}\\n")
"""
"""Has a command of its own sweep when it is told to; it comes from a run that is dead by then."""

SWEEP = """
    import json, logging
    logging.basicConfig(level=logging.INFO)
    import safepool
    result = safepool.sweep(dry_run=sys.argv[1] == "dry", grace=float(sys.argv[2]))
    print(result, file=sys.stderr)
    rows = [[p.pid, p.outcome, p.found, p.last_signal, p.reason] for p in result.processes]
    kept = [[record.run_id, record.verdict] for record in result.kept]
    owners = [run.owner for run in result.runs]
    say("result", json.dumps({"dry": result.dry_run, "rows": rows, "kept": kept, "runs": owners}))
"""


def dead_run(jail: Jail, role: str = "sleep") -> tuple[int, int, int, int]:
    """Kill an owner, its sidecar and its launcher at once. Returns the owner, the stray, a
    daemon with an empty environment, and a detached process, which all live."""
    number = len(jail.told("started")) + 1
    before = set(jail.pids())
    owner = jail.script(OWNER, role)
    said = jail.hear("started", number)[-1]
    stray, free, launcher = map(int, said.text.split())
    new = [pid for pid in jail.pids() if pid not in before]
    (daemon,) = (
        pid
        for pid in new
        if truth.command_line(pid).startswith("/bin/sleep") and pid not in (stray, free)
    )
    helpers = [owner.pid, launcher, *truth.sidecars(owner.pid)]
    assert len(helpers) == 3
    jail.kill_at_once(helpers)
    jail.assert_empty("killed", BOUND, besides=[*before, stray, free, daemon])
    assert all(truth.is_alive(pid) for pid in (stray, free, daemon))
    return owner.pid, stray, daemon, free


def sweep(jail: Jail, how: str, grace: float = 1.0) -> dict[str, object]:
    """Call it from a process that has no run; what it returned."""
    number = len(jail.told("result")) + 1
    caller = jail.script(SWEEP, how, str(grace))
    text = jail.hear("result", number)[-1].text
    assert caller.wait() == 0, caller.errors()
    result: dict[str, object] = json.loads(text)
    assert result["dry"] == (how == "dry")
    return result


def state_of(folder: Path) -> dict[str, tuple[int, str]]:
    """All that lies in a folder: its time of change and its content."""
    return {
        str(path): (path.lstat().st_mtime_ns, hashlib.sha1(path.read_bytes()).hexdigest())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    } | {str(folder): (folder.lstat().st_mtime_ns, "")}


def end(pid: int) -> None:
    """End what the test let live."""
    fd = os.pidfd_open(pid)
    signal.pidfd_send_signal(fd, signal.SIGKILL)
    os.close(fd)


def test_a_dry_run_reports_what_the_sweep_then_does(jail: Jail) -> None:
    """The dry run names both strays and the detached process, signals nobody and changes
    nothing on disk; the sweep ends the strays, spares the other, and the record goes."""
    owner, stray, daemon, free = dead_run(jail)
    registry = jail.folder / "run" / "safepool"
    before = state_of(registry)
    starts = {pid: truth.started(pid) for pid in (stray, daemon, free)}

    dry = sweep(jail, "dry")
    assert state_of(registry) == before
    assert {pid: truth.started(pid) for pid in starts} == starts
    assert all(truth.state(pid) == "S" for pid in starts), jail.living()
    assert dry["runs"] == [owner]
    found = {row[0]: row[1:] for row in dry["rows"]}  # type: ignore[attr-defined]
    assert found == {
        stray: ["found", "tag", None, ""],
        daemon: ["found", "tag", None, ""],
        free: ["spared", "", None, "it was let go on purpose"],
    }

    real = sweep(jail, "real")
    assert not truth.is_alive(stray)
    assert not truth.is_alive(daemon)
    assert truth.is_alive(free)
    assert real["runs"] == [owner]
    done = {row[0]: row[1:] for row in real["rows"]}  # type: ignore[attr-defined]
    assert done == {
        stray: ["ended", "tag", "SIGTERM", ""],
        daemon: ["ended", "tag", "SIGTERM", ""],
        free: ["spared", "", None, "it was let go on purpose"],
    }
    left = [path.name.split(".")[0] for path in registry.iterdir() if path.suffix != ".log"]
    assert left == ["detached"]
    (log,) = registry.glob("*.log")
    assert str(daemon) in log.read_text()

    again = sweep(jail, "real")
    assert (again["runs"], again["rows"], again["kept"]) == ([], [], [])
    end(free)
    jail.assert_empty("ended by the test", BOUND)


LIVE = """
    from safepool import get_context
    if __name__ == "__main__":
        pool = get_context("spawn").Pool(1)
        pool.apply(abs, (1,))
        say("live")
        sys.stdin.readline()
        pool.apply(abs, (1,))
        say("still")
"""


def test_living_and_damaged_runs_are_kept_and_named(jail: Jail) -> None:
    """A living owner's run and a record that cannot be read are not acted upon."""
    live = jail.script(LIVE)
    jail.hear("live")
    registry = jail.folder / "run" / "safepool"
    damaged = registry / f"{'ab' * 16}.run"
    damaged.write_text("{")
    everybody = set(jail.pids())
    for how in ("dry", "real"):
        result = sweep(jail, how)
        assert result["runs"] == []
        assert sorted(verdict for _, verdict in result["kept"]) == ["live", "unknown"]  # type: ignore[attr-defined]
    assert damaged.read_text() == "{"
    assert set(jail.pids()) == everybody
    live.go()
    jail.hear("still")
    assert live.wait() == 0


def test_two_dead_runs_are_swept_side_by_side(jail: Jail) -> None:
    """Without a grace: SIGKILL to the strays of both, and both are in one report."""
    first, second = dead_run(jail), dead_run(jail)
    result = sweep(jail, "real", 0.0)
    assert sorted(result["runs"]) == sorted([first[0], second[0]])  # type: ignore[call-overload]
    rows = result["rows"]
    assert {row[0] for row in rows if row[1] == "ended"} == {*first[1:3], *second[1:3]}  # type: ignore[attr-defined]
    assert {row[3] for row in rows if row[1] == "ended"} == {"SIGKILL"}  # type: ignore[attr-defined]
    end(first[3])
    end(second[3])
    jail.assert_empty("ended by the test", BOUND)


def test_it_does_not_end_its_caller(jail: Jail) -> None:
    """A command of a shell that a dead run left calls it: both stay, what else was left goes."""
    (jail.folder / "shell.py").write_text(SHELL)
    os.mkfifo(jail.folder / "line")
    line = os.open(jail.folder / "line", os.O_RDWR)
    try:
        _, shell, daemon, free = dead_run(jail, "shell")
        os.write(line, b"x")
        listener = jail.script("sys.stdin.readline()")  # with no owner the jail hears nobody
        (said,) = jail.hear("swept")
    finally:
        os.close(line)
    assert "'ended'" in said.text
    assert said.text.count("'spared'") == 3  # the shell, its command, and what was let go
    assert not truth.is_alive(daemon)
    assert truth.is_alive(shell)
    end(free)
    end(shell)
    listener.go()
    jail.assert_empty("ended by the test", BOUND)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"dry_run": 1}, TypeError),
        ({"dry_run": None}, TypeError),
        ({"grace": -1}, ValueError),
        ({"grace": "5"}, TypeError),
    ],
)
def test_wrong_arguments(arguments: dict[str, object], error: type[Exception]) -> None:
    """They are refused before anything is looked at."""
    with pytest.raises(error, match=next(iter(arguments))):
        safepool.sweep(**arguments)  # type: ignore[arg-type]


def test_without_a_registry_there_is_nothing_to_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is on record, and none is made; one that others can write is refused."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert safepool.sweep() == safepool.SweepResult(False, (), ())
    assert "0 dead runs" in str(safepool.sweep(dry_run=True))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "safepool").mkdir()
    (tmp_path / "safepool").chmod(0o777)
    with pytest.raises(safepool.ProtectionError, match="mode is 0777"):
        safepool.sweep(dry_run=True)
