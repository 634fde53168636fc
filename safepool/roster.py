"""The workers of one launcher: from the fork to the word that their trees are gone.

For each: its incarnation, the pipe that tells the owner, its exit code once reaped,
and the sweep of its tree, which begins with its death or with the owner's request.
EXITED is written when both are there: the worker is reaped and its tree is gone. A
tree that will not go (state D, no permission) is told as stuck, and stays in the
roster until its worker dies.

Called by: the launcher's loop.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress

from safepool.core.identity import Incarnation, Snapshot
from safepool.core.planner import Target
from safepool.core.policy import StopPolicy
from safepool.core.values import dataclass
from safepool.core.wire import Exited, Started, Status, encode_status
from safepool.host.base import Host
from safepool.sweeper import Sweep
from safepool.telling import describe


@dataclass
class _Worker:
    number: int
    incarnation: Incarnation
    status_fd: int
    code: int | None = None
    sweep: Sweep | None = None
    asked: bool = False


class Roster:
    """``look`` reads the launcher's subtree; ``tell`` takes (level, text)."""

    def __init__(
        self,
        host: Host,
        own: Incarnation,
        run_id: str,
        grace: float,
        look: Callable[[], Snapshot],
        tell: Callable[[str, str], None],
    ) -> None:
        self._host = host
        self._own = own
        self._run_id = run_id
        self._grace = grace
        self._look = look
        self._tell = tell
        self._workers: dict[int, _Worker] = {}
        self.has_had_any = False

    def __len__(self) -> int:
        return len(self._workers)

    def incarnations(self) -> frozenset[Incarnation]:
        """Names of all that are here, for a sweep of everything."""
        return frozenset(worker.incarnation for worker in self._workers.values())

    def sweeps(self) -> Iterator[Sweep]:
        """The sweeps that are not over."""
        for worker in self._workers.values():
            if worker.sweep is not None and worker.sweep.report is None:
                yield worker.sweep

    def add(self, number: int, incarnation: Incarnation, status_fd: int) -> None:
        """Take up a worker that was just forked, and tell the owner."""
        self._workers[number] = _Worker(number, incarnation, status_fd)
        self.has_had_any = True
        send_status(status_fd, Started(incarnation.pid, incarnation.start))

    def end(self, number: int, grace: float) -> None:
        """Begin the end of a worker's tree; a second request replaces the first."""
        worker = self._workers.get(number)
        if worker is not None:
            worker.asked = True
            self._begin(worker, grace)

    def note_death(self, pid: int, code: int, *, sweeps: bool) -> None:
        """Note an exit code. ``sweeps``: end what is left of the tree, if nothing does yet."""
        for worker in self._workers.values():
            if worker.incarnation.pid == pid and worker.code is None:
                worker.code = code
                if worker.sweep is None and sweeps:
                    self._begin(worker, self._grace)

    def settle(self) -> bool:
        """Tell of all trees that are gone by now; True if there were any."""
        over = [w for w in self._workers.values() if w.sweep is not None and w.sweep.report]
        settled = False
        for worker in over:
            if worker.code is not None and worker.sweep is not None:
                self._tell_end(worker, worker.sweep, worker.code)
                self._strike_off(worker)
                settled = True
        return settled

    def finish(self) -> None:
        """The launcher leaves: tell the exit codes that are known."""
        for worker in list(self._workers.values()):
            self._strike_off(worker)

    def close_in_child(self) -> None:
        """Close all descriptors in a worker, so that ends are seen as ends."""
        for worker in self._workers.values():
            if worker.sweep is not None:
                worker.sweep.close()
            os.close(worker.status_fd)

    def _begin(self, worker: _Worker, grace: float) -> None:
        if worker.sweep is not None:
            worker.sweep.close()
        target = Target(
            roots=frozenset({worker.incarnation}),
            run_id=self._run_id,
            workers=frozenset({worker.number}),
            born_from=worker.incarnation.start,
        )
        worker.sweep = Sweep(self._host, target, StopPolicy(grace), self._look, own=self._own)

    def _tell_end(self, worker: _Worker, sweep: Sweep, code: int) -> None:
        how = f"signal {-code}" if code < 0 else f"exit status {code}"
        why = "as asked" if worker.asked else f"worker {worker.incarnation.pid} ended ({how})"
        for level, text in describe(sweep, why, asked=worker.asked):
            self._tell(level, text)

    def _strike_off(self, worker: _Worker) -> None:
        if worker.sweep is not None:
            worker.sweep.close()
        if worker.code is not None:
            send_status(worker.status_fd, Exited(worker.code))
        os.close(worker.status_fd)
        del self._workers[worker.number]


def send_status(fd: int, status: Status) -> None:
    """Write a status record; an owner that is gone needs none (EPIPE)."""
    with suppress(OSError):
        os.write(fd, encode_status(status))
