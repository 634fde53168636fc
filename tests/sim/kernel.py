"""A small kernel: processes, their deaths, signals, sessions, cgroups, and a clock of its own.

It does what Linux does, as far as a sweep can notice:

* pids come from a tiny range, in a circle, and are free again when a process is *reaped*;
* an orphan goes to its nearest living ancestor that is a subreaper, else to pid 1;
* a signal waits for a process that is stopped, frozen or in uninterruptible sleep;
* fork hands down tag, environment, session, cgroup and habits; exec shows the environment.

It also keeps the truth that no process can change: by whom each was started, at birth
(``ancestors``). What a sweep may touch is judged by that, never by what a look shows.

Time passes with ``spend``; at each tick everybody who can run does what it is wont to.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

PIDS = range(2, 49)
"""So few that numbers are handed out again within one example."""

START_TICKS_PER_SECOND = 100
MOST_TICKS_AT_ONCE = 25

Habit = Callable[["Kernel", "Process"], None]


@dataclass(eq=False)
class Process:
    """One process, dead ones included. ``serial`` names it for ever; its pid does not."""

    serial: int
    pid: int
    start: int
    born_at: float
    parent: Process | None
    ancestors: frozenset[int]
    group: int = 0
    session: int = 0
    cgroup: str = "/"
    left_at: float = 0.0
    tag: int | None = None
    environment: str | None = None
    """The mark that it hands to what it execs."""
    mark: str | None = None
    """The mark that /proc shows: that of the last exec."""

    ignores_term: bool = False
    drains_for: float = 0.0
    habits: tuple[Habit, ...] = ()
    is_subreaper: bool = False
    is_careless: bool = False
    is_detached: bool = False
    detached_at: float = 0.0
    is_forbidden: bool = False
    was_forbidden: bool = False
    dies_with_parent: bool = False

    is_stopped: bool = False
    is_wedged: bool = False
    was_wedged: bool = False
    is_dead: bool = False
    is_reaped: bool = False
    died_at: float = math.inf
    moved_at: float = 0.0
    heirs: list[Process] = field(default_factory=list)
    """Who has adopted it, in turn."""
    leaves_at: float | None = None
    pending: set[str] = field(default_factory=set)
    on_death: list[Callable[[], None]] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"<{self.serial}: pid {self.pid} of tick {self.start}, {self.state}>"

    @property
    def state(self) -> str:
        """The letter that /proc shows."""
        if self.is_dead:
            return "Z"
        return "D" if self.is_wedged else "T" if self.is_stopped else "S"


class Kernel:
    """The table and the clock. ``tick`` is the time in which a process does one thing."""

    def __init__(self, tick: float = 0.001) -> None:
        self.clock = 100.0
        self.tick = tick
        self.everybody: list[Process] = []
        self.names: dict[tuple[int, int], Process] = {}
        self.table: dict[int, Process] = {}
        self.frozen: set[str] = set()
        self.freed: list[int] = []
        self.zombies = 0
        self.caller: Process | None = None
        """Who makes a system call just now: it has one thread, so it does nothing else."""
        self._next_tick = self.clock + tick
        self._last_pid = PIDS[0] - 1
        self._last_start: dict[int, int] = {}
        self.init = self._enter(1, None, frozenset())

    # -- what processes do ---------------------------------------------------------------

    def fork(self, parent: Process, pid: int | None = None) -> Process | None:
        """Return a child of ``parent``, or None when it is refused (EAGAIN).

        ``pid`` asks for one number, to hand out again what was freed just now.
        """
        if len(self.table) > len(PIDS) or not self.can_run(parent):
            return None
        start = self.ticks()
        free = [n for n in self._circle(pid) if n not in self.table]
        # Even the smallest pid_max takes longer than a tick of 10 ms to be used up.
        free = [n for n in free if self._last_start.get(n) != start]
        if not free:
            return None
        if pid is None:
            self._last_pid = free[0]
        child = self._enter(free[0], parent, parent.ancestors | {parent.serial})
        for name in ("group", "session", "cgroup", "tag", "environment", "mark", "habits",
                     "ignores_term", "drains_for", "is_careless", "is_detached",
                     "detached_at", "is_forbidden", "was_forbidden"):  # fmt: skip
            setattr(child, name, getattr(parent, name))
        return child

    def exec(self, process: Process) -> None:
        """Run another program: its environment can be seen, its handlers are gone."""
        process.mark = process.environment
        process.drains_for = 0.0

    def setsid(self, process: Process) -> None:
        """Become the leader of a session and a group of its own."""
        process.session = process.group = process.pid

    def exit(self, process: Process) -> None:
        """Die: a zombie until it is reaped; children go to the next subreaper above."""
        if process.is_dead:
            return
        process.is_dead, process.is_stopped, process.is_wedged = True, False, False
        process.died_at = self.clock
        self.zombies += 1
        orphans = self.children(process)
        heir = self._subreaper_above(process)
        for orphan in orphans:
            orphan.parent, orphan.moved_at = heir, self.clock
            orphan.heirs.append(heir)
        for tell in process.on_death:
            tell()
        for orphan in orphans:
            if orphan.dies_with_parent and not orphan.is_dead:
                orphan.dies_with_parent = False
                self.signal(orphan, "SIGKILL", by_kernel=True)
        if process.parent is self.init:
            self.reap(self.init)

    def reap(self, parent: Process) -> None:
        """Wait for all dead children: only now their pids are free."""
        for child in self.children(parent):
            if child.is_dead:
                child.is_reaped = True
                self.zombies -= 1
                del self.table[child.pid]
                self.freed.append(child.pid)

    def wedge(self, process: Process) -> None:
        """Enter uninterruptible sleep."""
        process.is_wedged = process.was_wedged = True

    def unwedge(self, process: Process) -> None:
        """The call returns, and what was sent meanwhile takes effect."""
        process.is_wedged = False
        self._take(process)

    # -- signals and cgroups -------------------------------------------------------------

    def signal(self, process: Process, sig: str, *, by_kernel: bool = False) -> str:
        """Send ``sig``; the answer is "sent", "denied" or "gone"."""
        if process.is_reaped:
            return "gone"
        if process.is_forbidden and not by_kernel:
            return "denied"
        if not process.is_dead:
            opposite = {"SIGSTOP": "SIGCONT", "SIGCONT": "SIGSTOP"}.get(sig)
            process.pending.discard(opposite or "")
            process.pending.add(sig)
            if sig == "SIGCONT":
                process.is_stopped = False
            self._take(process)
        return "sent"

    def freeze(self, cgroup: str) -> None:
        """Nobody in the group runs any more; only SIGKILL reaches them (cgroup.freeze)."""
        self.frozen.add(cgroup)

    def thaw(self, cgroup: str) -> None:
        """Let them run, and take what has come."""
        self.frozen.discard(cgroup)
        for process in self.living():
            if process.cgroup == cgroup:
                self._take(process)

    def kill_cgroup(self, cgroup: str) -> None:
        """SIGKILL to all in the group, in one step (cgroup.kill)."""
        for process in self.living():
            if process.cgroup == cgroup:
                self.signal(process, "SIGKILL", by_kernel=True)

    def _take(self, process: Process) -> None:
        """Let pending signals take effect, as far as the process can be reached."""
        pending = process.pending
        if process.is_dead or process.is_wedged:
            return
        if "SIGKILL" in pending:
            self.exit(process)
            return
        pending.discard("SIGCONT")
        if process.cgroup in self.frozen:
            return
        if "SIGSTOP" in pending:
            pending.discard("SIGSTOP")
            process.is_stopped = True
        if "SIGTERM" in pending and not process.is_stopped:
            pending.discard("SIGTERM")
            if process.drains_for:
                process.leaves_at = process.leaves_at or self.clock + process.drains_for
            elif not process.ignores_term:
                self.exit(process)

    # -- time ----------------------------------------------------------------------------

    def spend(self, seconds: float) -> None:
        """Let time pass. A long wait has few, long ticks: nothing happens in most of them."""
        until = self.clock + seconds
        length = max(self.tick, seconds / MOST_TICKS_AT_ONCE)
        while self._next_tick <= until:
            self.clock = max(self.clock, self._next_tick)
            self._act()
            self._next_tick = self.clock + length
        self.clock = until
        self._next_tick = min(self._next_tick, until + self.tick)

    def _act(self) -> None:
        """Everybody who can run does one thing; parents reap."""
        for process in list(self.table.values()):
            if not self.can_run(process) or process is self.caller:
                continue
            if process.leaves_at is not None and process.leaves_at <= self.clock:
                self.exit(process)
                continue
            if self.zombies and not process.is_careless:
                self.reap(process)
            for habit in process.habits:
                if self.can_run(process):
                    habit(self, process)

    def can_run(self, process: Process) -> bool:
        """Could it execute an instruction now?"""
        is_still = process.is_dead or process.is_stopped or process.is_wedged
        return not is_still and process.cgroup not in self.frozen

    def ticks(self) -> int:
        """Now, in the unit of start times."""
        return int(self.clock * START_TICKS_PER_SECOND)

    # -- the table -----------------------------------------------------------------------

    def living(self) -> list[Process]:
        """All that are alive, pid 1 included."""
        return [process for process in self.table.values() if not process.is_dead]

    def children(self, parent: Process) -> list[Process]:
        """The children of ``parent``, zombies as well."""
        return [process for process in self.table.values() if process.parent is parent]

    def _enter(self, pid: int, parent: Process | None, ancestors: frozenset[int]) -> Process:
        start = self.ticks()
        process = Process(len(self.everybody), pid, start, self.clock, parent, ancestors)
        self.everybody.append(process)
        self.table[pid] = self.names[pid, start] = process
        self._last_start[pid] = start
        return process

    def _circle(self, pid: int | None) -> list[int]:
        """The numbers in the order in which they are handed out."""
        if pid is not None:
            return [pid]
        after = self._last_pid + 1
        return [*range(after, PIDS.stop), *range(PIDS.start, min(after, PIDS.stop))]

    def _subreaper_above(self, process: Process) -> Process:
        above = process.parent
        while above is not None and (above.is_dead or not above.is_subreaper):
            above = above.parent
        return above or self.init
