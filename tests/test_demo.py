"""``safepool demo``: it shows what it says, and leaves nothing, however it ends.

Each demo runs in a jail, which knows of everything that was started, whatever the demo says.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import safepool
from safepool import cli
from tests.kit import truth
from tests.kit.jail import Jail, Owner

HELD = ("session of its own", "double-forked daemon", "empty environment")
DEMO = (sys.executable, "-m", "safepool", "demo")


def start(jail: Jail, *arguments: str) -> Owner:
    return jail.start([*DEMO, *arguments])


def test_it_shows_that_nothing_is_left_of_safepool_and_much_without(
    jail: Jail, method: str
) -> None:
    """Both acts show the four strays; safepool's are all gone, multiprocessing's stay for the
    demo to end; the lines fit a terminal, and the exit status says that all went well."""
    demo = start(jail, "--method", method)
    assert demo.wait() == 0, demo.errors()
    jail.assert_empty("after the demo")
    safe, _, plain = demo.errors().partition("2. multiprocessing.Pool")
    for what in HELD:
        assert safe.count(what) == plain.count(what) == 2
    assert "Left: nothing" in safe
    assert "STILL HERE" not in safe
    assert plain.count("STILL HERE") >= 8
    assert max(map(len, demo.errors().splitlines())) <= 100


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL], ids=lambda n: n.name
)
@pytest.mark.parametrize("act", ["safepool.SafePool", "multiprocessing.Pool"])
def test_an_interrupted_demo_clears_everything_up(
    jail: Jail, number: signal.Signals, act: str
) -> None:
    """A signal to the demo, at the first sign of an act's owner, leaves no process behind."""
    demo = start(jail)
    demo.wait_for_error(act)
    truth.until(
        lambda: any("demo_owner" in truth.command_line(pid) for pid in jail.pids()),
        "no owner has appeared",
    )
    demo.send(number)
    status = demo.wait()
    jail.assert_empty(f"after {number.name} in the act of {act}")
    assert status == (-9 if number is signal.SIGKILL else 128 + signal.SIGTERM)
    assert "Traceback" not in demo.errors()
    assert "cleared them up" not in demo.errors(), "it has played on to its end"


def test_an_impatient_reader_does_not_cut_the_clean_up_short(jail: Jail) -> None:
    """Ctrl-C to the whole foreground group, again and again until the demo has ended."""
    demo = start(jail)
    demo.wait_for_error("STILL HERE")

    def has_ended() -> bool:
        with contextlib.suppress(ProcessLookupError):  # it has ended just now
            demo.send_to_group(signal.SIGINT)
        return demo.process.poll() is not None

    truth.until(has_ended, "the demo goes on")
    jail.assert_empty("after many a Ctrl-C")
    assert "Traceback" not in demo.errors()


def test_a_reader_that_leaves_early_is_no_trouble(jail: Jail) -> None:
    """``safepool demo | head -1`` ends without a traceback and leaves nothing."""
    demo = jail.start(["sh", "-c", '"$@" | head -n 1', "sh", *DEMO])
    assert demo.wait() == 0
    jail.assert_empty("after the reader has left")
    assert demo.errors().startswith("1. safepool.SafePool")
    assert "Traceback" not in demo.errors()


def test_an_owner_that_cannot_start_is_a_failed_demo(jail: Jail) -> None:
    """With a registry folder that cannot be used the demo says why, and its status is 1."""
    registry = jail.folder / "run" / "safepool"
    registry.mkdir(mode=0o755)
    registry.chmod(0o755)
    demo = start(jail)
    assert demo.wait() == 1
    jail.assert_empty("after a failed demo")
    assert "the owner did not get going" in demo.errors()
    assert str(registry) in demo.errors()


def test_the_command_line_says_what_it_can_do(capsys: pytest.CaptureFixture[str]) -> None:
    """``--version`` is the package's, help names the subcommands, and nonsense is status 2."""
    for arguments, status in ((["--version"], 0), (["--help"], 0), (["nonsense"], 2), ([], 2)):
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert ended.value.code == status
    said = capsys.readouterr().out
    assert f"safepool {safepool.__version__}" in said
    assert "demo" in said


def test_the_installed_command_is_this_one(tmp_path: Path) -> None:
    """The command ``safepool`` beside the interpreter, where one is installed, is the same."""
    command = Path(sys.executable).with_name("safepool")
    if not command.exists():
        pytest.skip("safepool is not installed here")
    ended = subprocess.run(
        [command, "--version"], capture_output=True, text=True, cwd=tmp_path, env=os.environ.copy()
    )
    assert ended.stdout.strip() == f"safepool {safepool.__version__}"
