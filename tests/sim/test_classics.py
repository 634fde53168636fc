"""The classic counterexamples, in words: the trap is real, and the kill order stays out of it.

Each scene has a fixed script. The first tests show that the simple ways fail in this very
kernel: what nothing falls into is no trap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.sim.adversaries import HABITS, MOVES, reset_limits, scrub
from tests.sim.copies import Copies
from tests.sim.host import CALL
from tests.sim.kernel import Kernel, Process
from tests.sim.play import Play
from tests.sim.scenes import (
    AT_EACH_INSTANT,
    AT_ONCE,
    CGROUP,
    MOST_CALLS,
    POLITE,
    SCENES,
    perform,
)

WHOLE = Copies()


@pytest.mark.parametrize("name", [*SCENES, *AT_EACH_INSTANT])
def test_the_kill_order_gets_through(name: str) -> None:
    """All promises are kept in this scene."""
    perform(name, WHOLE)


def a_parent(kernel: Kernel) -> tuple[Process, Process]:
    parent = kernel.fork(kernel.init)
    assert parent is not None
    child = kernel.fork(parent)
    assert child is not None
    return parent, child


def test_killing_what_one_list_shows_leaks() -> None:
    """The list is true when it is made; what is born before the signals go out is not in it."""
    kernel = Kernel()
    parent, child = a_parent(kernel)
    listed = [parent, child]
    late = kernel.fork(child)
    for process in listed:
        kernel.signal(process, "SIGKILL")
    assert late is not None
    assert not late.is_dead


def test_asking_leaves_first_makes_a_supervisor_start_them_anew() -> None:
    """Each child that is ended is put back while its parent still runs."""
    kernel = Kernel()
    parent, child = a_parent(kernel)
    parent.habits = HABITS["restarts"]
    listed = [child, parent]
    for process in listed:
        kernel.signal(process, "SIGTERM")
        kernel.spend(2 * kernel.tick)
    survivors = [one for one in kernel.living() if one not in (kernel.init, *listed)]
    assert len(survivors) == 1


def test_a_pid_names_a_stranger_as_soon_as_it_is_reaped() -> None:
    """Signalling by number hits whoever has it now."""
    kernel = Kernel()
    parent, child = a_parent(kernel)
    kernel.exit(child)
    kernel.reap(parent)
    kernel.spend(0.02)
    stranger = kernel.fork(kernel.init, pid=child.pid)
    assert kernel.table[child.pid] is stranger
    assert stranger is not child


def test_rows_read_one_after_the_other_show_a_family_that_never_was() -> None:
    """A child's row names a parent's number; by the time that is read it is somebody else's."""
    kernel = Kernel()
    parent, child = a_parent(kernel)
    child_says = parent.pid
    kernel.exit(parent)
    kernel.spend(0.02)
    other = kernel.fork(kernel.init, pid=parent.pid)
    assert other is not None
    assert kernel.table[child_says] is other
    assert other.serial not in child.ancestors
    assert child.start < other.start, "this is how it can be told"


# -- who gets away, and who does not ----------------------------------------------------

Lose = Callable[[Kernel, Process], None]


def an_orphan(play: Play, *loses: Lose) -> Process:
    """A program whose parent is dead, and the launcher with it; it has lost some witnesses."""
    parent = play.kernel.fork(play.cast.workers[0])
    assert parent is not None
    play.kernel.exec(parent)
    orphan = play.kernel.fork(parent)
    assert orphan is not None
    for lose in loses:
        lose(play.kernel, orphan)
    play.kernel.exit(parent)
    play.kernel.exit(play.cast.launcher)
    return orphan


@pytest.fixture(params=[False, True], ids=["fork", "spawn"])
def play(request: pytest.FixtureRequest) -> Iterator[Play]:
    """With spawn, the sidecar is above the launcher."""
    play = Play(WHOLE, is_spawned=request.param)
    yield play
    play.close()


@pytest.mark.parametrize("loses", [(), (scrub,), (reset_limits,)], ids=["none", "mark", "tag"])
def test_one_witness_is_enough_when_the_launcher_is_dead(
    play: Play, loses: tuple[Lose, ...]
) -> None:
    """Tag or mark: either leads the sidecar to an orphan."""
    orphan = an_orphan(play, *loses)
    play.begin(play.cast.as_sidecar(), AT_ONCE)
    play.finish()
    assert orphan.is_dead


def test_without_witnesses_only_a_sidecar_above_finds_it(play: Play) -> None:
    """Parent, launcher, tag and mark are lost: beside it, nothing tells it from a stranger."""
    orphan = an_orphan(play, scrub, reset_limits)
    sweeping = play.begin(play.cast.as_sidecar(), AT_ONCE)
    play.finish()
    assert orphan.is_dead is play.cast.is_spawned
    assert sweeping.judge.is_lost(orphan) is not play.cast.is_spawned


def test_a_cgroup_is_a_witness_as_well(play: Play) -> None:
    """Whatever it has lost, it is inside."""
    for worker in play.cast.workers:
        worker.cgroup = CGROUP
    orphan = an_orphan(play, scrub, reset_limits)
    play.begin(play.cast.as_sidecar(), AT_ONCE, CGROUP)
    play.finish()
    assert orphan.is_dead


def test_a_cgroup_holds_who_is_as_quick_as_a_look() -> None:
    """It forks and exits at each reading of a sweeper that is beside it."""
    play = Play(WHOLE, tick=CALL)
    try:
        for worker in play.cast.workers:
            worker.cgroup = CGROUP
        an_orphan(play).habits = HABITS["hops"]
        sweeping = play.begin(play.cast.as_sidecar(), AT_ONCE, CGROUP)
        play.finish()
        assert not sweeping.judge.has_missed
        assert not [process for process in play.kernel.living() if process.habits]
    finally:
        play.close()


@pytest.mark.parametrize("kind", ["launcher", "sidecar"])
@pytest.mark.parametrize("move", MOVES)
def test_every_promise_is_kept_whenever_it_happens(move: str, kind: str) -> None:
    """Each move at calls all over a sweep: between look and signal, and within a look."""
    for number, instant in enumerate(range(0, MOST_CALLS, 5)):
        play = Play(WHOLE)
        try:
            first, second = play.cast.workers
            children = [play.kernel.fork(each) for each in (first, second)]
            assert all(children)
            is_launcher = kind == "launcher"
            view = play.cast.as_launcher() if is_launcher else play.cast.as_sidecar()
            play.begin(view, POLITE)
            play.finish([(instant, move, number)])
        finally:
            play.close()
