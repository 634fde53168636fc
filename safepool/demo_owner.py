"""The owner in ``safepool demo``, and what its four workers start.

This is the user's side of the demo: nothing here knows how to clean up. Each worker
starts one process, says on standard output ``WORKER-PID PID WHAT``, and sleeps.
Everything ends by itself after ``LIFETIME`` seconds.

Called by: the demo's stage, as ``python -m safepool.demo_owner POOL METHOD``.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import time

HELD = (
    "a subprocess",
    "a subprocess in a session of its own",
    "a double-forked daemon",
    "a daemon with an empty environment",
)
"""What the workers hold, one each, in the words of the printed tree."""

LIFETIME = 60
"""Seconds that workers and what they start last if nobody ends them."""


def hold(what: str) -> None:
    """Start the process that ``what`` names, say so, and keep the worker busy."""
    sleep = [shutil.which("sleep") or "/bin/sleep", str(LIFETIME)]
    if what == HELD[0]:
        pid = subprocess.Popen(sleep).pid
    elif what == HELD[1]:
        pid = subprocess.Popen(sleep, start_new_session=True).pid
    else:
        pid = daemonise(sleep, {} if what == HELD[3] else dict(os.environ))
    os.write(1, f"{os.getpid()} {pid} {what}\n".encode())
    time.sleep(LIFETIME)


def daemonise(command: list[str], environment: dict[str, str]) -> int:
    """Start a daemon as the textbook has it, new session and second fork; return its pid."""
    reader, writer = os.pipe()
    middle = os.fork()
    if middle == 0:
        try:
            os.setsid()
            daemon = os.fork()
            if daemon == 0:
                os.execve(command[0], command, environment)
            os.write(writer, b"%d" % daemon)
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(middle, 0)
    with open(reader, "rb") as answer:
        return int(answer.read())


def main(pool_of: str, method: str) -> None:
    """Make the pool, give each worker something to hold, and wait for the demo to end."""
    module = importlib.import_module(pool_of)
    pool = module.get_context(method).Pool(len(HELD))
    pool.map_async(hold, HELD, chunksize=1)
    # The stage keeps the other end open for as long as it lives.
    sys.stdin.read()
    pool.terminate()


if __name__ == "__main__":
    main(*sys.argv[1:])
