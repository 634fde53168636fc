"""What every host promises, asked of the real ones and of the simulated one alike.

A simulation proves nothing if it is kinder than the kernel. So each promise that sweeps
rely on is put to both, by a *stage* that starts and ends processes there.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterator
from typing import Protocol

import pytest

from safepool.core.identity import Incarnation
from safepool.core.planner import Sig
from safepool.host.base import Handle, Host, NoHandle, Sending
from safepool.host.linux import LinuxHost
from safepool.host.portable import PortableHost
from tests.kit import truth
from tests.sim.host import SimHost
from tests.sim.kernel import Kernel, Process


class Stage(Protocol):
    """A place with a host, in which ``own`` is the process that asks."""

    host: Host
    own: int

    def start(self) -> int:
        """Start a child of ``own`` that sits there; return its pid."""

    def kill(self, pid: int) -> None:
        """Kill a child, and leave it unreaped."""

    def reap(self, pid: int) -> None:
        """Ask for a dead child's exit status."""

    def close(self) -> None:
        """End and reap all that is left."""


class RealStage:
    """Children of the test run."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.own = os.getpid()
        self._children: set[int] = set()

    def start(self) -> int:
        pid = os.posix_spawn("/bin/sleep", ["sleep", "120"], {})
        self._children.add(pid)
        return pid

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        assert truth.wait_gone(pid)

    def reap(self, pid: int) -> None:
        self._children.remove(pid)
        os.waitpid(pid, 0)

    def close(self) -> None:
        for pid in list(self._children):
            os.kill(pid, signal.SIGKILL)
            self.reap(pid)


class SimStage:
    """Children of a process in the simulated kernel."""

    def __init__(self) -> None:
        self.kernel = Kernel()
        self._me = self._fork(self.kernel.init)
        self._me.is_careless = True
        self.own = self._me.pid
        self.host: Host = SimHost(self.kernel, self._me)

    def start(self) -> int:
        return self._fork(self._me).pid

    def kill(self, pid: int) -> None:
        self.kernel.signal(self.kernel.table[pid], "SIGKILL")

    def reap(self, pid: int) -> None:
        self.kernel.reap(self._me)

    def close(self) -> None:
        """Nothing was started outside of this process."""

    def _fork(self, parent: Process) -> Process:
        self.kernel.spend(0.02)
        child = self.kernel.fork(parent)
        assert child is not None
        return child


STAGES: dict[str, Callable[[], Stage]] = {
    "linux": lambda: RealStage(LinuxHost()),
    "portable": lambda: RealStage(PortableHost()),
    "simulated": SimStage,
}


@pytest.fixture(params=STAGES)
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    made = STAGES[request.param]()
    yield made
    made.close()


def name_of(stage: Stage, pid: int) -> Incarnation:
    name = stage.host.incarnation(pid)
    assert name is not None
    return name


def has_ended(stage: Stage, handle: Handle) -> bool:
    """By the handle's descriptor, or by another look where there is none."""
    if handle.fd < 0:
        return stage.host.open(handle.incarnation) is NoHandle.GONE
    return bool(select.select([handle.fd], [], [], 0)[0])


def await_end(stage: Stage, handle: Handle) -> None:
    truth.until(lambda: has_ended(stage, handle), "it does not end", truth.PATIENCE)


def test_a_child_is_in_its_parents_subtree_and_in_the_table(stage: Stage) -> None:
    """Both looks show the same row, under its parent."""
    pid = stage.start()
    for look in (stage.host.look_subtree(stage.own), stage.host.look_all(tags=True)):
        row = look.rows[pid]
        assert (row.ppid, row.is_alive) == (stage.own, True)
        assert row.incarnation == name_of(stage, pid)
    assert stage.own in stage.host.look_subtree(stage.own).rows


def test_a_zombie_is_shown_as_dead_until_it_is_reaped(stage: Stage) -> None:
    """It keeps its incarnation, and has no handle."""
    pid = stage.start()
    name = name_of(stage, pid)
    stage.kill(pid)
    row = stage.host.look_subtree(stage.own).rows[pid]
    assert (row.incarnation, row.is_alive) == (name, False)
    assert stage.host.open(name) is NoHandle.GONE
    stage.reap(pid)
    assert stage.host.row(pid) is None
    assert stage.host.incarnation(pid) is None
    assert pid not in stage.host.look_all(tags=False).rows
    assert stage.host.open(name) is NoHandle.GONE


def test_a_handle_tells_death_at_once_and_means_nobody_else(stage: Stage) -> None:
    """Seen from the death on, reaped or not; a signal then says GONE once it is reaped."""
    pid = stage.start()
    handle = stage.host.open(name_of(stage, pid))
    assert not isinstance(handle, NoHandle)
    assert handle.incarnation == name_of(stage, pid)
    assert not has_ended(stage, handle)
    assert stage.host.send(handle, Sig.KILL) is Sending.SENT
    await_end(stage, handle)
    stage.reap(pid)
    assert stage.host.send(handle, Sig.KILL) is Sending.GONE
    handle.close()
    handle.close()


def test_what_was_sent_to_a_stopped_process_waits_for_it(stage: Stage) -> None:
    """SIGTERM is taken after SIGCONT, not before."""
    pid = stage.start()
    handle = stage.host.open(name_of(stage, pid))
    assert not isinstance(handle, NoHandle)
    assert stage.host.send(handle, Sig.STOP) is Sending.SENT

    def is_stopped() -> bool:
        row = stage.host.row(pid)
        return row is not None and row.state == "T"

    truth.until(is_stopped, "it is not stopped", truth.PATIENCE)
    assert stage.host.send(handle, Sig.TERM) is Sending.SENT
    assert not has_ended(stage, handle)
    assert stage.host.send(handle, Sig.CONT) is Sending.SENT
    await_end(stage, handle)
    handle.close()


def test_another_start_time_is_another_process(stage: Stage) -> None:
    """And an unknown one cannot be told apart."""
    name = name_of(stage, stage.start())
    assert stage.host.open(Incarnation(name.pid, name.start - 1)) is NoHandle.GONE
    assert stage.host.open(Incarnation(name.pid, 0)) is NoHandle.UNKNOWN


def test_oneself_and_pid_1_are_refused(stage: Stage) -> None:
    """Whatever start time is given."""
    for pid in (stage.own, 1, 0, -1):
        with pytest.raises(ValueError):
            stage.host.open(Incarnation(pid, 1))


def test_nobody_is_below_a_process_that_is_not_there(stage: Stage) -> None:
    """No error either."""
    pid = stage.start()
    stage.kill(pid)
    stage.reap(pid)
    assert stage.host.look_subtree(pid).rows == {}
    assert stage.host.command_line(pid) == ""
    assert stage.host.read_tag(pid) is None
    assert stage.host.read_mark(pid) is None
