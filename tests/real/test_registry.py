"""The registry on a real disk, with owners that are really killed.

The *owner* here is a bare process that writes its run down and waits; it makes no
pool. It is told what to do by lines on its standard input, and ends with them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from safepool import registry
from safepool.core.identity import Incarnation
from safepool.core.record import (
    VERSION,
    Member,
    RunRecord,
    Unreadable,
    Verdict,
    format_record,
    parse_record,
)
from safepool.errors import ProtectionError
from safepool.host.linux import LinuxHost
from safepool.host.own import ticks
from safepool.registry import files as files_module
from safepool.registry import forgetting, place

HOST = LinuxHost()
HERE = registry.here(HOST)
ROOT = Path(__file__).resolve().parents[2]
BOUND = 30.0

# Lines in, each answered: "fork FD" makes a child that keeps every descriptor until FD ends; "scan"
# looks at the registry as any process may; "claim ID" takes a dead run over; "retire" ends that.
OWNER = """
import os, sys
from safepool import registry
from safepool.core.record import RunRecord
from safepool.host.linux import LinuxHost

folder, run_id = sys.argv[1:]
host = LinuxHost()
here = registry.here(host)
me = host.incarnation(os.getpid())
record = RunRecord(run_id, "", here.host, here.boot_id, here.pid_namespace, here.uid, me,
                   tuple(sys.argv), os.getcwd(), me.start, 0.0, 5.0)
if run_id != "-":
    files = registry.RunFiles.create(folder, record)
print("ready", flush=True)
for line in sys.stdin:
    word, *rest = line.split()
    if word == "fork" and os.fork() == 0:
        os.read(int(rest[0]), 1)
        os._exit(0)
    if word == "scan":
        for found in registry.scan(folder, here, host):
            assert found.run_id != run_id or found.judgement.verdict.value == "live"
    if word == "claim":
        claimed = registry.RunFiles.attach(folder, rest[0])
        print(claimed.claim(), flush=True)
    else:
        if word == "retire":
            claimed.retire()
        print("done", flush=True)
"""


class Owner:
    """A process that owns one run (or none, as "-") until it is killed."""

    def __init__(self, folder: str, run_id: str, *, keep: tuple[int, ...] = ()) -> None:
        self.run_id = run_id
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER, folder, run_id],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            pass_fds=keep,
        )
        assert self.answer() == "ready"

    def answer(self) -> str:
        """The next line that it writes."""
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], BOUND)[0], "no answer"
        return self.process.stdout.readline().strip()

    def ask(self, line: str) -> str:
        """Have it do something."""
        self.tell(line)
        return self.answer()

    def tell(self, line: str) -> None:
        """Have it do something, and do not wait."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """SIGKILL, and wait until it is dead; it stays a zombie."""
        fd = os.pidfd_open(self.process.pid)
        try:
            self.process.kill()
            assert select.select([fd], [], [], BOUND)[0]
        finally:
            os.close(fd)

    def end(self) -> None:
        """See that nothing of it is left."""
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        self.process.wait(BOUND)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A registry of the test's own."""
    base = tmp_path / "runtime"
    base.mkdir()
    return registry.directory({"XDG_RUNTIME_DIR": str(base)})


@pytest.fixture
def owners(folder: str) -> Iterator[list[Owner]]:
    """Owners that the test starts; all are gone after it."""
    started: list[Owner] = []
    yield started
    for owner in started:
        owner.end()


def new_id() -> str:
    return os.urandom(16).hex()


def record_of(run_id: str) -> RunRecord:
    """A record whose owner is this very process."""
    me = HOST.incarnation(os.getpid())
    assert me is not None
    return RunRecord(
        run_id=run_id,
        lineage="",
        host=HERE.host,
        boot_id=HERE.boot_id,
        pid_namespace=HERE.pid_namespace,
        uid=HERE.uid,
        owner=me,
        argv=("test",),
        cwd="/",
        started_ticks=me.start,
        started_wall=0.0,
        grace=5.0,
    )


def verdicts(folder: str) -> dict[str, Verdict]:
    return {run.run_id: run.judgement.verdict for run in registry.scan(folder, HERE, HOST)}


def dead_ids(folder: str) -> list[str]:
    return [run.record.run_id for run in registry.dead_runs(folder, HERE, HOST)]


# -- life and death of an owner ------------------------------------------------------------


def test_an_owner_is_proven_dead_though_its_forked_child_lives_on(
    folder: str, owners: list[Owner]
) -> None:
    """A child that keeps every descriptor of the owner does not keep the run alive.

    Also while the owner is still a zombie, and with the members that were written down.
    """
    reader, writer = os.pipe()
    run_id = new_id()
    owner = Owner(folder, run_id, keep=(reader,))
    owners.append(owner)
    os.close(reader)
    try:
        member = Member("worker", Incarnation(4711, 815), 3)
        assert registry.RunFiles.attach(folder, run_id).add_member(member) is None
        assert owner.ask(f"fork {reader}") == "done"
        assert verdicts(folder) == {run_id: Verdict.LIVE}
        owner.kill()
        # An error on the pipe would say that its only reader, the child, has gone.
        poll = select.poll()
        poll.register(writer, 0)
        assert poll.poll(0) == []
        (dead,) = registry.dead_runs(folder, HERE, HOST)
        assert dead.record.run_id == run_id
        assert dead.record.owner.pid == owner.process.pid
        assert dead.members == (member,)
    finally:
        os.close(writer)
    assert owner.answer() == "", "the child has ended, it had the output"


def test_looking_does_not_drop_the_lock_of_the_one_who_looks(
    folder: str, owners: list[Owner]
) -> None:
    """An owner that examines the registry goes on holding its own lock."""
    run_id = new_id()
    owner = Owner(folder, run_id)
    owners.append(owner)
    assert owner.ask("scan") == "done"
    # With a wrong start time in the record the lock is the only witness of the owner's life.
    falsify(folder, run_id, -1)
    assert verdicts(folder) == {run_id: Verdict.UNKNOWN}
    owner.kill()
    assert verdicts(folder) == {run_id: Verdict.DEAD}


def read(folder: str, run_id: str) -> RunRecord:
    """The record of a run."""
    record = parse_record(Path(folder, f"{run_id}.run").read_bytes(), run_id)
    assert isinstance(record, RunRecord)
    return record


def rewrite(folder: str, run_id: str, **changes: Any) -> None:
    """Change a record; the checksum fits."""
    fields = {**vars(read(folder, run_id)), **changes}
    Path(folder, f"{run_id}.run").write_bytes(format_record(RunRecord(**fields)))


def falsify(folder: str, run_id: str, ticks: int) -> None:
    """Move the owner's start time in a record."""
    owner = read(folder, run_id).owner
    rewrite(folder, run_id, owner=Incarnation(owner.pid, owner.start + ticks))


@pytest.mark.parametrize("ticks", [-1, 1, 100])
def test_a_living_owner_whose_start_time_is_recorded_wrongly_is_spared(
    folder: str, owners: list[Owner], ticks: int
) -> None:
    """One witness that errs is not enough to call a run dead."""
    run_id = new_id()
    owners.append(Owner(folder, run_id))
    falsify(folder, run_id, ticks)
    assert verdicts(folder) == {run_id: Verdict.UNKNOWN}


def test_a_run_whose_lock_file_was_deleted_is_spared(folder: str, owners: list[Owner]) -> None:
    """Without the second witness the owner's death is not proven."""
    run_id = new_id()
    owner = Owner(folder, run_id)
    owners.append(owner)
    os.unlink(os.path.join(folder, f"{run_id}.lock"))
    assert verdicts(folder) == {run_id: Verdict.LIVE}
    owner.kill()
    assert verdicts(folder) == {run_id: Verdict.UNKNOWN}


def test_a_process_table_that_shows_nothing_proves_nothing(
    folder: str, owners: list[Owner]
) -> None:
    """Without /proc every pid looks free; nobody is called dead for that."""

    class Blind(LinuxHost):
        def row(self, pid: int) -> None:
            return None

    run_id = new_id()
    owner = Owner(folder, run_id)
    owners.append(owner)
    owner.kill()
    (found,) = registry.scan(folder, HERE, Blind())
    assert found.judgement.verdict is Verdict.UNKNOWN
    assert dead_ids(folder) == [run_id]


def test_runs_that_start_in_the_same_instant_do_not_touch_each_other(tmp_path: Path) -> None:
    """Eight owners in an empty base directory: all are written down, all are alive."""
    script = (
        "import os, sys; sys.stdin.readline(); from safepool import registry; "
        "sys.argv[1] = registry.directory({'XDG_RUNTIME_DIR': sys.argv[1]})\n" + OWNER
    )
    ids = [new_id() for _ in range(8)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path), run_id],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        for run_id in ids
    ]
    try:
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(b"\n")
            process.stdin.flush()
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
        folder = str(tmp_path / "safepool")
        assert verdicts(folder) == dict.fromkeys(ids, Verdict.LIVE)
        processes[0].kill()
        processes[0].wait(BOUND)
        assert dead_ids(folder) == [ids[0]]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_a_forked_copy_closes_its_descriptor_and_no_other(folder: str) -> None:
    """The child's close frees neither the owner's lock nor a number that means another file."""
    run_id = new_id()
    before = set(os.listdir("/proc/self/fd"))
    files = registry.RunFiles.create(folder, record_of(run_id))
    (fd,) = {int(name) for name in set(os.listdir("/proc/self/fd")) - before if is_open(name)}

    def in_child(*, replace: bool) -> int:
        """Close the files in a forked child; return whether the number is open after that."""
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                if replace:
                    os.dup2(0, fd)
                files.close()
                os._exit(is_open(str(fd)))
            os._exit(9)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    try:
        assert in_child(replace=False) == 0
        assert in_child(replace=True) == 1
        falsify(folder, run_id, -1)  # only the lock speaks for the owner now
        pid = os.fork()
        if pid == 0:
            os._exit(list(verdicts(folder).values()) == [Verdict.UNKNOWN])
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    finally:
        files.retire()


def is_open(fd: str) -> bool:
    """Tell whether this process has a descriptor of that number."""
    return os.path.lexists(f"/proc/self/fd/{fd}")


# -- claims ---------------------------------------------------------------------------------


def test_only_one_of_two_sweepers_gets_a_dead_run(folder: str, owners: list[Owner]) -> None:
    """A claim excludes others, is seen by those who look, and ends with its claimer."""
    run_id = new_id()
    owner, sweeper = Owner(folder, run_id), Owner(folder, "-")
    owners += [owner, sweeper]
    files = registry.RunFiles.attach(folder, run_id)
    assert not files.claim(), "the owner lives"
    owner.kill()
    assert sweeper.ask(f"claim {run_id}") == "True"
    assert not files.claim()
    assert dead_ids(folder) == []
    sweeper.kill()
    assert dead_ids(folder) == [run_id]
    assert files.claim()
    assert files.claim(), "asking again changes nothing"
    assert not registry.RunFiles.attach(folder, run_id).claim(), "one claim per process, too"
    assert files.retire() is None
    assert registry.scan(folder, HERE, HOST) == []


def test_of_many_that_claim_in_the_same_instant_one_wins(folder: str, owners: list[Owner]) -> None:
    """Six claim a dead run at once; the winner is killed, and exactly one of the rest wins next."""
    run_id = new_id()
    owner = Owner(folder, run_id)
    owners.append(owner)
    owner.kill()
    claimers = [Owner(folder, "-") for _ in range(6)]
    owners += claimers
    while claimers:
        for claimer in claimers:
            claimer.tell(f"claim {run_id}")
        won = [claimer for claimer in claimers if claimer.answer() == "True"]
        assert len(won) == 1
        assert dead_ids(folder) == []
        won[0].kill()
        assert dead_ids(folder) == [run_id]
        claimers.remove(won[0])


def test_a_claim_that_comes_after_the_end_of_a_run_fails(
    folder: str, owners: list[Owner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that another retires in the very moment of the claim is not swept again."""
    run_id = new_id()
    owner, sweeper = Owner(folder, run_id), Owner(folder, "-")
    owners += [owner, sweeper]
    owner.kill()
    assert sweeper.ask(f"claim {run_id}") == "True"
    real = fcntl.lockf

    def late(fd: int, operation: int) -> None:
        assert sweeper.ask("retire") == "done"
        real(fd, operation)

    files = registry.RunFiles.attach(folder, run_id)
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "lockf", late)
        assert not files.claim()
    assert not files.claim()
    assert os.listdir(folder) == []


def test_a_claim_given_up_leaves_the_run_on_record(folder: str, owners: list[Owner]) -> None:
    """What could not be ended is found again by the next start."""
    run_id = new_id()
    owner = Owner(folder, run_id)
    owners.append(owner)
    owner.kill()
    files = registry.RunFiles.attach(folder, run_id)
    assert files.claim()
    files.close()
    files.close()
    assert dead_ids(folder) == [run_id]


# -- killed between two steps ---------------------------------------------------------------

CRASH = """
import os, signal, sys
from safepool import registry
from safepool.core.record import Member, RunRecord
from safepool.core.identity import Incarnation
from safepool.host.linux import LinuxHost

folder, run_id, step = sys.argv[1:]
host = LinuxHost()
here = registry.here(host)
me = host.incarnation(os.getpid())
record = RunRecord(run_id, "", here.host, here.boot_id, here.pid_namespace, here.uid, me,
                   (), "", me.start, 0.0, 5.0)
left = int(step)

def count(event, arguments):
    global left
    if event in ("open", "os.rename", "os.remove", "fcntl.lockf", "os.listdir"):
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(count)
files = registry.RunFiles.create(folder, record)
files.add_member(Member("sidecar", Incarnation(2, 3)))
files.append_log("text")
files.retire()
left = 1000
print("through")
"""


def test_a_kill_at_any_step_leaves_a_whole_record_or_none(folder: str) -> None:
    """No half-written record, no record without a lock; the debris is tidied up later."""
    seen = set()
    for step in range(100):
        run_id = new_id()
        done = subprocess.run(
            [sys.executable, "-c", CRASH, folder, run_id, str(step)],
            stdout=subprocess.PIPE,
            cwd=ROOT,
            timeout=BOUND,
        )
        if done.stdout:
            break
        assert done.returncode == -signal.SIGKILL
        for run in registry.scan(folder, HERE, HOST):
            assert run.judgement.verdict is Verdict.DEAD, run
            seen.add(run.run_id)
            files = registry.RunFiles.attach(folder, run.run_id)
            assert files.claim()
            assert files.retire() is None
    else:
        pytest.fail("it never came through")
    assert step > 8
    assert seen, "no step had a record"
    assert any(not name.endswith(".log") for name in os.listdir(folder)), "there was no debris"
    age(folder, files_module.DEBRIS_AGE + 10)
    registry.prune(folder)
    assert [name for name in os.listdir(folder) if not name.endswith(".log")] == []


def test_a_record_is_not_seen_before_it_is_whole(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who looks while it is being written, piece by piece, sees no run at all."""
    real = os.write

    def slow(fd: int, data: bytes) -> int:
        assert registry.scan(folder, HERE, HOST) == []
        return real(fd, data[:50])

    run_id = new_id()
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", slow)
        files = registry.RunFiles.create(folder, record_of(run_id))
    assert verdicts(folder) == {run_id: Verdict.LIVE}
    files.retire()


def age(folder: str, seconds: float) -> None:
    """Make all files look older by some seconds."""
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        old = os.stat(path).st_mtime - seconds
        os.utime(path, (old, old))


# -- damaged and foreign records ------------------------------------------------------------


@pytest.fixture(scope="module")
def two_owners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Owner, Owner]]:
    """A registry with a living and a dead run."""
    base = tmp_path_factory.mktemp("runtime")
    folder = registry.directory({"XDG_RUNTIME_DIR": str(base)})
    living, dead = Owner(folder, new_id()), Owner(folder, new_id())
    try:
        dead.kill()
        yield folder, living, dead
    finally:
        living.end()
        dead.end()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_damaged_record_is_kept_and_never_acted_upon(
    two_owners: tuple[str, Owner, Owner], data: st.DataObject
) -> None:
    """Cut, overwritten, flipped or replaced: not dead, not lost, and no error."""
    folder, living, dead = two_owners
    owner = data.draw(st.sampled_from([living, dead]))
    path = Path(folder, f"{owner.run_id}.run")
    whole = path.read_bytes()
    cut = st.integers(0, len(whole) - 3).map(lambda length: whole[:length])
    zeros = cut.map(lambda start: start + b"\0" * (len(whole) - len(start)))
    flip = st.tuples(st.integers(0, len(whole) - 1), st.integers(1, 255)).map(
        lambda change: (
            whole[: change[0]] + bytes([whole[change[0]] ^ change[1]]) + whole[change[0] + 1 :]
        )
    )
    damaged = data.draw(cut | zeros | flip | st.binary(max_size=300))
    path.write_bytes(damaged)
    try:
        found = {run.run_id: run for run in registry.scan(folder, HERE, HOST)}
        assert set(found) == {living.run_id, dead.run_id}
        run = found[owner.run_id]
        if isinstance(run.record, Unreadable):
            assert run.judgement.verdict is Verdict.UNKNOWN
            assert owner.run_id not in dead_ids(folder)
        else:
            assert run.record == parse_record(whole, owner.run_id)
        registry.prune(folder)
        assert path.read_bytes() == damaged
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize(
    "change",
    [{"host": "elsewhere"}, {"boot_id": "earlier"}, {"pid_namespace": 1}, {"uid": 4242}],
)
def test_the_record_of_another_place_is_foreign(
    two_owners: tuple[str, Owner, Owner], change: dict[str, str | int]
) -> None:
    """Another host, boot, namespace or user: never dead, whatever its pid means here."""
    folder, _, dead = two_owners
    path = Path(folder, f"{dead.run_id}.run")
    whole = path.read_bytes()
    rewrite(folder, dead.run_id, **change)
    try:
        assert verdicts(folder)[dead.run_id] is Verdict.FOREIGN
        assert dead_ids(folder) == []
        assert path.exists()
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize(("ticks", "reused"), [(-1, True), (1, True), (100, True), (0, False)])
def test_the_owners_pid_with_another_start_time_is_somebody_else(
    folder: str, owners: list[Owner], ticks: int, reused: bool
) -> None:
    """0.01 s make another process; it proves the owner gone, so a free lock decides.

    Without a free lock, and for the process itself, nothing follows from it.
    """
    run_id = new_id()
    stranger, owner = Owner(folder, "-"), Owner(folder, run_id)
    owners += [stranger, owner]
    owner.kill()
    started = HOST.incarnation(stranger.process.pid)
    assert started is not None
    rewrite(folder, run_id, owner=Incarnation(started.pid, started.start + ticks))
    expected = Verdict.DEAD if reused else Verdict.UNKNOWN
    assert verdicts(folder) == {run_id: expected}
    assert owner.process.pid != stranger.process.pid


# -- forgetting -----------------------------------------------------------------------------


@pytest.fixture
def earlier(folder: str, owners: list[Owner]) -> str:
    """The ID of a run on record that was written before the last boot."""
    run_id = new_id()
    owner = Owner(folder, run_id)
    owners.append(owner)
    files = registry.RunFiles.attach(folder, run_id)
    assert files.add_member(Member("worker", Incarnation(4711, 815), 3)) is None
    assert files.append_log("text") is None
    owner.kill()
    rewrite(folder, run_id, boot_id="earlier")
    return run_id


@pytest.fixture
def local(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system that the tests' files lie in counts as one of this machine's own."""
    with place.verified(folder) as fd:
        monkeypatch.setattr(forgetting, "_LOCAL", {forgetting._file_system(fd)})


@pytest.mark.usefixtures("local")
def test_a_record_of_an_earlier_boot_is_forgotten_on_request(folder: str, earlier: str) -> None:
    """Nothing removes it by itself; on request record, lock and members go and the log stays."""
    registry.prune(folder)
    assert verdicts(folder) == {earlier: Verdict.FOREIGN}
    assert registry.forget(folder, earlier, HERE) == ""
    assert os.listdir(folder) == [f"{earlier}.log"]
    assert "no record" in registry.forget(folder, earlier, HERE)


@pytest.mark.usefixtures("local")
@pytest.mark.parametrize("change", ["boot", "host", "namespace", "damaged", "version", "lock"])
def test_what_may_live_somewhere_is_not_forgotten(folder: str, earlier: str, change: str) -> None:
    """This boot's, another host's, a damaged one: all stay, with the reason and the next step."""
    path = Path(folder, f"{earlier}.run")
    if change == "boot":
        rewrite(folder, earlier, boot_id=HERE.boot_id)
    elif change == "host":
        rewrite(folder, earlier, host="elsewhere")
    elif change == "namespace":
        rewrite(folder, earlier, boot_id=HERE.boot_id, pid_namespace=1)
    elif change == "version":
        rewrite(folder, earlier, version=VERSION + 1)
    elif change == "damaged":
        path.write_bytes(path.read_bytes()[:-9])
    else:
        Path(folder, f"{earlier}.lock").unlink()
        os.mkfifo(os.path.join(folder, f"{earlier}.lock"))
    before = sorted(os.listdir(folder))
    why = registry.forget(folder, earlier, HERE)
    assert "remove" in why
    assert f"{earlier}.*" in why
    assert sorted(os.listdir(folder)) == before


def test_nothing_is_forgotten_where_other_machines_may_write(
    folder: str, earlier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine of the same name may have written it: on a shared disk it stays."""
    monkeypatch.setattr(forgetting, "_LOCAL", frozenset())
    assert "other machines" in registry.forget(folder, earlier, HERE)
    assert verdicts(folder) == {earlier: Verdict.FOREIGN}


@pytest.mark.parametrize(("path", "kind"), [("/proc", "proc"), ("/sys", "sysfs")])
def test_the_kind_of_file_system_is_that_of_the_kernel(path: str, kind: str) -> None:
    """Two that are the same everywhere; neither counts as a local disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        assert forgetting._file_system(fd) == kind
    finally:
        os.close(fd)
    assert kind not in forgetting._LOCAL


def test_only_a_run_can_be_forgotten(folder: str) -> None:
    """A path is no run ID."""
    with pytest.raises(ValueError, match="run ID"):
        registry.forget(folder, "../x", HERE)


def test_what_is_no_plain_file_is_no_record(folder: str, tmp_path: Path) -> None:
    """A pipe, a link or a folder of that name is reported; it hangs nobody."""
    ids = sorted(new_id() for _ in range(4))
    os.mkfifo(os.path.join(folder, f"{ids[0]}.run"))
    os.mkdir(os.path.join(folder, f"{ids[1]}.run"))
    target = tmp_path / "record"
    target.write_bytes(format_record(record_of(ids[2])))
    os.symlink(target, os.path.join(folder, f"{ids[2]}.run"))
    Path(folder, f"{ids[3]}.run").write_bytes(b" " * (1 << 19))
    found = registry.scan(folder, HERE, HOST)
    assert [run.run_id for run in found] == ids
    assert all(isinstance(run.record, Unreadable) for run in found)
    assert {run.judgement.verdict for run in found} == {Verdict.UNKNOWN}


# -- the directory --------------------------------------------------------------------------


def test_the_registry_is_private_whatever_the_umask(tmp_path: Path) -> None:
    """Mode 0700 for the directory and 0600 for what is in it."""
    for umask in (0o000, 0o022, 0o277):
        base = tmp_path / f"base{umask:o}"
        base.mkdir()
        before = os.umask(umask)
        try:
            folder = registry.directory({"XDG_RUNTIME_DIR": str(base)})
        finally:
            os.umask(before)
        assert os.stat(folder).st_mode & 0o777 == 0o700
    files = registry.RunFiles.create(folder, record_of(new_id()))
    try:
        files.append_log("text")
        for name in os.listdir(folder):
            assert os.stat(os.path.join(folder, name)).st_mode & 0o777 == 0o600
    finally:
        files.retire()


def refusal(base: Path) -> str:
    """The message with which the registry in ``base`` is refused, by all who use it."""
    folder = str(base / "safepool")
    with pytest.raises(ProtectionError) as raised:
        registry.directory({"XDG_RUNTIME_DIR": str(base), "TMPDIR": str(base)})
    for use in (
        lambda: registry.scan(folder, HERE, HOST),
        lambda: registry.RunFiles.create(folder, record_of(new_id())),
    ):
        with pytest.raises(ProtectionError):
            use()
    message = str(raised.value)
    assert folder in message
    assert "remove it" in message
    return message


def test_a_link_in_the_place_of_the_registry_is_refused(tmp_path: Path) -> None:
    """A symbolic link is not followed, not even to a directory of ours."""
    mine = tmp_path / "mine"
    mine.mkdir(mode=0o700)
    (tmp_path / "safepool").symlink_to(mine)
    assert "symbolic link" in refusal(tmp_path)
    assert list(mine.iterdir()) == []


def test_a_file_in_the_place_of_the_registry_is_refused(tmp_path: Path) -> None:
    """A plain file is refused with the reason."""
    (tmp_path / "safepool").write_text("")
    assert "not a directory" in refusal(tmp_path)


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o1777, 0o701, 0o500])
def test_a_registry_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    """Whoever could write there could have our processes ended."""
    (tmp_path / "safepool").mkdir()
    (tmp_path / "safepool").chmod(mode)
    assert f"{mode:04o}" in refusal(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_strangers_registry_is_refused(tmp_path: Path) -> None:
    """Somebody else's directory where ours should be is never used."""
    (tmp_path / "safepool").mkdir(mode=0o700)
    os.chown(tmp_path / "safepool", 4242, 4242)
    assert "4242" in refusal(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_strangers_base_is_passed_over(tmp_path: Path) -> None:
    """After sudo -E the variable names another user's directory; nothing is put there."""
    theirs, mine = tmp_path / "theirs", tmp_path / "mine"
    theirs.mkdir()
    mine.mkdir()
    os.chown(theirs, 4242, 4242)
    env = {"XDG_RUNTIME_DIR": str(theirs), "XDG_STATE_HOME": str(mine)}
    assert registry.directory(env) == str(mine / "safepool")
    assert list(theirs.iterdir()) == []


def test_bases_that_cannot_be_used_are_passed_over(tmp_path: Path) -> None:
    """Missing, relative and unset ones lead to the next, in the end to the temporary folder."""
    missing = str(tmp_path / "missing")
    name = f"safepool-{os.geteuid()}"
    for env in (
        {"XDG_RUNTIME_DIR": missing, "XDG_STATE_HOME": missing},
        {"XDG_RUNTIME_DIR": "relative", "XDG_STATE_HOME": ""},
        {},
    ):
        found = registry.directory({**env, "TMPDIR": str(tmp_path)})
        assert found == str(tmp_path / name)
    assert not os.path.exists("relative")


def test_no_place_at_all_is_an_error_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason of the system and the next step are in the message."""

    def read_only(path: str, mode: int = 0) -> None:
        raise OSError(30, "Read-only file system", path)

    monkeypatch.setattr(os, "mkdir", read_only)
    with pytest.raises(ProtectionError, match=r"Read-only file system.*set XDG_RUNTIME_DIR"):
        registry.directory({"TMPDIR": str(tmp_path)})


def test_a_full_disk_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another place would hide this user's runs from each other; so it is an error at once."""

    def full(path: str, mode: int = 0) -> None:
        raise OSError(28, "No space left on device", path)

    monkeypatch.setattr(os, "mkdir", full)
    with pytest.raises(ProtectionError, match=r"No space left on device; make room"):
        registry.directory({"XDG_RUNTIME_DIR": str(tmp_path), "TMPDIR": str(tmp_path)})


# -- when the system says no ----------------------------------------------------------------


def test_a_full_disk_is_an_error_that_leaves_nothing_behind(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner is told why and what to do; the lock is free again."""

    def full(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    run_id = new_id()
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(ProtectionError, match=r"No space left on device; make room"):
            registry.RunFiles.create(folder, record_of(run_id))
        error = registry.RunFiles.attach(folder, run_id).append_log("text")
        assert error is not None
        assert error.errno == 28
    Path(folder, f"{run_id}.log").unlink()
    assert os.listdir(folder) == []
    registry.RunFiles.create(folder, record_of(run_id)).retire()


@contextlib.contextmanager
def no_descriptors(spare: int) -> Iterator[None]:
    """Let this process open only ``spare`` more files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    probe = [os.dup(0) for _ in range(spare + 1)]
    for fd in probe:
        os.close(fd)
    # Descriptors are given out from the lowest free number.
    resource.setrlimit(resource.RLIMIT_NOFILE, (probe[-1], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_without_descriptors_nothing_is_judged_dead(folder: str, owners: list[Owner]) -> None:
    """Errors are raised for the owner, returned for the sidecar, and nothing is misread."""
    run_id = new_id()
    owner = Owner(folder, run_id)
    owners.append(owner)
    owner.kill()
    other = registry.RunFiles.attach(folder, new_id())
    record = record_of(new_id())
    with no_descriptors(0):
        with pytest.raises(ProtectionError, match=r"Too many open files; close some"):
            registry.RunFiles.create(folder, record)
        assert other.add_member(Member("worker", Incarnation(5, 6), 1)) is not None
        assert other.append_log("text") is not None
        assert other.members() == ()
        assert not registry.RunFiles.attach(folder, run_id).claim()
        with pytest.raises(OSError, match="Too many open files"):
            registry.scan(folder, HERE, HOST)

    class Starved(LinuxHost):
        def row(self, pid: int) -> None:
            raise OSError(24, "Too many open files")

    (found,) = registry.scan(folder, HERE, Starved())
    assert found.judgement.verdict is Verdict.UNKNOWN
    assert dead_ids(folder) == [run_id]


def test_a_run_cannot_be_created_twice(folder: str) -> None:
    """The second of the same ID is refused and does not disturb the first."""
    run_id = new_id()
    files = registry.RunFiles.create(folder, record_of(run_id))
    try:
        with pytest.raises(ProtectionError, match="File exists"):
            registry.RunFiles.create(folder, record_of(run_id))
        assert verdicts(folder) == {run_id: Verdict.LIVE}
    finally:
        assert files.retire() is None


# -- members, log, tidying ------------------------------------------------------------------


def test_members_come_and_go_one_by_one(folder: str) -> None:
    """Each is a file of its own; doing a thing twice is no error."""
    run_id = new_id()
    files = registry.RunFiles.create(folder, record_of(run_id))
    sidecar = Member("sidecar", Incarnation(100, 7))
    worker = Member("worker", Incarnation(101, 8), 1)
    beside = registry.RunFiles.attach(folder, run_id)
    for _ in range(2):
        assert files.add_member(sidecar) is None
        assert beside.add_member(worker) is None
    assert files.members() == (sidecar, worker)
    assert registry.RunFiles.attach(folder, new_id()).members() == ()
    for _ in range(2):
        assert beside.remove_member(sidecar) is None
    assert files.members() == (worker,)
    assert files.retire() is None
    assert os.listdir(folder) == []
    assert files.retire() is None


def test_the_log_of_a_run_outlives_it_if_it_says_something(folder: str) -> None:
    """What was ended and why can be read after the run has been retired."""
    files = registry.RunFiles.create(folder, record_of(new_id()))
    assert files.append_log("one\n") is None
    assert files.append_log("zwei \udc80 drei\n") is None
    files.retire()
    assert Path(files.log_path).read_text() == "one\nzwei \\udc80 drei\n"
    silent = registry.RunFiles.create(folder, record_of(new_id()))
    assert silent.append_log("") is None
    silent.retire()
    assert os.listdir(folder) == [os.path.basename(files.log_path)]


def test_old_logs_are_tidied_up_but_nothing_with_a_record(folder: str) -> None:
    """The newest 50 logs of at most 30 days stay; those of runs on record stay anyway."""
    kept = registry.RunFiles.create(folder, record_of(new_id()))
    kept.append_log("text")
    age(folder, 10 * files_module.KEPT_LOG_AGE)
    now = time.time()
    for number in range(60):
        path = Path(folder, f"{number:032x}.log")
        path.write_text("text")
        os.utime(path, (now - number, now - number))
    old = Path(folder, f"{'f' * 32}.log")
    old.write_text("text")
    os.utime(old, (now - files_module.KEPT_LOG_AGE - 60,) * 2)
    note = Path(folder, "note.txt")
    note.write_text("mine")
    registry.prune(folder)
    logs = {path.name for path in Path(folder).glob("*.log")}
    newest = {f"{number:032x}.log" for number in range(files_module.KEPT_LOGS)}
    assert logs == newest | {f"{kept.run_id}.log"}
    assert note.exists()
    assert verdicts(folder) == {kept.run_id: Verdict.LIVE}
    kept.retire()


def test_an_old_log_goes_however_few_there_are(folder: str) -> None:
    """Thirty days after its run a log is removed; a day before that it is not."""
    old, young = (Path(folder, f"{digit * 32}.log") for digit in "ab")
    for path, days in ((old, 31), (young, 29)):
        path.write_text("text")
        os.utime(path, (time.time() - days * 86400,) * 2)
    registry.prune(folder)
    assert not old.exists()
    assert young.exists()


def test_a_start_in_progress_is_not_taken_for_debris(folder: str, owners: list[Owner]) -> None:
    """A lock without a record stays as long as somebody holds it, however old it is."""
    run_id = new_id()
    owner = Owner(folder, run_id)
    owners.append(owner)
    os.unlink(os.path.join(folder, f"{run_id}.run"))
    age(folder, 2 * files_module.DEBRIS_AGE)
    registry.prune(folder)
    assert os.listdir(folder) == [f"{run_id}.lock"]
    owner.kill()
    registry.prune(folder)
    assert os.listdir(folder) == []


def test_the_last_sign_of_life_bounds_what_a_run_can_have_started(folder: str) -> None:
    """In ticks since boot: not before now while it lives, long past when it was silent."""
    files = registry.RunFiles.create(folder, record_of(new_id()))
    try:
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
            started = HOST.incarnation(child.pid)
            assert started is not None
            assert started.start <= files.last_sign_of_life(ticks())
            age(folder, files_module.HEARTBEAT + 1000)
            assert files.last_sign_of_life(ticks()) < started.start - 900 * os.sysconf("SC_CLK_TCK")
            assert files.give_sign_of_life() is None
            assert started.start <= files.last_sign_of_life(ticks())
            child.communicate(b"\n", timeout=BOUND)
    finally:
        files.retire()
    assert files.last_sign_of_life(ticks()) == 0


@pytest.mark.parametrize("step", [-86400.0, 0.0, 86400.0])
def test_a_clock_that_is_set_does_not_move_the_end_of_a_run(
    folder: str, monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    """The last sign of life was given 200 s ago, whatever the wall clock says by now."""
    files = registry.RunFiles.create(folder, record_of(new_id()))
    path = os.path.join(folder, f"{files.run_id}.lock")
    try:
        assert files.give_sign_of_life() is None
        given = os.stat(path)
        os.utime(path, ns=(given.st_atime_ns - 200 * 10**9, given.st_mtime_ns - 200 * 10**9))
        wall = time.time() + step
        monkeypatch.setattr(time, "time", lambda: wall)
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        silent = now - files.last_sign_of_life(ticks()) / os.sysconf("SC_CLK_TCK")
        assert silent == pytest.approx(200 - files_module.HEARTBEAT, abs=5)
    finally:
        files.retire()


@example("")
@example("../../etc/passwd")
@example("F" * 32)
@given(st.text(max_size=40))
def test_only_run_ids_name_files(text: str) -> None:
    """No path can be made of what is no run ID."""
    with pytest.raises(ValueError, match="run ID"):
        registry.RunFiles.attach("/nowhere", text)
