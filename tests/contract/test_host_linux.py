"""What the real hosts promise, held against psutil, /proc and processes that the test started.

Tests that take ``host`` hold for every host; those that take ``linux_host`` for what only
Linux has: tags, pidfds, lists of children, prctl.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from safepool.core.identity import Incarnation
from safepool.core.lineage import MARK_VARIABLE, extend, tag_of
from safepool.core.planner import Sig
from safepool.host import linux, prctl
from safepool.host.base import Handle, Host, NoHandle, Sending
from safepool.host.linux import LinuxHost, Pidfd
from safepool.host.portable import PortableHost, PsutilHandle
from tests.kit import truth

RUN = "0123456789abcdef0123456789abcdef"
OTHER_RUN = "fedcba9876543210fedcba9876543210"
SLEEP = ["/bin/sleep", "120"]


@pytest.fixture(params=[LinuxHost, PortableHost])
def host(request: pytest.FixtureRequest) -> Host:
    made: Host = request.param()
    return made


@pytest.fixture
def linux_host() -> LinuxHost:
    return LinuxHost()


@contextlib.contextmanager
def started(*argv: str, **options: object) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the test's own session group, dead and reaped at the end of the block."""
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True, **options)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()
        process.wait(truth.PATIENCE)


@contextlib.contextmanager
def script(source: str) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process that has printed a line."""
    with started(sys.executable, "-S", "-E", "-c", source) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        yield process


def name_of(host: Host, pid: int) -> Incarnation:
    incarnation = host.incarnation(pid)
    assert incarnation is not None
    return incarnation


@contextlib.contextmanager
def opened(host: Host, pid: int) -> Iterator[Handle]:
    handle = host.open(name_of(host, pid))
    assert not isinstance(handle, NoHandle)
    try:
        yield handle
    finally:
        handle.close()


# -- rows ------------------------------------------------------------------------------


def test_a_row_says_what_psutil_says(host: Host) -> None:
    """Parent, group, session and start time are those of an independent reader."""
    with started(*SLEEP) as process:
        row, oracle = host.row(process.pid), psutil.Process(process.pid)
        assert row == LinuxHost().row(process.pid), "one host reads what another has written"
        assert row is not None
        assert (row.pid, row.ppid) == (oracle.pid, oracle.ppid())
        assert (row.group, row.session) == (os.getpgid(row.pid), os.getsid(row.pid))
        ticks = os.sysconf("SC_CLK_TCK")
        assert row.start / ticks + psutil.boot_time() == pytest.approx(oracle.create_time(), abs=1)
        assert row.incarnation == host.incarnation(process.pid)


def test_a_process_may_name_itself_anything(host: Host) -> None:
    """Brackets, blanks and line ends in a name do not shift the fields after it."""
    source = """
import signal
open('/proc/self/comm', 'w').write(') Z 1 (\\n) ')
print('ready', flush=True)
signal.pause()
"""
    with script(source) as process:
        row = host.row(process.pid)
        assert row is not None
        assert (row.ppid, row.is_alive) == (os.getpid(), True)


def test_a_process_whose_first_thread_has_ended_is_alive(host: Host) -> None:
    """The kernel shows Z for it as well, but its other threads go on."""
    source = """
import ctypes, threading, time
def stay():
    while open('/proc/self/stat').read().rsplit(')', 1)[1].split()[0] != 'Z':
        time.sleep(0.001)
    print('ready', flush=True)
    time.sleep(120)
threading.Thread(target=stay).start()
ctypes.CDLL(None).syscall({'x86_64': 60}.get(__import__('os').uname().machine, 93), 0)
"""
    with script(source) as process:
        assert truth.state(process.pid) == "Z"
        row = host.row(process.pid)
        assert row is not None
        assert row.is_alive
        with opened(host, process.pid) as handle:
            assert host.send(handle, Sig.KILL) is Sending.SENT
            assert truth.wait_gone(process.pid)


# -- looks -----------------------------------------------------------------------------

FAMILY = """
import os, sys, time
def child(levels):
    if os.fork() == 0:
        if levels: child(levels - 1)
        else: os.write(1, b'ready\\n')
        time.sleep(120)
child(2)
time.sleep(120)
"""


@pytest.mark.parametrize("has_children_files", [True, False])
def test_a_subtree_is_what_psutil_finds(has_children_files: bool) -> None:
    """All descendants, whether or not the kernel has lists of children."""
    host = LinuxHost()
    assert host._has_children_files, "this kernel cannot show what is tested here"
    host._has_children_files = has_children_files
    with script(FAMILY) as process:
        expected = {p.pid for p in psutil.Process(process.pid).children(recursive=True)}
        assert len(expected) == 3
        rows = host.look_subtree(process.pid).rows
        assert set(rows) == expected | {process.pid}
        for pid, row in rows.items():
            assert row.ppid == truth.parent(pid)
            assert row.start == truth.started(pid)


def test_a_subtree_is_the_same_for_every_host(host: Host) -> None:
    """All descendants, with their parents and start times."""
    with script(FAMILY) as process:
        expected = {p.pid for p in psutil.Process(process.pid).children(recursive=True)}
        rows = host.look_subtree(process.pid).rows
        assert set(rows) == expected | {process.pid}
        for pid, row in rows.items():
            assert (row.ppid, row.start) == (truth.parent(pid), truth.started(pid))


def test_a_subtree_includes_what_threads_have_started(host: Host) -> None:
    """Children are listed under the thread that forked them."""
    source = """
import subprocess, threading, time
def start():
    subprocess.Popen(['/bin/sleep', '120'])
    print('ready', flush=True)
    time.sleep(120)
threading.Thread(target=start).start()
"""
    with script(source) as process:
        assert len(host.look_subtree(process.pid).rows) == 2


def test_a_long_list_of_children_is_read_to_its_end(host: Host) -> None:
    """The kernel hands the list out a page at a time."""
    count = 1500
    source = f"""
import os, signal
for _ in range({count}):
    if os.fork() == 0:
        signal.pause()
print('ready', flush=True)
signal.pause()
"""
    with script(source) as process:
        assert len(host.look_subtree(process.pid).rows) == count + 1


def test_the_dead_have_no_children(linux_host: LinuxHost) -> None:
    """What the look relies on when it asks no zombie for its children: they have gone up."""
    source = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from safepool.host import prctl
prctl.set_child_subreaper()
reader, writer = os.pipe()
middle = os.fork()
if middle == 0:
    for _ in range(50):
        if os.fork() == 0:
            os.close(writer)
            os.read(reader, 1)
            os._exit(0)
    os._exit(0)
os.waitid(os.P_PID, middle, os.WEXITED | os.WNOWAIT)
print('ready', flush=True)
time.sleep(120)
"""
    root = str(Path(linux.__file__).parents[2])
    with started(sys.executable, "-S", "-E", "-c", source, root) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        rows = linux_host.look_subtree(process.pid).rows
        zombies = [row for row in rows.values() if not row.is_alive]
        orphans = [row for row in rows.values() if row.is_alive and row.pid != process.pid]
        assert (len(zombies), len(orphans)) == (1, 50)
        assert {row.ppid for row in orphans} == {process.pid}


def test_a_look_at_everything_sees_everybody(host: Host) -> None:
    """What was there before and after the look is in it, and nothing invented."""
    before = set(psutil.pids())
    rows = host.look_all(tags=False).rows
    after = set(psutil.pids())
    assert before & after <= set(rows)
    short_lived = set(rows) - (before | after)
    assert not [pid for pid in short_lived if truth.is_alive(pid)]
    assert not [row for row in rows.values() if row.tag is not None or row.mark is not None]


def test_a_look_without_descriptors_is_an_error(host: Host) -> None:
    """A look that was cut short must not pass for "nobody is there"."""
    with no_descriptors():
        with pytest.raises(OSError) as error:
            host.look_subtree(os.getpid())
        assert error.value.errno == errno.EMFILE
        with pytest.raises(OSError):
            host.look_all(tags=True)
    assert os.getpid() in host.look_all(tags=False).rows


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Not one descriptor can be opened in the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# -- tag and mark ----------------------------------------------------------------------


@contextlib.contextmanager
def tagged(number: int, mark: str | None) -> Iterator[subprocess.Popen[bytes]]:
    """A sleeper with a tag and a mark."""
    limit = (number, resource.RLIM_INFINITY)
    environment = {MARK_VARIABLE: mark} if mark else {}
    with started(
        *SLEEP,
        env={"NOT_" + MARK_VARIABLE: "no", **environment},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_RTTIME, limit),
    ) as process:
        yield process


def test_tag_and_mark_are_read(linux_host: LinuxHost) -> None:
    """Both witnesses are what the process was started with."""
    mark = extend(extend(None, OTHER_RUN, 1), RUN, 7)
    with tagged(tag_of(RUN, 7), mark) as process:
        assert linux_host.read_tag(process.pid) == tag_of(RUN, 7)
        assert linux_host.read_mark(process.pid) == mark
        row = linux_host.look_all(tags=True).rows[process.pid]
        assert (row.tag, row.mark) == (tag_of(RUN, 7), mark)
        assert linux._limit_in_file(process.pid) == tag_of(RUN, 7)


def test_the_witnesses_of_elders_are_left_out(linux_host: LinuxHost) -> None:
    """Who started before ``since`` has a row all the same; at that very tick it counts."""
    with tagged(tag_of(RUN, 7), extend(None, RUN, 7)) as process:
        start = name_of(linux_host, process.pid).start
        for since, tag in ((start, tag_of(RUN, 7)), (start + 1, None)):
            row = linux_host.look_all(tags=True, since=since).rows[process.pid]
            assert (row.start, row.tag) == (start, tag)
            assert (row.mark is None) == (tag is None)


def test_an_ordinary_limit_is_no_tag(linux_host: LinuxHost) -> None:
    """Somebody's real-time limit, no limit and a dead process have no tag and no mark."""
    with tagged(200_000, None) as process:
        assert linux_host.read_tag(process.pid) is None
        assert linux_host.read_mark(process.pid) is None
    with started(*SLEEP) as process:
        assert linux_host.read_tag(process.pid) is None
        assert linux._limit_in_file(process.pid) == -1
    assert linux_host.read_tag(process.pid) is None
    assert linux_host.read_mark(process.pid) is None


def test_the_children_of_the_top_carry_their_witnesses(linux_host: LinuxHost) -> None:
    """The mark is read where the tag does not answer whose the child is."""
    own, foreign = tag_of(RUN, 7), tag_of(OTHER_RUN, 1)
    mark = extend(None, RUN, 7)
    with tagged(own, mark) as a, tagged(foreign, mark) as b, tagged(200_000, mark) as c:
        rows = linux_host.look_subtree(os.getpid()).rows
        found = [(rows[p.pid].tag, rows[p.pid].mark) for p in (a, b, c)]
        assert found == [(own, None), (foreign, None), (None, mark)]
        rows = linux_host.look_subtree(os.getpid(), RUN).rows
        found = [(rows[p.pid].tag, rows[p.pid].mark) for p in (a, b, c)]
        assert found == [(own, None), (foreign, mark), (None, mark)]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_a_process_that_cannot_be_read_shows_its_tag_all_the_same() -> None:
    """Another user's process: prlimit is refused, its limits file is not; no mark, no error."""
    source = f"""
import os, sys
sys.path.insert(0, {str(Path(linux.__file__).parents[2])!r})
from safepool.host.linux import LinuxHost
host = LinuxHost()
os.setresuid(12345, 12345, 12345)
print(host.read_tag(int(sys.argv[1])), host.read_mark(int(sys.argv[1])))
"""
    with tagged(tag_of(RUN, 7), extend(None, RUN, 7)) as process:
        argv = [sys.executable, "-c", source, str(process.pid)]
        said = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
    assert said.stdout.split() == [str(tag_of(RUN, 7)), "None"]


# -- handles and signals ---------------------------------------------------------------


def test_a_signal_reaches_the_process_and_its_handle_tells_its_death(host: Host) -> None:
    """Each signal arrives; a descriptor, if there is one, is readable exactly at the death."""
    with started(*SLEEP) as process, opened(host, process.pid) as handle:
        assert handle.incarnation == host.incarnation(process.pid)
        assert host.send(handle, Sig.STOP) is Sending.SENT
        assert os.waitpid(process.pid, os.WUNTRACED)[1] >> 8 == signal.SIGSTOP
        assert host.send(handle, Sig.TERM) is Sending.SENT
        watched = [handle.fd] if handle.fd >= 0 else []
        assert not select.select(watched, [], [], 0)[0]
        assert host.send(handle, Sig.CONT) is Sending.SENT
        assert truth.wait_gone(process.pid)
        assert select.select(watched, [], [], 0)[0] == watched
        assert host.send(handle, Sig.KILL) is not Sending.DENIED, "a zombie is no error"
        assert process.wait(truth.PATIENCE) == -signal.SIGTERM
        assert host.send(handle, Sig.KILL) is Sending.GONE


def test_without_a_descriptor_nothing_is_said_about_the_process(host: Host) -> None:
    """EMFILE is neither "gone" nor an error that would stop the sweep of others."""
    with started(*SLEEP) as process:
        own = name_of(host, process.pid)
        with no_descriptors():
            assert host.open(own) is NoHandle.UNKNOWN


def test_no_descriptor_is_left_by_a_handle_that_was_refused(host: Host) -> None:
    """Refusals close what they had opened."""
    with started(*SLEEP) as process:
        own = name_of(host, process.pid)
        before = truth.open_files()
        host.open(Incarnation(own.pid, own.start - 1))
        handle = host.open(own)
        assert not isinstance(handle, NoHandle)
        assert len(truth.open_files()) == len(before) + (handle.fd >= 0)
        handle.close()
        handle.close()
        assert truth.open_files() == before


@pytest.mark.parametrize("pid", [-1, 0, 1, os.getpid()], ids=["-1", "0", "1", "own"])
def test_this_process_and_pid_1_are_refused(host: Host, pid: int) -> None:
    """Whoever asks, with whatever start time, by handle or by name."""
    with pytest.raises(ValueError):
        host.open(Incarnation(pid, 1))
    with started(*SLEEP) as process:
        name = Incarnation(pid, 1)
        for handle in (Pidfd(name, os.pidfd_open(process.pid)), PsutilHandle(name)):
            with pytest.raises(ValueError):
                host.send(handle, Sig.KILL)
            handle.close()
        assert truth.is_alive(process.pid)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give up its rights for a while")
def test_a_refused_signal_is_denied(host: Host) -> None:
    """EPERM is an answer, not an error."""
    with started(*SLEEP) as process, opened(host, process.pid) as handle:
        os.seteuid(12345)
        try:
            # kill(2) also accepts the real user, which root still is: so take both away.
            os.setresuid(12345, 12345, 0)
            outcome = host.send(handle, Sig.TERM)
        finally:
            os.setresuid(0, 0, 0)
        assert outcome is Sending.DENIED
        assert truth.is_alive(process.pid)


# -- for people ------------------------------------------------------------------------


def test_a_command_line_can_be_read_and_cannot_break_a_log(host: Host) -> None:
    """Quoted as in a shell, without line ends or escapes, cut when long."""
    wait = "import signal; print('ready', flush=True); signal.pause()"
    words = ["two words", "line\nend", "\x1b[31m"]
    with started(sys.executable, "-c", wait, *words) as process:
        assert process.stdout is not None
        process.stdout.readline()
        line = host.command_line(process.pid)
        assert line.startswith(sys.executable)
        assert line.endswith("'two words' 'line\\nend' '\\x1b[31m'")
        assert line.isprintable()
    assert host.command_line(process.pid) == ""
    with started(sys.executable, "-c", wait, "x" * 9000) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert 4000 < len(host.command_line(process.pid)) < 4200


def test_boot_and_namespace_are_named(host: Host) -> None:
    """The same in every process that sees the same pids."""
    assert host.boot_id() == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert f"pid:[{host.pid_namespace()}]" == os.readlink("/proc/self/ns/pid")


# -- prctl -----------------------------------------------------------------------------


def test_an_orphan_goes_to_the_subreaper() -> None:
    """Set once, the process becomes the parent of its grandchildren's orphans."""
    source = """
import os, sys
sys.path.insert(0, sys.argv[1])
from safepool.host import prctl
prctl.set_child_subreaper()
reader, writer = os.pipe()
if os.fork() == 0:
    if os.fork() == 0:
        os.close(writer)
        os.read(reader, 1)
        print(os.getppid(), flush=True)
    os._exit(0)
os.wait()
os.close(writer)
os.wait()
print(os.getpid())
"""
    root = str(Path(linux.__file__).parents[2])
    said = subprocess.run(
        [sys.executable, "-c", source, root], stdin=subprocess.DEVNULL, capture_output=True,
        text=True, check=True, timeout=60,
    )  # fmt: skip
    first, second = said.stdout.split()
    assert first == second


def test_the_parent_death_signal_comes() -> None:
    """A child that asked for it is killed when its parent is."""
    source = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from safepool.host import prctl
prctl.load()
if os.fork() == 0:
    prctl.set_parent_death_signal(signal.SIGKILL)
    print(os.getpid(), flush=True)
signal.pause()
"""
    root = str(Path(linux.__file__).parents[2])
    with started(sys.executable, "-c", source, root) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.kill()
        assert truth.wait_gone(child)


def test_a_name_is_set_and_cut() -> None:
    """What ps shows is the first 15 bytes."""
    before = prctl.get_name()
    try:
        prctl.set_name("safepool-a-long-name")
        assert prctl.get_name() == "safepool-a-long"
        assert Path("/proc/self/comm").read_text() == "safepool-a-long\n"
    finally:
        prctl.set_name(before)


def test_a_refused_prctl_is_an_error_with_its_number() -> None:
    """The system's reason is raised."""
    with pytest.raises(OSError) as error:
        prctl.set_parent_death_signal(4711)
    assert error.value.errno == errno.EINVAL
    assert ctypes.get_errno() == 0 or error.value.strerror
