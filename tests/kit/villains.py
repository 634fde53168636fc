"""What workers do, and what they have started, when their owner dies.

Each villain is a function that a worker runs. It says ``ready`` once it is in its final
state and would then last for ``LIFE`` seconds if nobody ended it: that bounds the harm
of a test run that is killed itself. ``play`` is what is handed to the pool.

``CASTS`` says which villains share one owner in the kill tests. Those that make a sweep
hard (a process that forks for ever, a nested pool) have an owner of their own.

Called by: owner.py, in the workers. Standard library only: it is imported in every
worker, and run as a script without site.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

LIFE = 180
FORKS = 300
SLEEP = ["/bin/sleep", str(LIFE)]


def say(word: str, text: str = "") -> None:
    """Tell the test: one line, with the pid of the speaker."""
    with open(os.environ["TELL"], "a") as tell:
        tell.write(f"{word} {os.getpid()} {text}\n")


def rest() -> None:
    """Be in a sleep that SIGTERM's default action ends."""
    time.sleep(LIFE)


def sleeper() -> None:
    """Be an ordinary worker in an ordinary task."""
    say("ready", "sleeper")
    rest()


def busy_python() -> None:
    """Loop in bytecode."""
    os.nice(19)  # the rest of the machine has work to do
    say("ready", "busy_python")
    end = time.monotonic() + LIFE
    while time.monotonic() < end:
        pass


def gil_held() -> None:
    """Be in a C call that never gives the GIL back: no other thread of this process runs."""
    libc = ctypes.PyDLL(None)
    mutex = ctypes.create_string_buffer(128)
    libc.pthread_mutex_lock(mutex)
    say("ready", "gil_held")
    libc.pthread_mutex_lock(mutex)


def ignores_term() -> None:
    """Ignore SIGTERM, SIGINT and SIGHUP."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    say("ready", "ignores_term")
    rest()


def stubborn_subprocess() -> None:
    """Hold a subprocess that ignores SIGTERM."""
    shell = subprocess.Popen(
        ["/bin/sh", "-c", f"trap '' TERM HUP INT; echo; exec sleep {LIFE}"], stdout=subprocess.PIPE
    )
    assert shell.stdout is not None
    shell.stdout.readline()
    say("ready", "stubborn_subprocess")
    shell.wait()


def started_subprocess() -> None:
    """Hold a subprocess."""
    child = subprocess.Popen(SLEEP)
    say("ready", "subprocess")
    child.wait()


def new_session() -> None:
    """Hold a subprocess that leads a session of its own."""
    child = subprocess.Popen(SLEEP, start_new_session=True)
    say("ready", "new_session")
    child.wait()


def double_fork(environment: Mapping[str, str]) -> None:
    """Start a textbook daemon and return when it runs its program."""
    reader, writer = os.pipe()
    first = os.fork()
    if first == 0:
        try:
            os.setsid()
            if os.fork() == 0:
                os.chdir("/")
                null = os.open(os.devnull, os.O_RDWR)
                for fd in range(3):
                    os.dup2(null, fd)
                os.closerange(3, writer)
                os.closerange(writer + 1, 1024)
                os.execve(SLEEP[0], SLEEP, environment)
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(first, 0)
    os.read(reader, 1)  # ends when the exec has closed the last copy of the other end
    os.close(reader)


def daemon() -> None:
    """Have started a double-forked daemon."""
    double_fork(os.environ)
    say("ready", "daemon")
    rest()


def nothing_to_know_it_by() -> Mapping[str, str]:
    """An empty environment; with the portable backend the whole: see tests/portable.py."""
    is_portable = os.environ.get("SAFEPOOL_BACKEND") == "portable"
    return os.environ if is_portable and "TRULY_EMPTY" not in os.environ else {}


def daemon_empty_env() -> None:
    """Have started a double-forked daemon with an empty environment."""
    double_fork(nothing_to_know_it_by())
    say("ready", "daemon_empty_env")
    rest()


def forker() -> None:
    """Hold a subprocess that forks every few milliseconds."""
    child = subprocess.Popen([sys.executable, "-S", "-E", __file__, os.environ["TELL"]])
    child.wait()


def fork_for_long() -> None:
    """The program of that subprocess: children that last, ``FORKS`` at most."""
    say("ready", "forker")
    for _ in range(FORKS):
        if os.fork() == 0:
            rest()
            os._exit(0)
        time.sleep(0.005)
    rest()


def killed_worker_leaves_strays() -> None:
    """Have started a session and a daemon, and be SIGKILLed."""
    subprocess.Popen(SLEEP, start_new_session=True)
    double_fork(nothing_to_know_it_by())
    say("ready", "stray_of_killed_worker")
    os.kill(os.getpid(), signal.SIGKILL)


def nested(package: str, method: str, grace: float) -> None:
    """Hold a pool of its own whose workers are at work."""
    pool = make_pool(package, method, 2, grace)
    pool.map(int, range(4))
    running = [pool.apply_async(held, ("inner",)) for _ in range(2)]
    say("ready", "nested")
    for result in running:
        result.get()


def held(word: str) -> None:
    """Say a word, then last."""
    say(word)
    rest()


VILLAINS = {
    "sleeper": sleeper,
    "busy_python": busy_python,
    "gil_held": gil_held,
    "ignores_term": ignores_term,
    "stubborn_subprocess": stubborn_subprocess,
    "subprocess": started_subprocess,
    "new_session": new_session,
    "daemon": daemon,
    "daemon_empty_env": daemon_empty_env,
    "forker": forker,
    "stray_of_killed_worker": killed_worker_leaves_strays,
}

CASTS = (
    ("idle",),
    ("busy_python", "subprocess"),
    ("gil_held",),
    ("ignores_term", "stubborn_subprocess"),
    ("new_session", "daemon", "daemon_empty_env"),
    ("nested",),
    ("forker",),
    ("stray_of_killed_worker",),
)


def play(name: str, package: str, method: str, grace: float) -> None:
    """Run a villain by its name."""
    if name == "nested":
        nested(package, method, grace)
    else:
        VILLAINS[name]()


def make_pool(package: str, method: str, processes: int, grace: float) -> Any:
    """Make a pool of safepool's, or of multiprocessing's for the negative control."""
    context = importlib.import_module(package).get_context(method)
    options = {"grace": grace} if package == "safepool" else {}
    return context.Pool(processes, **options)


if __name__ == "__main__":
    fork_for_long()
