"""What a process has from its parent besides memory and descriptors, taken along.

multiprocessing's spawned children are children of the owner, so they have its umask,
limits, CPUs, priority, ignored signals and signal mask as these are at ``start()``.
Ours are children of a launcher that was forked from the sidecar, perhaps long before.
So the owner sends its own, and the child puts them on before the user's code runs.

User and groups cannot be put on by everybody: when they have changed, a new sidecar is
started that has them (see :mod:`safepool.monitor`).

Called by: :mod:`safepool.process` (gathers), :mod:`safepool.bootstrap` (puts on).
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from safepool.host import own

_LIMITS = {
    name: getattr(resource, name)
    for name in dir(resource)
    # RLIMIT_RTTIME carries the tag.
    if name.startswith("RLIMIT_") and name not in ("RLIMIT_RTTIME", "RLIMIT_OFILE")
}


def credentials() -> tuple[Any, ...]:
    """User and groups of this process; what differs must not be shared."""
    groups = tuple(sorted(os.getgroups()))
    if not hasattr(os, "getresuid"):  # macOS
        return os.getuid(), os.geteuid(), os.getgid(), os.getegid(), groups
    return os.getresuid(), os.getresgid(), groups


def gather(blocked: Iterable[int] = ()) -> tuple[Any, ...]:
    """Everything that :func:`put_on` takes, of this process and thread, for marshal.

    ``blocked``: signals that the child shall have blocked besides.
    """
    limits = tuple((number, resource.getrlimit(number)) for number in set(_LIMITS.values()))
    ignored = tuple(
        int(number)
        for number in signal.valid_signals()
        if signal.getsignal(number) is signal.SIG_IGN
    )
    own_mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    mask = tuple({int(number) for number in (*own_mask, *blocked)})
    return (
        own.umask(),
        limits,
        os.getpriority(os.PRIO_PROCESS, 0),
        tuple(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (),
        ignored,
        mask,
    )


def put_on(surroundings: tuple[Any, ...]) -> None:
    """Make this process like the one that gathered; what needs a privilege stays as it is."""
    umask, limits, priority, cpus, ignored, mask = surroundings
    if umask is not None:
        os.umask(umask)
    for number, (soft, hard) in limits:
        with suppress(OSError, ValueError):
            resource.setrlimit(number, (soft, hard))
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, priority)
    if cpus:
        with suppress(OSError):
            os.sched_setaffinity(0, cpus)
    for number in ignored:
        with suppress(OSError):
            signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
