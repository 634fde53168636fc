"""What is known to break the kernel's parent death signal, tried on workers.

The signal follows the thread that forked (covered by tests/real), is cleared by a change
of credentials, can be taken back by the program itself, and tells nothing where the
parent is in another pid namespace. None of it may keep a worker alive, or kill one.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess

import pytest

from tests.kit import truth
from tests.kit.jail import Jail

BOUND = 10.5

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")


def can_unshare_pids() -> bool:
    """Tell whether a pid namespace can be made here."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "-pf", "true"], capture_output=True).returncode == 0


needs_namespaces = pytest.mark.skipif(not can_unshare_pids(), reason="namespaces need root")

DROPPED = """
    import subprocess
    from safepool import get_context
    from tests.kit import villains

    def drop(_):
        tell = open(os.environ["TELL"], "a")
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        villains.double_fork(villains.nothing_to_know_it_by())
        tell.write(f"dropped {os.getpid()} \\n")
        tell.flush()
        time.sleep(180)

    if __name__ == "__main__":
        pool = get_context(sys.argv[1]).Pool(2, grace=0.5)
        pool.map(drop, range(2), 1)
"""


@needs_root
@pytest.mark.parametrize("killed", ["owner", "owner-and-launcher"])
def test_workers_that_have_dropped_their_privileges(method: str, killed: str, jail: Jail) -> None:
    """A change of user clears the death signal; worker and daemon go all the same.

    Seen in the wild: https://github.com/rootless-containers/rootlesskit/pull/66
    """
    owner = jail.script(DROPPED, method)
    workers = [line.pid for line in jail.hear("dropped", 2)]
    launchers = {truth.parent(pid) for pid in workers}
    owner.send(signal.SIGKILL)
    if killed == "owner-and-launcher":
        for pid in launchers:
            os.kill(pid, signal.SIGKILL)
    jail.assert_empty(f"{killed} killed", BOUND)


DISARMED = """
    import ctypes
    from safepool import get_context

    PR_SET_PDEATHSIG = 1

    def wipe_environment():
        '''Do what setting a process title does: overwrite the block that the kernel shows.'''
        stat = open("/proc/self/stat").read().rpartition(")")[2].split()
        start, end = int(stat[47]), int(stat[48])
        ctypes.memset(start, 0, end - start)
        assert not open("/proc/self/environ", "rb").read().strip(b"\\0")

    def hide(_):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0)
        wipe_environment()
        if os.fork() == 0:
            os.setsid()
            say("hidden", "stray")
            time.sleep(180)
        say("hidden", "worker")
        time.sleep(180)

    if __name__ == "__main__":
        pool = get_context(sys.argv[1]).Pool(2, grace=0.5)
        pool.map(hide, range(2), 1)
"""


@pytest.mark.parametrize("killed", ["owner", "owner-and-launcher"])
def test_workers_that_disarm_themselves_and_wipe_their_environment(
    method: str, killed: str, jail: Jail
) -> None:
    """A task takes the death signal back and sets a process title over its marks: it goes.

    Seen in the wild: https://github.com/containers/bubblewrap/issues/700
    """
    owner = jail.script(DISARMED, method)
    workers = [line.pid for line in jail.hear("hidden", 4) if line.text == "worker"]
    launchers = {truth.parent(pid) for pid in workers}
    owner.send(signal.SIGKILL)
    if killed == "owner-and-launcher":
        for pid in launchers:
            os.kill(pid, signal.SIGKILL)
    jail.assert_empty(f"{killed} killed", BOUND)


ORPHAN = """
    from safepool import get_context
    from tests.kit import villains

    if __name__ == "__main__":
        assert os.getppid() == 0, "the parent is to be outside of this namespace"
        pool = get_context(sys.argv[1]).Pool(2, grace=0.5)
        assert pool.map(abs, range(-9, 0), 1) == list(range(9, 0, -1))
        say("owner")
        pool.apply(villains.daemon_empty_env)
"""


@needs_namespaces
def test_an_owner_whose_parent_is_in_another_namespace(method: str, jail: Jail) -> None:
    """``getppid()`` is 0 after entering a container: workers live and die with their owner.

    Seen in the wild: https://github.com/aristanetworks/bst/pull/78
    """
    holder = jail.start(["unshare", "-pf", "--mount-proc", "--kill-child", "sleep", "180"])
    (first,) = truth.until(lambda: truth.children(holder.pid), "no namespace")
    truth.until(lambda: "sleep" in truth.command_line(first), "no first process")
    owner = jail.script(ORPHAN, method, before=["nsenter", "-t", str(first), "-p", "-m"])
    jail.hear("owner")
    jail.hear("ready")
    inside = next(
        pid for pid in truth.descendants(owner.pid) if "script_" in truth.command_line(pid)
    )
    os.kill(inside, signal.SIGKILL)
    jail.assert_empty("owner inside the namespace killed", BOUND, {holder.pid, first})


CONTAINERS = """
    import subprocess
    from safepool import get_context

    TEXT = 'echo "inside $$ " >> "$TELL"; sleep 180'

    def contain(_):
        subprocess.run(["unshare", "-pf", "--mount-proc", "sh", "-c", TEXT])

    if __name__ == "__main__":
        pool = get_context(sys.argv[1]).Pool(2, grace=0.5)
        pool.map(contain, range(2), 1)
"""


@needs_namespaces
def test_tasks_that_start_containers(method: str, jail: Jail) -> None:
    """Processes in a pid namespace of their own, started by a task, end with the owner.

    Seen in the wild: https://github.com/containers/bubblewrap/issues/692
    """
    owner = jail.script(CONTAINERS, method)
    jail.hear("inside", 2)
    owner.send(signal.SIGKILL)
    jail.assert_empty("owner of containers killed", BOUND)
