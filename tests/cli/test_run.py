"""``safepool run -- COMMAND``: like the command alone in a shell, but nothing outlives it.

Each run is in a jail, which knows who lives. The terminal is real (a pty).
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Iterator

import pytest

from tests.kit import truth
from tests.kit.jail import Jail, Owner

RUN = [sys.executable, "-m", "safepool", "run"]


def all_of(jail: Jail, program: str) -> list[int]:
    return [pid for pid in jail.pids() if truth.command_line(pid).split(" ")[0] == program]


def shell(jail: Jail, script: str, *options: str) -> Owner:
    return jail.start([*RUN, *options, "--", "/bin/sh", "-c", script])


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (["true"], 0),
        (["sh", "-c", "exit 7"], 7),
        (["sh", "-c", "kill -TERM $$"], -signal.SIGTERM),
        (["sh", "-c", "kill -KILL $$"], -signal.SIGKILL),
        (["sh", "-c", "kill -SEGV $$"], -signal.SIGSEGV),
        (["no-such-command"], 127),
        (["./missing/command"], 127),
        (["/etc/passwd"], 126),
        (["/"], 126),
    ],
    ids=str,
)
def test_the_exit_status_is_that_of_the_command(
    command: list[str], status: int, jail: Jail
) -> None:
    """As a shell sees it, death by a signal included; what cannot be started is said."""
    ran = jail.start([*RUN, "--", *command])
    assert ran.wait() == status, ran.errors()
    if status in (126, 127):
        assert command[0] in ran.errors()
    else:
        assert ran.errors() == ""
    jail.assert_empty("after the command")


def test_what_cannot_be_protected_is_not_started(jail: Jail) -> None:
    """Without a registry there is no run: 125, the reason, and the command has not begun."""
    (jail.folder / "run" / "safepool").write_text("in the way")
    ran = shell(jail, 'echo started 0 >> "$TELL"')
    assert ran.wait() == 125
    assert "not a directory" in ran.errors()
    jail.assert_empty("after the refusal")
    assert jail.heard == []


def test_standard_input_descriptors_and_arguments_pass_through(jail: Jail) -> None:
    """What the shell has set up is the command's: pipes, other descriptors, a "--" of its own."""
    script = 'read line; echo "$line|$1|$2|$(cat <&4)|$SAFEPOOL_RUN"'
    start = 'exec 4<"$0"; exec "$@"'
    (jail.folder / "four").write_text("four")
    ran = jail.start(
        ["sh", "-c", start, "four", *RUN, "--grace", "1", "--", "sh", "-c", script, "x", "--", "-h"]
    )
    ran.go()
    assert ran.wait() == 0, ran.errors()
    words = ran.errors().strip().split("|")
    assert words[:4] == ["go", "--", "-h", "four"]
    assert words[4].endswith(":1")
    jail.assert_empty("after the command")


def test_a_pipe_that_the_command_closes_is_closed(jail: Jail) -> None:
    """Its reader sees the end at once, not when the command ends."""
    ran = jail.start(
        [
            "sh",
            "-c",
            '"$@" | { cat; echo; }',
            "x",
            *RUN,
            "--",
            "sh",
            "-c",
            "exec >&-; exec sleep 99",
        ]
    )
    ran.wait_for_error("\n")
    truth.until(lambda: all_of(jail, "sleep"), "the command is at work")


def test_what_the_command_leaves_behind_is_ended_and_told(jail: Jail) -> None:
    """At its end: background job, session of its own, empty environment; by name, on stderr."""
    ran = shell(jail, "sleep 97 & setsid sleep 98 & env -i setsid sleep 99 & sleep 0.2; exit 3")
    assert ran.wait() == 3
    jail.assert_empty("after the command", 0.0)
    for seconds in ("97", "98", "99"):
        assert f"(sleep {seconds})" in ran.errors()
    assert ran.errors().count("SIGTERM") == 3
    assert ran.errors().count("start it with safepool.detached") == 3


def test_what_ignores_sigterm_is_ended_after_the_grace(jail: Jail) -> None:
    """Politely first, then by force, and safepool does not leave before."""
    ran = shell(jail, "(trap '' TERM; echo up; exec sleep 99) & sleep 0.3", "--grace", "0.2")
    assert ran.wait(10) == 0
    jail.assert_empty("after the command", 0.0)
    assert "SIGKILL" in ran.errors()


LISTENER = """
    def got(number, frame):
        say("got", signal.Signals(number).name)
        if number == signal.SIGALRM:
            os._exit(9)

    for name in ("INT TERM HUP QUIT USR1 USR2 WINCH CONT ALRM RTMIN").split():
        signal.signal(getattr(signal, "SIG" + name), got)
    say("ready")
    while True:
        signal.pause()
"""
SENT = ["INT", "TERM", "HUP", "QUIT", "USR1", "USR2", "WINCH", "CONT", "RTMIN", "INT"]


def listen(jail: Jail, terminal: int | None = None) -> Owner:
    ran = jail.script(LISTENER, before=[*RUN, "--"], terminal=terminal)
    jail.hear("ready")
    return ran


def check_heard_once(jail: Jail, ran: Owner, expected: list[str]) -> None:
    ran.send(signal.SIGALRM)
    jail.hear("got", len(expected) + 1)
    assert ran.wait() == 9, ran.errors()
    jail.assert_empty("after the end")
    heard = [line.text for line in jail.heard if line.word == "got"]
    assert heard == [f"SIG{name}" for name in [*expected, "ALRM"]]


def test_signals_are_handed_on_once(jail: Jail) -> None:
    """What is sent to safepool alone reaches the command; none ends safepool first."""
    ran = listen(jail)
    for count, name in enumerate(SENT, 1):
        ran.send(getattr(signal, f"SIG{name}"))
        jail.hear("got", count)
    check_heard_once(jail, ran, SENT)


def test_signals_to_the_whole_group_come_once(jail: Jail) -> None:
    """``kill -- -PGID`` and ``killpg`` reach the command directly: it gets no second one.

    Afterwards one to safepool alone is handed on again.
    """
    ran = listen(jail)
    for count, name in enumerate(SENT, 1):
        ran.send_to_group(getattr(signal, f"SIG{name}"))
        jail.hear("got", count)
    launcher = truth.parent(jail.hear("ready")[0].pid)
    truth.until(lambda: not pending(launcher), "the launcher forgets")
    for count, name in enumerate(("INT", "TERM"), len(SENT) + 1):
        ran.send(getattr(signal, f"SIG{name}"))
        jail.hear("got", count)
    check_heard_once(jail, ran, [*SENT, "INT", "TERM"])


def pending(pid: int) -> int:
    with open(f"/proc/{pid}/status") as file:
        line = next(line for line in file if line.startswith("ShdPnd"))
    return int(line.split()[1], 16)


VILLAINS = """
    import threading
    from tests.kit import villains

    for villain in (villains.daemon_empty_env, villains.new_session, villains.stubborn_subprocess):
        threading.Thread(target=villain).start()
"""


@pytest.mark.parametrize("victim", ["safepool", "launcher", "command"])
def test_a_sigkill_leaves_nothing(victim: str, jail: Jail) -> None:
    """safepool, its launcher or the command is killed: all that the command started is gone."""
    ran = jail.script(VILLAINS, before=[*RUN, "--grace", "0.5", "--"])
    command = jail.hear("ready", 3)[0].pid
    victims = {"safepool": ran.pid, "launcher": truth.parent(command), "command": command}
    os.kill(victims[victim], signal.SIGKILL)
    assert ran.wait() == -signal.SIGKILL
    jail.assert_empty(f"{victim} killed")


def test_a_safepool_program_runs_below_it(jail: Jail) -> None:
    """An inner run works and is gone with the outer one."""
    ran = jail.script(
        """
        from tests.kit import villains
        if __name__ == "__main__":
            villains.nested("safepool", "spawn", 0.5)
        """,
        before=[*RUN, "--grace", "0.5", "--"],
    )
    jail.hear("inner", 2)
    ran.send(signal.SIGKILL)
    jail.assert_empty("safepool killed")


class Terminal:
    """A pseudo-terminal: ``slave`` is for the program; what it shows is kept in ``text``."""

    def __init__(self) -> None:
        self._master, self.slave = os.openpty()
        self.text = ""

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def foreground(self) -> int:
        return os.tcgetpgrp(self._master)

    def wait_for(self, text: str, seconds: float = truth.PATIENCE) -> None:
        """Wait until ``text`` is shown, and forget what came up to there."""
        limit = time.monotonic() + seconds
        while text not in self.text:
            assert time.monotonic() < limit, f"no {text!r} on the terminal: {self.text!r}"
            if select.select([self._master], [], [], 0.2)[0]:
                self.text += os.read(self._master, 4096).decode()
        self.text = self.text.partition(text)[2]

    def close(self) -> None:
        os.close(self.slave)
        os.close(self._master)


@pytest.fixture
def terminal(jail: Jail) -> Iterator[Terminal]:
    opened = Terminal()
    yield opened
    jail.clear()
    opened.close()


def test_a_ctrl_c_reaches_the_command_once(jail: Jail, terminal: Terminal) -> None:
    """The terminal sends it to both; safepool neither ends of it nor hands it on again.

    Afterwards one to safepool alone is handed on.
    """
    ran = listen(jail, terminal.slave)
    terminal.type("\x03")
    jail.hear("got", 1)
    terminal.type("\x03")
    jail.hear("got", 2)
    launcher = truth.parent(jail.hear("ready")[0].pid)
    truth.until(lambda: not pending(launcher), "the launcher forgets")
    ran.send(signal.SIGINT)
    jail.hear("got", 3)
    check_heard_once(jail, ran, ["INT", "INT", "INT"])


def test_a_ctrl_c_ends_both_by_the_same_signal(jail: Jail, terminal: Terminal) -> None:
    """A shell loop around it stops, since safepool has died of SIGINT as the command did."""
    program = """
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        say("ready")
        signal.pause()
    """
    ran = jail.script(program, before=[*RUN, "--"], terminal=terminal.slave)
    jail.hear("ready")
    terminal.type("\x03")
    assert ran.wait() == -signal.SIGINT, ran.errors()
    assert "Traceback" not in ran.errors()
    jail.assert_empty("after Ctrl-C")


def test_job_control_works_as_in_a_plain_shell(jail: Jail, terminal: Terminal) -> None:
    """Ctrl-Z stops the job, fg continues it, a reader in the background is stopped."""
    command = " ".join([*RUN, "--"])
    shell = "exec bash --norc --noprofile -i >/dev/tty 2>&1"
    jail.start(["sh", "-c", shell], terminal=terminal.slave, environment={"PS1": "$ "})
    terminal.wait_for("$ ")
    terminal.type(f"{command} sh -c 'echo up; exec sleep 99'\n")
    terminal.wait_for("\nup")
    terminal.type("\x1a")
    terminal.wait_for("Stopped")
    terminal.type("fg\n")
    terminal.wait_for("sh -c")
    truth.until(lambda: "S" in map(truth.state, all_of(jail, "sleep")), "it is continued")
    terminal.type("\x03")
    terminal.wait_for("$ ")
    terminal.type("echo status $?\n")
    terminal.wait_for("status 130")
    terminal.type(f"{command} cat &\n")
    # The job's two, cat and safepool; launcher and sidecar take no signals.
    truth.until(lambda: [*map(truth.state, jail.pids())].count("T") == 2, "it is stopped")
    terminal.type("fg\n")
    cat = all_of(jail, "cat")[0]
    group = os.getpgid(cat)
    truth.until(lambda: terminal.foreground() == group and truth.state(cat) == "S", "it reads")
    terminal.type("a line\n")
    terminal.wait_for("a line\r\na line")
    terminal.type("\x04")
    terminal.type("echo status $?; exit\n")
    terminal.wait_for("status 0")
