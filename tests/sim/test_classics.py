"""The classic counterexamples, in words: the trap is real, and the kill order stays out of it.

Each scene has a fixed script. The first tests show that the simple ways fail in this very
kernel: what nothing falls into is no trap.
"""

from __future__ import annotations

import pytest

from tests.sim.adversaries import HABITS
from tests.sim.copies import Copies
from tests.sim.kernel import Kernel, Process
from tests.sim.scenes import AT_EACH_INSTANT, SCENES, perform

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
