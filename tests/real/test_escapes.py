"""What a task starts and how it is caught: the table in docs/what-can-escape.md, cell by cell.

Each situation (who is killed) is played once: an owner with two workers that have started
all strays of tests/kit/strays.py. Who is left says the kernel; how the others were found
says safepool's log. ``LAYERS`` is what is expected; tests/test_escape_table.py compares it
with the page.

The tests after that are about processes that are not a run's, or that it may not end.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest

from tests.kit import truth
from tests.kit.cage import cgroup_folder
from tests.kit.console import Console
from tests.kit.jail import Jail, Owner
from tests.kit.strays import NEED_ROOT, NOBODY, STRAYS, members

BOUND = 15.0
IS_ROOT = os.geteuid() == 0

needs_cgroup = pytest.mark.skipif(
    cgroup_folder() is None or os.environ.get("SAFEPOOL_TEST_CAGE") == "keepers",
    reason="no cgroup can be made here",
)
NO_CGROUP = ("env", "SAFEPOOL_CGROUP=off")
"""Not everybody may make a cgroup, so the tables do without."""

ESCAPES = "no"
TREE, TAG, MARK = "tree", "tag", "mark"

EVERYBODY = dict.fromkeys(STRAYS, TREE)
BY_TAG = {**dict.fromkeys(STRAYS, TAG), "no_tag": MARK, "no_witness": ESCAPES}

LAYERS: dict[str, dict[str, str]] = {
    "owner": EVERYBODY,
    "worker": BY_TAG,
    "launcher": BY_TAG,
    "all": BY_TAG,
}
"""Situation, tactic: how it is found; ``ESCAPES``: it is not."""

OWNER = """
    import logging
    from safepool import get_context
    from tests.kit import strays

    if __name__ == "__main__":
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        method, *names = sys.argv[1:]
        pool = get_context(method).Pool(2, grace=0.3)
        for half in (names[::2], names[1::2]):
            pool.apply_async(strays.start_all, (half,))
        sys.stdin.readline()
        pool.terminate()
        pool.join()
        say("closed")
        sys.stdin.readline()
"""


@dataclass
class Outcome:
    """What became of each tactic: how its first process was found, or that it is left."""

    layers: dict[str, str] = field(default_factory=dict)
    at_the_end: set[str] = field(default_factory=set)
    """Those that are left when the owner has ended as well."""


class Play:
    """One owner with all strays, before and after something is killed."""

    def __init__(
        self, jail: Jail, method: str, names: Iterable[str], before: Iterable[str]
    ) -> None:
        self.jail = jail
        self.names = [name for name in names if IS_ROOT or name not in NEED_ROOT]
        self.owner = jail.script(OWNER, method, *self.names, before=[*before])
        self.workers = [line.pid for line in jail.hear("worker", 2)]
        self.launchers = {truth.parent(pid) for pid in self.workers}
        words = [line.text.split() for line in jail.hear("stray", len(self.names))]
        self.pids = {name: int(pid) for name, pid in words}
        self.readers: list[Owner] = [self.owner]

    def left(self) -> set[str]:
        """The tactics of which somebody lives."""
        living = self.jail.pids()
        return {name for name, pid in self.pids.items() if members(pid, living)}

    def told(self) -> dict[int, str]:
        """How those that were ended had been found, as safepool said it."""
        text = "\n".join(reader.errors() for reader in self.readers)
        found = {}
        for pid, how in re.findall(r"ended \w+ (\d+) \(.*\), (?:found )?(.*), [\d.]+ s old", text):
            is_tree = how.startswith("as child of")
            found[int(pid)] = TREE if is_tree else how.removeprefix("by its ")
        return found

    def outcome(self, expected: dict[str, str]) -> Outcome:
        """Wait until those that are expected to go are gone and told; then see who is left."""
        doomed = {name for name in self.names if expected[name] != ESCAPES}
        until_or_late(lambda: not self.left() & doomed)
        until_or_late(lambda: {self.pids[name] for name in doomed} <= set(self.told()))
        told = self.told()
        outcome = Outcome()
        for name in self.names:
            is_left = name in self.left()
            outcome.layers[name] = ESCAPES if is_left else told.get(self.pids[name], "not told")
        return outcome


def until_or_late(claim: Callable[[], bool]) -> None:
    """Wait for it; if it does not come, the tests of single tactics say what is wrong."""
    with contextlib.suppress(AssertionError):
        truth.until(claim, "", BOUND)


def play(
    situation: str,
    method: str,
    jail: Jail,
    names: Iterable[str] = STRAYS,
    before: Iterable[str] = NO_CGROUP,
) -> Outcome:
    """Kill somebody, and see what becomes of the strays, then end the owner as well."""
    stage = Play(jail, method, names, before)
    assert stage.left() == set(stage.names)
    expected = LAYERS[situation]
    if situation == "owner":
        stage.owner.send(signal.SIGKILL)
    elif situation == "worker":
        jail.kill_at_once(stage.workers)
    elif situation == "launcher":
        jail.kill_at_once(stage.launchers)
    else:
        jail.kill_at_once([stage.owner.pid, *truth.sidecars(stage.owner.pid), *stage.launchers])
        for pid in stage.workers:
            assert truth.wait_gone(pid, BOUND), "the kernel ends workers with their launcher"
        assert stage.left() == set(stage.names), "there is nobody who could have ended them"
        console = Console(jail, method, name="next", before=before)
        console.ask("map")
        stage.readers.append(console.owner)
    outcome = stage.outcome(expected)
    if situation in ("worker", "launcher"):
        stage.owner.go()
        jail.hear("closed", seconds=BOUND)
        stage.owner.send(signal.SIGKILL)
        truth.until(lambda: not guards(jail), "sidecar or launcher stays")
    outcome.at_the_end = stage.left()
    return outcome


def guards(jail: Jail) -> list[int]:
    """Sidecars and launchers, by their titles."""
    return [pid for pid in jail.pids() if "safepool-" in truth.command_line(pid)]


CASES = [
    ("owner", "fork"),
    ("worker", "fork"),
    ("launcher", "fork"),
    ("launcher", "spawn"),
    ("all", "fork"),
]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, str, Outcome]:
    """One situation and start method, played; nothing of it lives any more."""
    situation, method = request.param
    with Jail(tmp_path_factory.mktemp("jail")) as jail:
        return situation, method, play(situation, method, jail)


@pytest.mark.parametrize("name", STRAYS)
def test_what_becomes_of_a_stray(case: tuple[str, str, Outcome], name: str) -> None:
    """It is ended, and found as the page says; or it is left, as the page says."""
    situation, _, outcome = case
    if name not in outcome.layers:
        pytest.skip("only root can start it")
    assert outcome.layers[name] == LAYERS[situation][name]


def test_who_is_left_in_the_end(case: tuple[str, str, Outcome]) -> None:
    """Without its launcher's subtree a process without parent, tag and mark is nobody's.

    Not so with spawn: its launcher was the sidecar's child, so the orphan is, too.
    """
    is_lost = case[:2] in (("launcher", "fork"), ("all", "fork"))
    assert case[2].at_the_end == ({"no_witness"} if is_lost else set())


@needs_cgroup
@pytest.mark.parametrize("situation", ["launcher", "all"])
def test_with_a_cgroup_what_has_no_witness_is_found(situation: str, jail: Jail) -> None:
    """In the run's own cgroup it stays, whatever it throws away."""
    outcome = play(situation, "fork", jail, ["no_witness", "no_tag"], ["env", "SAFEPOOL_CGROUP=on"])
    truth.until(lambda: not jail.pids() or situation == "all", "somebody is left", BOUND)
    assert not outcome.at_the_end
    assert "in the run's cgroup" in outcome.layers["no_witness"]


AS_A_USER = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
"""Root without its powers: it may see and end only what a user may see and end of his own."""
needs_setpriv = pytest.mark.skipif(
    not IS_ROOT or not shutil.which("setpriv"), reason="needs root and setpriv"
)


@needs_setpriv
@pytest.mark.parametrize("situation", LAYERS)
def test_a_stray_that_nobody_may_look_into(situation: str, jail: Jail) -> None:
    """Like ssh-agent: environment and memory are closed to other processes of the same user."""
    outcome = play(situation, "fork", jail, ["closed"], [*NO_CGROUP, *AS_A_USER])
    assert outcome.layers == {"closed": LAYERS[situation]["closed"]}


INNER = """
    from safepool import get_context
    from tests.kit import villains

    def outer(_):
        pool = get_context("fork").Pool(1, grace=0.3)
        result = pool.apply_async(villains.daemon_empty_env)
        say("worker", str(os.getppid()))
        result.get()

    if __name__ == "__main__":
        pool = get_context("fork").Pool(1, grace=0.3)
        pool.apply_async(outer, (1,))
        sys.stdin.readline()
"""


@pytest.mark.parametrize("situation", LAYERS)
def test_a_pool_within_a_task(situation: str, jail: Jail) -> None:
    """It is a run of its own: its guards end it when its owner, the worker, is dead.

    Also when all guards of the outer run were killed; no next start is needed then.
    """
    owner = jail.script(INNER)
    jail.hear("ready")
    (line,) = jail.hear("worker")
    launcher = int(line.text)
    outer = {owner.pid, launcher, *truth.sidecars(owner.pid)}
    ours = {"owner": {owner.pid}, "worker": {line.pid}, "launcher": {launcher}, "all": outer}
    inner = set(truth.descendants(line.pid))
    assert [pid for pid in inner if truth.command_line(pid).startswith("/bin/sleep")]
    jail.kill_at_once(ours[situation])
    truth.until(lambda: not [pid for pid in inner if truth.is_alive(pid)], "the inner run", BOUND)


# -- what may not be ended ---------------------------------------------------------------------

SET_USER_ID = """
    import subprocess
    from safepool import get_context
    from tests.kit import truth

    def start(_):
        for words in (["./sleep", "180"], ["./setpriv", "--reuid", "65534", "sleep", "180"]):
            child = subprocess.Popen(words, start_new_session=True)
            truth.until(lambda: truth.command_line(child.pid).endswith("sleep 180"), "no exec")
            say("stray", str(child.pid))
        time.sleep(180)

    if __name__ == "__main__":
        pool = get_context("fork").Pool(1, grace=0.3)
        pool.map(start, range(1))
"""


@needs_setpriv
def test_a_program_that_became_another_user_is_reported(jail: Jail) -> None:
    """As with sudo: the system refuses the signal, and safepool says who is left.

    A set-user-ID program that keeps its caller as its real user is ended like any other.
    """
    if os.statvfs(jail.folder).f_flag & os.ST_NOSUID:
        pytest.skip("the file system knows no set-user-ID")
    for name in ("sleep", "setpriv"):
        copy = jail.folder / name
        shutil.copy(str(shutil.which(name)), copy)
        os.chown(copy, NOBODY, NOBODY)
        copy.chmod(0o4755)
    owner = jail.script(SET_USER_ID, before=[*NO_CGROUP, *AS_A_USER])
    willing, other = (int(line.text) for line in jail.hear("stray", 2))
    owner.send(signal.SIGKILL)
    jail.assert_empty("all but the other user's", BOUND, {other})
    assert not truth.is_alive(willing)
    said = owner.wait_for_error(f"could not end {other} ")
    assert "permission" in said
    assert list(jail.folder.glob("run/safepool/*.run")), "it stays on record"


TRACER = """
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.ptrace(0x4206, int(sys.argv[1]), 0, 0) == 0, ctypes.get_errno()  # PTRACE_SEIZE
    say("tracing")
    sys.stdin.readline()
    say("alive")
"""

TRACED = """
    from safepool import get_context
    from tests.kit import strays

    if __name__ == "__main__":
        pool = get_context("fork").Pool(1, grace=0.3)
        pool.apply(strays.start_all, (["daemon"],))
"""


@pytest.mark.skipif(not IS_ROOT, reason="only root may always trace")
def test_a_stray_that_a_stranger_traces_is_ended(jail: Jail) -> None:
    """A debugger keeps SIGTERM from its process for ever; the forced end reaches it."""
    owner = jail.script(TRACED)
    stray = int(jail.hear("stray")[0].text.split()[1])
    jail.hear("worker")
    tracer = jail.script(TRACER, str(stray))
    jail.hear("tracing")
    owner.send(signal.SIGKILL)
    truth.until(lambda: not truth.is_alive(stray), "the traced one lives", BOUND)
    tracer.go()
    jail.hear("alive")


# -- what is somebody else's --------------------------------------------------------------------

SERVER = """
    import subprocess
    say("server")
    while line := sys.stdin.readline():
        child = subprocess.Popen(line.split(), start_new_session=True)
        say("served", str(child.pid))
"""

CLIENT = """
    from safepool import get_context

    def order(_):
        with open("counter", "w") as counter:
            counter.write("sleep 180\\n")
        time.sleep(180)

    if __name__ == "__main__":
        pool = get_context("fork").Pool(1, grace=0.3)
        pool.map(order, range(1))
"""


def test_what_a_server_starts_for_a_task_is_the_servers(jail: Jail) -> None:
    """Like a container of docker, a unit of systemd-run, a job of at or cron, a window of tmux.

    It has neither parent nor tag nor mark of the run: it is spared, by the next start too.
    """
    os.mkfifo(jail.folder / "counter")
    server = jail.script(SERVER, before=["sh", "-c", 'exec "$@" <> counter', "sh"])
    jail.hear("server")
    owner = jail.script(CLIENT)
    ordered = int(jail.hear("served")[0].text)
    owner.send(signal.SIGKILL)
    jail.assert_empty("the owner", BOUND, {server.pid, ordered})
    console = Console(jail, "fork")
    console.ask("map")
    console.ask("close")
    assert truth.is_alive(server.pid)
    assert truth.is_alive(ordered)


# -- who is hard to see -------------------------------------------------------------------------

RUNNER = """
    from safepool import get_context
    from tests.kit import strays

    def start(_):
        strays.runner("runner.lock")
        say("ready")
        time.sleep(180)

    if __name__ == "__main__":
        pool = get_context("fork").Pool(1, grace=0.3)
        pool.map(start, range(1))
"""


def test_a_runner_is_found_below_its_launcher(jail: Jail) -> None:
    """It forks and exits every 0.2 ms: at each look it has another pid.

    Below its launcher it comes back to that each time.
    """
    owner = jail.script(RUNNER, before=NO_CGROUP)
    jail.hear("ready")
    assert is_running(jail)
    jail.kill_at_once([owner.pid])
    truth.until(lambda: not is_running(jail), "it runs on", BOUND)


def is_running(jail: Jail) -> bool:
    """Is there any runner? No list of pids tells, but the kernel knows who holds a lock."""
    with open(jail.folder / "runner.lock") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
