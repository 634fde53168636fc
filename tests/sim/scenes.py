"""The classic traps of ending process trees, each a short play with a fixed script.

A scene plays with the copies that it is given and raises ``PromiseError`` when a promise is
broken. The code as it is gets through all of them; faults are tried on them first. Where a
trap is a matter of one instant, the scene is played once for each instant of the look.
"""

from __future__ import annotations

from collections.abc import Callable

from safepool.core.policy import StopPolicy
from tests.sim.adversaries import HABITS
from tests.sim.cast import View
from tests.sim.copies import Copies
from tests.sim.kernel import Kernel, Process
from tests.sim.play import Play
from tests.sim.promises import PromiseError

AT_ONCE = StopPolicy(0.0, 0.4)
POLITE = StopPolicy(0.05, 0.4)
CGROUP = "/safepool"
MOST_CALLS = 60
"""More than the calls of one look and of the opening of handles after it."""


def one_look_is_not_enough(play: Play) -> None:
    """A process forks and exits between list and row, all through the first look: it sees only
    the dead. A sweep that trusts one look leaks it."""
    runner, other = play.cast.workers
    play.kernel.signal(other, "SIGKILL")
    line = [runner]
    sweeping = play.begin(play.cast.as_launcher(), AT_ONCE)

    def hop(pid: int) -> None:
        if sweeping.judge.looks == 0 and pid == line[-1].pid:
            line.append(_fork(play.kernel, line[-1]))
            play.kernel.exit(line[-2])

    sweeping.host.before_row = hop
    _end(play, *line)


def a_supervisor_puts_back_what_it_loses(play: Play) -> None:
    """Asked from the leaves up, it would start its child anew before it is asked itself."""
    supervisor = play.cast.workers[0]
    child = _fork(play.kernel, supervisor)
    supervisor.habits = HABITS["restarts"]
    play.begin(play.cast.as_launcher(), POLITE)
    _end(play, supervisor, child, *play.kernel.children(supervisor))


def a_pid_is_handed_out_again(play: Play, instant: int) -> None:
    """A member is reaped between look and signal, and a stranger gets its number."""
    play.begin(play.cast.as_launcher(), AT_ONCE)
    child = _fork(play.kernel, play.cast.workers[0])
    play.finish([(instant, "be_replaced", play.members().index(child))])
    last = [one for one in play.kernel.everybody if one.pid == child.pid][-1]
    _check(play, last is child or not last.is_dead, "nobody else is ended")


def a_torn_look_makes_a_family(play: Play, instant: int) -> None:
    """A stranger's child is read, then the stranger exits and a member gets its number: the
    look shows the child below the member."""
    play.begin(play.cast.as_sidecar(), AT_ONCE)
    play.finish([(instant, "replace_a_stranger", 0)])
    _check(play, not play.cast.bystanders[-1].is_dead, "nobody else is ended")


def a_zombie_is_dead(play: Play) -> None:
    """The parent reaps nobody: what has ended is still in the table, and is not stuck."""
    play.cast.launcher.is_careless = True
    play.begin(play.cast.as_launcher(), POLITE)
    _end(play, *play.cast.workers)


def a_refusal_is_told(play: Play) -> None:
    """A set-user-ID program takes no signal: the report says so."""
    play.cast.workers[0].is_forbidden = play.cast.workers[0].was_forbidden = True
    play.begin(play.cast.as_launcher(), POLITE)
    _end(play, play.cast.workers[1])


def one_that_refuses_does_not_keep_the_rest_alive(play: Play) -> None:
    """It is somebody new at every look and cannot be held: the others are killed in time."""
    root, other = play.cast.workers
    root.is_forbidden = root.was_forbidden = True
    line = [root]
    sweeping = play.begin(play.cast.as_launcher(), AT_ONCE)

    def hop() -> None:
        """Once between two looks."""
        if len(line) - 1 <= sweeping.judge.looks:
            child = play.kernel.fork(line[-1])
            if child is not None:
                play.kernel.exit(line[-1])
                line.append(child)
                play.kernel.reap(play.cast.launcher)

    sweeping.host.meanwhile = hop
    _end(play, other)


def newcomers_do_not_put_the_end_off(play: Play) -> None:
    """Who refuses signals forks every 50 ms: the time is that of the sweep, not of each."""
    root = play.cast.workers[0]
    root.is_forbidden = root.was_forbidden = True
    born = [root]

    def fork_now_and_then(kernel: Kernel, me: Process) -> None:
        is_time = me is root and kernel.clock - born[-1].born_at > 0.05
        child = kernel.fork(me) if is_time else None
        if child is not None:
            born.append(child)

    root.habits = (fork_now_and_then,)
    play.begin(play.cast.as_launcher(), AT_ONCE)
    _end(play, play.cast.workers[1])


def a_late_child_is_killed_too(play: Play) -> None:
    """It is born when all others have got their SIGKILL, by one that refused it."""
    root = play.cast.workers[0]
    root.is_forbidden = root.was_forbidden = True
    sweeping = play.begin(play.cast.as_launcher(), AT_ONCE)
    play.run(0.1)
    child = _fork(play.kernel, root)
    child.is_forbidden = child.was_forbidden = False
    _end(play, child)
    _check(play, child.died_at < sweeping.judge.ends - 0.1, "what can be ended is ended")


def deaths_are_no_look(play: Play) -> None:
    """Descriptors run out; all known members die, and one of them has left a child."""
    root = play.cast.workers[0]
    sweeping = play.begin(play.cast.as_launcher(), StopPolicy(0.4, 0.4))
    root.ignores_term = True
    play.run(0.02)
    sweeping.host.is_starved = True
    child = _fork(play.kernel, root)
    for worker in play.cast.workers:
        play.kernel.signal(worker, "SIGKILL", by_kernel=True)
    play.run(0.1)
    sweeping.host.is_starved = False
    _end(play, child)


def a_sweep_that_saw_nothing_in_time_still_kills(play: Play) -> None:
    """Descriptors run out before the first look, until after the deadline."""
    sweeping = play.begin(play.cast.as_launcher(), StopPolicy(0.0, 0.1))
    sweeping.host.is_starved = True
    play.run(0.3)
    sweeping.host.is_starved = False
    _end(play, *play.cast.workers)


def a_sweep_that_never_sees_ends(play: Play) -> None:
    """Descriptors run out for good: it gives up after a while, signals nobody, and does not
    call that a clean end."""
    sweeping = play.begin(play.cast.as_launcher(), StopPolicy(0.0, 0.1))
    sweeping.host.is_starved = True
    _end(play)
    _check(play, not sweeping.judge.sent, "only verified incarnations")


def the_next_sweep_lets_nobody_stay_stopped(play: Play) -> None:
    """A sweeper is killed while all are held: they can do nothing until the next one comes."""
    view = play.cast.as_sidecar()
    me, workers = play.cast.launcher, play.cast.workers
    play.begin(play.cast.as_launcher(), AT_ONCE)
    _until(play, lambda: all(worker.is_stopped for worker in workers))
    play.kernel.signal(me, "SIGKILL", by_kernel=True)
    play.begin(view, POLITE)
    _end(play, *workers)


def who_was_seen_once_is_not_forgotten(play: Play) -> None:
    """It bears nothing and was found by its parents; then all of these die."""
    child = _fork(play.kernel, play.cast.workers[0])
    child.tag = child.environment = None
    child.ignores_term = True
    sweeping = play.begin(play.cast.as_sidecar(), POLITE)
    _until(play, lambda: sweeping.judge.looks > 0)
    for parent in (play.cast.workers[0], play.cast.launcher):
        play.kernel.signal(parent, "SIGKILL", by_kernel=True)
    _end(play, child)


def what_came_later_is_somebody_elses(play: Play) -> None:
    """All guards were killed long ago; what the run has left has started something since."""
    cast, kernel = play.cast, play.kernel
    child = _fork(kernel, cast.workers[0])
    ended = kernel.ticks()
    for guard in (cast.owner, cast.sidecar, cast.launcher):
        kernel.signal(guard, "SIGKILL", by_kernel=True)
    kernel.spend(0.05)
    late = _fork(kernel, child)
    kernel.spend(0.05)
    play.begin(cast.as_next_run(ended), AT_ONCE)
    _end(play, child)
    _check(play, not late.is_dead, "nobody else is ended")


def two_sweep_at_once(play: Play) -> None:
    """Launcher and sidecar end the same workers, one of them forks all the time."""
    play.cast.workers[0].habits = HABITS["forks"]
    views: list[View] = [play.cast.as_launcher(), play.cast.as_sidecar()]
    for view in views:
        play.begin(view, POLITE)
    _end(play, *play.cast.workers)


def _contained(play: Play) -> Process:
    """Put the workers into a cgroup; return a child that one of them has there."""
    for worker in play.cast.workers:
        worker.cgroup = CGROUP
    return _fork(play.kernel, play.cast.workers[0])


def a_container_ends_what_forks_all_the_time(play: Play) -> None:
    """It is frozen and killed as a whole, and nobody who comes later finds it frozen."""
    child = _contained(play)
    play.cast.workers[0].habits = child.habits = HABITS["forks"]
    play.begin(play.cast.as_launcher(), AT_ONCE, CGROUP)
    _end(play, *play.cast.workers, child)
    _check(play, CGROUP not in play.kernel.frozen, "nothing stays stopped")


def a_container_makes_signals_superfluous(play: Play) -> None:
    """Without a grace, members who do nothing are frozen and killed without one."""
    child = _contained(play)
    sweeping = play.begin(play.cast.as_launcher(), AT_ONCE, CGROUP)
    _end(play, *play.cast.workers, child)
    _check(play, not sweeping.judge.signalled, "what is contained needs no signal")


def a_detached_process_lives_in_the_container(play: Play, instant: int) -> None:
    """From some instant on, somebody is in it who was let go: he is not frozen for long, and
    not killed with the rest."""
    child = _contained(play)
    play.begin(play.cast.as_launcher(), POLITE, CGROUP)
    play.finish([(instant, "let_go", play.members().index(child))])
    _end(play, *play.cast.workers, child)
    let_go = [one for one in play.kernel.everybody if one.is_detached]
    _check(play, all(not one.is_dead for one in let_go), "a detached process is left alone")
    _check(play, CGROUP not in play.kernel.frozen, "nothing stays stopped")


def a_stranger_lives_in_the_container(play: Play) -> None:
    """Somebody has moved a process of his own into it: the container is not used."""
    child = _contained(play)
    play.cast.bystanders[1].cgroup = CGROUP
    play.begin(play.cast.as_launcher(), AT_ONCE, CGROUP)
    _end(play, *play.cast.workers, child)
    _check(play, not play.cast.bystanders[1].is_dead, "nobody else is ended")


def a_stranger_is_moved_in_while_all_are_held(play: Play) -> None:
    """He is thawed at once, and the others are killed one by one."""
    child = _contained(play)
    play.begin(play.cast.as_launcher(), AT_ONCE, CGROUP)
    _until(play, lambda: CGROUP in play.kernel.frozen)
    stranger = play.cast.bystanders[1]
    stranger.cgroup = CGROUP
    _end(play, *play.cast.workers, child)
    _check(play, not stranger.is_dead, "nobody else is ended")
    _check(play, CGROUP not in play.kernel.frozen, "nothing stays stopped")


def a_container_is_refused(play: Play) -> None:
    """A kernel without cgroup.freeze and cgroup.kill: signals, as ever."""
    child = _contained(play)
    play.cast.workers[0].habits = child.habits = HABITS["forks"]
    sweeping = play.begin(play.cast.as_launcher(), AT_ONCE, CGROUP)
    assert sweeping.container is not None
    sweeping.container.is_refused = True
    _end(play, *play.cast.workers, child)


def who_came_later_hides_in_the_container(play: Play) -> None:
    """The run is long dead; what it has left has started a runner since, who is in no list."""
    cast, kernel = play.cast, play.kernel
    child = _contained(play)
    cast.workers[1].ignores_term = True
    ended = kernel.ticks()
    for guard in (cast.owner, cast.sidecar, cast.launcher):
        kernel.signal(guard, "SIGKILL", by_kernel=True)
    kernel.spend(0.05)
    runner = _fork(kernel, child)
    runner.habits = HABITS["hops"]
    kernel.spend(0.05)
    play.begin(cast.as_next_run(ended), AT_ONCE, CGROUP)
    _end(play, child)


def a_member_leaves_the_container(play: Play, instant: int) -> None:
    """It is in no list any more, and gets its signals."""
    child = _contained(play)
    play.begin(play.cast.as_launcher(), AT_ONCE, CGROUP)
    play.finish([(instant, "leave_the_cgroup", play.members().index(child))])
    _end(play, *play.cast.workers, child)


def a_member_leaves_before_the_container_is_killed(play: Play, instant: int) -> None:
    """The sweeper is late and freezes nothing any more: it was listed, and the kill misses it."""
    child = _contained(play)
    play.begin(play.cast.as_launcher(), AT_ONCE, CGROUP)
    play.kernel.spend(0.3)
    play.finish([(instant, "leave_the_cgroup", play.members().index(child))])
    _end(play, *play.cast.workers, child)


def a_stranger_gets_a_number_that_was_listed(play: Play, instant: int) -> None:
    """Within the tick in which the list of the container was read: he looks like one inside."""
    child = _contained(play)
    # Into the tick in which the list will be read: nobody gets a number twice in one.
    play.kernel.spend(0.022)
    play.begin(play.cast.as_sidecar(), AT_ONCE, CGROUP)
    play.finish([(instant, "be_replaced", play.members().index(child))])
    last = [one for one in play.kernel.everybody if one.pid == child.pid][-1]
    _check(play, last is child or not last.is_dead, "nobody else is ended")


def who_is_let_go_meanwhile_goes_on(play: Play, instant: int) -> None:
    """The launcher of another sweep spares it: it is not ended nor said to be, nor stays held."""
    child = _fork(play.kernel, play.cast.workers[0])
    sweeping = play.begin(play.cast.as_sidecar(), AT_ONCE)
    play.finish([(instant, "be_let_go", play.members().index(child))])
    assert sweeping.report is not None
    is_told = any(one.incarnation.pid == child.pid for one in sweeping.report.ended)
    _check(play, is_told == child.is_dead, "who is reported as ended is dead")
    _check(play, not child.is_stopped, "nothing stays stopped")


SCENES: dict[str, Callable[[Play], None]] = {
    scene.__name__: scene
    for scene in (
        one_look_is_not_enough, a_supervisor_puts_back_what_it_loses, a_refusal_is_told,
        one_that_refuses_does_not_keep_the_rest_alive, newcomers_do_not_put_the_end_off,
        a_zombie_is_dead, a_late_child_is_killed_too, deaths_are_no_look,
        a_sweep_that_saw_nothing_in_time_still_kills, a_sweep_that_never_sees_ends,
        the_next_sweep_lets_nobody_stay_stopped, two_sweep_at_once,
        who_was_seen_once_is_not_forgotten, what_came_later_is_somebody_elses,
        a_container_ends_what_forks_all_the_time,
        a_container_makes_signals_superfluous, a_stranger_lives_in_the_container,
        a_stranger_is_moved_in_while_all_are_held, a_container_is_refused,
        who_came_later_hides_in_the_container,
    )
}  # fmt: skip

AT_EACH_INSTANT: dict[str, Callable[[Play, int], None]] = {
    scene.__name__: scene
    for scene in (
        a_pid_is_handed_out_again,
        a_torn_look_makes_a_family,
        a_detached_process_lives_in_the_container,
        a_member_leaves_the_container,
        a_member_leaves_before_the_container_is_killed,
        a_stranger_gets_a_number_that_was_listed,
        who_is_let_go_meanwhile_goes_on,
    )
}


def perform(name: str, copies: Copies) -> None:
    """Play one scene; where it is a matter of the instant, at each one."""
    for instant in range(MOST_CALLS if name in AT_EACH_INSTANT else 1):
        play = Play(copies)
        try:
            if name in AT_EACH_INSTANT:
                AT_EACH_INSTANT[name](play, instant)
            else:
                SCENES[name](play)
        finally:
            play.close()


def _fork(kernel: Kernel, parent: Process) -> Process:
    child = kernel.fork(parent)
    assert child is not None
    return child


def _until(play: Play, claim: Callable[[], bool]) -> None:
    """Let the sweeps go on until it is true, and no step further."""
    for _ in range(1000):
        if claim():
            return
        play.run(play.kernel.tick / 20)
    raise AssertionError("it did not come to that")


def _check(play: Play, is_kept: bool, promise: str) -> None:
    if not is_kept:
        raise PromiseError(promise, f"{play.kernel.living()}")


def _end(play: Play, *gone: Process) -> None:
    """Finish all sweeps; then these processes are dead."""
    play.finish()
    left = [process for process in gone if not process.is_dead]
    _check(play, not left, "what can be ended is ended")
