"""``safepool run -- COMMAND``: be the owner of any program.

::

    shell ── safepool run (owner) ──── sidecar
                └── launcher (subreaper)
                      └── COMMAND ── whatever it starts

COMMAND is exec'd by an ordinary worker: PDEATHSIG and the tag survive the exec, the mark
is in its environment, and the launcher above it adopts what it leaves behind. So the
end of COMMAND, of this process or of any of the two between is handled as for a pool.

All are in the process group that the shell made, in the foreground: what the terminal
sends (Ctrl-C, Ctrl-Z, a resize) reaches COMMAND by itself. This process takes every
signal out of the kernel's queue, with the word of where it comes from, and

* hands on what was sent to it alone, with ``kill PID``;
* not what the terminal sent, nor what was sent to the whole group: the launcher, which
  blocks all signals, then has it pending;
* stops itself when COMMAND has stopped, so that the shell sees the job stop;
* at last exits as COMMAND did, of the same signal if need be.

Called by: the command line.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Iterable
from typing import NoReturn

from safepool import loop, run
from safepool.bootstrap import StartRequest
from safepool.core.policy import EndPolicy
from safepool.core.wire import Exited
from safepool.errors import ProtectionError
from safepool.host import choose, own_signals, vitals
from safepool.host.base import Handle, NoHandle
from safepool.launcher_link import LauncherLink, StartedWorker, read_status

UNPROTECTED = 125
CANNOT_EXECUTE = 126
NOT_FOUND = 127

_LOST = -signal.SIGKILL
_STOPS = {signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
_STOP_TIME = 1.0
"""Seconds that COMMAND has to stop after Ctrl-Z (an editor tidies the screen first)."""
_STOP_LOOK = 0.01


def run_command(command: list[str], grace: float) -> int:
    """Run ``command`` and return its exit status; if a signal ended it, die of the same."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    ignores_children = signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
    if ignores_children:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else no word comes of their end

    def become_command(request: StartRequest) -> NoReturn:
        if ignores_children:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        _exec(command, mask)

    _log_to_stderr()
    try:
        owner = run.current()
        link = owner.fork_launcher(become_command, EndPolicy(grace), one_shot=True)
        worker = link.start(owner.next_number(), command[0])
    except (ProtectionError, OSError) as error:
        print(f"safepool run: {error}", file=sys.stderr)
        return UNPROTECTED
    loop.let_go_of_stdio()
    code = _Attendance(link, worker).wait()
    os.close(worker.status_fd)
    if link.is_lost:
        owner.wait_until_swept(link)
    owner.monitor.release(link)
    owner.shutdown()
    logging.shutdown()
    if code < 0:
        own_signals.end_by(-code)
    return code


def _log_to_stderr() -> None:
    """Tell what was ended and why; quiet are the ends that are a matter of course."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("safepool: %(message)s"))
    handler.setLevel(logging.WARNING)
    logger = logging.getLogger("safepool")
    logger.addHandler(handler)
    logger.propagate = False


def _exec(command: list[str], mask: Iterable[int]) -> NoReturn:
    """In the worker: become the command, with the signals that this program was given."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores both; exec would hand that down
    status = CANNOT_EXECUTE
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.execvp(command[0], command)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            status = NOT_FOUND
        advice = "; has it a #! line?" if error.errno == errno.ENOEXEC else ""
        text = f"safepool run: cannot run {command[0]!r}: {error.strerror}{advice}\n"
        os.write(2, text.encode("utf-8", "backslashreplace"))
    finally:
        os._exit(status)


class _Attendance:
    """Waits for COMMAND and hands signals on to it."""

    def __init__(self, link: LauncherLink, worker: StartedWorker) -> None:
        self._host = choose.host()
        self._link = link
        self._worker = worker
        self._stop_until: float | None = None

    def wait(self) -> int:
        """Return the exit code once COMMAND and its tree are gone; negative for a signal."""
        handle = self._host.open(self._worker.incarnation)
        try:
            while True:
                code = self._exit_code()
                if code is not None:
                    return code
                info = self._next_signal()
                if info is None:
                    self._stop_with_command()
                elif info.si_signo != signal.SIGCHLD:
                    self._take(info, handle)
        finally:
            if not isinstance(handle, NoHandle):
                handle.close()

    def _exit_code(self) -> int | None:
        """The launcher ends after COMMAND, so SIGCHLD comes when there is a code to read."""
        fd = self._worker.status_fd
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        if not poll.poll(0):
            return None
        status = read_status(fd, 0)
        if isinstance(status, Exited):
            self._link.numbers.discard(self._worker.number)
            return status.code
        self._link.is_lost = True
        return _LOST

    def _next_signal(self) -> signal.struct_siginfo | None:
        if self._stop_until is None:
            return signal.sigwaitinfo(signal.valid_signals())
        return signal.sigtimedwait(signal.valid_signals(), _STOP_LOOK)

    def _take(self, info: signal.struct_siginfo, handle: Handle | NoHandle) -> None:
        """Hand a signal on unless COMMAND has got it already; be ready to stop with it."""
        number = info.si_signo
        # Asked for the terminal's as well: the launcher has to forget those, too.
        was_for_all = self._was_for_all(number)
        # Positive: the kernel itself, for the terminal (signal(7), sigaction(2), si_code).
        came_from_kernel = info.si_code > 0
        if not (was_for_all or came_from_kernel or isinstance(handle, NoHandle)):
            self._host.send(handle, number)
        if number in _STOPS:
            self._stop_until = time.monotonic() + _STOP_TIME
        elif number == signal.SIGCONT:
            self._stop_until = None

    def _was_for_all(self, number: int) -> bool:
        """Was the signal sent to our process group, so that COMMAND, a member, has it too?

        The launcher is in the group as well. A signal to a group reaches the youngest
        members first (it is the order of the kernel's list), so when we have it, so has it.
        """
        launcher = self._link.incarnation
        row = self._host.row(self._worker.incarnation.pid)
        if launcher is None or row is None or row.group != os.getpgrp():
            return False
        if not vitals.has_pending(launcher.pid, number):
            return False
        self._link.forget_signal(number)
        return True

    def _stop_with_command(self) -> None:
        """Stop if COMMAND has; one that goes on in spite of Ctrl-Z keeps the terminal."""
        row = self._host.row(self._worker.incarnation.pid)
        if row is not None and row.state == "T":
            self._stop_until = None
            if signal.SIGCONT not in signal.sigpending():
                own_signals.suspend()
        elif self._stop_until is not None and time.monotonic() > self._stop_until:
            self._stop_until = None
