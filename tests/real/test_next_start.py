"""Owner, sidecar and launchers are SIGKILLed in the same instant: the next start ends the rest.

And only the rest: a live run of the same program beside it, what bears the dead run's tag
and mark but was started after its end, and whoever has a pid that a record names, all
these are spared. What is done is told, once, whoever else starts in the same instant.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safepool import registry
from safepool.core.identity import Incarnation
from safepool.core.lineage import extend, tag_of
from safepool.core.record import (
    VERSION,
    Member,
    RunRecord,
    format_record,
    member_name,
    parse_record,
)
from safepool.core.values import replace
from safepool.host.linux import LinuxHost
from tests.kit import truth
from tests.kit.console import Console
from tests.kit.jail import PRELUDE, Jail
from tests.kit.villains import SLEEP

BOUND = 15.0
SILENCE = 60.0
"""Seconds within which a sidecar repeats its sign of life; see safepool/registry/files.py."""

PROGRAM = """
import ctypes, logging
from safepool import get_context
from tests.kit import strays

def disarmed():
    '''Be a worker that has taken its death signal back.'''
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0)
    return os.getpid()

STRAYS = {
    "session": strays.new_session,
    "daemon": lambda: strays.daemon({}),
    "marked": lambda: strays.daemon(os.environ, keeps_tag=False),
    "server": strays.STRAYS["port"],
    "disarmed": disarmed,
}

def work(name):
    say("stray", f"{os.getppid()} {name} {STRAYS[name]()}")
    time.sleep(180)

def where():
    return os.getpid()

if __name__ == "__main__":
    pool = get_context(sys.argv[1]).Pool(len(STRAYS) + 1, grace=0.5)
    for name in STRAYS:
        pool.apply_async(work, (name,))
    for line in sys.stdin:
        say("worker", str(pool.apply(where)))
"""


class Run:
    """An owner of the program, and everything that belongs to it."""

    def __init__(self, jail: Jail, method: str) -> None:
        before, said = set(jail.pids()), len([x for x in jail.heard if x.word == "stray"])
        self._jail = jail
        self._asked = 0
        self.owner = jail.start([sys.executable, "program.py", method])
        words = [line.text.split() for line in jail.hear("stray", said + 5)[said:]]
        self.strays = {name: int(pid) for _, name, pid in words}
        self.launchers = {int(parent) for parent, _, _ in words}
        self.free_worker = self.ask()
        truth.until(lambda: truth.sidecars(self.owner.pid), "no sidecar")
        self.pids = set(jail.pids()) - before

    def ask(self) -> int:
        """Have a free worker do something; its pid."""
        said = len([line for line in self._jail.heard if line.word == "worker"])
        self.owner.go()
        return int(self._jail.hear("worker", said + 1)[-1].text)

    def run_id(self) -> str:
        """The ID, from the record that names its owner."""
        for path in self._jail.folder.glob("run/safepool/*.run"):
            record = parse_record(path.read_bytes(), path.stem)
            if isinstance(record, RunRecord) and record.owner.pid == self.owner.pid:
                return path.stem
        raise AssertionError("the run is not on record")

    def kill_guards(self) -> None:
        """SIGKILL for owner, sidecar and launchers in one instant."""
        guards = [self.owner.pid, *truth.sidecars(self.owner.pid), *self.launchers]
        self._jail.kill_at_once(guards)
        assert truth.wait_gone(self.owner.pid)
        strays = set(self.strays.values())
        for pid in self.pids - strays:
            assert truth.wait_gone(pid, BOUND), f"not a stray: {truth.describe(pid)}"
        assert {pid for pid in strays if truth.is_alive(pid)} == strays, "nobody could end them"


def bearer(jail: Jail, run_id: str) -> int:
    """Start a process with the tag and the mark of a run, as a server of that run could."""
    pid = jail.start(SLEEP, environment={"SAFEPOOL_RUN": extend(None, run_id, 1)}).pid
    truth.until(lambda: truth.command_line(pid) == " ".join(SLEEP), "no exec")
    hard = resource.prlimit(pid, resource.RLIMIT_RTTIME)[1]
    resource.prlimit(pid, resource.RLIMIT_RTTIME, (tag_of(run_id, 1), hard))
    return pid


def test_the_next_start_ends_what_is_left_and_nothing_else(method: str, jail: Jail) -> None:
    """Two starts in the same instant: all strays go, each told once; the rest is untouched."""
    (jail.folder / "program.py").write_text(PRELUDE + PROGRAM)
    twin, doomed = Run(jail, method), Run(jail, method)
    run_id = doomed.run_id()
    doomed.kill_guards()
    # As if the last sign of life had been given one interval before the end, which is now.
    folder = jail.folder / "run" / "safepool"
    os.utime(folder / f"{run_id}.lock", (time.time() - SILENCE,) * 2)
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    truth.until(lambda: time.clock_gettime(time.CLOCK_BOOTTIME) > now + 0.2, "no time passes")
    late = bearer(jail, run_id)
    stranger = jail.start(SLEEP).pid
    for ticks in (-1, 1):
        name = member_name(
            run_id, Member("worker", Incarnation(stranger, truth.started(stranger) + ticks), 9)
        )
        (folder / name).touch()

    consoles = [Console(jail, method, name=f"next{n}", processes=1) for n in range(2)]
    for console in consoles:
        console.ask("map")

    def said() -> str:
        return "".join(console.owner.errors() for console in consoles)

    strays = sorted(doomed.strays.values())
    for pid in strays:
        assert truth.wait_gone(pid, BOUND), f"{truth.describe(pid)} is left"
    truth.until(lambda: f"spared {late} " in said(), "the late one is not told", BOUND)
    why = f"left by an earlier run whose owner {doomed.owner.pid} is gone"
    ended = re.findall(
        rf"WARNING safepool: {why}: ended stray (\d+) \(.*\), found by its (\w+)", said()
    )
    witnesses = {**dict.fromkeys(doomed.strays, "tag"), "marked": "mark"}
    assert sorted((int(pid), witness) for pid, witness in ended) == sorted(
        (pid, witnesses[name]) for name, pid in doomed.strays.items()
    )
    assert not [path.name for path in folder.glob(f"{run_id}*")], "it is still on record"

    assert truth.is_alive(late)
    assert truth.is_alive(stranger)
    assert {pid for pid in twin.pids if not truth.is_alive(pid)} == set()
    assert twin.ask() == twin.free_worker
    assert twin.run_id()
    assert not twin.owner.errors()


NEXT = """
import logging
from safepool import get_context
if __name__ == "__main__":
    logging.basicConfig(level=logging.DEBUG, format="%(levelname)s %(message)s")
    with get_context("fork").Pool(1) as pool:
        say("result", str(pool.apply(abs, (-1,))))
        sys.stdin.readline()
"""

DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda data: data[:-9],
    "half written": lambda data: data[: len(data) // 2].ljust(len(data), b"\0"),
    "changed": lambda data: data.replace(b'"grace": 5.0', b'"grace": 6.0'),
    "empty": lambda data: b"",
}
FOREIGN: dict[str, dict[str, Any]] = {
    "of another run": {"run_id": "f" * 32},
    "later version": {"version": VERSION + 1},
    "earlier boot": {"boot_id": "00000000-0000-0000-0000-000000000000"},
    "other host": {"host": "elsewhere"},
    "other namespace": {"pid_namespace": 1},
    "other user": {"uid": 4242},
}
LOCKS = ("no lock", "a pipe for a lock", "a lock that is held", "a lock of somebody else")


class Stage:
    """A registry with records of owners that are dead, and a bearer of each run's witnesses."""

    def __init__(self, jail: Jail, dead: Incarnation) -> None:
        self.folder = jail.folder / "run" / "safepool"
        self.folder.mkdir(mode=0o700)
        self.bearers: dict[str, int] = {}
        self.run_ids: dict[str, str] = {}
        self._jail = jail
        here = registry.here(LinuxHost())
        self._record = RunRecord(
            run_id="",
            lineage="",
            host=here.host,
            boot_id=here.boot_id,
            pid_namespace=here.pid_namespace,
            uid=here.uid,
            owner=dead,
            argv=("test",),
            cwd="/",
            started_ticks=dead.start,
            started_wall=0.0,
            grace=5.0,
        )

    def add(self, name: str, **changes: Any) -> Path:
        """Put a run on record whose lock is free, and start a process that bears its witnesses."""
        run_id = os.urandom(16).hex()
        path = self.folder / f"{run_id}.run"
        path.write_bytes(format_record(replace(self._record, **{"run_id": run_id, **changes})))
        path.with_suffix(".lock").touch()
        self.run_ids[name] = run_id
        self.bearers[name] = bearer(self._jail, run_id)
        return path


def test_no_damaged_or_foreign_record_ends_anybody(jail: Jail) -> None:
    """Each names a run whose bearers live: only those of the whole record of a dead owner end.

    All other records are left as they are, and the start says so at debug level.
    """
    ended = subprocess.Popen(["sleep", "0"])
    dead = Incarnation(ended.pid, truth.started(ended.pid))
    ended.wait()
    stage = Stage(jail, dead)
    stage.add("whole")
    for name, change in DAMAGE.items():
        path = stage.add(name)
        path.write_bytes(change(path.read_bytes()))
    for name, fields in FOREIGN.items():
        stage.add(name, **fields)
    for name in LOCKS:
        lock = stage.add(name).with_suffix(".lock")
        if name == "a lock of somebody else" and os.geteuid() == 0:
            os.chown(lock, 4242, 4242)
            continue
        lock.unlink()
        if name == "a pipe for a lock":
            os.mkfifo(lock)
    holder = registry.RunFiles.attach(str(stage.folder), stage.run_ids["a lock that is held"])
    (stage.folder / f"{holder.run_id}.lock").touch()
    path = stage.add("misnamed")
    path.rename(path.with_name("MISNAMED.run"))
    # The very pid of a living process, 0.01 s off: the owner is dead, that process is nobody.
    neighbour = jail.start(SLEEP).pid
    started = truth.started(neighbour)
    for ticks in (-1, 1):
        stage.add(f"start {ticks:+}", owner=Incarnation(neighbour, started + ticks))
    doomed = {"whole", "start -1", "start +1"}
    kept = {
        path.name: path.read_bytes()
        for path in stage.folder.glob("*.run")
        if path.stem not in {stage.run_ids[name] for name in doomed}
    }
    assert holder.claim()
    try:
        owner = jail.script(NEXT)
        jail.hear("result")
        for name in doomed:
            assert truth.wait_gone(stage.bearers[name], BOUND), f"nobody ended: {name}"
        said = owner.wait_for_error("records left alone")
    finally:
        holder.close()
    assert f"{len(kept)} records left alone" in said
    owner.go()
    assert owner.wait() == 0, owner.errors()
    left = {name for name, pid in stage.bearers.items() if truth.is_alive(pid)}
    assert left == set(stage.bearers) - doomed
    assert truth.is_alive(neighbour)
    assert {path.name: path.read_bytes() for path in stage.folder.glob("*.run")} == kept
