"""A bystander: says every signal that it gets, and lives on.

It may look as if it belonged to a run (its name, its arguments, its environment); who
signals it all the same, breaks the promise that nothing else is ever signalled. It asks
its standard input what to do: ``stop`` ends it, anything else is answered by ``alive``.
With the argument ``--stay`` it asks nothing and only lasts.

Called by: the tests about strangers, through a jail, and as an example of a daemon that
outlives its run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from types import FrameType

LIFE = 180
SPARED = (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD)


def say(word: str, text: str = "") -> None:
    with open(os.environ["TELL"], "a") as tell:
        tell.write(f"{word} {os.getpid()} {text}\n")


def note(number: int, frame: FrameType | None) -> None:
    say("signalled", signal.Signals(number).name)


def main() -> None:
    for number in signal.valid_signals():
        if number not in SPARED:
            with contextlib.suppress(OSError, ValueError):  # kept by the C library
                signal.signal(number, note)
    say("stranger")
    if "--stay" in sys.argv:
        time.sleep(LIFE)
    while (line := sys.stdin.readline()) and line.strip() != "stop":
        say("alive")


if __name__ == "__main__":
    main()
