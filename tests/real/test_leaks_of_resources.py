"""Pools that come and go leave nothing behind in a long-lived owner, and nothing after it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit import truth
from tests.kit.jail import OWNER, Jail

BOUND = 10.5


class PrivateShm:
    """A /dev/shm that only the owners of one test see, so that all names in it are theirs.

    ``before`` goes in front of an owner's command. Where no private mount can be made it
    is empty, and the names are not looked at.
    """

    def __init__(self, jail: Jail) -> None:
        self.before: list[str] = []
        if os.geteuid() != 0:
            return
        mount = "mount -t tmpfs none /dev/shm && touch mounted && exec sleep 180"
        holder = jail.start(["unshare", "-m", "sh", "-c", mount])
        mounted = jail.folder / "mounted"
        truth.until(
            lambda: mounted.exists() or holder.process.poll() is not None, "no private /dev/shm"
        )
        self._names = f"/proc/{holder.pid}/root/dev/shm"
        if mounted.exists():
            self.before = ["nsenter", f"--mount=/proc/{holder.pid}/ns/mnt"]

    def names(self) -> list[str]:
        """The names of shared memory and semaphores that are there."""
        return os.listdir(self._names) if self.before else []


@pytest.fixture
def shm(tmp_path: Path) -> Iterator[PrivateShm]:
    """A private /dev/shm; what holds it lives in a jail of its own."""
    folder = tmp_path / "shm"
    folder.mkdir()
    with Jail(folder) as holders:
        yield PrivateShm(holders)


MANY = """
    import gc
    from safepool import get_context
    from tests.kit import truth

    def one_pool(context):
        with context.Pool(1, grace=0.5) as pool:
            assert pool.apply(abs, (-1,)) == 1
        pool.join()

    def one_closed_pool(context):
        pool = context.Pool(1, grace=0.5)
        assert list(pool.imap_unordered(abs, [-1, -2])) in ([1, 2], [2, 1])
        pool.close()
        pool.join()

    def one_process(context):
        process = context.Process(target=abs, args=(1,))
        process.start()
        process.join(30)
        assert process.exitcode == 0
        process.close()

    if __name__ == "__main__":
        method, kind, count = sys.argv[1:]
        context = get_context(method)
        work = globals()[kind]
        work(context)
        gc.collect()
        files = truth.open_files()
        for _ in range(int(count)):
            work(context)
        gc.collect()
        say("worked")
        sys.stdin.readline()
        # What belonged to a launcher is let go of when its end has been seen.
        end = time.monotonic() + 3
        while len(truth.open_files()) > len(files) and time.monotonic() < end:
            time.sleep(0.01)
        more = {fd: name for fd, name in truth.open_files().items() if fd not in files}
        say("files", f"{len(files)} {len(truth.open_files())} {more}")
        sys.stdin.readline()
"""


@pytest.mark.parametrize("kind", ["one_pool", "one_closed_pool", "one_process"])
def test_pools_that_come_and_go_leave_only_the_one_sidecar(
    method: str, kind: str, jail: Jail, shm: PrivateShm
) -> None:
    """After many pools: one helper process, no zombie, no more descriptors, no shared names."""
    count = 50 if method == "fork" else 12  # an interpreter's start costs more than a fork
    owner = jail.script(MANY, method, kind, str(count), before=shm.before)
    jail.hear("worked", seconds=60)

    def one_sidecar() -> bool:
        return len(truth.sidecars(owner.pid)) == 1 and len(jail.pids()) == 2

    # Promise: within 1 s of their last duty; the rest is for a busy machine.
    truth.until(one_sidecar, f"more than owner and sidecar: {jail.living()}", 3)

    def no_zombie() -> bool:
        return all(truth.is_alive(pid) for pid in truth.descendants(owner.pid))

    # A helper that has just ended is reaped when its parent gets the CPU.
    truth.until(no_zombie, "a zombie stays", 3)

    def one_cgroup() -> bool:
        return len(jail.cgroups()) <= 1

    truth.until(one_cgroup, f"those of launchers stay: {jail.cgroups()}", 3)
    owner.go()
    files, now, more = jail.hear("files")[0].text.split(" ", 2)
    assert int(now) <= int(files), f"{files} descriptors have become {now}: {more}"
    assert shm.names() == [], "names in /dev/shm are left"
    owner.go()
    assert owner.wait() == 0, owner.errors()
    jail.assert_empty("after many pools", 3)
    assert jail.cgroups() == [], "cgroups are left"
    assert shm.names() == [], "names in /dev/shm are left"


SHORT = """
    from safepool import get_context
    if __name__ == "__main__":
        pool = get_context(sys.argv[1]).Pool(1)
        assert pool.apply(abs, (-1,)) == 1
        if sys.argv[2] == "os_exit":
            os._exit(5)
        sys.exit(5)
"""


def test_short_owners_leave_no_process(method: str, jail: Jail, shm: PrivateShm) -> None:
    """Owners that come and go, with an open pool: no worker, launcher or sidecar stays."""
    ends = ["os_exit", "sys_exit"] * (9 if method == "fork" else 8)
    for start in range(0, len(ends), 4):
        owners = [
            jail.script(SHORT, method, end, before=shm.before) for end in ends[start : start + 4]
        ]
        for owner in owners:
            assert owner.wait() == 5, owner.errors()
    jail.assert_empty(f"after {len(ends)} owners", BOUND)
    assert jail.cgroups() == [], "cgroups are left"
    assert shm.names() == [], "names in /dev/shm are left"
    left = [path.name for path in (jail.folder / "run").glob("safepool/*") if path.suffix != ".log"]
    assert not left, "records of finished runs are left"


def test_shared_memory_of_killed_owners_is_not_kept(
    method: str, jail: Jail, shm: PrivateShm
) -> None:
    """An owner with a pool is SIGKILLed: what safepool itself shares leaves no name."""
    owner = jail.start(
        [*shm.before, sys.executable, OWNER, f"--method={method}", "--cast=busy_python,gil_held"]
    )
    jail.hear("ready", 2)
    assert shm.names() == [], "a running pool has names in /dev/shm"
    owner.send(9)
    jail.assert_empty("owner killed", BOUND)
