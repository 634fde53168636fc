"""The subreaper above one owner, where no cgroup can be made.

Runs the command that it was given and reaps all that falls to it, until nothing is
left. Then it ends as the owner ended: with its exit status, or by its signal. It
takes no notice of signals, so that those for the owner's group leave it alone.

Called by: the cage, as a process of its own. Standard library only, no site.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import sys
import termios

PR_SET_CHILD_SUBREAPER = 36


def keep(argv: list[str]) -> int:
    """Start ``argv``, reap until nothing is left; the owner's wait status."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "no child subreaper")
    owner = os.fork()
    if owner == 0:
        try:
            os.setsid()
            if os.isatty(0):
                fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            os.execvp(argv[0], argv)
        finally:
            os._exit(127)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    verdict = 0
    while True:
        try:
            pid, status = os.waitpid(-1, 0)
        except ChildProcessError:
            return verdict
        if pid == owner:
            verdict = status


if __name__ == "__main__":
    code = os.waitstatus_to_exitcode(keep(sys.argv[1:]))
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
