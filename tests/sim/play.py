"""A play: sweeps that run in the simulated kernel, side by side, each under its judge.

The real :class:`safepool.sweeper.Sweep` does the sweeping. It is woken as the poll loop of a
launcher or sidecar would: when ``wake_at`` has come, or a watched descriptor is readable.
"""

from __future__ import annotations

import select
from collections.abc import Iterable
from typing import Any

from safepool.core.identity import Snapshot
from safepool.core.planner import SweepReport
from safepool.core.policy import StopPolicy
from tests.sim.adversaries import MOVES
from tests.sim.cast import Cast, View, name_of
from tests.sim.copies import Copies
from tests.sim.host import SimContainer, SimHost
from tests.sim.kernel import Kernel, Process
from tests.sim.promises import Judge, PromiseError

MOST_STEPS = 4000
PROMPT = 0.02
"""Seconds by which another sweep, or a look, may delay one that still counts as prompt."""

Cue = tuple[int, str, int]
"""After so many calls of a sweeper, this move by that member."""


class Sweeping:
    """One sweep of a view, and its judge."""

    def __init__(
        self,
        copies: Copies,
        kernel: Kernel,
        view: View,
        policy: StopPolicy,
        cgroup: str | None = None,
    ) -> None:
        self.copies = copies
        self.view = view
        self.kernel = kernel
        self.host = SimHost(kernel, view.me)
        self.judge = Judge(kernel, view, policy, cgroup)
        self.host.on_send, self.host.on_sent = self.judge.on_send, self.judge.on_sent
        target = copies.planner.Target(**vars(view.target))
        self.container = (
            SimContainer(self.host, cgroup, self.judge.on_container) if cgroup else None
        )
        self.sweep: Any = copies.sweeper.Sweep(
            self.host,
            target,
            policy,
            self._look,
            own=name_of(view.me),
            container=self.container,
        )
        self.is_over = False

    def _look(self) -> Snapshot:
        self.judge.look_began = self.kernel.clock
        return self.view.look(self.host)

    @property
    def report(self) -> SweepReport | None:
        report: SweepReport | None = self.sweep.report
        return report

    def is_due(self) -> bool:
        """Is it time for a step, or has a watched process died?"""
        if self.is_over or not self.kernel.can_run(self.view.me):
            return False
        if self.sweep.wake_at <= self.kernel.clock:
            return True
        poll = select.poll()
        for fd in self.sweep.watched:
            poll.register(fd, select.POLLIN)
        return bool(poll.poll(0))

    def advance(self) -> None:
        """One step of the sweep, and the judgement of its report if that was the last."""
        late = self.kernel.clock - self.sweep.wake_at
        if late > PROMPT:
            self.judge.is_prompt = False
        if self.host.is_starved:
            self.judge.is_disturbed = True
        self.copies.listener = self.judge.on_step
        looks = self.judge.looks
        self.sweep.advance()
        if self.judge.looks == looks:
            self.judge.blind_until = self.sweep.wake_at or self.kernel.clock
        if self.report is not None:
            self.close()
            self.judge.on_report(self.report)

    def close(self) -> None:
        """The sweep is over, or its process was killed: the kernel closes what it had open."""
        self.is_over = True
        self.sweep.close()
        for handle in self.host.handles:
            handle.close()


class Play:
    """A cast in its kernel, the sweeps that go on, and what is to happen meanwhile."""

    def __init__(self, copies: Copies, *, tick: float = 0.001, is_spawned: bool = False) -> None:
        self.copies = copies
        self.kernel = Kernel(tick)
        self.cast = Cast(self.kernel, is_spawned=is_spawned)
        self.sweepings: list[Sweeping] = []
        self.cues: list[Cue] = []

    def begin(self, view: View, policy: StopPolicy, cgroup: str | None = None) -> Sweeping:
        """Begin a sweep beside those that go on; ``cgroup``: that of its members."""
        sweeping = Sweeping(self.copies, self.kernel, view, policy, cgroup)
        sweeping.host.meanwhile = self._follow_cue
        self.sweepings.append(sweeping)
        return sweeping

    def members(self) -> list[Process]:
        """The living that workers have started, and the workers; no sweeper among them."""
        sweepers = [sweeping.view.me for sweeping in self.active()]
        return [
            process
            for process in self.kernel.living()
            if self.cast.offspring(process) and process not in sweepers
        ]

    def move(self, name: str, who: int) -> None:
        """One member makes a move, if there is any member."""
        members = self.members()
        if members:
            MOVES[name](self.kernel, members[who % len(members)])

    def active(self) -> list[Sweeping]:
        """The sweeps that are not over and whose process is alive."""
        for sweeping in self.sweepings:
            if sweeping.view.me.is_dead and not sweeping.is_over:
                sweeping.close()
        return [sweeping for sweeping in self.sweepings if not sweeping.is_over]

    def run(self, seconds: float, cues: Iterable[Cue] = ()) -> None:
        """Let time pass; sweeps take their steps, with the cues followed in between."""
        self.cues = list(cues)
        until = self.kernel.clock + seconds
        while self.kernel.clock < until:
            self._wait(until)
            self._advance_all()
        self.cues = []

    def finish(self, cues: Iterable[Cue] = ()) -> None:
        """Bring every sweep to its end."""
        self.cues = list(cues)
        for _ in range(MOST_STEPS):
            awake = [one for one in self.active() if self.kernel.can_run(one.view.me)]
            if not awake:
                break
            self._wait(min(one.sweep.wake_at for one in awake))
            self._advance_all()
        else:
            raise PromiseError("every sweep ends in time", f"not after {MOST_STEPS} steps")
        self.cues = []

    def close(self) -> None:
        """Let go of all descriptors."""
        for sweeping in self.sweepings:
            sweeping.close()

    def _wait(self, until: float) -> None:
        """Let time pass until a sweep is due or ``until`` has come."""
        pause = max(self.kernel.tick, (until - self.kernel.clock) / 8)
        while self.kernel.clock < until and not any(one.is_due() for one in self.active()):
            self.kernel.spend(min(pause, max(until - self.kernel.clock, 1e-6)))

    def _advance_all(self) -> None:
        for sweeping in self.active():
            if sweeping.is_due():
                sweeping.advance()

    def _follow_cue(self) -> None:
        if self.cues:
            calls, name, who = self.cues[0]
            if calls > 0:
                self.cues[0] = (calls - 1, name, who)
            else:
                del self.cues[0]
                self.move(name, who)
