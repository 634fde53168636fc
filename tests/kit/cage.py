"""Two ways to know everything that an owner has started, whatever it did to hide.

A *cage* holds an owner and all that it starts. The kernel keeps the list:

* ``Cgroup``: a cgroup v2 of its own. ``cgroup.procs``, its own and those of all cgroups
  that were made below, name every member, whatever its parent, session or environment;
  ``cgroup.events`` is an event when all are empty; ``cgroup.kill`` ends all at once.
  Needs a cgroup2 mount that we may write to.
* ``Keepers``: elsewhere, each owner gets a child subreaper above it (keeper.py). All
  that it starts stays in the subtree of that process. The price: the owner then lives
  under a foreign subreaper, which hides bugs that only show when orphans go to PID 1.

``SAFEPOOL_TEST_CAGE=keepers`` chooses the second although the first is there.

Called by: the jail.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from tests.kit import truth

KEEPER = Path(__file__).with_name("keeper.py")


class Cage(Protocol):
    """Holds processes; see the module's header."""

    def command(self, argv: list[str]) -> list[str]:
        """What to start so that ``argv`` runs as an owner in the cage."""

    def entrance(self) -> Callable[[], None]:
        """What a new child calls before its exec."""

    gives_terminal: bool
    """The cage makes a terminal on standard input the owner's controlling one."""

    def took(self, pid: int) -> int:
        """Learn of a started process; returns the pid of the owner itself."""

    def pids(self) -> list[int]:
        """Everything that lives in the cage."""

    def event_fd(self) -> int | None:
        """A descriptor with a priority event when the cage may have become empty."""

    def freeze(self, frozen: bool) -> bool:
        """Let nothing in the cage run, or go on; False where that cannot be done."""

    def cgroups(self) -> list[Path]:
        """The cgroups that were made in the cage, parents first; none where it is no cgroup."""

    def kill(self) -> None:
        """Send SIGKILL to everything in the cage."""

    def close(self) -> None:
        """Give back what the cage itself holds; it must be empty."""


def cgroup_folder() -> Path | None:
    """Where cgroups can be made, None when that is nowhere."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if after.startswith("cgroup2 "):
            mount = Path(before.split()[4])
            own = Path("/proc/self/cgroup").read_text().partition("0::/")[2].splitlines()[0]
            folder = mount / own
            return folder if os.access(folder / "cgroup.procs", os.W_OK) else None
    return None


def cgroups_below(folder: Path) -> list[Path]:
    """The cgroups below one, parents first."""
    found = [folder]
    for each in found:
        with contextlib.suppress(OSError):  # it was removed meanwhile
            found += sorted(path for path in each.iterdir() if path.is_dir())
    return found[1:]


def processes_in(folder: Path) -> list[int]:
    """The processes of just this cgroup; none when it is gone."""
    try:
        return [int(line) for line in (folder / "cgroup.procs").read_text().split()]
    except OSError:
        return []


class Cgroup:
    """A cage that the kernel keeps: see the module's header."""

    gives_terminal = False

    def __init__(self, parent: Path) -> None:
        self.folder = parent / f"safepool-test-{os.getpid()}-{secrets.token_hex(4)}"
        self.folder.mkdir()
        self._events = os.open(self.folder / "cgroup.events", os.O_RDONLY | os.O_CLOEXEC)

    def command(self, argv: list[str]) -> list[str]:
        return argv

    def entrance(self) -> Callable[[], None]:
        procs = str(self.folder / "cgroup.procs")

        def enter() -> None:
            fd = os.open(procs, os.O_WRONLY)
            os.write(fd, b"0")
            os.close(fd)

        return enter

    def took(self, pid: int) -> int:
        return pid

    def pids(self) -> list[int]:
        os.pread(self._events, 100, 0)  # reading takes back the event
        while True:
            below = cgroups_below(self.folder)
            found = {pid for folder in [self.folder, *below] for pid in processes_in(folder)}
            # What moved to a new cgroup meanwhile was perhaps in neither list.
            if cgroups_below(self.folder) == below:
                return sorted(found)

    def event_fd(self) -> int | None:
        return self._events

    def freeze(self, frozen: bool) -> bool:
        (self.folder / "cgroup.freeze").write_text(str(int(frozen)))
        if frozen:
            # Only this: after a thaw the kernel may go on saying so of a cgroup whose frozen
            # processes have been killed, though everybody runs.
            events = self._events
            truth.until(lambda: b"frozen 1\n" in os.pread(events, 100, 0), "it does not freeze")
        return True

    def cgroups(self) -> list[Path]:
        return cgroups_below(self.folder)

    def kill(self) -> None:
        (self.folder / "cgroup.kill").write_text("1")

    def close(self) -> None:
        os.close(self._events)
        truth.until(self._removed, f"{self.folder} cannot be removed")

    def _removed(self) -> bool:
        try:
            for folder in reversed(cgroups_below(self.folder)):
                folder.rmdir()
            self.folder.rmdir()
        except OSError:
            return False  # the last member is still being taken down
        return True


class Keepers:
    """A cage of one subreaper above each owner: see the module's header."""

    gives_terminal = True

    def __init__(self) -> None:
        self._keepers: list[int] = []

    def command(self, argv: list[str]) -> list[str]:
        return [sys.executable, "-S", "-E", str(KEEPER), *argv]

    def entrance(self) -> Callable[[], None]:
        return lambda: None

    def took(self, pid: int) -> int:
        self._keepers.append(pid)
        return truth.until(lambda: truth.children(pid), "the keeper starts no owner")[0]

    def pids(self) -> list[int]:
        return [
            pid
            for keeper in self._keepers
            for pid in truth.descendants(keeper)
            if truth.is_alive(pid)
        ]

    def event_fd(self) -> int | None:
        return None

    def freeze(self, frozen: bool) -> bool:
        return False

    def cgroups(self) -> list[Path]:
        return []

    def kill(self) -> None:
        # Stopped first: one that forks as fast as it is killed would get away.
        for number in (signal.SIGSTOP, signal.SIGSTOP, signal.SIGKILL):
            for pid in self.pids():
                with contextlib.suppress(ProcessLookupError):  # it went by itself
                    os.kill(pid, number)

    def close(self) -> None:
        self._keepers.clear()  # each leaves by itself when it has no children left


def new_cage() -> Cage:
    """The best cage that this machine allows."""
    folder = cgroup_folder()
    if folder is None or os.environ.get("SAFEPOOL_TEST_CAGE") == "keepers":
        return Keepers()
    return Cgroup(folder)
