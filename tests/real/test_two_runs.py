"""The other half of the promise: nothing else is ever signalled.

Two owners share one registry and start in the same instant; bystanders look like members
of a run, by name, arguments, environment, limits, process group or a recycled pid.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import sys
from pathlib import Path

import pytest

from tests.kit import truth
from tests.kit.console import Console
from tests.kit.jail import Jail, Owner

BOUND = 10.5
STRANGER = Path(__file__).parents[1] / "kit" / "stranger.py"


@pytest.fixture
def two_jails(tmp_path: Path) -> tuple[Path, Path]:
    """Folders of two jails."""
    folders = tmp_path / "a", tmp_path / "b"
    for folder in folders:
        folder.mkdir()
    return folders


def test_killing_one_of_two_owners_leaves_the_other_untouched(
    method: str, two_jails: tuple[Path, Path]
) -> None:
    """Two owners that started at once: one is SIGKILLed, the other keeps the very same workers."""
    with Jail(two_jails[0]) as first_jail, Jail(two_jails[1]) as second_jail:
        second_jail.environment["XDG_RUNTIME_DIR"] = first_jail.environment["XDG_RUNTIME_DIR"]
        first = Console(first_jail, method)
        second = Console(second_jail, method)
        first.ask("hold daemon_empty_env")
        second.ask("hold daemon_empty_env")
        first_jail.hear("ready")
        second_jail.hear("ready")
        before = second.meet()
        living = set(second_jail.pids())
        first.owner.send(signal.SIGKILL)
        first_jail.assert_empty("the killed owner", BOUND)
        assert second.meet() == before
        assert set(second_jail.pids()) == living
        third = Console(first_jail, method, name="third")  # its start looks for dead runs
        third.ask("map")
        assert second.meet() == before
        assert set(second_jail.pids()) == living
        second.owner.send(signal.SIGKILL)
        second_jail.assert_empty("the second owner", BOUND)
        third.ask("map")


def test_many_owners_start_and_die_side_by_side(method: str, two_jails: tuple[Path, Path]) -> None:
    """Six owners start in the same instant beside one that lives; every other one is SIGKILLed."""
    with Jail(two_jails[0]) as jail, Jail(two_jails[1]) as quiet:
        quiet.environment["XDG_RUNTIME_DIR"] = jail.environment["XDG_RUNTIME_DIR"]
        steady = Console(quiet, method)
        before = steady.meet()
        owners = [Console(jail, method, name=f"owner{n}", processes=1) for n in range(6)]
        for console in owners:
            console.ask("map")
        for console in owners[::2]:
            console.owner.send(signal.SIGKILL)
        for console in owners[1::2]:
            console.ask("map")
        assert steady.meet() == before
        for console in owners[1::2]:
            console.owner.send(signal.SIGTERM)
        jail.assert_empty("all six", BOUND)
        assert steady.meet() == before


def start_stranger(jail: Jail, *arguments: str, **environment: str) -> Owner:
    """Start a bystander that says every signal that it gets."""
    said = len([line for line in jail.heard if line.word == "stranger"])
    stranger = jail.start(
        [sys.executable, "-S", "-E", STRANGER, *arguments], environment=environment
    )
    jail.hear("stranger", said + 1)
    return stranger


def check_untouched(jail: Jail, strangers: list[Owner]) -> None:
    """All strangers live, and none has been signalled."""
    for number, stranger in enumerate(strangers, 1):
        stranger.go()
        jail.hear("alive", number)
    touched = [line for line in jail.heard if line.word == "signalled"]
    assert not touched, touched


def test_strangers_that_look_like_ours_are_spared(
    method: str, two_jails: tuple[Path, Path]
) -> None:
    """Names, arguments, another run's mark and another run's limit make nobody a target."""
    other = secrets.token_hex(16)
    with Jail(two_jails[0]) as jail, Jail(two_jails[1]) as outside:
        strangers = [
            start_stranger(outside, "safepool-sidecar"),
            start_stranger(outside, "safepool-launcher", SAFEPOOL_RUN=f"{other}:1"),
            start_stranger(outside, SAFEPOOL_RUN=""),
            start_stranger(outside, SAFEPOOL_RUN="not a mark at all"),
        ]
        consoles = Console(jail, method), Console(jail, method, name="second")
        for console in consoles:
            console.ask("hold daemon_empty_env")
        jail.hear("ready", 2)
        strangers.append(start_stranger(outside, SAFEPOOL_RUN=f"{other}:1/{other}:2"))
        for pid in {truth.parent(line.pid) for line in jail.hear("ready", 2)}:
            os.kill(pid, signal.SIGKILL)  # a launcher's death makes the sidecar look further
        for console in consoles:
            console.owner.send(signal.SIGKILL)
        jail.assert_empty("the owners", BOUND)
        check_untouched(outside, strangers)


def test_a_neighbour_in_the_owners_process_group_is_spared(method: str, jail: Jail) -> None:
    """A pipeline's other half shares session, group and terminal with the owner: it lives on."""
    shell = f'{sys.executable} -S -E {STRANGER} < "$TELL.in" & "$@"; wait'
    os.mkfifo(f"{jail.environment['TELL']}.in")
    speak = os.open(f"{jail.environment['TELL']}.in", os.O_RDWR | os.O_CLOEXEC)
    try:
        console = Console(jail, method, before=["sh", "-c", shell, "sh"])
        (stranger,) = jail.hear("stranger")
        console.ask("hold ignores_term")
        jail.hear("ready")
        owner = next(
            pid
            for pid in truth.children(console.owner.pid)
            if "console.py" in truth.command_line(pid)
        )
        os.kill(owner, signal.SIGKILL)
        spared = {console.owner.pid, stranger.pid}
        jail.assert_empty("owner in a pipeline killed", BOUND, spared)
        os.write(speak, b"hello\n")
        assert jail.hear("alive")[0].pid == stranger.pid
        assert not [line for line in jail.heard if line.word == "signalled"]
    finally:
        os.close(speak)


def test_what_the_owner_started_by_other_means_is_spared(method: str, jail: Jail) -> None:
    """A subprocess of the owner itself is none of the pool's: nobody signals it."""
    owner = jail.script(
        f"""
        import subprocess
        from safepool import get_context
        if __name__ == "__main__":
            command = [sys.executable, "-S", "-E", {str(STRANGER)!r}, "--stay"]
            before = subprocess.Popen(command)
            pool = get_context(sys.argv[1]).Pool(2, grace=0.5)
            pool.map(abs, range(4))
            after = subprocess.Popen(command)
            sys.stdin.readline()
            pool.terminate()
            pool.join()
            say("terminated")
            time.sleep(180)
        """,
        method,
    )
    strangers = {line.pid for line in jail.hear("stranger", 2)}
    owner.go()
    jail.hear("terminated")
    owner.send(signal.SIGKILL)
    jail.assert_empty("owner killed", BOUND, strangers)
    assert strangers <= set(jail.pids())
    assert not [line for line in jail.heard if line.word == "signalled"]


def test_a_recycled_pid_in_an_old_record_is_spared(method: str, jail: Jail) -> None:
    """A dead run's record names pids that others have by now: the next start spares those."""
    stranger = start_stranger(jail)
    console = Console(jail, method)
    console.ask("map")
    registry = jail.folder / "run" / "safepool"
    members = truth.until(lambda: list(registry.glob("*.m.*")), "no member is on record")
    kept = {path.name: path.read_bytes() for path in registry.iterdir() if path.is_file()}
    console.owner.send(signal.SIGKILL)
    jail.assert_empty("the first owner", BOUND, {stranger.pid})
    for name, content in kept.items():
        # The member's name holds its pid and its start; only the pid is the stranger's.
        (registry / re.sub(r"\.m\.\d+-", f".m.{stranger.pid}-", name)).write_bytes(content)
    run_id = members[0].name.partition(".")[0]
    assert list(registry.glob(f"{run_id}.m.{stranger.pid}-*"))

    def acted_upon() -> bool:
        return not list(registry.glob(f"{run_id}.m.*"))

    Console(jail, method, name="next").ask("map")
    truth.until(acted_upon, "the dead run's record is not taken up by the next start")
    check_untouched(jail, [stranger])
