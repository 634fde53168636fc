"""The workers of one launcher: from the fork to the word that their trees are gone.

For each: its incarnation, the pipe that tells the owner, its exit code once reaped,
and the sweep of its tree, which begins with its death or with the owner's request.
EXITED is written when both are there: the worker is reaped and its tree is gone. A
tree that will not go (state D, no permission) is told as stuck, and stays in the
roster until its worker dies.

A worker that was sent away and left with status 0 has ended *in order*; then the
policy may say that what it leaves is let go instead.

Called by: the launcher's loop.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress

from safepool.census import Census
from safepool.core.identity import Incarnation, Snapshot
from safepool.core.planner import Target
from safepool.core.policy import EndPolicy, StopPolicy
from safepool.core.record import Member
from safepool.core.values import dataclass, field, replace
from safepool.core.wire import Exited, Started, Status, encode_status
from safepool.host import own
from safepool.host.base import Host
from safepool.registry import RunFiles
from safepool.sparing import Released, Sparing
from safepool.sweeper import Sweep
from safepool.telling import describe


@dataclass
class _Ending:
    """A sweep of a worker's tree; ``asked``: the program wanted it, while it was alive."""

    sweep: Sweep
    asked: bool


@dataclass
class _Worker:
    number: int
    incarnation: Incarnation
    status_fd: int
    code: int | None = None
    is_retiring: bool = False
    is_left_alone: bool = False
    sweeps: list[_Ending] = field(default_factory=list)

    def is_over(self) -> bool:
        """Is it reaped, and its tree gone as far as it will go?"""
        ended = self.sweeps and all(each.sweep.report for each in self.sweeps)
        return self.code is not None and bool(ended or self.is_left_alone)

    def close_sweeps(self) -> None:
        """Let go of their descriptors."""
        for each in self.sweeps:
            each.sweep.close()


class Roster:
    """``look`` reads the launcher's subtree; ``tell`` takes (level, text).

    ``has_failed``: a worker has ended in another way than in order. Where the kernel does
    not keep the tree together, ``census`` remembers it, and workers are written down in
    ``files``, since they might outlive a launcher that is killed.
    """

    def __init__(
        self,
        host: Host,
        me: Incarnation,
        run_id: str,
        policy: EndPolicy,
        look: Callable[[], Snapshot],
        tell: Callable[[str, str], None],
        sparing: Sparing,
        census: Census | None = None,
        files: RunFiles | None = None,
    ) -> None:
        self._host = host
        self._me = me
        self._run_id = run_id
        self._policy = policy
        self._look = look
        self._tell = tell
        self._sparing = sparing
        self._census = census
        self._files = files
        self.numbers: set[int] = set()
        self._workers: dict[int, _Worker] = {}
        self.has_had_any = False
        self.has_failed = False

    def __len__(self) -> int:
        return len(self._workers)

    def incarnations(self) -> frozenset[Incarnation]:
        """Names of all that are here, for a sweep of everything."""
        return frozenset(worker.incarnation for worker in self._workers.values())

    def everything(self, spare: frozenset[Incarnation]) -> Target:
        """All that is below the launcher, and all that came from there."""
        target = Target(self.incarnations(), subtree_of=self._me, spare=spare)
        if self._census is None or own.keeps_orphans():
            return target
        return replace(
            target,
            known=self._census.of(),
            run_id=self._run_id,
            workers=frozenset(self.numbers),
            born_from=self._me.start,
        )

    def sweeps(self) -> Iterator[Sweep]:
        """The sweeps that are not over."""
        for worker in self._workers.values():
            for each in worker.sweeps:
                if each.sweep.report is None:
                    yield each.sweep

    def add(self, number: int, incarnation: Incarnation, status_fd: int) -> None:
        """Take up a worker that was just forked, and tell the owner."""
        self._workers[number] = _Worker(number, incarnation, status_fd)
        self.numbers.add(number)
        if self._files is not None:
            self._files.add_member(Member("worker", incarnation, number))
        if self._census is not None:
            self._census.soon()
        self.has_had_any = True
        send_status(status_fd, Started(incarnation.pid, incarnation.start))

    def end(self, number: int, grace: float) -> None:
        """Begin the end of a worker's tree.

        A sweep that is under way goes on beside it: two are as good as one, and each
        tells what it ended.
        """
        worker = self._workers.get(number)
        if worker is not None:
            self._begin(worker, grace, asked=worker.code is None and self._is_alive(worker))

    def note_retiring(self, number: int) -> None:
        """The owner is sending this worker away: its work is done."""
        worker = self._workers.get(number)
        if worker is not None:
            worker.is_retiring = True

    def note_death(self, pid: int, code: int, *, sweeps: bool) -> None:
        """Note an exit code. ``sweeps``: end what is left of the tree, if nothing does yet."""
        for worker in self._workers.values():
            if worker.incarnation.pid == pid and worker.code is None:
                worker.code = code
                in_order = worker.is_retiring and code == 0 and not worker.sweeps
                self.has_failed = self.has_failed or not in_order
                if in_order and sweeps and self._policy.spares:
                    self._let_go(worker)
                elif not worker.sweeps and sweeps:
                    self._begin(worker, self._policy.grace, asked=False)

    def settle(self) -> bool:
        """Tell of all trees that are gone by now; True if there were any."""
        over = [worker for worker in self._workers.values() if worker.is_over()]
        for worker in over:
            self._tell_end(worker)
            self._strike_off(worker)
        return bool(over)

    def spare_rest(self, target: Target) -> Target:
        """The pool is closed: let go, if that is its policy, orphans of which it is not known
        any more whose they were; return ``target`` without them."""
        if not self._policy.spares or self._workers or self.has_failed:
            return target
        released = self._sparing.let_go(target)
        self._tell_released(released, "the pool was closed")
        return replace(target, spare=target.spare | released.names.keys())

    def finish(self) -> None:
        """The launcher leaves: tell the exit codes that are known."""
        for worker in list(self._workers.values()):
            self._strike_off(worker)

    def close_in_child(self) -> None:
        """Close all descriptors in a worker, so that ends are seen as ends."""
        for worker in self._workers.values():
            worker.close_sweeps()
            os.close(worker.status_fd)

    def _is_alive(self, worker: _Worker) -> bool:
        try:
            row = self._host.row(worker.incarnation.pid)
        except OSError:
            return True  # no descriptor to look with: then it is a request like any other
        return row is not None and row.is_alive and row.incarnation == worker.incarnation

    def _target(self, worker: _Worker) -> Target:
        return Target(
            roots=frozenset({worker.incarnation}),
            known=frozenset() if self._census is None else self._census.of(worker.incarnation),
            run_id=self._run_id,
            workers=frozenset({worker.number}),
            born_from=worker.incarnation.start,
            spare=self._sparing.on_record(),
        )

    def _let_go(self, worker: _Worker) -> None:
        """Let the tree go; the helpers of an inner run, which leave by themselves, are awaited."""
        released = self._sparing.let_go(self._target(worker))
        self._tell_released(released, f"worker {worker.incarnation.pid} retired")
        if released.is_all:
            self._begin(worker, self._policy.grace, asked=False)
        else:
            worker.is_left_alone = True

    def _begin(self, worker: _Worker, grace: float, *, asked: bool) -> None:
        target = self._target(worker)
        sweep = Sweep(self._host, target, StopPolicy(grace), self._look, own=self._me)
        worker.sweeps.append(_Ending(sweep, asked))

    def _tell_end(self, worker: _Worker) -> None:
        code = worker.code or 0
        how = f"signal {-code}" if code < 0 else f"exit status {code}"
        for each in worker.sweeps:
            asked = each.asked and _died_of(each.sweep, worker.incarnation, code)
            why = "as asked" if asked else f"worker {worker.incarnation.pid} ended ({how})"
            for level, text in describe(each.sweep, why, asked=asked):
                self._tell(level, text)

    def _tell_released(self, released: Released, why: str) -> None:
        if released.names:
            who = ", ".join(f"{name.pid} ({command})" for name, command in released.names.items())
            self._tell("info", f"{why}: spared {who}, on record as detached (strays='spare')")
        if not released.is_all:
            self._tell(
                "warning",
                f"{why}: its strays could not be followed (they start others all the time, or no "
                f"descriptor was free); those that are not named as spared are left alone",
            )

    def _strike_off(self, worker: _Worker) -> None:
        worker.close_sweeps()
        if worker.code is not None:
            send_status(worker.status_fd, Exited(worker.code))
        os.close(worker.status_fd)
        if self._files is not None and worker.code is not None:
            self._files.remove_member(Member("worker", worker.incarnation, worker.number))
        del self._workers[worker.number]


def _died_of(sweep: Sweep, worker: Incarnation, code: int) -> bool:
    """Was it the sweep that ended the worker? A request may come when it is dying already."""
    sent = (
        [p.last_signal for p in sweep.report.ended if p.incarnation == worker]
        if sweep.report
        else []
    )
    if not sent or sent[0] is None:
        return False
    return code >= 0 or signal.Signals(-code).name == sent[0].value


def send_status(fd: int, status: Status) -> None:
    """Write a status record; an owner that is gone needs none (EPIPE)."""
    with suppress(OSError):
        os.write(fd, encode_status(status))
