"""What processes of the simulated kernel do to get away, and what the world does to a sweep.

*Habits* are done again at every tick and handed down to children. *Moves* happen once, to
one process, at an instant that the test chooses. Each is fair: a real process can do it
without help. None of them asks what the sweep does.
"""

from __future__ import annotations

from collections.abc import Callable

from safepool.core.lineage import detached_tag, extend, tag_of
from tests.sim.kernel import Habit, Kernel, Process

RUN = "0123456789abcdef0123456789abcdef"
OTHER_RUN = "fedcba9876543210fedcba9876543210"

Move = Callable[[Kernel, Process], None]

# -- habits ----------------------------------------------------------------------------


def forks(kernel: Kernel, me: Process) -> None:
    """A fork bomb: one more child at each tick, and each child does the same."""
    kernel.fork(me)


def hops(kernel: Kernel, me: Process) -> None:
    """Never the same pid twice: fork, and leave the rest to the child."""
    if kernel.fork(me) is not None:
        kernel.exit(me)


def restarts(kernel: Kernel, me: Process) -> None:
    """A supervisor: puts back the child that it has lost."""
    if all(child.is_dead for child in kernel.children(me)):
        child = kernel.fork(me)
        if child is not None:
            child.habits = ()


def drifts(kernel: Kernel, me: Process) -> None:
    """Changes its session for ever, as far as one that leads none can."""
    kernel.setsid(me)


HABITS: dict[str, tuple[Habit, ...]] = {
    "sits": (),
    "forks": (forks,),
    "hops": (hops,),
    "restarts": (restarts,),
    "drifts": (drifts,),
}

MULTIPLYING = frozenset({forks, hops, restarts})
"""Who has one of these may be alive at the deadline: there is always one more."""

# -- moves -----------------------------------------------------------------------------


def fork(kernel: Kernel, process: Process) -> None:
    kernel.fork(process)


def fork_with_the_pid_just_freed(kernel: Kernel, process: Process) -> None:
    """A member gets the number of one that was reaped a moment ago."""
    if kernel.freed:
        kernel.fork(process, pid=kernel.freed[-1])


def leave(kernel: Kernel, process: Process) -> None:
    """Exit, without a word to anybody."""
    if kernel.can_run(process):
        kernel.exit(process)


def daemonize(kernel: Kernel, process: Process) -> None:
    """Double fork, a session of its own, another program with an empty environment."""
    child = kernel.fork(process)
    daemon = None if child is None else kernel.fork(child)
    if child is None or daemon is None:
        return
    kernel.exit(child)
    kernel.setsid(daemon)
    daemon.environment = None
    kernel.exec(daemon)


def run_a_program(kernel: Kernel, process: Process) -> None:
    """A subprocess, with the environment handed down."""
    child = kernel.fork(process)
    if child is not None:
        kernel.exec(child)


def scrub(kernel: Kernel, process: Process) -> None:
    """Exec with an empty environment: the mark is gone, the tag stays."""
    if kernel.can_run(process):
        process.environment = None
        kernel.exec(process)


def reset_limits(kernel: Kernel, process: Process) -> None:
    """Set RLIMIT_RTTIME, as real-time audio programs do: the tag is gone."""
    # One that was let go keeps its tag: losing it would be to come back on purpose.
    if kernel.can_run(process) and not process.is_detached:
        process.tag = None


def join_another_run(kernel: Kernel, process: Process) -> None:
    """Bear the tag and the mark of a run that is not this one."""
    if kernel.can_run(process) and not process.is_detached:
        process.tag = tag_of(OTHER_RUN, 1)
        process.environment = extend(None, OTHER_RUN, 1)
        kernel.exec(process)


def change_session(kernel: Kernel, process: Process) -> None:
    if kernel.can_run(process):
        kernel.setsid(process)


def stop(kernel: Kernel, process: Process) -> None:
    """A debugger or Ctrl-Z: stopped by somebody else."""
    kernel.signal(process, "SIGSTOP")


def leave_the_cgroup(kernel: Kernel, process: Process) -> None:
    """Write itself into another one, as whoever starts it as a service of its own would."""
    if kernel.can_run(process):
        process.cgroup, process.left_at = "/", kernel.clock


def wedge(kernel: Kernel, process: Process) -> None:
    """A dead network drive: uninterruptible sleep."""
    if kernel.can_run(process):
        kernel.wedge(process)


def unwedge(kernel: Kernel, process: Process) -> None:
    if process.is_wedged:
        kernel.unwedge(process)


def become_root(kernel: Kernel, process: Process) -> None:
    """Exec a set-user-ID program: signals are refused, PDEATHSIG is cleared."""
    if kernel.can_run(process):
        process.is_forbidden = process.was_forbidden = True
        process.dies_with_parent = False


def adopt(kernel: Kernel, process: Process) -> None:
    """Become a subreaper, as an init system in a container or an inner launcher is."""
    if kernel.can_run(process):
        process.is_subreaper = True


def let_go(kernel: Kernel, process: Process) -> None:
    """Start a detached process: it has the tag before it runs its first instruction."""
    child = kernel.fork(process)
    if child is not None:
        child.is_detached, child.tag = True, detached_tag(RUN)
        child.habits = ()
        kernel.setsid(child)


def be_let_go(kernel: Kernel, process: Process) -> None:
    """Be spared by the launcher, with all below: it sets their tags from outside."""
    for child in kernel.children(process):
        be_let_go(kernel, child)
    if not process.is_dead and not process.is_detached:
        process.is_detached, process.tag = True, detached_tag(RUN)
        process.detached_at = kernel.clock


def drop_privileges(kernel: Kernel, process: Process) -> None:
    """What a server does that began as root: signals reach it again."""
    if kernel.can_run(process):
        process.is_forbidden = False


def be_replaced(kernel: Kernel, process: Process) -> None:
    """Exit and be reaped, and a stranger gets the number."""
    parent = process.parent
    if parent is not None and kernel.can_run(process) and kernel.can_run(parent):
        kernel.exit(process)
        kernel.reap(parent)
        kernel.fork(kernel.init, pid=process.pid)


def replace_a_stranger(kernel: Kernel, process: Process) -> None:
    """Fork, with the number of a stranger who has left children behind."""
    # An orphan may be sweeping: who is in the middle of a system call does not exit.
    orphans = [one for one in kernel.children(kernel.init) if one is not kernel.caller]
    parents = [one for one in orphans if kernel.children(one) and not one.is_subreaper]
    if parents and kernel.can_run(process):
        stranger = max(parents, key=lambda parent: parent.pid)
        kernel.exit(stranger)
        kernel.fork(process, pid=stranger.pid)


def be_killed(kernel: Kernel, process: Process) -> None:
    """The OOM killer."""
    kernel.signal(process, "SIGKILL", by_kernel=True)


MOVES: dict[str, Move] = {
    move.__name__: move
    for move in (
        fork, fork_with_the_pid_just_freed, leave, daemonize, run_a_program, scrub, reset_limits,
        join_another_run, change_session, stop, wedge, unwedge, become_root, drop_privileges,
        adopt, leave_the_cgroup, let_go, be_let_go, be_replaced, replace_a_stranger, be_killed,
    )
}  # fmt: skip
