"""The cgroup of a run: who is in it, what it adds to a sweep, and that it goes again.

Where no cgroup can be made these tests are skipped, but for those that make sure that
nothing changes there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from safepool.core.identity import CgroupName
from safepool.core.lineage import detached_tag
from safepool.core.planner import Sig, Target
from safepool.core.policy import StopPolicy
from safepool.host import cgroup, container
from safepool.host.base import Handle, Sending
from safepool.host.container import Container
from safepool.host.linux import LinuxHost
from safepool.sweeper import Sweep, run
from tests.kit import truth
from tests.kit.cage import cgroup_folder
from tests.kit.jail import ROOT, Jail

BOUND = 10.5
NOBODY = 65534

needs_cgroup = pytest.mark.skipif(
    cgroup_folder() is None or os.environ.get("SAFEPOOL_TEST_CAGE") == "keepers",
    reason="no cgroup can be made here",
)
needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None,
    reason="only root can become another user, with setpriv of util-linux",
)

OWNER = """
    import resource, safepool

    def where():
        with open("/proc/self/cgroup") as file:
            return file.read().partition("0::")[2].split()[0]

    BORN = where()  # for a worker of spawn: while its main module is imported

    def tell_where(word="inside"):
        say(word, f"{where()} {os.getppid()}")

    def stray(on_term="-"):
        '''Start a daemon that has lost environment, tag and parent.

        ``on_term``: what it does at SIGTERM, as for the shell's trap.
        '''
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                hard = resource.getrlimit(resource.RLIMIT_RTTIME)[1]
                resource.setrlimit(resource.RLIMIT_RTTIME, (hard, hard))
                program = 'trap "$2" TERM; echo "ready $$ stray" > "$1"; '
                program += "while :; do sleep 0.02; done"
                words = ["sh", "-c", program, "stray", os.environ["TELL"], on_term]
                os.execve("/bin/sh", words, {})
            os._exit(0)
        os.wait()

    def wait():
        sys.stdin.readline()
"""


def below(jail: Jail, name: str) -> list[Path]:
    """The cgroups in the jail whose name begins like that."""
    return [folder for folder in jail.cgroups() if folder.name.startswith(name)]


def processes(folder: Path) -> list[int]:
    return [int(line) for line in (folder / "cgroup.procs").read_text().split()]


# -- who is in it ---------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def wanted(jail: Jail) -> None:
    """Root makes none unless it is asked to."""
    jail.environment.setdefault("SAFEPOOL_CGROUP", "on")


@needs_cgroup
@needs_root
def test_root_makes_one_by_itself_only_where_it_is_delegated(jail: Jail) -> None:
    """Whoever made a cgroup and did not delegate it expects nobody to make more in it."""
    del jail.environment["SAFEPOOL_CGROUP"]
    source = (
        OWNER
        + """
    if __name__ == "__main__":
        pool = safepool.get_context("fork").Pool(1, grace=0.3)
        from safepool.host import cgroup
        say("home", cgroup.directory_of())
        say("protected", str(pool.protection.cgroup))
    """
    )
    jail.script(source)
    assert jail.hear("protected")[0].text == "False"
    try:
        os.setxattr(jail.hear("home")[0].text, "trusted.delegate", b"1")
    except OSError:
        pytest.skip("this kernel keeps no attributes of cgroups")
    jail.script(source)
    assert jail.hear("protected", 2)[1].text == "True"


def test_a_setting_that_makes_no_sense_is_an_error(jail: Jail) -> None:
    """At the first use, with the words that are known."""
    jail.environment["SAFEPOOL_CGROUP"] = "yes"
    owner = jail.script(OWNER + "    safepool.SafePool(1)\n")
    assert owner.wait() == 1
    assert 'ProtectionError: SAFEPOOL_CGROUP must be "auto", "on" or "off"' in owner.errors()


@needs_cgroup
def test_every_worker_is_inside_from_the_first_instruction(method: str, jail: Jail) -> None:
    """Workers, their replacements and processes; owner, sidecar and record-keeping are not."""
    owner = jail.script(
        OWNER
        + """
    if __name__ == "__main__":
        context = safepool.get_context(sys.argv[1])
        with context.Pool(2, initializer=tell_where, maxtasksperchild=1) as pool:
            assert pool.protection.cgroup
            for _ in range(6):
                pool.apply(tell_where)
            process = context.Process(target=tell_where)
            process.start()
            process.join()
            say("owner", where())
            wait()
    """,
        method,
    )
    outside = jail.hear("owner")[0].text
    lines = jail.hear("inside", 9)
    folder = below(jail, "safepool-")[0]
    assert {line.text.rpartition("/")[0] for line in lines} == {f"{outside}/{folder.name}"}
    sidecar = truth.sidecars(owner.pid)
    assert set(processes(folder.parent)) >= {owner.pid, *sidecar}
    owner.go()
    assert owner.wait() == 0, owner.errors()
    jail.assert_empty("after an orderly end", BOUND)
    assert jail.cgroups() == []


@needs_cgroup
def test_an_inner_run_is_inside_the_outer_one(jail: Jail) -> None:
    """A pool in a worker: its workers are in a cgroup of their own, within that worker's."""
    owner = jail.script(
        OWNER
        + """
    def nested():
        with safepool.get_context("fork").Pool(1) as pool:
            pool.apply(tell_where)
            wait_for_ever()

    def wait_for_ever():
        say("held")
        time.sleep(120)

    if __name__ == "__main__":
        with safepool.get_context("fork").Pool(1, grace=0.3) as pool:
            pool.apply(nested)
    """
    )
    jail.hear("held")
    (line,) = jail.hear("inside")
    assert [part.split("-")[0] for part in line.text.split()[0].split("/")][-4:] == [
        "safepool",
        "launcher",
        "safepool",
        "launcher",
    ]
    owner.send(signal.SIGKILL)
    jail.assert_empty("owner killed", BOUND)
    assert jail.cgroups() == []


# -- where there is none --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SAFEPOOL_CGROUP=off", "SAFEPOOL_TEST_NETS=launcher,sidecar"])
def test_without_a_cgroup_nothing_else_changes(name: str, jail: Jail) -> None:
    """Switched off, a run says that it has none, and works and ends as ever."""
    variable, _, value = name.partition("=")
    owner = jail.script(
        OWNER
        + """
    if __name__ == "__main__":
        pool = safepool.get_context("fork").Pool(1, grace=0.3)
        say("protected", str(pool.protection.cgroup))
        pool.apply(stray)
        wait()
    """,
        environment={variable: value},
    )
    jail.hear("ready")
    assert jail.hear("protected")[0].text == "False"
    assert jail.cgroups() == []
    owner.send(signal.SIGKILL)
    jail.assert_empty("owner killed", BOUND)


UNPRIVILEGED = """
import os, sys
sys.path.insert(0, sys.argv[1])
import safepool
assert os.getuid() == 65534

def where():
    with open("/proc/self/cgroup") as file:
        return file.read().partition("0::")[2].split()[0]

with safepool.get_context("fork").Pool(1) as pool:
    print(pool.protection.cgroup, pool.apply(where) == where(), flush=True)
"""


@contextlib.contextmanager
def open_folder() -> Iterator[str]:
    """A folder that nobody, the user, can write to; pytest's own are closed to him."""
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, NOBODY, NOBODY)
        yield folder


def as_nobody(folder: str, directory: str | None = None) -> list[str]:
    """What the unprivileged program prints, in the cgroup of that directory."""
    # To read everything lets it use an interpreter in a folder that is closed to the user.
    user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    reads = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]

    def enter() -> None:
        if directory is not None:
            Path(directory, "cgroup.procs").write_text("0")

    done = subprocess.run(
        [*user, *reads, sys.executable, "-c", UNPRIVILEGED, str(ROOT)],
        preexec_fn=enter,
        stdout=subprocess.PIPE,
        env={"XDG_RUNTIME_DIR": folder, "PATH": os.defpath},
        timeout=60,
        check=True,
        text=True,
    )
    return done.stdout.split()


@needs_root
def test_a_user_who_may_make_none_has_none() -> None:
    """No permission: the pool works, and says that its workers are in no cgroup."""
    with open_folder() as folder:
        assert as_nobody(folder) == ["False", "True"]


@needs_cgroup
@needs_root
def test_a_user_with_a_delegated_cgroup_has_one(jail: Jail) -> None:
    """Delegation gives the directory and the files that move processes; no more is needed."""
    parent = cgroup_folder()
    assert parent is not None
    delegated = parent / f"safepool-test-{os.getpid()}-delegated"
    delegated.mkdir()
    try:
        for path in (delegated, *(delegated / f"cgroup.{name}" for name in ("procs", "threads"))):
            os.chown(path, NOBODY, NOBODY)
        with open_folder() as folder:
            assert as_nobody(folder, str(delegated)) == ["True", "False"]
        assert [path for path in delegated.iterdir() if path.is_dir()] == []
    finally:
        truth.until(lambda: not processes(delegated), "somebody stays in it")
        delegated.rmdir()


@pytest.mark.parametrize(
    ("path", "root", "point", "expected"),
    [
        ("/", "/", "/sys/fs/cgroup", "/sys/fs/cgroup"),
        ("/user/a", "/", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/unified/user/a"),
        ("/docker/x/y", "/docker/x", "/sys/fs/cgroup", "/sys/fs/cgroup/y"),
        ("/docker/x", "/docker/x", "/sys/fs/cgroup", "/sys/fs/cgroup"),
        ("/docker/xy", "/docker/x", "/sys/fs/cgroup", None),
        ("/../other", "/", "/sys/fs/cgroup", None),
        ("/a", "/..", "/sys/fs/cgroup", None),
    ],
)
def test_the_directory_follows_from_path_and_mount(
    path: str, root: str, point: str, expected: str | None
) -> None:
    """Whole, hybrid and partial mounts; what is beyond the namespace is not guessed at."""
    assert cgroup._in_mount(path, root, point) == expected


# -- what it adds ---------------------------------------------------------------------------

LOST = (
    OWNER
    + """
    if __name__ == "__main__":
        pool = safepool.get_context("fork").Pool(1, grace=0.3)
        pool.apply(tell_where)
        pool.apply(stray, sys.argv[1:])
        wait()
    """
)


@needs_cgroup
@pytest.mark.parametrize("switch", ["on", "off"])
def test_what_lost_tag_mark_and_parents_is_found_by_its_cgroup(switch: str, jail: Jail) -> None:
    """Its launcher was SIGKILLed, and nothing else says whose it was. Negative control: off."""
    owner = jail.script(LOST, "exit 0", environment={"SAFEPOOL_CGROUP": switch})
    (stray,) = jail.hear("ready")
    launcher = int(jail.hear("inside")[0].text.split()[1])
    os.kill(launcher, signal.SIGKILL)
    if switch == "on":
        assert truth.wait_gone(stray.pid, BOUND), truth.describe(stray.pid)
        said = owner.wait_for_error("ended stray")
        assert f"ended stray {stray.pid} " in said
        assert "found in the run's cgroup" in said
    owner.send(signal.SIGKILL)
    if switch == "on":
        jail.assert_empty("owner killed", BOUND)
    else:
        assert not jail.wait_empty(1.0), "it is found without a cgroup"
        assert truth.is_alive(stray.pid)
    assert jail.cgroups() == []


def kill_all_but_workers(jail: Jail, owner: int, launcher: int) -> None:
    """End owner, sidecar and launcher before any of them can act."""
    everybody = [owner, launcher, *truth.sidecars(owner)]
    assert len(everybody) == 3
    jail.kill_at_once(everybody)


@needs_cgroup
def test_the_next_start_ends_what_is_inside_and_removes_it(jail: Jail) -> None:
    """Owner, sidecar and launcher were killed in one instant; a sweeper of theirs had frozen
    the run. Nobody stays frozen: the stray is asked to leave, and does."""
    owner = jail.script(LOST, "exit 0")
    (stray,) = jail.hear("ready")
    launcher = int(jail.hear("inside")[0].text.split()[1])
    (folder,) = below(jail, "launcher-")
    kill_all_but_workers(jail, owner.pid, launcher)
    truth.until(lambda: not {owner.pid, launcher} & set(jail.pids()), "they stay")
    for frozen in (folder, folder.parent):
        (frozen / "cgroup.freeze").write_text("1")
    jail.script("import safepool; safepool.SafePool(1).apply(abs, (1,)); say('next')")
    jail.hear("next")
    jail.assert_empty("after the next start", BOUND)
    assert jail.cgroups() == []
    logs = "".join(path.read_text() for path in (jail.folder / "run").glob("safepool/*.log"))
    (line,) = [line for line in logs.splitlines() if f"ended stray {stray.pid} " in line]
    assert "found in the run's cgroup" in line
    assert "with SIGTERM" in line


@needs_cgroup
def test_a_process_that_somebody_moved_in_is_spared(jail: Jail) -> None:
    """It is older than the run: it is no member, and the members are ended by signals.

    The cgroup stays as long as it lives there, and so does the record: the next start
    removes both."""
    stranger = jail.start(["/bin/sleep", "120"])
    owner = jail.script(LOST, "")  # the stray ignores SIGTERM, so force is needed
    jail.hear("ready")
    (folder,) = below(jail, "launcher-")
    (folder / "cgroup.procs").write_text(str(stranger.pid))
    owner.send(signal.SIGKILL)
    jail.assert_empty("owner killed", BOUND, besides=(stranger.pid,))
    assert truth.is_alive(stranger.pid)
    assert (folder / "cgroup.freeze").read_text() == "0\n"
    stranger.send(signal.SIGKILL)
    stranger.wait()
    assert folder in jail.cgroups()
    jail.script("import safepool; safepool.SafePool(1).apply(abs, (1,)); say('next')")
    jail.hear("next")
    jail.assert_empty("after the next start", BOUND)
    assert jail.cgroups() == []
    left = [path.name for path in (jail.folder / "run").glob("safepool/*") if path.suffix != ".log"]
    assert left == []


# -- one sweep, seen from close by ----------------------------------------------------------


class Counting(LinuxHost):
    """The real host; says which signals went out."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[int, Sig]] = []

    def send(self, handle: Handle, sig: Sig | int) -> Sending:
        assert isinstance(sig, Sig), f"no sweep sends the number {sig}"
        self.sent.append((handle.incarnation.pid, sig))
        return super().send(handle, sig)


class Quarters:
    """A cgroup as a run makes it, and processes in it. All end with it."""

    def __init__(self) -> None:
        self.run_id = os.urandom(16).hex()
        self.name = cgroup.make(cgroup.place(self.run_id))
        self._children: list[subprocess.Popen[bytes]] = []

    def start(self, source: str) -> int:
        """Start Python inside and wait for its first line; returns the pid."""
        held = self.open()
        child = subprocess.Popen(
            [sys.executable, "-S", "-c", f"import os, signal, sys, time\n{source}", str(ROOT)],
            stdout=subprocess.PIPE,
            preexec_fn=lambda: cgroup.enter(held.fd),  # noqa: PLW1509  system calls only
        )
        held.close()
        self._children.append(child)
        assert child.stdout is not None
        assert child.stdout.readline()
        return child.pid

    def open(self) -> Container:
        held = Container.open(self.name)
        assert held is not None
        return held

    def sweep(self, host: LinuxHost, target: Target, held: Container | None) -> Sweep:
        def look() -> object:
            return host.look_all(tags=True)

        return Sweep(host, target, StopPolicy(0.0), look, container=held)  # type: ignore[arg-type]

    def close(self) -> None:
        held = self.open()
        held.thaw()
        held.kill()
        for child in self._children:
            child.wait(truth.PATIENCE)
            if child.stdout is not None:
                child.stdout.close()
        assert held.remove(truth.PATIENCE)
        held.close()


@pytest.fixture
def quarters() -> Iterator[Quarters]:
    """A cgroup of the test's own."""
    opened = Quarters()
    yield opened
    opened.close()


BOMB = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("forking", flush=True)
for _ in range(200):
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    time.sleep(0.002)
time.sleep(60)
"""


@needs_cgroup
@pytest.mark.parametrize("contained", [True, False])
def test_a_process_that_forks_for_ever_is_held_in_one_step(
    contained: bool, quarters: Quarters
) -> None:
    """Whoever was listed inside needs no signal; without the container each gets his own.

    One that is born between the list and the look is held by itself.
    """
    bomb = quarters.start(BOMB)
    host = Counting()
    name = host.incarnation(bomb)
    assert name is not None
    held = quarters.open()
    sweep = quarters.sweep(host, Target(roots=frozenset({name})), held if contained else None)
    try:
        report = run(sweep)
    finally:
        held.close()
    assert report.stuck == ()
    assert bomb in {process.incarnation.pid for process in report.ended}
    listing = quarters.open()
    try:
        found = listing.listing()
        assert found is not None
        assert {pid for pid in found.pids if truth.is_alive(pid)} == set()
    finally:
        listing.close()
    if contained:
        assert bomb not in {pid for pid, _ in host.sent}
        assert {sig for _, sig in host.sent} <= {Sig.STOP}
    else:
        assert {sig for pid, sig in host.sent if pid == bomb} == {Sig.STOP, Sig.KILL}


@needs_cgroup
def test_a_detached_process_inside_is_neither_frozen_nor_killed(quarters: Quarters) -> None:
    """It has the tag and has not left yet: the other one is ended by signals, it works on."""
    detach = f"""
import resource
resource.setrlimit(resource.RLIMIT_RTTIME, ({detached_tag(quarters.run_id)}, -1))
print("detached", flush=True)
while True:
    time.sleep(0.01)
    os.write(1, b".")
"""
    spared, other = quarters.start(detach), quarters.start("print(1, flush=True); time.sleep(60)")
    host = Counting()
    held = quarters.open()
    report = run(quarters.sweep(host, Target(run_id=quarters.run_id, born_from=1), held))
    assert {(each.incarnation.pid, each.how) for each in report.ended} == {(other, "cgroup")}
    assert {pid for pid, _ in host.sent} == {other}
    assert truth.is_alive(spared)
    child = quarters._children[0]
    assert child.stdout is not None
    assert os.read(child.stdout.fileno(), 100)
    assert os.read(child.stdout.fileno(), 1) == b".", "it does not work on"


@needs_cgroup
def test_a_sweep_that_is_given_up_leaves_nobody_frozen(quarters: Quarters) -> None:
    """Closed in a forked child it changes nothing; given up, all go on."""
    pid = quarters.start("print(1, flush=True); time.sleep(60)")
    host = LinuxHost()
    name = host.incarnation(pid)
    assert name is not None
    sweep = quarters.sweep(host, Target(roots=frozenset({name})), quarters.open())
    frozen = Path(quarters.name.path, "cgroup.freeze")
    sweep.advance()
    assert frozen.read_text() == "1\n"
    child = os.fork()
    if child == 0:
        sweep.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert frozen.read_text() == "1\n"
    sweep.give_up()
    assert frozen.read_text() == "0\n"
    assert truth.is_alive(pid)


@needs_cgroup
def test_a_process_can_leave_every_run_that_it_is_in(quarters: Quarters) -> None:
    """From an inner run's cgroup to beside the outermost; what it starts is outside as well."""
    inner = Path(quarters.name.path, "launcher-1", f"safepool-{'0' * 32}", "launcher-2")
    inner.mkdir(parents=True)
    source = f"""
sys.path.insert(0, sys.argv[1])
from safepool.host import cgroup
with open("{inner}/cgroup.procs", "w") as file:
    file.write("0")
door = cgroup.way_out()
assert cgroup.write(door, b"0") is None and cgroup.way_out() is None
print(door, cgroup.directory_of(), flush=True)
"""
    child = subprocess.run(
        [sys.executable, "-c", f"import sys{source}", str(ROOT)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60,
    )
    outside = os.path.dirname(quarters.name.path)
    assert child.stdout.split() == [f"{outside}/cgroup.procs", outside]


@needs_cgroup
def test_only_the_very_cgroup_of_the_record_is_opened(quarters: Quarters) -> None:
    """Another inode, or none, is another cgroup: it is neither acted upon nor removed."""
    path, inode = quarters.name
    assert Container.open(CgroupName(path, inode + 1)) is None
    assert Container.open(CgroupName(path)) is None
    assert container.remove(CgroupName(path, inode + 1)), "ours is not there"
    assert os.path.isdir(path)
    pid = quarters.start("print(1, flush=True); time.sleep(60)")
    # Not sure to be ours: it stays, since somebody lives in it.
    assert not container.remove(CgroupName(path))
    assert not container.remove(quarters.name, 0.0)
    assert truth.is_alive(pid)
    assert container.remove(CgroupName(f"{path}x", 7))
    assert container.remove(CgroupName())
