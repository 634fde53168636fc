"""The state machine that plays at random: a world that moves, and sweeps that come and go.

``machine_for(copies)`` makes the class; the tests run it with the code as it is, and with
faults. Each rule is one thing that can happen; between any two, and within every look, any
member may make any move. When the rules are through, every sweep is finished, the sidecar
(or that of a later run) sweeps what is left, and then sweeps again.
"""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from safepool.core.lineage import detached_tag
from safepool.core.policy import StopPolicy
from tests.sim.adversaries import HABITS, MOVES, RUN
from tests.sim.cast import View
from tests.sim.copies import Copies
from tests.sim.kernel import Kernel, Process
from tests.sim.play import Cue, Play, Sweeping
from tests.sim.promises import PromiseError
from tests.sim.scenes import CGROUP

MOST_AT_ONCE = 2


class Person(NamedTuple):
    """A process that is there when the curtain rises: a child of that member, and how it is."""

    parent: int
    habit: str
    manner: str
    bears: str
    is_careless: bool

    def enter(self, kernel: Kernel, parent: Process) -> Process | None:
        """Fork it; its habit begins when everybody is there."""
        child = kernel.fork(parent)
        if child is None or child.is_detached:
            return child
        child.ignores_term = self.manner == "ignores"
        child.drains_for = 0.03 if self.manner == "drains" else 0.0
        child.is_careless = self.is_careless
        if "mark" in self.bears:
            kernel.exec(child)
        else:
            child.environment = None
        if "tag" not in self.bears:
            child.tag = None
        if self.manner == "detached":
            child.is_detached, child.tag = True, detached_tag(RUN)
        if self.manner == "stopped":
            kernel.signal(child, "SIGSTOP")
        return child


# Not `st.integers`: that also tries numbers which it has found in the code, so the examples
# would change with every file.
indexes = st.sampled_from(range(31))
moves = st.sampled_from(sorted(MOVES))
cues = st.lists(st.tuples(st.sampled_from(range(13)), moves, indexes), max_size=6)
policies = st.builds(StopPolicy, st.sampled_from([0.0, 0.05, 0.4]), st.sampled_from([0.1, 0.4]))
kinds = st.sampled_from(["launcher", "worker", "sidecar", "stray"])
people = st.lists(
    st.builds(
        Person,
        indexes,
        st.sampled_from(["sits", "sits", "sits", *sorted(HABITS)]),
        st.sampled_from(["willing", "willing", "ignores", "drains", "stopped", "detached"]),
        st.sampled_from(["", "tag", "mark", "tag and mark"]),
        st.booleans(),
    ),
    max_size=8,
)


class KillOrder(RuleBasedStateMachine):
    """Plays against ``copies``, which a subclass names."""

    copies: Copies
    play: Play
    finale: tuple[str, int, StopPolicy, list[Cue]]
    cgroup: str | None = None
    is_refused = False
    last_sign_of_life: int | None = None
    is_broken = False

    @initialize(
        tick=st.sampled_from([0.0002, 0.001, 0.005]),
        is_spawned=st.booleans(),
        is_contained=st.booleans(),
        people=people,
        finale=st.tuples(kinds, indexes, policies, cues),
    )
    def raise_curtain(
        self,
        tick: float,
        is_spawned: bool,
        is_contained: bool,
        people: list[Person],
        finale: tuple[str, int, StopPolicy, list[Cue]],
    ) -> None:
        """Owner, sidecar, launcher, two workers, and what those have started.

        ``is_contained``: the workers live in a cgroup of the run.
        """
        self.play = Play(self.copies, tick=tick, is_spawned=is_spawned)
        if is_contained:
            self.cgroup = CGROUP
            for worker in self.play.cast.workers:
                worker.cgroup = CGROUP
        self.finale = finale
        started = []
        for person in people:
            members = [one for one in self.play.members() if self.play.kernel.can_run(one)]
            child = person.enter(self.play.kernel, members[person.parent % len(members)])
            if child is not None and not child.is_detached:
                started.append((child, person.habit))
        for child, habit in started:
            child.habits = HABITS[habit]

    # -- the world -----------------------------------------------------------------------

    @rule(name=moves, who=indexes)
    def move(self, name: str, who: int) -> None:
        """One member makes one move."""
        self.play.move(name, who)

    @rule(is_recycling=st.booleans())
    def a_stranger_starts(self, is_recycling: bool) -> None:
        """Somebody else's process, perhaps with the number of one that was just reaped."""
        freed = self.play.kernel.freed
        self.play.cast.start_stranger(freed[-1] if is_recycling and freed else None)

    @rule(who=indexes)
    def a_stranger_leaves(self, who: int) -> None:
        """Its number is free for a member."""
        bystanders = self.play.cast.bystanders
        self.play.kernel.exit(bystanders[who % len(bystanders)])

    @precondition(lambda self: self.cgroup)
    @rule(is_refused=st.booleans())
    def the_kernel_is_another(self, is_refused: bool) -> None:
        """From the next sweep on it has neither cgroup.freeze nor cgroup.kill, or has both."""
        self.is_refused = is_refused

    @precondition(lambda self: self.cgroup)
    @rule(who=indexes)
    def a_stranger_is_moved_in(self, who: int) -> None:
        """By hand. He is older than the run: a younger one cannot be told from a stray."""
        cast = self.play.cast
        elders = [one for one in cast.bystanders if one.start < cast.began]
        elders[who % len(elders)].cgroup = CGROUP

    @rule()
    def the_owner_dies(self) -> None:
        """And its pid is free for anybody."""
        self.play.kernel.exit(self.play.cast.owner)

    @precondition(lambda self: not self.play.active())
    @rule()
    def all_guards_die(self) -> None:
        """Owner, sidecar and launcher are killed at once; a later run will find the record."""
        cast, kernel = self.play.cast, self.play.kernel
        if self.last_sign_of_life is None:
            self.last_sign_of_life = kernel.ticks()
        for guard in (cast.owner, cast.sidecar, cast.launcher):
            kernel.signal(guard, "SIGKILL", by_kernel=True)

    # -- the sweeps ----------------------------------------------------------------------

    @precondition(lambda self: len(self.play.active()) < MOST_AT_ONCE)
    @rule(
        kind=kinds,
        who=indexes,
        policy=policies,
    )
    def a_sweep_begins(self, kind: str, who: int, policy: StopPolicy) -> None:
        """The second may be of the same kind, or of any other."""
        self._begin(kind, who, policy)

    def _begin(self, kind: str, who: int, policy: StopPolicy) -> None:
        view = self._view(kind, who)
        if view is not None and self.play.kernel.can_run(view.me):
            # A worker's end and a stray's sweep do not act upon the whole.
            within = self.cgroup if kind in ("launcher", "sidecar", "next run") else None
            sweeping = self.play.begin(view, policy, within)
            if sweeping.container is not None:
                sweeping.container.is_refused = self.is_refused

    @precondition(lambda self: self.play.active())
    @rule(seconds=st.sampled_from([0.001, 0.02, 0.2]), cues=cues)
    def sweeps_go_on(self, seconds: float, cues: list[Cue]) -> None:
        """Time passes, and the sweeps use it."""
        self._watched(lambda: self.play.run(seconds, cues))

    @rule(seconds=st.sampled_from([0.01, 0.1, 0.6]))
    def nobody_sweeps(self, seconds: float) -> None:
        """Time passes in which the sweepers get no processor."""
        self.play.kernel.spend(seconds)

    @precondition(lambda self: self.play.active())
    @rule(who=indexes)
    def a_sweeper_is_killed(self, who: int) -> None:
        """Half way: what it has stopped stays stopped until somebody else comes."""
        active = self.play.active()
        kernel, me = self.play.kernel, active[who % len(active)].view.me
        if me is not self.play.cast.sidecar:
            kernel.signal(me, "SIGKILL", by_kernel=True)

    @precondition(lambda self: self.play.active())
    @rule(who=indexes, is_starved=st.booleans())
    def descriptors_run_out(self, who: int, is_starved: bool) -> None:
        """Every look fails for a while."""
        active = self.play.active()
        active[who % len(active)].host.is_starved = is_starved

    # -- the end -------------------------------------------------------------------------

    def teardown(self) -> None:
        """Finish all sweeps, end what is left, and see that another sweep finds nothing."""
        if not hasattr(self, "play"):
            return
        try:
            if not self.is_broken:
                self._finish()
        finally:
            self.play.close()

    def _finish(self) -> None:
        for sweeping in self.play.active():
            sweeping.host.is_starved = False
        kind, who, policy, cues = self.finale
        self._begin(kind, who, policy)
        self.play.finish(cues)
        last = self._sweep_the_rest()
        for process in self.play.kernel.living():
            if process.is_stopped and self._was_held(process) and not last.judge.is_lost(process):
                raise PromiseError("nothing stays stopped", f"{process}")
        is_clean = last.report is not None and not last.report.stuck
        if is_clean and not last.judge.has_missed:
            again = self._sweep_the_rest()
            assert again.report is not None
            if again.judge.sent or again.report.ended:
                raise PromiseError("running it again changes nothing", f"{dict(again.judge.sent)}")

    def _was_held(self, process: Process) -> bool:
        """Has a sweep stopped it that could still let it go on, or another one could?"""
        holders = [
            each
            for each in self.play.sweepings
            for one in each.judge.sent.get(process, ())
            if one.sig == "SIGSTOP" and one.outcome != "contained"
        ]
        # Nobody but its holder wakes one that was let go: not if that was killed or is blind.
        is_lost = any(each.report is None or each.judge.is_disturbed for each in holders)
        return bool(holders) and not (process.is_detached and is_lost)

    def _sweep_the_rest(self) -> Sweeping:
        view = self._view("sidecar", 0) or self._view("next run", 0)
        assert view is not None
        sweeping = self.play.begin(view, StopPolicy(0.05, 0.4), self.cgroup)
        self.play.finish()
        return sweeping

    def _view(self, kind: str, who: int) -> View | None:
        """The view of a kind, when there is somebody to sweep from there."""
        cast = self.play.cast
        if kind == "launcher":
            return cast.as_launcher()
        if kind == "worker":
            return cast.as_worker_end(who)
        if kind == "stray":
            strays: list[Process] = self.play.members()
            return cast.as_stray(strays[who % len(strays)]) if strays else None
        if not cast.sidecar.is_dead:
            return cast.as_sidecar() if kind == "sidecar" else None
        if kind == "next run" and self.last_sign_of_life is not None:
            self.play.kernel.spend(0.03)
            return cast.as_next_run(self.last_sign_of_life)
        return None

    def _watched(self, go_on: object) -> None:
        """Remember that a promise was broken: the end need not be played then."""
        self.is_broken = True
        assert callable(go_on)
        go_on()
        self.is_broken = False


def machine_for(copies: Copies) -> type[KillOrder]:
    """The machine that plays against these copies."""
    return type("KillOrder", (KillOrder,), {"copies": copies})
