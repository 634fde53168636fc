"""A jail: where a test starts owners, and from which nothing gets away.

    with Jail(folder) as jail:
        owner = jail.script("from safepool import SafePool ...")
        jail.hear("ready")
        owner.send(signal.SIGKILL)
        jail.assert_empty()

Whatever happens in the block, also when the test fails, everything that was started
in the jail is dead at its end. Who lives is read from the cage, never from safepool.

Processes speak to the test through one named pipe: a line is a word, a pid and a text.
It needs no inherited descriptor, so a daemon can speak as well. An owner starts as a
fresh login shell would start it: leader of a session, default signal actions, nothing
blocked, no core dumps, and a registry folder of its own.

Called by: the tests of tests/real; see tests/README.md.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tests.kit import truth
from tests.kit.cage import Keepers, new_cage
from tests.kit.truth import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
OWNER = Path(__file__).with_name("owner.py")
PASSED_ON = ("SAFEPOOL_BACKEND",)
"""What owners take from the environment of the tests: the backend that all is tested with."""

PRELUDE = """\
import os, signal, sys, time

def say(word, text=""):
    with open(os.environ["TELL"], "a") as tell:
        tell.write(f"{word} {os.getpid()} {text}\\n")
"""


@dataclass(frozen=True)
class Line:
    """What a process said: ``word``, its ``pid`` and a free ``text``."""

    word: str
    pid: int
    text: str


class Owner:
    """A process that a jail started. ``pid`` is its own pid."""

    def __init__(self, process: subprocess.Popen[bytes], pid: int, errors: Path) -> None:
        self.process = process
        self.pid = pid
        self._errors = errors

    def send(self, number: int) -> None:
        """Signal the owner alone."""
        os.kill(self.pid, number)

    def send_to_group(self, number: int) -> None:
        """Signal the owner's process group, as the terminal does for Ctrl-C."""
        os.killpg(self.pid, number)

    def go(self) -> None:
        """Let an owner go on that waits for a line on its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"go\n")
        self.process.stdin.flush()

    def wait(self, seconds: float = PATIENCE) -> int:
        """Wait for the owner's end; its status as in ``subprocess``. Fails after ``seconds``."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"the owner lives on after {seconds:g} s:\n{self.errors()}"
            ) from None

    def errors(self) -> str:
        """All that was written to standard error so far, by the owner or its offspring."""
        return self._errors.read_text(errors="replace")

    def wait_for_error(self, text: str, seconds: float = PATIENCE) -> str:
        """Wait until standard error holds ``text``; returns all of it."""
        truth.until(lambda: text in self.errors(), f"no {text!r} in {self._errors}", seconds)
        return self.errors()


class Jail:
    """See the module's header. ``folder`` is a private, empty one for its files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.heard: list[Line] = []
        self._owners: list[Owner] = []
        self._cage = new_cage()
        self._rest = b""
        tell = folder / "tell"
        os.mkfifo(tell)
        tell.chmod(0o666)
        # Open for both: the pipe then never says EOF between two speakers.
        self._tell = os.open(tell, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        (folder / "run").mkdir(mode=0o700)
        self.environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
            "PYTHONUNBUFFERED": "1",
            "XDG_RUNTIME_DIR": str(folder / "run"),
            "TELL": str(tell),
            **{name: os.environ[name] for name in PASSED_ON if name in os.environ},
        }
        if isinstance(self._cage, Keepers):
            # Else runs would have theirs beside the test's own, which nobody clears up.
            self.environment["SAFEPOOL_CGROUP"] = "off"

    def __enter__(self) -> Jail:  # noqa: PYI034  Self needs Python 3.11
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End everything that is left, then give everything back."""
        try:
            self.clear()
        finally:
            for owner in self._owners:
                owner.process.wait(PATIENCE)
                if owner.process.stdin is not None:
                    owner.process.stdin.close()
            self._cage.close()
            os.close(self._tell)

    def start(
        self,
        argv: Iterable[str | Path],
        *,
        environment: Mapping[str, str] | None = None,
        terminal: int | None = None,
    ) -> Owner:
        """Start a command in the jail.

        Args:
            argv: the command.
            environment: added to the jail's own.
            terminal: a descriptor that becomes the controlling terminal and standard input.
        """
        number = len(self._owners)
        errors = self.folder / f"stderr-{number}"
        enter = self._cage.entrance()

        def before_exec() -> None:
            enter()
            start_as_a_shell_would(None if self._cage.gives_terminal else terminal)

        with errors.open("wb") as stderr:
            process = subprocess.Popen(
                self._cage.command([str(part) for part in argv]),
                stdin=subprocess.PIPE if terminal is None else terminal,
                stdout=stderr,
                stderr=stderr,
                env={**self.environment, **(environment or {})},
                cwd=self.folder,
                start_new_session=True,
                preexec_fn=before_exec,  # noqa: PLW1509  it runs system calls only
            )
        owner = Owner(process, process.pid, errors)
        self._owners.append(owner)
        owner.pid = self._cage.took(process.pid)
        return owner

    def script(
        self,
        source: str,
        *arguments: str,
        before: Iterable[str] = (),
        environment: Mapping[str, str] | None = None,
        terminal: int | None = None,
    ) -> Owner:
        """Start Python on ``source``, which may use ``say(word, text)``.

        Args:
            source: the program; indentation common to all lines is removed.
            arguments: its ``sys.argv[1:]``.
            before: a command in front, such as ``unshare -pf``.
            environment: added to the jail's own.
            terminal: see :meth:`start`.
        """
        path = self.folder / f"script_{len(self._owners)}.py"
        path.write_text(PRELUDE + textwrap.dedent(source))
        argv = [*before, sys.executable, str(path), *arguments]
        return self.start(argv, environment=environment, terminal=terminal)

    def owner(self, *arguments: str) -> Owner:
        """Start the owner of the kill tests (owner.py) with these arguments."""
        return self.start([sys.executable, OWNER, *arguments])

    def hear(self, word: str, count: int = 1, seconds: float = PATIENCE) -> list[Line]:
        """Wait until ``word`` was said ``count`` times in all; returns those lines.

        Fails after ``seconds``, and at once when nobody is left who could say it.
        """
        limit = time.monotonic() + seconds
        while True:
            # The owners first: what one of them leaves behind may have something to say yet.
            over = all(owner.process.poll() is not None for owner in self._owners)
            over = over and not self.pids()
            self._listen()
            lines = [line for line in self.heard if line.word == word]
            if len(lines) >= count:
                return lines
            if over or time.monotonic() > limit:
                why = "all have ended" if over else f"{seconds:g} s passed"
                said = "\n".join(owner.errors() for owner in self._owners)
                raise AssertionError(
                    f"{why} with {len(lines)} of {count} {word!r}; heard {self.heard}; "
                    f"standard error:\n{said}\nliving: {self.living()}"
                )
            select.select([self._tell], [], [], 0.2)

    def told(self, word: str) -> list[Line]:
        """The lines with ``word`` that have been said so far; for what must not be said."""
        self._listen()
        return [line for line in self.heard if line.word == word]

    def _listen(self) -> None:
        """Read what has been said so far."""
        try:
            while data := os.read(self._tell, 65536):
                self._rest += data
        except BlockingIOError:
            pass  # read to the end
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            word, pid, text = line.decode().split(" ", 2)
            self.heard.append(Line(word, int(pid), text))

    def clear(self) -> None:
        """End everything that lives in the jail."""

        def dead() -> bool:
            self._cage.kill()
            return not self._cage.pids()

        truth.until(dead, "the jail cannot be emptied")

    def kill_at_once(self, pids: Iterable[int]) -> None:
        """SIGKILL for several in the same instant: none of them runs between first and last.

        Where there is no cgroup to freeze, they get it as fast as it goes. (SIGSTOP would not do:
        the death of one can orphan the process group of another, and that wakes the stopped.)
        """
        self._cage.freeze(True)
        try:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        finally:
            self._cage.freeze(False)

    def pids(self) -> list[int]:
        """Everything that lives in the jail."""
        return self._cage.pids()

    def cgroups(self) -> list[Path]:
        """The cgroups that were made in the jail, parents first."""
        return self._cage.cgroups()

    def living(self) -> list[str]:
        """The same for people, with the role that a process told."""
        roles = {line.pid: f"{line.word} {line.text}" for line in self.heard}
        return [f"{truth.describe(pid)} [{roles.get(pid, '?')}]" for pid in self.pids()]

    def wait_empty(self, seconds: float = PATIENCE, besides: Iterable[int] = ()) -> bool:
        """Wait until nobody lives in the jail, ``besides`` left out of account."""
        limit = time.monotonic() + seconds
        poll = select.poll()
        event = self._cage.event_fd()
        if event is not None:
            poll.register(event, select.POLLPRI)
        spared = set(besides)
        while set(self.pids()) - spared:
            if time.monotonic() > limit:
                return False
            poll.poll(50 if event is not None and not spared else 10)
        return True

    def assert_empty(
        self, what: str = "", seconds: float = PATIENCE, besides: Iterable[int] = ()
    ) -> None:
        """Fail with the list of survivors unless the jail becomes empty in ``seconds``."""
        if not self.wait_empty(seconds, besides):
            spared = {str(pid) for pid in besides}
            self._listen()
            left = [line for line in self.living() if line.split()[0] not in spared]
            said = "\n".join(owner.errors()[-3000:] for owner in self._owners)
            lines = "\n  ".join(left)
            raise AssertionError(
                f"{what}: {len(left)} left after {seconds:g} s:\n  {lines}\nstandard error:\n{said}"
            )


def start_as_a_shell_would(terminal: int | None) -> None:
    """Give a new process default signal actions, no mask and no core dumps."""
    for number in signal.valid_signals():
        # SIGKILL, SIGSTOP, and those that the C library keeps for itself, refuse.
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if terminal is not None:
        import fcntl
        import termios

        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
