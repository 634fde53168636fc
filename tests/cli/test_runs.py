"""``safepool ps``, ``tree``, ``stop``, ``sweep`` and ``log``, against what the kernel says.

The owners and the command are in one jail, and so in one registry.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kit import truth
from tests.kit.console import Console
from tests.kit.jail import Jail

SAFEPOOL = [sys.executable, "-m", "safepool"]


def command(jail: Jail, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command outside of the jail's cage, on the jail's registry."""
    return subprocess.run(
        [*SAFEPOOL, *arguments],
        env={**jail.environment, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def answer(jail: Jail, *arguments: str, status: int = 0) -> Any:
    """The JSON that a command prints."""
    ran = command(jail, *arguments, "--json")
    assert ran.returncode == status, ran.stderr
    body = json.loads(ran.stdout)
    assert body["format"] == 1
    return body


def only_run(jail: Jail) -> Any:
    """The one run that ps lists."""
    (run,) = answer(jail, "ps")["runs"]
    return run


def by_role(run: Any) -> dict[str, list[int]]:
    roles: dict[str, list[int]] = {}
    for process in run["processes"]:
        roles.setdefault(process["role"], []).append(process["pid"])
    return roles


LET_GO = """
    import safepool

    if __name__ == "__main__":
        with safepool.detached(["/bin/sleep", "180"]) as child:
            say("let_go", str(child.pid))
            sys.stdin.readline()
"""


def let_go(jail: Jail) -> int:
    """The pid of a process that an owner without any run has let go; the jail ends it."""
    jail.script(LET_GO)
    return int(jail.hear("let_go")[0].text)


def wait_for_sidecars(jail: Jail) -> None:
    """With fork they come up beside the first workers."""

    def are_up() -> bool:
        return all("sidecar" in by_role(run) for run in answer(jail, "ps")["runs"])

    truth.until(are_up, "every run has its sidecar")


def held(jail: Jail, method: str) -> tuple[Console, list[int]]:
    """A pool of two, whose first worker has started a daemon that has no environment."""
    console = Console(jail, method)
    workers = [pid for pid, _ in console.meet()]
    console.ask("hold daemon_empty_env")
    jail.hear("ready")
    wait_for_sidecars(jail)
    return console, workers


def kill_all_helpers(jail: Jail, console: Console, run: Any) -> None:
    """Owner, sidecar and launchers are killed in one instant: none gets to sweep."""
    roles = by_role(run)
    victims = [console.owner.pid, *roles["sidecar"], *roles["launcher"]]
    jail.kill_at_once(victims)
    for pid in [*victims, *roles["worker"]]:
        truth.wait_gone(pid)


def test_ps_lists_what_was_let_go(jail: Jail) -> None:
    """Also without any run; no longer when it is gone."""
    pid = let_go(jail)
    (listed,) = answer(jail, "ps")["detached"]
    assert (listed["pid"], listed["start"]) == (pid, truth.started(pid))
    assert listed["argv"] == ["/bin/sleep", "180"]
    assert listed["spared"] is False
    assert f"detached: {pid} (/bin/sleep 180)" in command(jail, "ps").stdout
    os.kill(pid, signal.SIGKILL)
    assert truth.wait_gone(pid)
    assert answer(jail, "ps")["detached"] == []


def test_ps_lists_each_process_with_its_role(method: str, jail: Jail) -> None:
    """The roles are those that the kernel's tree shows; nobody is left out or invented."""
    console, workers = held(jail, method)
    run = only_run(jail)
    roles = by_role(run)
    assert run["state"] == "live"
    assert run["owner"]["pid"] == console.owner.pid == roles["owner"][0]
    assert sorted(roles["worker"]) == workers
    assert roles["sidecar"] == truth.sidecars(console.owner.pid)
    assert roles["launcher"] == [truth.parent(workers[0])]
    (stray,) = roles["stray"]
    assert truth.command_line(stray) == "/bin/sleep 180"
    listed = [process["pid"] for process in run["processes"]]
    assert sorted(listed) == sorted({*jail.pids()} & {console.owner.pid, *listed})
    assert {*jail.pids()} - {*listed} <= {*truth.children(os.getpid()), *trackers(jail)}
    for process in run["processes"]:
        assert process["parent"] == truth.parent(process["pid"])
        assert process["start"] == truth.started(process["pid"])
        assert process["memory"] > 0
    number = {process["pid"]: process["worker"] for process in run["processes"]}
    assert number[stray] in [number[pid] for pid in workers]
    assert run["memory"] == sum(process["memory"] for process in run["processes"])


def trackers(jail: Jail) -> list[int]:
    return [pid for pid in jail.pids() if "resource_tracker" in truth.command_line(pid)]


def test_nested_runs_are_told_apart(jail: Jail) -> None:
    """The owner of the inner run is a worker of the outer one; the rest is of one run only."""
    console = Console(jail, "fork")
    console.ask("hold nested")
    jail.hear("inner", 2)
    wait_for_sidecars(jail)
    runs = {run["owner"]["pid"]: run for run in answer(jail, "ps")["runs"]}
    outer = runs.pop(console.owner.pid)
    (inner,) = runs.values()
    assert inner["inside"] == outer["id"]
    assert outer["inside"] is None
    pids = [{process["pid"] for process in run["processes"]} for run in (outer, inner)]
    assert pids[0] & pids[1] == {inner["owner"]["pid"]}
    assert inner["owner"]["pid"] in by_role(outer)["worker"]
    assert len(by_role(inner)["worker"]) == len(by_role(outer)["worker"]) == 2
    assert pids[0] | pids[1] == {*jail.pids()} - {*trackers(jail)} - keepers(jail)


def keepers(jail: Jail) -> set[int]:
    """What the jail itself needs, where there are no cgroups."""
    return {pid for pid in jail.pids() if "keeper.py" in truth.command_line(pid)}


def test_plain_text_has_the_same_and_fits(jail: Jail) -> None:
    """A line for each run; tree shows parents above their children, and says what is what."""
    console, workers = held(jail, "fork")
    run = only_run(jail)
    listed = command(jail, "ps").stdout.splitlines()
    assert listed[0].split() == ["RUN", "STATE", "OWNER", "AGE", "WORKERS", "STRAYS", "MEMORY",
                                 "COMMAND"]  # fmt: skip
    assert listed[1].startswith(run["id"][:8])
    assert "console.py" in listed[1]
    for name in (run["id"], run["id"][:3], str(console.owner.pid)):
        tree = command(jail, "tree", name)
        assert tree.returncode == 0, tree.stderr
        lines = tree.stdout.splitlines()
        places = [next(at for at, line in enumerate(lines) if f"{pid} {role}" in line)
                  for role, pid in (("owner", console.owner.pid),
                                    ("launcher", truth.parent(workers[0])),
                                    ("worker", workers[0]))]  # fmt: skip
        assert places == sorted(places)
        assert any("stray" in line and "/bin/sleep 180" in line for line in lines)
    assert answer(jail, "tree", run["id"])["run"]["id"] == run["id"]


def test_a_name_that_means_no_single_run_is_an_error_with_the_candidates(jail: Jail) -> None:
    """Unknown, empty or ambiguous: exit status 2, nothing is done, and all IDs are there."""
    for name in ("one", "two"):
        Console(jail, "fork", name=name).meet()
    runs = answer(jail, "ps")["runs"]
    first, second = (run["id"] for run in runs)
    common = first[: next(at for at, digit in enumerate(first) if digit != second[at])]
    for subcommand in ("tree", "stop"):
        for name in ("xyz", "", common, str(os.getpid())):
            ran = command(jail, subcommand, name)
            assert (ran.returncode, ran.stdout) == (2, "")
            assert all(run["id"] in ran.stderr for run in runs)
    assert len(answer(jail, "ps")["runs"]) == 2


def test_without_runs_there_is_an_empty_answer(jail: Jail) -> None:
    """No registry yet: nothing is listed, swept or logged, and that is no error."""
    assert answer(jail, "ps")["runs"] == []
    assert answer(jail, "sweep")["runs"] == []
    assert answer(jail, "log")["lines"] == []
    for subcommand in ("ps", "sweep", "log"):
        ran = command(jail, subcommand)
        assert ran.returncode == 0
        assert "no" in ran.stdout
    assert "none on record" in command(jail, "tree", "ab").stderr


def test_a_registry_that_cannot_be_trusted_is_refused_with_the_reason(jail: Jail) -> None:
    """Open to others: exit status 4, one line, no traceback."""
    (jail.folder / "run" / "safepool").mkdir()
    (jail.folder / "run" / "safepool").chmod(0o755)
    for words in (["ps"], ["tree", "a"], ["stop", "a"], ["sweep"], ["log"]):
        ran = command(jail, *words)
        assert (ran.returncode, ran.stdout) == (4, "")
        assert "mode is 0755" in ran.stderr
        assert ran.stderr.count("\n") == 1


def test_a_reader_that_goes_away_is_no_traceback(jail: Jail) -> None:
    """``safepool ps | head -0``."""
    reader, writer = os.pipe()
    os.close(reader)
    ran = subprocess.run(
        [*SAFEPOOL, "ps"], env=jail.environment, stdout=writer, stderr=subprocess.PIPE, timeout=60
    )
    os.close(writer)
    assert (ran.returncode, ran.stderr) == (141, b"")


# -- stop --------------------------------------------------------------------------------


def test_stop_ends_a_run_and_waits_for_all_of_it(method: str, jail: Jail) -> None:
    """SIGTERM to the owner; when stop returns nobody is left, and the other run works on."""
    other = Console(jail, "fork", name="other")
    bystanders = [pid for pid, _ in other.meet()]
    console, _ = held(jail, method)
    ran = command(jail, "stop", str(console.owner.pid))
    assert ran.returncode == 0, ran.stderr
    assert "ended with SIGTERM" in ran.stdout
    assert console.owner.wait() == -signal.SIGTERM
    assert [pid for pid, _ in other.meet()] == bystanders
    assert only_run(jail)["owner"]["pid"] == other.owner.pid
    other.owner.send(signal.SIGKILL)
    jail.assert_empty("both are gone")


def test_stop_kills_an_owner_that_ignores_sigterm(jail: Jail) -> None:
    """After the grace, and not before it was asked."""
    owner = jail.script(
        """
        from safepool import get_context
        if __name__ == "__main__":
            signal.signal(signal.SIGTERM, lambda *_: say("asked"))
            pool = get_context("fork").Pool(2, grace=0.5)
            pool.map(abs, [1])
            say("up")
            while True:
                signal.pause()
        """
    )
    jail.hear("up")
    stopped = answer(jail, "stop", str(owner.pid), "--grace", "0.3")
    assert stopped == {**stopped, "owner": "ended with SIGKILL", "clean": True, "left": []}
    assert owner.wait() == -signal.SIGKILL
    assert len(jail.hear("asked")) == 1
    jail.assert_empty("stopped")


def test_stop_says_what_is_left(jail: Jail) -> None:
    """Its own launcher gives a worker a long grace: exit status 3, and the survivors' names.

    What is being ended by those whose it is gets no signal from outside.
    """
    owner = jail.script(
        """
        from safepool import get_context
        from tests.kit import villains
        if __name__ == "__main__":
            pool = get_context("fork").Pool(1, grace=60)
            pool.apply(villains.ignores_term)
        """
    )
    worker = jail.hear("ready")[0].pid
    wait_for_sidecars(jail)
    ran = command(jail, "stop", str(owner.pid), "--wait", "0.3")
    assert ran.returncode == 3
    assert "not all of run" in ran.stderr
    assert "owner" in ran.stdout.splitlines()[0]
    assert f"left: worker {worker} (" in ran.stdout
    assert truth.is_alive(worker)


def test_stop_refuses_the_run_that_it_comes_from(jail: Jail) -> None:
    """It would be ended itself half way; the run goes on."""
    inner = f"{sys.executable} -m safepool stop $PPID_OF_RUN; echo status $?"
    script = f'PPID_OF_RUN=$(ps -o ppid= -p $PPID | tr -d " "); {inner}'
    ran = jail.start([*SAFEPOOL, "run", "--", "sh", "-c", script])
    assert ran.wait() == 0, ran.errors()
    assert "this very command comes from it" in ran.errors()
    assert "status 2" in ran.errors()
    jail.assert_empty("after it")


# -- what dead runs left -------------------------------------------------------------------


def test_sweep_ends_what_a_dead_run_left(method: str, jail: Jail) -> None:
    """The dry run names it and changes nothing; the sweep ends just that, and is logged."""
    bystander = jail.start(["sleep", "179"], environment={"SAFEPOOL_RUN": "0" * 32 + ":1"})
    console, _ = held(jail, method)
    run = only_run(jail)
    (stray,) = by_role(run)["stray"]
    kill_all_helpers(jail, console, run)
    folder = jail.folder / "run" / "safepool"
    assert only_run(jail)["state"] == "dead"
    assert by_role(only_run(jail)) == {"stray": [stray]}
    assert "safepool sweep" in command(jail, "ps").stdout
    before = listing(folder)
    foreseen = answer(jail, "sweep", "--dry-run", status=1)
    assert listing(folder) == before
    assert truth.is_alive(stray)
    swept = answer(jail, "sweep", status=1)
    assert truth.wait_gone(stray)
    for result, outcome in ((foreseen, "found"), (swept, "ended")):
        (entry,) = result["runs"]
        assert entry["id"] == run["id"]
        assert [(p["pid"], p["outcome"]) for p in entry["processes"]] == [(stray, outcome)]
    assert swept["runs"][0]["processes"][0]["last_signal"] == "SIGTERM"
    assert answer(jail, "sweep", status=0)["runs"] == []
    (line,) = [line for line in answer(jail, "log")["lines"] if line["ended"]]
    assert (line["ended"]["pid"], line["ended"]["signal"]) == (stray, "SIGTERM")
    assert line["ended"]["command"] == "/bin/sleep 180"
    assert truth.is_alive(bystander.pid)


def listing(folder: Path) -> list[tuple[str, int, bytes]]:
    """The registry, name by name; not locks, which a reader leaves as they are."""
    return [
        (path.name, path.stat().st_mtime_ns, path.read_bytes()) for path in sorted(folder.iterdir())
    ]


def test_stop_of_a_dead_run_sweeps_it_alone(jail: Jail) -> None:
    """What another dead run left stays for the next sweep."""
    left = []
    consoles = [Console(jail, "fork", name=name) for name in ("one", "two")]
    for console in consoles:
        console.ask("hold daemon")
    jail.hear("ready", 2)
    wait_for_sidecars(jail)
    runs = {run["owner"]["pid"]: run for run in answer(jail, "ps")["runs"]}
    for console in consoles:
        run = runs[console.owner.pid]
        left.append((run["id"], *by_role(run)["stray"]))
        kill_all_helpers(jail, console, run)
    (first, ended), (_, stays) = left
    ran = command(jail, "stop", first)
    assert ran.returncode == 0, ran.stderr
    assert truth.wait_gone(ended)
    assert truth.is_alive(stays)


def test_records_that_prove_nothing_are_left_alone_and_explained(jail: Jail) -> None:
    """Broken or of another host: listed with the reason, not swept, not stopped, not removed."""
    console = Console(jail, "fork")
    console.meet()
    run = only_run(jail)
    path = Path(run["path"])
    data = path.read_text()
    console.owner.send(signal.SIGKILL)
    jail.assert_empty("owner killed")
    broken = path.with_name("a" * 32 + ".run")
    broken.write_text(data[:100])
    foreign = path.with_name(run["id"] + ".run")
    foreign.write_text(data.replace(f'"host": "{os.uname().nodename}"', '"host": "elsewhere"'))
    states = {run["id"]: (run["state"], run["reason"]) for run in answer(jail, "ps")["runs"]}
    assert states["a" * 32][0] == "unknown"
    assert "not whole" in states["a" * 32][1]
    assert states[run["id"]][0] == "unknown"
    assert "checksum" in states[run["id"]][1]
    ran = command(jail, "sweep")
    assert ran.returncode == 0
    assert ran.stdout.count("left alone") == 2
    for name in states:
        ran = command(jail, "stop", name)
        assert ran.returncode == 2
        assert states[name][1] in ran.stderr
    assert broken.exists()
    assert foreign.exists()


# -- log -----------------------------------------------------------------------------------


def test_log_says_what_was_ended_why_and_how_to_spare_it(jail: Jail) -> None:
    """Newest first; of all runs or one; in words and as facts."""
    console, _ = held(jail, "fork")
    run = only_run(jail)
    (stray,) = by_role(run)["stray"]
    console.owner.send(signal.SIGKILL)
    jail.assert_empty("owner killed")
    lines = answer(jail, "log", run["id"][:6])["lines"]
    (ended,) = [line["ended"] for line in lines if line["ended"] and line["ended"]["pid"] == stray]
    assert ended["why"] == f"owner {console.owner.pid} is gone"
    assert (ended["what"], ended["command"]) == ("stray", "/bin/sleep 180")
    assert ended["signal"] == "SIGTERM"
    assert "outlive" in ended["spare"]
    assert [line["time"] for line in lines] == sorted((ln["time"] for ln in lines), reverse=True)
    text = command(jail, "log", "-n", "1").stdout
    assert text.count("\n") == 1
    assert run["id"][:8] in text
    assert command(jail, "log", "xyz").returncode == 2


@pytest.mark.parametrize(
    "words",
    [[], ["nonsense"], ["ps", "--watch", "0"], ["stop"], ["stop", "a", "--grace", "-1"],
     ["run", "--grace", "x", "--", "true"], ["run"], ["run", "--"], ["log", "-n", "0"]],
    ids=" ".join,
)  # fmt: skip
def test_wrong_usage_is_said_in_two_lines(words: list[str], jail: Jail) -> None:
    """Exit status 2 and the usage; no traceback."""
    ran = command(jail, *words)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "usage: safepool" in ran.stderr
    assert "Traceback" not in ran.stderr
