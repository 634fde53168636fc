"""Real sweeps of real processes: what was meant is gone, everybody else lives.

Each test starts a *sweeping process* in a jail: a subreaper that starts the villains,
waits for the test's word, sweeps what is below it and tells its report. Who is dead
is read from pidfds that the test opened itself, and from the jail.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import textwrap
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kit.jail import Jail, Owner

SWEEPING = """
import json, resource, subprocess
from safepool.core.identity import Incarnation
from safepool.core.lineage import tag_of
from safepool.core.policy import StopPolicy
from safepool.host import prctl
from safepool.host.linux import LinuxHost
from safepool.core.planner import Target
from safepool.sweeper import Sweep, run

RUN = "0123456789abcdef0123456789abcdef"
host, me = LinuxHost(), os.getpid()
looks = 0

def look():
    global looks
    looks += 1
    return host.look_subtree(me, RUN)

def python(source, **options):
    head = "import os, signal, sys, time\\n"
    words = [sys.executable, "-S", "-E", "-c", head + source]
    return subprocess.Popen(words, stdout=subprocess.PIPE, **options)

def ready(process):
    assert process.stdout.readline()
    return process.pid

def name(pid):
    return host.incarnation(pid)

def tell(report, sweep, began):
    say("swept", json.dumps({
        "ended": {e.incarnation.pid: [e.how, e.last_signal and e.last_signal.value]
                  for e in report.ended},
        "stuck": {s.incarnation.pid: s.reason for s in report.stuck},
        "lines": {n.pid: line for n, line in sweep.command_lines.items()},
        "took": time.monotonic() - began,
        "looks": looks,
        "fds": len(os.listdir("/proc/self/fd")),
    }))

def sweep_now(target=None, grace=30.0, kill_timeout=30.0, seen=look):
    target = target or Target(subtree_of=name(me))
    before = len(os.listdir("/proc/self/fd"))
    sys.stdin.readline()
    began = time.monotonic()
    sweep = Sweep(host, target, StopPolicy(grace, kill_timeout), seen)
    tell(run(sweep), sweep, began)
    assert len(os.listdir("/proc/self/fd")) == before, "descriptors are left"

prctl.set_child_subreaper()
"""


class Witness:
    """A pidfd of the test's own: proof of one process' life or death."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.fd = os.pidfd_open(pid)

    def is_dead(self, seconds: float = 0.0) -> bool:
        return bool(select.select([self.fd], [], [], seconds)[0])


class Stage:
    """The sweeping process of one test, and witnesses of what it started."""

    def __init__(self, jail: Jail) -> None:
        self._jail = jail
        self._owner: Owner | None = None
        self._witnesses: list[Witness] = []

    def play(self, source: str, villains: int) -> list[Witness]:
        """Start the sweeping process; returns witnesses in the order of "villain" lines."""
        self._owner = self._jail.script(SWEEPING + textwrap.dedent(source))
        lines = self._jail.hear("villain", villains)
        self._witnesses += [Witness(line.pid) for line in lines]
        return self._witnesses

    def sweep(self) -> dict[str, Any]:
        """Give the word and return the report."""
        assert self._owner is not None
        self._owner.go()
        (line,) = self._jail.hear("swept")
        report: dict[str, Any] = json.loads(line.text)
        return report

    def close(self) -> None:
        for witness in self._witnesses:
            os.close(witness.fd)


@pytest.fixture
def stage(jail: Jail) -> Iterator[Stage]:
    with contextlib.closing(Stage(jail)) as stage:
        yield stage


TELL = "open(os.environ['TELL'], 'a').write(f'villain {os.getpid()} \\n'); "


def test_a_willing_process_is_asked_and_gone(stage: Stage) -> None:
    """SIGTERM, no grace waited for, and the report says who it was."""
    (witness,) = stage.play(
        f"""
        child = python({(TELL + "time.sleep(120)")!r})
        sweep_now(Target(roots=frozenset([name(child.pid)])))
        """,
        1,
    )
    report = stage.sweep()
    assert witness.is_dead()
    assert report["ended"] == {str(witness.pid): ["named", "SIGTERM"]}
    assert report["stuck"] == {}
    assert "time.sleep(120)" in report["lines"][str(witness.pid)]
    assert report["took"] < 20, "the grace was waited for"


DAEMONS = """
if os.fork() == 0:                      # a session of its own
    os.setsid()
    {tell}time.sleep(120)
if os.fork() == 0:                      # a daemon: its parent ends at once
    os.setsid()
    if os.fork() == 0:
        {tell}time.sleep(120)
    os._exit(0)
if os.fork() == 0:                      # a daemon that ignores the question
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        {tell}time.sleep(120)
    os._exit(0)
{tell}time.sleep(120)
""".replace("{tell}", TELL)


def test_sessions_and_daemons_go_with_their_tree(stage: Stage, jail: Jail) -> None:
    """What left its session or its parents is found under the subreaper all the same."""
    witnesses = stage.play(
        f"python({DAEMONS!r})\nsweep_now(grace=0.2)",
        4,
    )
    report = stage.sweep()
    assert all(witness.is_dead() for witness in witnesses)
    assert {str(witness.pid) for witness in witnesses} <= set(report["ended"])
    assert sorted({signal for _, signal in report["ended"].values() if signal}) == [
        "SIGKILL",
        "SIGTERM",
    ]
    jail.assert_empty("after the sweep")


def test_one_worker_is_swept_with_its_orphans_and_the_other_keeps_his(stage: Stage) -> None:
    """By its tag an orphan with an empty environment is put down to its worker."""
    worker = f"""
if os.fork() == 0:
    if os.fork() == 0:
        {TELL}os.execve('/bin/sleep', ['sleep', '120'], {{}})
    os._exit(0)
os.wait()
{TELL}time.sleep(120)
"""
    witnesses = stage.play(
        f"""
        def start(number):
            limit = resource.RLIMIT_RTTIME, (tag_of(RUN, number), resource.RLIM_INFINITY)
            return python({worker!r}, preexec_fn=lambda: resource.setrlimit(*limit))

        workers = [start(1), start(2)]
        names = {{name(worker.pid) for worker in workers}}
        root = name(workers[0].pid)
        say("workers", f"{{workers[0].pid}} {{workers[1].pid}}")
        sweep_now(Target(
            roots=frozenset([root]), run_id=RUN, workers=frozenset([1]),
            spare=frozenset(names - {{root}}),
        ))
        sys.stdin.readline()
        """,
        4,
    )
    mine = {int(pid) for pid in stage.sweep()["ended"]}
    assert len(mine) == 2
    assert {witness.pid for witness in witnesses if witness.is_dead()} == mine


def test_who_ignores_the_question_is_ended_after_the_grace(stage: Stage) -> None:
    """Never before it, and soon after."""
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    (witness,) = stage.play(
        f"python({(ignore + TELL + 'time.sleep(120)')!r})\nsweep_now(grace=0.2)",
        1,
    )
    report = stage.sweep()
    assert witness.is_dead()
    assert report["ended"][str(witness.pid)][1] == "SIGKILL"
    assert report["took"] >= 0.2


def test_a_process_that_forks_all_the_time_cannot_get_away(stage: Stage, jail: Jail) -> None:
    """Its children fork as well; all are held, then ended."""
    forker = f"""
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.nice(10)
{TELL}
end = time.monotonic() + 60
while time.monotonic() < end:
    if os.fork() == 0:
        if os.fork() == 0:
            time.sleep(0.05)
            os._exit(0)
        os._exit(0)
    os.wait()
    time.sleep(0.001)
"""
    (witness,) = stage.play(f"python({forker!r})\nsweep_now(grace=0.1)", 1)
    report = stage.sweep()
    assert witness.is_dead()
    assert report["stuck"] == {}
    jail.assert_empty("after the sweep")


def test_a_stopped_process_hears_the_question(stage: Stage) -> None:
    """It is woken after SIGTERM, so its handler runs: no SIGKILL is needed."""
    source = f"""
def bye(number, frame):
    open(os.environ['TELL'], 'a').write(f'heard {{os.getpid()}} \\n')
    os._exit(0)
signal.signal(signal.SIGTERM, bye)
{TELL}os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(120)
"""
    (witness,) = stage.play(
        f"child = python({source!r})\nos.waitpid(child.pid, os.WUNTRACED)\nsweep_now()",
        1,
    )
    report = stage.sweep()
    assert witness.is_dead()
    assert report["ended"][str(witness.pid)][1] in ("SIGTERM", "SIGCONT")
    assert len(stage._jail.hear("heard")) == 1


def test_strangers_in_the_same_table_are_left_alone(stage: Stage) -> None:
    """A look at everything, a stranger with the mark from before the run, a recycled pid."""
    # Strangers of another test run at the same time would be younger: so a run ID of its own.
    run = uuid.uuid4().hex
    with contextlib.ExitStack() as stack:
        strangers = []
        for _ in range(2):
            stranger = subprocess.Popen(
                ["/bin/sleep", "120"],
                env={"SAFEPOOL_RUN": f"{run}:1"},
            )
            stack.callback(stranger.wait)
            stack.callback(stranger.kill)
            strangers.append(stranger)
        witnesses = stage.play(
            f"""
            child = python({(TELL + "time.sleep(120)")!r})
            one, two = {strangers[0].pid}, {strangers[1].pid}
            target = Target(
                roots=frozenset([name(child.pid), Incarnation(two, name(two).start - 1)]),
                run_id={run!r}, born_from=name(two).start + 1, born_until=None,
            )
            sweep_now(target, grace=0.0, seen=lambda: host.look_all(tags=True))
            """,
            1,
        )
        report = stage.sweep()
        assert witnesses[0].is_dead()
        assert [stranger.poll() for stranger in strangers] == [None, None]
        assert list(report["ended"]) == [str(witnesses[0].pid)]


def test_a_sweep_without_descriptors_goes_on_with_what_it_holds(stage: Stage) -> None:
    """EMFILE in the middle: whoever is held is ended, and no end is reported unseen."""
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    witnesses = stage.play(
        f"""
        for _ in range(4):
            python({(ignore + TELL + "time.sleep(120)")!r})
        sys.stdin.readline()
        began = time.monotonic()
        sweep = Sweep(host, Target(subtree_of=name(me)), StopPolicy(0.1, 4.0), look)
        sweep.advance()
        assert len(sweep.watched) == 4
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, limits[1]))
        taken = []
        while sweep.watched:
            try:
                while True:
                    taken.append(os.dup(0))
            except OSError:
                pass
            sweep.wait()
            sweep.advance()
            assert sweep.report is None
        say("starved", os.waitpid(-1, 0)[1])
        for fd in taken:
            os.close(fd)
        tell(run(sweep), sweep, began)
        """,
        4,
    )
    report = stage.sweep()
    (line,) = stage._jail.hear("starved")
    assert int(line.text) == signal.SIGKILL
    assert all(witness.is_dead() for witness in witnesses)
    assert len(report["ended"]) == 4


def test_a_thousand_sleepers_are_ended(stage: Stage, jail: Jail, record_property: Any) -> None:
    """All of them, with fewer descriptors than processes; the figure is for people."""
    many = f"""
for _ in range(1000):
    if os.fork() == 0:
        os.execv('/bin/sleep', ['sleep', '120'])
{TELL}time.sleep(120)
"""
    stage.play(
        f"""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
        python({many!r})
        sweep_now()
        """,
        1,
    )
    report = stage.sweep()
    assert len(report["ended"]) == 1001
    jail.assert_empty("after the sweep")
    record_property("seconds", report["took"])
    record_property("looks", report["looks"])
