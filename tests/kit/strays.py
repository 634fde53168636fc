"""What a task can start that is hard to end, one tactic each.

``STRAYS`` maps the name of a tactic to a function that runs in a worker and returns the
pid of what it has started, in its final state. What a tactic starts besides that lives
in the session of that pid. Nothing lasts longer than ``LIFE``.

``start_all`` is what is handed to a pool: it says ``stray`` with name and pid for each.

Called by: the tests of tests/real, in the workers of owners. Standard library only.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping

from tests.kit import truth
from tests.kit.villains import LIFE, SLEEP, rest, say

NOBODY = 65534

WIPE = f"""
import ctypes, time
stat = open("/proc/self/stat").read().rpartition(")")[2].split()
ctypes.memset(int(stat[47]), 0, int(stat[48]) - int(stat[47]))
print("ready", flush=True)
time.sleep({LIFE})
"""

DEAF = f"""
import signal, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
print("ready", flush=True)
time.sleep({LIFE})
"""

FORKER = f"""
import os, time
print("ready", flush=True)
for _ in range(60):
    if os.fork() == 0:
        time.sleep({LIFE})
        os._exit(0)
    time.sleep(0.02)
time.sleep({LIFE})
"""

RUNNER = """
import fcntl, os, sys, time
fcntl.flock(os.open(sys.argv[1], os.O_CREAT | os.O_RDWR), fcntl.LOCK_EX)
os.nice(19)  # the rest of the machine has work to do
end = time.monotonic() + 60
print("ready", flush=True)
while time.monotonic() < end:
    if os.fork():
        os._exit(0)
    until = time.perf_counter() + 0.0002
    while time.perf_counter() < until:
        pass
"""

TRACED = f"""
import ctypes, os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = os.fork()
if child == 0:
    ctypes.CDLL(None).ptrace(0, 0, 0, 0)  # PTRACE_TRACEME
    os.kill(os.getpid(), signal.SIGSTOP)
    os._exit(0)
os.waitpid(child, os.WUNTRACED)
print("ready", flush=True)
time.sleep({LIFE})
"""


CLOSED = f"""
import ctypes, time
ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
print("ready", flush=True)
time.sleep({LIFE})
"""

PORT = f"""
import socket, time
server = socket.create_server(("127.0.0.1", 0))
print("ready", flush=True)
time.sleep({LIFE})
"""


def lose_tag() -> None:
    """Reset the limit that the tag is."""
    hard = resource.getrlimit(resource.RLIMIT_RTTIME)[1]
    resource.setrlimit(resource.RLIMIT_RTTIME, (resource.RLIM_INFINITY, hard))


def daemon(
    environment: Mapping[str, str], *, keeps_tag: bool = True, user: int | None = None
) -> int:
    """Fork twice in a new session and run a program; return when it does."""
    reader, writer = os.pipe()
    first = os.fork()
    if first == 0:
        try:
            os.setsid()
            second = os.fork()
            if second == 0:
                if not keeps_tag:
                    lose_tag()
                if user is not None:
                    os.setresuid(user, user, user)
                os.execve(SLEEP[0], SLEEP, dict(environment))
            os.write(writer, b"%d" % second)
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(first, 0)
    with open(reader) as told:
        return int(told.read())  # ends when the exec has closed the last copy of the other end


def program(source: str, *words: str) -> int:
    """Run a small Python program in a session of its own; return when it says that it is ready."""
    argv = [sys.executable, "-S", "-E", "-c", source, *words]
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True)
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    return child.pid


def plain_child() -> int:
    return os.posix_spawn(SLEEP[0], SLEEP, os.environ)


def new_session() -> int:
    return subprocess.Popen(SLEEP, start_new_session=True).pid


def by_a_thread() -> int:
    """Have a thread start it and end."""
    pids: list[int] = []
    thread = threading.Thread(target=lambda: pids.append(new_session()))
    thread.start()
    thread.join()
    return pids[0]


def stopped() -> int:
    pid = new_session()
    os.kill(pid, signal.SIGSTOP)
    truth.until(lambda: truth.state(pid) == "T", "it does not stop")
    return pid


def in_vfork() -> int:
    """Be caught between vfork and exec: the parent in uninterruptible sleep, its child deaf."""
    pipe = os.path.join(tempfile.mkdtemp(dir="."), "pipe")
    os.mkfifo(pipe)
    pid = os.fork()
    if pid == 0:
        os.setsid()
        # The child opens this before its exec, and nobody ever writes there.
        os.posix_spawn(
            SLEEP[0],
            SLEEP,
            os.environ,
            file_actions=[(os.POSIX_SPAWN_OPEN, 0, pipe, os.O_RDONLY, 0)],
        )
        os._exit(0)
    truth.until(lambda: truth.state(pid) == "D", "it is not caught in vfork")
    return pid


def in_a_namespace() -> int:
    """Be the first process of a pid namespace, as in a container."""
    container = ["unshare", "-pf", "--mount-proc", *SLEEP]
    pid = subprocess.Popen(container, start_new_session=True).pid
    truth.until(
        lambda: [p for p in truth.children(pid) if "sleep" in truth.command_line(p)], "no container"
    )
    return pid


def runner(lock: str) -> int:
    """Fork and exit every 0.2 ms, so that nobody can name it; whoever it is holds ``lock``.

    Not one of ``STRAYS``: without launcher and cgroup it is a matter of luck.
    """
    return program(RUNNER, lock)


STRAYS: dict[str, Callable[[], int]] = {
    "child": plain_child,
    "session": new_session,
    "thread": by_a_thread,
    "daemon": lambda: daemon(os.environ),
    "empty_environment": lambda: daemon({}),
    "title": lambda: program(WIPE),
    "no_tag": lambda: daemon(os.environ, keeps_tag=False),
    "no_witness": lambda: daemon({}, keeps_tag=False),
    "forker": lambda: program(FORKER),
    "deaf": lambda: program(DEAF),
    "stopped": stopped,
    "traced": lambda: program(TRACED),
    "vfork": in_vfork,
    "port": lambda: program(PORT),
    "closed": lambda: program(CLOSED),
    "user": lambda: daemon(os.environ, user=NOBODY),
    "namespace": in_a_namespace,
}

NEED_ROOT = ("user", "namespace")


def start_all(names: Iterable[str]) -> None:
    """Start all of these in this worker, say so, and last."""
    for name in names:
        say("stray", f"{name} {STRAYS[name]()}")
    say("worker")
    rest()


def members(pid: int, among: Iterable[int]) -> list[int]:
    """What lives of a stray: itself and whoever is in its session."""
    found = []
    for other in among:
        stat = truth.fields(other)
        if stat and stat[0] not in "ZX" and (other == pid or int(stat[3]) == pid):
            found.append(other)
    return found
