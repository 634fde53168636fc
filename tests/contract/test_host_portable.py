"""What only the portable host promises, and the choice between the two."""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import subprocess
from pathlib import Path

import psutil
import pytest

from safepool import loop
from safepool.core.identity import Incarnation
from safepool.core.lineage import MARK_VARIABLE, extend
from safepool.core.planner import Sig
from safepool.errors import ProtectionError
from safepool.host import choose, own, portable, probe
from safepool.host.base import Host, NoHandle, Sending
from safepool.host.linux import LinuxHost
from safepool.host.portable import PortableHost, PsutilHandle
from tests.kit import truth

RUN = "0123456789abcdef0123456789abcdef"
SLEEP = ["/bin/sleep", "120"]


@pytest.fixture
def host() -> PortableHost:
    return PortableHost()


@pytest.fixture
def undecided(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No backend has been chosen in this process."""
    monkeypatch.setattr(choose, "_name", "")
    monkeypatch.setattr(choose, "_host", None)
    monkeypatch.delenv(choose.VARIABLE, raising=False)
    return monkeypatch


# -- start times -------------------------------------------------------------------------


@pytest.mark.parametrize("is_stable", [True, False])
def test_setting_the_clock_makes_nobody_another(
    host: PortableHost, monkeypatch: pytest.MonkeyPatch, is_stable: bool
) -> None:
    """The boot time jumps by an hour: a process keeps its name, with any psutil."""
    monkeypatch.setattr(portable, "_STABLE", is_stable and portable._STABLE)
    process = subprocess.Popen(SLEEP)
    try:
        before = host.incarnation(process.pid)
        assert before is not None
        assert before.start == truth.started(process.pid)
        boot, platform = psutil.boot_time() + 3600, psutil._psplatform
        monkeypatch.setattr(platform, "boot_time", lambda: boot)
        monkeypatch.setattr(platform, "BOOT_TIME", boot, raising=False)
        assert psutil.boot_time() == boot
        assert host.incarnation(process.pid) == before
        assert not isinstance(host.open(before), NoHandle)
    finally:
        process.kill()
        process.wait()


def test_while_the_clock_is_being_set_nothing_is_said(
    host: PortableHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Start times that cannot be read are no sign of anybody's end, and nobody is signalled."""
    process = subprocess.Popen(SLEEP)
    try:
        name = host.incarnation(process.pid)
        assert name is not None
        hours = iter(range(0, 10**9, 3600))
        monkeypatch.setattr(portable, "_boot", lambda: float(next(hours)))
        assert host.open(name) is NoHandle.UNKNOWN
        for ask in (
            lambda: host.look_all(tags=False),
            lambda: host.row(process.pid),
            lambda: host.send(PsutilHandle(name), Sig.KILL),
        ):
            with pytest.raises(OSError) as error:
                ask()
            assert error.value.errno == errno.EAGAIN
        assert truth.is_alive(process.pid)
    finally:
        process.kill()
        process.wait()


# -- handles -----------------------------------------------------------------------------


def test_a_handle_is_verified_at_each_signal(host: PortableHost) -> None:
    """It was right once; now its number is another's, which is not signalled."""
    process = subprocess.Popen(SLEEP)
    try:
        name = host.incarnation(process.pid)
        assert name is not None
        stranger = PsutilHandle(Incarnation(name.pid, name.start - 1))
        assert host.send(stranger, Sig.KILL) is Sending.GONE
        assert truth.is_alive(process.pid)
        assert host.send(PsutilHandle(name), Sig.KILL) is Sending.SENT
        assert process.wait() == -signal.SIGKILL
    finally:
        process.kill()
        process.wait()


def test_a_zombie_is_not_signalled(host: PortableHost) -> None:
    """It is dead, and its number is kept only until it is reaped."""
    process = subprocess.Popen(SLEEP)
    name = host.incarnation(process.pid)
    assert name is not None
    process.kill()
    try:
        assert truth.wait_gone(process.pid)
        assert host.send(PsutilHandle(name), Sig.KILL) is Sending.GONE
    finally:
        process.wait()


def test_marks_are_read_and_tags_are_not(host: PortableHost) -> None:
    """Of all in a look at everything, of the children in a look at a subtree."""
    mark = extend(None, RUN, 7)
    process = subprocess.Popen(SLEEP, env={MARK_VARIABLE: mark})
    try:
        for rows in (host.look_all(tags=True).rows, host.look_subtree(os.getpid()).rows):
            assert (rows[process.pid].mark, rows[process.pid].tag) == (mark, None)
        assert host.look_all(tags=False).rows[process.pid].mark is None
        assert host.read_tag(process.pid) is None
    finally:
        process.kill()
        process.wait()


# -- the choice --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "kind"), [("portable", PortableHost), ("linux", LinuxHost), ("auto", LinuxHost)]
)
def test_the_backend_is_what_the_variable_says(
    undecided: pytest.MonkeyPatch, wanted: str, kind: type[Host]
) -> None:
    """And stays so when the program changes its environment later."""
    undecided.setenv(choose.VARIABLE, wanted)
    assert type(choose.host()) is kind
    undecided.setenv(choose.VARIABLE, "nonsense")
    assert type(choose.host()) is kind


def test_an_unknown_backend_is_an_error_that_names_the_known_ones(
    undecided: pytest.MonkeyPatch,
) -> None:
    """A misspelt variable must not choose silently."""
    undecided.setenv(choose.VARIABLE, "potrable")
    with pytest.raises(ProtectionError, match=r"'potrable'.*auto, linux or portable"):
        choose.name()


def refuse(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM])
def test_where_pidfds_are_refused_auto_is_portable(
    undecided: pytest.MonkeyPatch, number: int
) -> None:
    """An old kernel or a container's filter; who asks for linux by name is told the reason."""

    def refused(pid: int) -> int:
        raise refuse(number)

    undecided.setattr(os, "pidfd_open", refused)
    with pytest.raises(ProtectionError, match=os.strerror(number)):
        choose._decide("linux")
    assert choose.name() == "portable"


def test_without_pidfds_in_python_auto_is_portable(undecided: pytest.MonkeyPatch) -> None:
    """A Python that was built on an old system."""
    undecided.delattr(os, "pidfd_open")
    assert choose.name() == "portable"


def test_a_lack_of_descriptors_says_nothing_about_the_kernel(
    undecided: pytest.MonkeyPatch,
) -> None:
    """A program at its limit must not be given less for ever."""

    def starved(pid: int) -> int:
        raise refuse(errno.EMFILE)

    undecided.setattr(os, "pidfd_open", starved)
    assert probe.why_not_linux() == ""
    assert choose.name() == "linux"


# -- what a process asks about itself ----------------------------------------------------


@pytest.fixture(params=["linux", "portable"])
def backend(request: pytest.FixtureRequest, undecided: pytest.MonkeyPatch) -> str:
    choose.use(request.param)
    return str(request.param)


def test_the_own_end_is_told_to_whoever_has_a_copy(backend: str) -> None:
    """Not while the process lives, and then at once, though a fork of it lives on."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        end = own.OwnEnd()
        ready, go = os.pipe()
        if os.fork() == 0:
            os.write(writer, b"early" if is_readable(end.fd, 0) else b"alive,")
            os.write(go, b".")
            os.write(writer, b"gone" if is_readable(end.fd, truth.PATIENCE) else b"late")
        else:
            os.read(ready, 1)
        os._exit(0)
    os.close(writer)
    try:
        with open(reader, "rb") as told:
            assert told.read() == b"alive,gone"
    finally:
        os.waitpid(pid, 0)


def is_readable(fd: int, seconds: float) -> bool:
    return bool(select.select([fd], [], [], seconds)[0])


def test_a_child_is_reaped_within_bounds(backend: str) -> None:
    """Its exit code when it has ended, None when it takes longer, -9 when it is not ours."""
    quick, slow = subprocess.Popen(["/bin/sh", "-c", "exit 5"]), subprocess.Popen(SLEEP)
    try:
        assert own.reap_child(quick.pid, truth.PATIENCE) == 5
        assert own.reap_child(quick.pid, truth.PATIENCE) == -signal.SIGKILL
        assert own.reap_child(slow.pid, 0.05) is None
    finally:
        slow.kill()
        slow.wait()


def test_an_unnamed_file_is_empty_and_not_inherited(backend: str) -> None:
    """Nothing of it is left in any folder, whatever becomes of its user."""
    fd = own.unnamed_file("safepool-test")
    try:
        assert os.fstat(fd).st_size == 0
        assert not os.get_inheritable(fd)
        os.write(fd, b"x")
        assert os.pread(fd, 2, 0) == b"x"
        leads_to = os.readlink(f"/proc/self/fd/{fd}")
        assert leads_to.endswith("(deleted)")
        assert not Path(leads_to).exists()
    finally:
        os.close(fd)


def test_a_system_without_packet_sockets_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS; a lack of descriptors stays what it is."""
    answers = [refuse(errno.EPROTONOSUPPORT), refuse(errno.EMFILE)]

    def refused(*_: object) -> None:
        raise answers.pop(0)

    monkeypatch.setattr(socket, "socketpair", refused)
    with pytest.raises(ProtectionError, match="no packet sockets"):
        loop.packet_pair()
    with pytest.raises(OSError) as error:
        loop.packet_pair()
    assert error.value.errno == errno.EMFILE


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_the_umask_is_read_and_not_touched(backend: str, mask: int) -> None:
    before = os.umask(mask)
    try:
        assert own.umask() == mask
    finally:
        assert os.umask(before) == mask
