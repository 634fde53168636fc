"""Descriptors that must not be copied into a fork by accident, and the gate that sees to it.

Between the making of a pipe and the closing of the end that was handed over, a fork in
another thread would copy that end, and whoever waits for its end of file would wait for a
stranger. So such stretches hold the gate, and every fork of this process waits for it
(a moment; a fork is never refused).

Also here: what stands in for standard descriptors that the program was born without, so
that none of ours gets the number 0, 1 or 2.

Called by: the run (which also forks by ``fork``), the launcher links.
"""

from __future__ import annotations

import os
import threading
import warnings

_GATE_TIMEOUT = 2.0


class _Gate:
    """A reentrant lock that a forked child replaces.

    Hold ``lock`` itself in a ``with``: taking it in a method of ours would leave an
    instruction at which Ctrl-C leaves it taken.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.forks = 0


gate = _Gate()
"""Hold its lock while descriptors are in flight."""


def close_gate() -> None:
    """Before a fork, in the forking thread."""
    if gate.lock.acquire(timeout=_GATE_TIMEOUT):
        gate.forks += 1


def open_gate() -> None:
    """After a fork, in the parent."""
    if gate.forks:
        gate.forks -= 1
        gate.lock.release()


def renew_gate() -> None:
    """After a fork, in the child: what the forking thread holds it holds here as well; what
    another held is held for ever."""
    if gate.forks:
        open_gate()
    else:
        gate.lock = threading.RLock()


def forget_gate() -> None:
    """In a forked launcher, which never leaves the stretch that its owner's thread was in."""
    gate.lock = threading.RLock()
    gate.forks = 0


def is_open(fd: int) -> bool:
    """Tell whether a standard descriptor is the program's own: exec would hand it down."""
    try:
        return os.get_inheritable(fd)
    except OSError:
        return False


def occupy_stdio() -> None:
    """Put something harmless, closed on exec, in the place of closed standard descriptors."""
    while True:
        fd = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        if fd > 2:
            os.close(fd)
            return


def fork() -> int:
    """Fork without the warning about threads when all other threads are safepool's own.

    CPython 3.12 warns about every other thread. Ours are known to hold no lock that
    a launcher needs; the user's are worth the warning.
    """
    me = threading.current_thread()
    others = [t for t in threading.enumerate() if t is not me and not t.name.startswith("safepool")]
    if others:
        return os.fork()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()
