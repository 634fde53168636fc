"""How numbers and tables look, on a terminal and elsewhere, with rich and without."""

from __future__ import annotations

import importlib.util
import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest

from safepool.cli import words
from tests.kit.console import Console
from tests.kit.jail import Jail

PS = [sys.executable, "-m", "safepool", "ps"]
needs_rich = pytest.mark.skipif(
    importlib.util.find_spec("rich") is None, reason="rich, the extra safepool[cli], is missing"
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0, "0.0 s"), (59.94, "59.9 s"), (60, "1 min 0 s"), (3725, "1 h 2 min"),
     (90061, "1 d 1 h")],
)  # fmt: skip
def test_durations(seconds: float | None, text: str) -> None:
    """The two largest units."""
    assert words.duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(None, "-"), (0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 30, "5.0 GiB"),
     (1 << 50, "1024.0 TiB")],
)  # fmt: skip
def test_sizes(count: int | None, text: str) -> None:
    """Binary units."""
    assert words.size(count) == text


def test_tables_are_cut_to_the_terminal_in_the_last_column_only() -> None:
    """However narrow: the last column keeps enough to be recognised."""
    rows = [["1", "x" * 50], ["22", "short"]]
    assert words.table(["A", "WHAT"], rows, None)[1] == "1   " + "x" * 50
    assert words.table(["A", "WHAT"], rows, 20) == ["A   WHAT", "1   " + "x" * 13 + "...",
                                                    "22  short"]  # fmt: skip
    assert words.table(["A", "WHAT"], rows, 1)[1] == "1   " + "x" * 9 + "..."


class OnTerminal:
    """A command with a pseudo-terminal of ``columns``; ``text`` is what it shows."""

    def __init__(self, jail: Jail, argv: list[str], columns: int = 80, **more: str) -> None:
        master, slave = pty.openpty()
        environment = {"TERM": "xterm", "COLUMNS": str(columns), **jail.environment, **more}
        self.process = subprocess.Popen(
            argv, env=environment, stdin=slave, stdout=slave, stderr=subprocess.PIPE
        )
        os.close(slave)
        self._master = master
        self.text = ""

    def read_until(self, text: str | None = None) -> str:
        """Read until ``text`` has come, or to the end; fails after a while."""
        limit = time.monotonic() + 30
        while text is None or text not in self.text:
            assert time.monotonic() < limit, self.text
            try:
                if select.select([self._master], [], [], 0.2)[0]:
                    self.text += os.read(self._master, 4096).decode()
            except OSError:
                break  # EIO: the last user of the terminal has ended
        return self.text

    def end(self) -> tuple[int, str]:
        """Its exit status, and its standard error."""
        self.read_until()
        _, errors = self.process.communicate(timeout=30)
        os.close(self._master)
        return self.process.returncode, errors.decode()


def without_rich(jail: Jail) -> str:
    """A PYTHONPATH on which importing rich fails, installed or not."""
    folder = jail.folder / "no-rich"
    folder.mkdir()
    (folder / "rich.py").write_text("raise ImportError('not here')\n")
    return f"{folder}:{jail.environment['PYTHONPATH']}"


def test_without_rich_everything_is_plain(jail: Jail) -> None:
    """Also on a terminal, cut to its width; the live view says what it needs."""
    Console(jail, "fork").meet()
    path = without_rich(jail)
    listed = OnTerminal(jail, PS, 70, PYTHONPATH=path)
    assert listed.end() == (0, "")
    assert "\x1b" not in listed.text
    assert max(map(len, listed.text.splitlines())) <= 70
    assert "..." in listed.text
    watched = OnTerminal(jail, [*PS, "--watch"], PYTHONPATH=path)
    status, errors = watched.end()
    assert status == 2
    assert "pip install 'safepool[cli]'" in errors


@needs_rich
def test_with_rich_a_terminal_gets_colour_unless_it_wants_none(jail: Jail) -> None:
    """The words are the same; NO_COLOR, TERM=dumb and pipes get plain text."""
    Console(jail, "fork").meet()
    coloured = OnTerminal(jail, PS, 70)
    assert coloured.end() == (0, "")
    assert "\x1b[1m" in coloured.text
    assert "live" in coloured.text
    for variable, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        plain = OnTerminal(jail, PS, 70, **{variable: value})
        assert plain.end() == (0, "")
        assert "\x1b" not in plain.text
    piped = subprocess.run(PS, env=jail.environment, capture_output=True, timeout=60)
    assert b"\x1b" not in piped.stdout


@needs_rich
def test_the_live_view_follows_and_ends_with_ctrl_c(jail: Jail) -> None:
    """A run that begins is shown; Ctrl-C is the way out, and no error."""
    watched = OnTerminal(jail, [*PS, "--watch", "0.2"])
    watched.read_until("no runs on record")
    console = Console(jail, "fork")
    console.meet()
    watched.read_until(str(console.owner.pid))
    watched.process.send_signal(signal.SIGINT)
    assert watched.end() == (0, "")


@needs_rich
def test_the_live_view_needs_a_terminal(jail: Jail) -> None:
    """In a pipe it would be unreadable: exit status 2, and what to use instead."""
    ran = subprocess.run(
        [*PS, "--watch"], env=jail.environment, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 2
    assert "--json" in ran.stderr
