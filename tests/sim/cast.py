"""The processes of a play: an owner with its sidecar, launcher and workers, and bystanders.

And the *views*: from where, and with which target, safepool sweeps them. Each view says
what it aims at twice: as the ``Target`` that safepool would use, and as the truth by birth
(``means``), which the promises are judged by.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from safepool.core.identity import Incarnation, Snapshot
from safepool.core.lineage import extend, helper_tag, is_mark_of, is_tag_of_run, plain_tag, tag_of
from safepool.core.planner import Target
from tests.sim.adversaries import OTHER_RUN, RUN
from tests.sim.host import SimHost
from tests.sim.kernel import Kernel, Process

UNLIMITED = -1


def name_of(process: Process) -> Incarnation:
    return Incarnation(process.pid, process.start)


@dataclass
class View:
    """One sweep to be: who sweeps, what it asks for, and whom that means by birth.

    ``is_above``: the sweeper is a subreaper above all that it means, so nothing can get away
    from it; with ``is_walk``, where a look follows the lists of children, not even by being
    quick. From beside, ``bears_witness`` tells who shows where it comes from.
    """

    me: Process
    target: Target
    look: Callable[[SimHost], Snapshot]
    means: Callable[[Process], bool]
    bears_witness: Callable[[Process], bool]
    is_above: bool
    is_walk: bool = False


class Cast:
    """Everybody on the stage. With ``is_spawned`` the sidecar is above the launcher."""

    def __init__(self, kernel: Kernel, *, is_spawned: bool, workers: int = 2) -> None:
        self.kernel = kernel
        self.is_spawned = is_spawned
        shell = self._start(kernel.init)
        self.bystanders = [self._start(shell) for _ in range(2)]
        # A terminal server that got the marks of an earlier process with its environment.
        self.bystanders[0].tag, self.bystanders[0].mark = tag_of(RUN, 1), extend(None, RUN, 1)
        self.bystanders[1].tag = tag_of(OTHER_RUN, 1)
        self.next_sidecar = self._start(shell)
        # Its child has the lower number, so a look shows the child first.
        family = self._start(kernel.init, pid=40)
        self.bystanders += [family, self._start(family, pid=30)]
        self.owner = self._start(shell)
        self.sidecar = self._start(self.owner)
        self.sidecar.is_subreaper = True
        self.began = self.sidecar.start
        self.launcher = self._start(self.sidecar if is_spawned else self.owner)
        self.launcher.is_subreaper = True
        for each in (self.sidecar, self.launcher):
            each.tag = helper_tag(UNLIMITED, RUN)
        self.workers = [self._start_worker(number) for number in range(1, workers + 1)]

    def offspring(self, process: Process) -> bool:
        """Was it started by a worker, or is it one? Whatever has become of it since."""
        return any(self.comes_from(process, worker) for worker in self.workers)

    @staticmethod
    def comes_from(process: Process, ancestor: Process) -> bool:
        return process is ancestor or ancestor.serial in process.ancestors

    def is_of_the_run(self, process: Process) -> bool:
        return self.offspring(process) or process in (self.launcher, self.sidecar)

    # -- views ---------------------------------------------------------------------------

    def as_launcher(self) -> View:
        """The launcher ends all that is below it: its owner is gone, or closes the pool."""
        roots = frozenset(name_of(worker) for worker in self.workers if not worker.is_dead)
        return View(
            self.launcher,
            Target(roots=roots, subtree_of=name_of(self.launcher)),
            lambda host: host.look_subtree(self.launcher.pid, RUN),
            self.offspring,
            bears_witness=lambda process: True,
            is_above=True,
            is_walk=True,
        )

    def as_worker_end(self, number: int) -> View:
        """The launcher ends the tree of one worker, by parentage, tag and mark."""
        worker = self.workers[number % len(self.workers)]
        number = self.workers.index(worker) + 1
        target = Target(
            roots=frozenset({name_of(worker)}),
            run_id=RUN,
            workers=frozenset({number}),
            born_from=worker.start,
        )
        return View(
            self.launcher,
            target,
            lambda host: host.look_subtree(self.launcher.pid, RUN),
            lambda process: self.comes_from(process, worker),
            # Of those further down such a look does not read the mark.
            bears_witness=lambda process: bears(
                process, number, is_mark_read=process.parent is self.launcher
            ),
            is_above=False,
        )

    def as_sidecar(self) -> View:
        """The sidecar ends the run, launcher included, wherever its processes are."""
        target = Target(
            roots=frozenset({name_of(self.launcher)}),
            subtree_of=name_of(self.sidecar),
            run_id=RUN,
            born_from=self.began,
            spare=frozenset({name_of(self.sidecar), name_of(self.owner)}),
        )
        return View(
            self.sidecar,
            target,
            lambda host: host.look_all(tags=True),
            self.is_of_the_run,
            bears_witness=bears,
            is_above=self.is_spawned,
        )

    def as_stray(self, stray: Process) -> View:
        """The command line, run from inside of what it is to end: it spares itself alone."""
        stray.habits = ()
        target = Target(
            run_id=RUN,
            born_from=self.began,
            spare=frozenset({name_of(self.sidecar), name_of(self.owner)}),
        )
        return View(
            stray,
            target,
            lambda host: host.look_all(tags=True),
            self.is_of_the_run,
            bears_witness=bears,
            is_above=False,
        )

    def as_next_run(self, ended: int) -> View:
        """The sidecar of a later run ends what this one, all dead at tick ``ended``, has left.

        What the run's processes started between its end and this sweep may be somebody
        else's by now: it is left alone, with all that it starts.
        """
        sweeper, begins = self.next_sidecar, self.kernel.ticks()

        def is_of_another(process: Process) -> bool:
            # Adopted by a subreaper of the run, it cannot be told from a child of that.
            if process.start >= begins and any(map(self.is_of_the_run, process.heirs)):
                return False
            line = [self.kernel.everybody[serial] for serial in process.ancestors]
            return any(
                ended < each.start < begins and self.is_of_the_run(each)
                for each in (*line, process)
            )

        roots = (self.owner, self.sidecar, self.launcher, *self.workers)
        target = Target(
            roots=frozenset(map(name_of, roots[1:])),
            run_id=RUN,
            born_from=self.began,
            born_until=ended,
            swept_from=begins,
            spare=frozenset({name_of(sweeper)}),
        )
        return View(
            sweeper,
            target,
            lambda host: host.look_all(tags=True),
            lambda process: self.is_of_the_run(process) and not is_of_another(process),
            bears_witness=lambda process: process.start <= ended and bears(process),
            is_above=False,
        )

    # -- entrances -----------------------------------------------------------------------

    def start_stranger(self, pid: int | None = None) -> Process | None:
        """Somebody else's process begins, on a number of choice if that is free."""
        stranger = self.kernel.fork(self.kernel.init, pid)
        if stranger is not None:
            self.bystanders.append(stranger)
        return stranger

    def _start(self, parent: Process, pid: int | None = None) -> Process:
        self.kernel.spend(0.02)
        child = self.kernel.fork(parent, pid)
        assert child is not None
        return child

    def _start_worker(self, number: int) -> Process:
        worker = self._start(self.launcher)
        worker.tag, worker.environment = tag_of(RUN, number), extend(None, RUN, number)
        worker.dies_with_parent = True
        return worker


def bears(process: Process, number: int | None = None, *, is_mark_read: bool = True) -> bool:
    """Does it show the run's tag or mark (and the worker's number), as far as can be read?"""
    tag = process.tag
    if tag is not None and is_tag_of_run(tag, RUN):
        is_of_worker = number is None or plain_tag(tag) == tag_of(RUN, number)
        if is_of_worker:
            return True
    # What sleeps uninterruptibly is not asked for its environment.
    is_mark_read = is_mark_read and not process.was_wedged
    return is_mark_read and is_mark_of(process.mark, RUN, number)
