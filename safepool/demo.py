"""``safepool demo``: kill the owner of a pool before the reader's eyes and show what is left.

Three kinds of process:

* *front*: what the user starts. It only starts the stage, hands signals on and waits.
* *stage*: plays the two acts, one with safepool and one with multiprocessing. It is a
  child subreaper and was exec'd without children, so whatever an act leaves behind
  becomes a child of the stage: it sees all of it, and ends and reaps nothing else. The
  last word is the kernel's: ECHILD from waitpid means that nobody is left.
* *owner*: makes the pool, whose four workers each start a process and wait
  (:mod:`safepool.demo_owner`).

Called by: the command line; by the front as ``python -m safepool.demo METHOD``.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import IO, NoReturn

from safepool.core.identity import Incarnation, ProcessRow
from safepool.core.planner import Sig
from safepool.core.policy import StopPolicy
from safepool.demo_owner import HELD
from safepool.host.base import Handle, NoHandle

_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_START_LIMIT = 20.0
_SAFE_LIMIT = 7.0
_PLAIN_LIMIT = 2.0
"""How many seconds the processes of a dead owner are watched. safepool's may take
grace and kill timeout; multiprocessing's would stay for good, so two must do."""

_READING_TIME = 1.5
"""Seconds between tree and kill when a person is reading."""

_WIDTH = 96
_LOG_LINES = 2


# -- front -----------------------------------------------------------------------------


def show(method: str) -> int:
    """Play the demo on standard output and return its exit status.

    ``method`` is the start method of both pools. 0: nothing of safepool's was left;
    1: something was, or an act failed; 2: not possible on this system; 130 or 143:
    interrupted. Nothing that the demo started is left in any of these cases.
    """
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        print("safepool demo needs Linux 5.3 or later", file=sys.stderr)
        return 2
    command = [sys.executable, "-m", "safepool.demo", method]
    with subprocess.Popen(command) as stage, _handing_on(stage.pid):
        status = stage.wait()
    return status if status >= 0 else 128 - status


@contextlib.contextmanager
def _handing_on(pid: int) -> Iterator[None]:
    """Hand SIGINT, SIGTERM and SIGHUP on to the stage, which cleans up and ends."""
    from safepool.host.linux import LinuxHost

    host = LinuxHost()
    name = host.incarnation(pid)
    handle = host.open(name) if name is not None else NoHandle.GONE

    def hand_on(number: int, frame: FrameType | None) -> None:
        if not isinstance(handle, NoHandle):
            host.send(handle, Sig.TERM)

    before = {number: signal.signal(number, hand_on) for number in _ENDINGS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if not isinstance(handle, NoHandle):
            handle.close()


# -- stage -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Seen:
    """One process of an act as it was before the kill."""

    name: Incarnation
    parent: int
    what: str
    command: str


class _Stage:
    """One act: an owner with its pool, watched from above."""

    def __init__(self) -> None:
        from safepool.host.linux import LinuxHost

        self._host = LinuxHost()
        self._log = tempfile.TemporaryFile()

    def play(self, kind: str, method: str) -> int:
        """Play one act and return how many processes outlived their owner."""
        self._log.truncate(0)
        owner = subprocess.Popen(
            [sys.executable, "-m", "safepool.demo_owner", kind, method],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        try:
            held = self._wait_for_workers(owner)
            cast = self._look(kind, owner.pid, held)
            _print_tree(cast, os.getpid())
            if sys.stdout.isatty():
                time.sleep(_READING_TIME)  # for the reader alone
            limit = _SAFE_LIMIT if kind == "safepool" else _PLAIN_LIMIT
            times = self._kill_and_watch(cast, owner.pid, limit)
            owner.wait()
            _print_times(cast, owner.pid, times, limit)
            return self._count_left()
        finally:
            for pipe in (owner.stdin, owner.stdout):
                if pipe is not None:
                    pipe.close()

    def log(self) -> list[str]:
        """What the processes of the last act wrote to standard error."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace").splitlines()

    def clear(self) -> int:
        """End and reap whatever an act has left; return how many had to be ended."""
        from safepool import sweeper
        from safepool.core.membership import Target

        me = self._host.incarnation(os.getpid())
        sweep = sweeper.Sweep(
            self._host,
            Target(subtree_of=me),
            StopPolicy(grace=0.5),
            look=lambda: self._host.look_subtree(os.getpid()),
        )
        report = sweeper.run(sweep)
        self._reap()
        return len(report.ended)

    def _wait_for_workers(self, owner: subprocess.Popen[bytes]) -> dict[int, str]:
        """Return what is known by pid once every worker has said what it holds."""
        assert owner.stdout is not None
        what = {owner.pid: "owner"}
        lines = b""
        until = time.monotonic() + _START_LIMIT
        while lines.count(b"\n") < len(HELD):
            left = until - time.monotonic()
            if not _is_readable(owner.stdout, left) or owner.poll() is not None:
                reason = "\n".join(self.log()[-5:]) or "no word from its workers"
                raise RuntimeError(f"the owner did not get going: {reason}")
            lines += os.read(owner.stdout.fileno(), 4096)
        for line in lines.decode().splitlines():
            worker, stray, held = line.split(" ", 2)
            what |= {int(worker): "worker", int(stray): held}
        return what

    def _look(self, kind: str, owner: int, known: dict[int, str]) -> list[_Seen]:
        """Name every process below the stage."""
        rows = self._below()
        above_workers = {row.ppid for row in rows if known.get(row.pid) == "worker"} - {owner}
        is_safe = kind == "safepool"
        cast = []
        for row in rows:
            command = self._host.command_line(row.pid)
            if row.pid in known:
                what = known[row.pid]
            elif row.pid in above_workers:
                what = "launcher" if is_safe else "fork server"
            elif "resource_tracker" in command or not is_safe:
                what = "resource tracker of multiprocessing"
            else:
                what = "sidecar"
            cast.append(_Seen(row.incarnation, row.ppid, what, command if what in HELD else ""))
        return cast

    def _kill_and_watch(
        self, cast: list[_Seen], owner: int, limit: float
    ) -> dict[Incarnation, float]:
        """SIGKILL the owner; return for all that ended in time how many seconds it took."""
        times: dict[Incarnation, float] = {}
        with contextlib.ExitStack() as stack:
            handles: dict[int, Handle] = {}
            for seen in cast:
                handle = self._host.open(seen.name)
                if isinstance(handle, NoHandle):
                    times[seen.name] = 0.0
                    continue
                stack.callback(handle.close)
                handles[handle.fd] = handle
            poll = select.poll()
            for fd in handles:
                poll.register(fd, select.POLLIN)
            killed_at = time.monotonic()
            victim = next(handle for handle in handles.values() if handle.incarnation.pid == owner)
            self._host.send(victim, Sig.KILL)
            while handles and (left := killed_at + limit - time.monotonic()) > 0:
                for fd, _ in poll.poll(left * 1000):
                    times[handles.pop(fd).incarnation] = time.monotonic() - killed_at
                    poll.unregister(fd)
        return times

    def _count_left(self) -> int:
        """How many processes are left, also such as were not there before the kill."""
        left = len(self._below())
        has_children = self._reap()
        return left or int(has_children)

    def _below(self) -> list[ProcessRow]:
        me = os.getpid()
        rows = self._host.look_subtree(me).alive()
        return sorted((row for row in rows if row.pid != me), key=lambda row: row.incarnation)

    def _reap(self) -> bool:
        """Reap the dead, adopted ones as well; tell whether a child is left."""
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return False
        return True


def _is_readable(pipe: IO[bytes], seconds: float) -> bool:
    return bool(select.select([pipe], [], [], max(0.0, seconds))[0])


def _print_tree(cast: list[_Seen], top: int) -> None:
    """Print who is whose child, the children of ``top`` leftmost."""

    def print_below(parent: int, indent: str) -> None:
        children = [seen for seen in cast if seen.parent == parent]
        for seen in children:
            is_last = seen is children[-1]
            branch = "" if parent == top else ("`-- " if is_last else "|-- ")
            line = f"{indent}{branch}{seen.name.pid} {seen.what}"
            print(f"  {line:<58} {seen.command}"[:_WIDTH].rstrip())
            deeper = "" if parent == top else ("    " if is_last else "|   ")
            print_below(seen.name.pid, indent + deeper)

    print_below(top, "")


def _print_times(
    cast: list[_Seen], owner: int, times: dict[Incarnation, float], limit: float
) -> None:
    """Print for each process how long it outlived the owner's SIGKILL."""
    print(f"\n  kill -9 {owner}\n")
    for seen in sorted(cast, key=lambda seen: times.get(seen.name, limit)):
        if seen.name in times:
            fate = f"gone after {times[seen.name] * 1000:4.0f} ms"
        else:
            fate = f"STILL HERE after {limit:g} s"
        print(f"  {seen.name.pid} {seen.what:<50} {fate}"[:_WIDTH])


def _print_log(lines: list[str]) -> None:
    """Print what safepool said of its own accord: some lines on strays, and the last."""
    if not lines:
        return
    print("\n  What safepool itself says of it:")
    strays = [line for line in lines[:-1] if " stray " in line]
    shown = [*strays[:_LOG_LINES], "...", lines[-1]]
    for line in shown:
        print(textwrap.fill(line, _WIDTH, initial_indent="  | ", subsequent_indent="  |   "))


def _play(method: str) -> int:
    """Play both acts and return the exit status."""
    stage = _Stage()
    try:
        print(f"1. safepool.SafePool ({method}): four workers, and what they have started\n")
        left = stage.play("safepool", method)
        _print_log(stage.log())
        print(f"\n  Left: {left or 'nothing. The kernel knows of no child (ECHILD)'}.\n")
        stage.clear()
        print(f"2. multiprocessing.Pool ({method}): the same\n")
        stays = stage.play("multiprocessing", method)
        ended = stage.clear()
        print(f"\n  Left: {stays}. The demo has cleared them up, {ended} processes.")
        return 1 if left else 0
    except RuntimeError as error:
        print(f"safepool demo: {error}", file=sys.stderr)
        return 1
    finally:
        _turn_deaf()
        stage.clear()


def _turn_deaf() -> None:
    """From here on a Ctrl-C is too late to be obeyed, and must not cut the clean-up short.

    Not SIG_IGN: for a signal that came just before, Python prints a traceback then.
    """
    for number in _ENDINGS:
        signal.signal(number, lambda number, frame: None)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    _turn_deaf()
    sys.exit(128 + number)


def _be_stage(method: str) -> int:
    """Become the process that sees and clears up everything, and play."""
    from safepool.host import prctl

    for number in _ENDINGS:
        signal.signal(number, _leave)
    prctl.set_parent_death_signal(signal.SIGTERM)
    prctl.set_child_subreaper()
    try:
        return _play(method)
    except BrokenPipeError:
        # The reader has seen enough (`safepool demo | head`); say no more at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(_be_stage(sys.argv[1]))
