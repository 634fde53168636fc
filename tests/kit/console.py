"""An owner that does what the test asks, one line at a time.

    console = Console(jail, "spawn")
    workers = console.meet()          # [(pid, parent), ...], one for each worker
    console.ask("hold daemon")        # a worker now runs that villain
    console.owner.send(signal.SIGKILL)

The program at the end of this file reads commands from standard input and says each
answer in one line. A command that fails is answered with the error; ``ask`` then fails
the test unless it is told to expect that.

Called by: the tests of tests/real.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.kit import truth, villains
from tests.kit.truth import PATIENCE

if TYPE_CHECKING:
    from tests.kit.jail import Jail

GRACE = 0.5


class Console:
    """Starts the program in a jail and speaks to it. ``name`` tells two of them apart."""

    def __init__(
        self,
        jail: Jail,
        method: str,
        *,
        name: str = "console",
        processes: int = 2,
        before: Iterable[str] = (),
        environment: Mapping[str, str] | None = None,
        package: str = "safepool",
    ) -> None:
        self._jail = jail
        self._word = f"{name}-answer"
        self._asked = 0
        options = [f"--method={method}", f"--name={name}", f"--processes={processes}"]
        self.owner = jail.start(
            [*before, sys.executable, __file__, f"--package={package}", *options],
            environment=environment,
        )

    def ask(self, command: str, *, fails: bool = False, seconds: float = PATIENCE) -> str:
        """Send a command and return the answer; ``fails`` says that an error is expected."""
        self.tell(command)
        self._asked += 1
        answer = self._jail.hear(self._word, self._asked, seconds)[self._asked - 1].text
        assert answer.startswith("ERROR") == fails, f"{command}: {answer}\n{self.owner.errors()}"
        return answer

    def tell(self, command: str) -> None:
        """Send a command whose answer is not awaited: the process may be about to end."""
        stdin = self.owner.process.stdin
        assert stdin is not None
        stdin.write(f"{command}\n".encode())
        stdin.flush()

    def meet(self) -> list[tuple[int, int]]:
        """Pid and parent of every worker that is free, as these see them, sorted."""
        return sorted((pid, parent) for pid, parent in json.loads(self.ask("meet")))


# -- the program -------------------------------------------------------------------------


def meet(folder: str, number: int, everybody: int) -> tuple[int, int]:
    """Run at the same time as the other tasks of this meeting, so in a worker of its own."""
    Path(folder, str(number)).touch()
    end = time.monotonic() + 20
    while len(os.listdir(folder)) < everybody:
        if time.monotonic() > end:
            raise TimeoutError(f"only {os.listdir(folder)} of {everybody} workers came")
        time.sleep(0.005)
    return os.getpid(), os.getppid()


def ending_of(result: Any) -> str:
    """Wait for a task; its value or the name of its error."""
    try:
        return str(result.get(20))
    except Exception as error:
        return type(error).__name__


class Program:
    """The owner's side: a pool, and the tasks that are held in it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._pool = self._new_pool()
        self._pending: list[Any] = []
        self._meetings = itertools.count()

    def _new_pool(self) -> Any:
        options = self._options
        return villains.make_pool(options.package, options.method, options.processes, GRACE)

    def meet(self) -> str:
        """Let all free workers meet; a villain that is held keeps its worker."""
        folder = Path.cwd() / f"meeting-{self._options.name}-{next(self._meetings)}"
        folder.mkdir()
        free = self._options.processes - sum(not result.ready() for result in self._pending)
        tasks = [(str(folder), number, free) for number in range(free)]
        return json.dumps(self._pool.starmap(meet, tasks, 1))

    def hold(self, villain: str) -> str:
        """Give a worker to a villain."""
        task = (villain, self._options.package, self._options.method, GRACE)
        self._pending.append(self._pool.apply_async(villains.play, task))
        return ""

    def settle(self) -> str:
        """Wait for all held tasks; returns the names of the errors that they ended with."""
        ends = [ending_of(result) for result in self._pending]
        self._pending.clear()
        return " ".join(ends)

    def map(self) -> str:
        """Use the pool."""
        return str(self._pool.map(abs, range(-10, 0)))

    def watched(self) -> str:
        """Wait until the sidecar has said that it watches."""
        truth.until(lambda: self._pool.protection.sidecar, "no sidecar watches", 20)
        return ""

    def renew(self) -> str:
        """Close the pool and make another one."""
        self.close()
        self._pool = self._new_pool()
        return ""

    def close(self) -> str:
        """Close the pool in the friendly way."""
        self._pool.close()
        self._pool.join()
        return ""

    def terminate(self) -> str:
        """End the pool."""
        self._pool.terminate()
        self._pool.join()
        return ""

    def answer(self, line: str) -> str:
        """Carry out one command."""
        command, *words = line.split()
        try:
            return str(getattr(self, command)(*words))
        except Exception as error:
            logging.getLogger("console").exception(line)
            return f"ERROR {type(error).__name__}: {error}".replace("\n", " ")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--package", default="safepool")
    parser.add_argument("--method", default="fork")
    parser.add_argument("--name", default="console")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    program = Program(options)
    for line in sys.stdin:
        villains.say(f"{options.name}-answer", program.answer(line))


if __name__ == "__main__":
    main()
