"""What must be true of every sweep, checked at every signal, after every step, at the end.

The judge knows the truth of the simulated kernel: who was started by whom, who is alive.
Of the sweep it knows what anybody can see: the looks, the signals, the report. It never
asks the code under test who belongs.

A broken promise is a :class:`PromiseError` with the promise's name, so that a test can tell
which one has caught a fault.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from safepool.core.identity import Incarnation, ProcessRow, Snapshot
from safepool.core.lineage import is_helper_tag
from safepool.core.planner import BLIND_WAIT, LAST_WAIT, Step, SweepReport
from safepool.core.policy import StopPolicy
from tests.sim.adversaries import MULTIPLYING
from tests.sim.cast import View, name_of
from tests.sim.kernel import Kernel, Process

RANK = {"SIGTERM": 0, "SIGCONT": 1, "SIGSTOP": 2, "SIGKILL": 3}
LOOK = 0.05
"""Seconds that one look at a full table can take, with its signals."""


class PromiseError(AssertionError):
    """A promise that was not kept."""

    def __init__(self, promise: str, story: str) -> None:
        super().__init__(f"{promise}: {story}")
        self.promise = promise


class Sent(NamedTuple):
    """One signal that a sweep sent, or tried to."""

    sig: str
    at: float
    outcome: str


class Judge:
    """Watches one sweep of one view."""

    def __init__(
        self, kernel: Kernel, view: View, policy: StopPolicy, cgroup: str | None = None
    ) -> None:
        self.kernel = kernel
        self.view = view
        self.policy = policy
        self.cgroup = cgroup
        self.began = kernel.clock
        self.half = self.began + policy.grace / 2
        self.forced = self.began + policy.grace
        self.ends = self.forced + policy.kill_timeout
        self.is_prompt = True
        self.is_disturbed = False
        self.blind_until = -math.inf
        self.looks = 0
        self.has_missed = False
        self.last_looks = [self.began, self.began]
        self.signalled: set[Process] = set()
        self.rows: dict[int, ProcessRow] = {}
        self.look_began = self.look_ended = self.began
        self.looks_without_news = 0
        self.met: dict[Process, float] = {}
        self.turns: defaultdict[Process, int] = defaultdict(int)
        self.seen_stopped: set[Process] = set()
        self.sent: defaultdict[Process, list[Sent]] = defaultdict(list)
        self.spared = {self.view.me, *self._processes(view.target.spare), kernel.init}

    # -- what it hears -------------------------------------------------------------------

    def on_step(self, snapshot: Snapshot, now: float, step: Step) -> None:
        """Note a look and what was made of it, before the signals go out."""
        self.looks += 1
        self.last_looks = [self.last_looks[1], self.look_began]
        self.rows, self.look_ended = dict(snapshot.rows), now
        named = {*step.living, *(incarnation for incarnation, _ in step.signals)}
        members = [process for process in self._processes(named) if self._is_shown(process)]
        self.looks_without_news += 1
        for process in members:
            if process not in self.met:
                self.met[process] = now
                self.looks_without_news = 0
            if self.half <= now < self.forced and not is_helper_tag(self._row(process).tag):
                self.turns[process] += 1
                if self._row(process).state == "T":
                    self.seen_stopped.add(process)

    def on_send(self, process: Process, sig: str) -> None:
        """Hold one signal against the promises, at the moment before it is delivered."""
        past = self.sent[process]
        self.signalled.add(process)
        if sig == "SIGSTOP":
            self.looks_without_news = 0
        self._is_ours(process, sig)
        self._is_in_time(process, sig, past)
        self._goes_forward(process, sig, past)
        # Without descriptors some signals cannot be tried when it is their turn.
        if sig == "SIGTERM" and not self.is_disturbed:
            self._asks_parents_first(process)
        if sig == "SIGKILL" and not self.is_disturbed:
            self._was_held(process, past)
            self._kills_leaves_first(process)

    def on_container(self, cgroup: str, action: str) -> None:
        """Hold what is done to a cgroup against the promises: it meets everybody inside."""
        sig = {"freeze": "SIGSTOP", "kill": "SIGKILL"}[action]
        if sig == "SIGSTOP":
            self.looks_without_news = 0
        for process in self.kernel.living():
            if process.cgroup == cgroup:
                self._is_meant(process, sig)
                if self.kernel.clock < self.forced:
                    raise PromiseError("no force before the grace is over", f"{action} {process}")
                if sig == "SIGKILL" and self._is_shown(process) and not self.is_disturbed:
                    self._was_held(process, self.sent[process])
                self.on_sent(process, sig, "contained")

    def on_sent(self, process: Process, sig: str, outcome: str) -> None:
        self.sent[process].append(Sent(sig, self.kernel.clock, outcome))

    # -- at each signal ------------------------------------------------------------------

    def _is_ours(self, process: Process, sig: str) -> None:
        self._is_meant(process, sig)
        if not self._is_shown(process):
            story = f"{sig} to {process}, which no look showed"
            raise PromiseError("only verified incarnations", story)

    def _is_meant(self, process: Process, sig: str) -> None:
        if process.pid <= 1 or process in self.spared:
            raise PromiseError("never self, the owner, pid 1", f"{sig} to {process}")
        is_known = max(process.born_at, process.detached_at) < self.look_began
        past = self.sent.get(process, [])
        is_release = sig == "SIGCONT" and any(old.sig == "SIGSTOP" for old in past)
        if process.is_detached and is_known and not is_release:
            raise PromiseError("a detached process is left alone", f"{sig} to {process}")
        if not self.view.means(process):
            raise PromiseError("nobody else is signalled", f"{sig} to {process}")

    def _is_in_time(self, process: Process, sig: str, past: list[Sent]) -> None:
        now = self.kernel.clock
        if sig in ("SIGSTOP", "SIGKILL"):
            if now < self.forced:
                raise PromiseError("no force before the grace is over", f"{sig} to {process}")
            is_asked = self.turns[process] and not self.is_disturbed
            if is_asked and all(old.sig != "SIGTERM" for old in past):
                raise PromiseError("asked before it is forced", f"{sig} to {process}")
            is_woken = process not in self.seen_stopped or self.is_disturbed
            if not is_woken and all(old.sig != "SIGCONT" for old in past):
                raise PromiseError("who is stopped is woken to hear it", f"{sig} to {process}")

    @staticmethod
    def _goes_forward(process: Process, sig: str, past: list[Sent]) -> None:
        took = [old for old in past if old.outcome == "sent"]
        is_release = (
            sig == "SIGCONT" and past and (past[-1].outcome == "denied" or process.is_detached)
        )
        if not is_release and any(RANK[old.sig] > RANK[sig] for old in took):
            raise PromiseError("escalation never goes back", f"{sig} to {process} after {past}")
        if any(old.sig == sig for old in took):
            raise PromiseError("each signal once", f"{sig} to {process} after {past}")

    def _asks_parents_first(self, process: Process) -> None:
        parent = self._parent_of(process)
        if parent is None or is_helper_tag(self._row(parent).tag):
            return
        if all(old.sig != "SIGTERM" for old in self.sent[parent]):
            raise PromiseError("parents are asked first", f"{process} before {parent}")
        is_root = name_of(process) in self.view.target.roots
        if self.look_ended < self.half and not is_root:
            raise PromiseError("parents may drain", f"{process} was asked while {parent} was there")

    def _was_held(self, process: Process, past: list[Sent]) -> None:
        if self.look_ended >= self.forced + self.policy.kill_timeout / 2:
            return
        if past and past[-1].outcome == "denied":
            return
        if all(old.sig != "SIGSTOP" for old in past):
            raise PromiseError("held before it is killed", f"{process} got only {past}")
        if self.looks_without_news < 2:
            raise PromiseError("two looks without anybody new", f"{process} after one")

    def _kills_leaves_first(self, process: Process) -> None:
        for child in self._processes(row.incarnation for row in self.rows.values()):
            # One that went out before its cgroup was killed is met by no kill of that look.
            is_out = child.left_at > self.look_began
            is_left = child.is_dead or child.is_detached or is_out
            is_known = child in self.met and not is_left and self._parent_of(child) is process
            if is_known and all(old.sig != "SIGKILL" for old in self.sent[child]):
                raise PromiseError("leaves are killed first", f"{process} before its child {child}")

    # -- at the end ----------------------------------------------------------------------

    def on_report(self, report: SweepReport) -> None:
        """Hold the report against what is true."""
        ended = self._processes(one.incarnation for one in report.ended)
        stuck = self._processes(one.incarnation for one in report.stuck)
        for process in ended:
            if not process.is_dead:
                raise PromiseError("who is reported as ended is dead", f"{process}")
        for process in self.kernel.living():
            if self._should_be_gone(process) and process not in stuck:
                # What is born or moves while the last look is taken is for the next sweep, and
                # so is everything when no look could be taken. But a sweep that calls itself
                # done has looked twice, and must have missed nobody.
                is_late = max(process.born_at, process.moved_at) > self.look_began
                # In the whole table, one that did not live through the two last looks may be in
                # neither: who hops faster than a look is seen by a walk alone.
                is_hopping = not self.view.is_walk and process.born_at > self.last_looks[0]
                self.has_missed |= is_hopping
                if not ((report.stuck and (is_late or self.is_disturbed)) or is_hopping):
                    raise PromiseError("nothing is left alive but what is reported", f"{process}")
        self._had_reason(stuck)
        self._gives_reasons(report)
        # One that could not look tries on, for a while, and then still needs a moment to kill.
        ends = max(self.ends, min(self.blind_until, self.ends + BLIND_WAIT) + LAST_WAIT)
        if self.is_prompt and report.finished_at > ends + LOOK:
            late = report.finished_at - ends
            raise PromiseError("every sweep ends in time", f"{late:.3f} s after its deadline")

    def _had_reason(self, stuck: Iterable[Process]) -> None:
        """Who is stuck was alive in the last look, and got its SIGKILL if there was time."""
        is_wild = any(MULTIPLYING.intersection(one.habits) for one in self.kernel.everybody)
        late = self.ends - self.policy.kill_timeout / 4
        for process in stuck:
            if process.died_at < self.look_began and not self.is_disturbed:
                raise PromiseError("zombies are dead", f"{process} is reported as stuck")
            if self.is_disturbed or not self.is_prompt:
                continue
            past = self.sent.get(process, [])
            was_met = self.met.get(process, self.ends) < late
            if was_met and all(old.sig != "SIGKILL" for old in past):
                raise PromiseError("what is left is killed", f"{process} got only {past}")
            is_able = not (process.is_dead or process.was_wedged or process.was_forbidden)
            if is_able and not is_wild:
                raise PromiseError("what can be ended is ended", f"{process} is reported as stuck")

    def _gives_reasons(self, report: SweepReport) -> None:
        for one in report.stuck:
            (process,) = self._processes([one.incarnation])
            past = [old for old in self.sent.get(process, []) if old.at < self.look_began]
            is_denied = bool(past) and past[-1].outcome == "denied"
            if is_denied and not self.is_disturbed and "permission" not in one.reason:
                raise PromiseError("the report says why", f"{process}: {one.reason}")

    def _should_be_gone(self, process: Process) -> bool:
        if process in self.spared or process.is_detached or not self.view.means(process):
            return False
        return self.view.is_above or not self.is_lost(process)

    def is_lost(self, process: Process) -> bool:
        """Neither it nor anybody living above it shows where it comes from, nor did it before."""
        line: Process | None = process
        while line is not None and line not in self.spared:
            if self.view.bears_witness(line) or self._is_contained(line) or line in self.met:
                return False
            line = line.parent
        return True

    def _is_contained(self, process: Process) -> bool:
        """Is it in the sweep's cgroup, and from within the run's life?"""
        target = self.view.target
        is_inside = self.cgroup is not None and process.cgroup == self.cgroup
        is_early = target.born_until is None or process.start <= target.born_until
        return is_inside and is_early and process.start >= target.born_from

    # -- what the looks have shown -------------------------------------------------------

    def _processes(self, names: Iterable[Incarnation]) -> list[Process]:
        """The processes of these names, dead ones as well."""
        found = (self.kernel.names.get((name.pid, name.start)) for name in names)
        return [process for process in found if process is not None]

    def _row(self, process: Process) -> ProcessRow:
        return self.rows[process.pid]

    def _is_shown(self, process: Process) -> bool:
        row = self.rows.get(process.pid)
        return row is not None and row.is_alive and row.start == process.start

    def _parent_of(self, process: Process) -> Process | None:
        """The living member that was the parent in the last look and still is."""
        row, parent = self._row(process), process.parent
        if parent is None or row.ppid != parent.pid or not self._is_shown(parent):
            return None
        is_member = parent in self.met and parent not in self.spared
        return parent if is_member and parent is not self.view.me else None


def last_moment(policy: StopPolicy, began: float) -> float:
    """When a sweep that was given its time late has to be over, from now on."""
    return max(began + policy.grace + policy.kill_timeout, began) + LAST_WAIT + LOOK
