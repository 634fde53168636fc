"""Which run and which worker a process comes from.

Two witnesses are handed down by every process to all that it starts:

* the *mark*: the environment variable ``SAFEPOOL_RUN``. Its value is the chain of
  ``RUN:WORKER`` from the outermost run inward; an inner run appends, never
  replaces. Lost with ``env={}`` and under setproctitle.
* the *tag*: one 62-bit number made of the run ID and the worker's number, kept as
  the soft limit RLIMIT_RTTIME. The kernel hands limits down through fork and exec,
  whatever becomes of the environment, the session or the parent; the value is
  about 150,000 years of uninterrupted real-time work, so it limits nobody. It
  names the innermost run only. Source: getrlimit(2), "a child process created via
  fork(2) inherits its parent's resource limits; preserved across execve(2)".

Neither is enough to signal a process: it must also have started within the run's
life. Decides what a witness says; reads and sets nothing.

Called by: the launcher, the sidecar, the worker's bootstrap, the registry.
"""

from __future__ import annotations

MARK_VARIABLE = "SAFEPOOL_RUN"

_TAG_BIT = 1 << 62
_WORKER_BITS = 24
_RUN_BITS = 62 - _WORKER_BITS

_HELPER_BIT = 1 << (_WORKER_BITS - 1)

_DETACHED = _HELPER_BIT - 1
"""In the place of a worker's number: its user let it go on purpose, with all that it starts."""


def tag_of(run_id: str, worker: int) -> int:
    """The tag of a worker of a run; ``run_id`` is 32 hexadecimal digits, workers count from 1."""
    run = int(run_id, 16) & ((1 << _RUN_BITS) - 1)
    # Beyond eight million the numbers begin anew: a worker must never look detached.
    return _TAG_BIT | run << _WORKER_BITS | worker % _DETACHED


def detached_tag(run_id: str) -> int:
    """The tag of a process that was let go in a run: no sweep of any run touches it."""
    return tag_of(run_id, 0) | _DETACHED


def is_detached_tag(tag: int | None) -> bool:
    """Tell whether ``tag`` is that of a detached process, of any run."""
    return tag is not None and is_tag(tag) and tag & _DETACHED == _DETACHED


def helper_tag(limit: int, run_id: str) -> int:
    """The tag of a sidecar or launcher that begins with the soft limit ``limit``.

    In a worker it is that worker's, so that the outer run knows whose inner run this
    is; it bears one bit more, which says that it ends by itself.
    """
    return (limit if is_tag(limit) else tag_of(run_id, 0)) | _HELPER_BIT


def plain_tag(tag: int) -> int:
    """The tag of the worker that a process or its helper comes from."""
    return tag & ~_HELPER_BIT


def worker_of_tag(tag: int) -> int:
    """The number of the worker that a tag names; 0: the owner's own sidecar or launchers."""
    return plain_tag(tag) & (_HELPER_BIT - 1)


def is_tag(limit: int) -> bool:
    """Tell whether a soft limit is a tag at all (any run's)."""
    return limit >= _TAG_BIT and limit >> 63 == 0


def is_helper_tag(tag: int | None) -> bool:
    """Tell whether ``tag`` is that of a sidecar or launcher, of any run."""
    return tag is not None and is_tag(tag) and bool(tag & _HELPER_BIT)


def is_tag_of_run(tag: int | None, run_id: str) -> bool:
    """Tell whether ``tag`` is that of any worker or helper of the run."""
    return tag is not None and tag >> _WORKER_BITS == tag_of(run_id, 0) >> _WORKER_BITS


def extend(mark: str | None, run_id: str, worker: int) -> str:
    """The mark of a worker whose run was started in a process marked ``mark``."""
    link = f"{run_id}:{worker}"
    return f"{mark}/{link}" if mark else link


def innermost(mark: str | None) -> str:
    """The ID of the innermost run that a mark names, "" for none."""
    return (mark or "").rpartition("/")[2].partition(":")[0]


def is_mark_of(mark: str | None, run_id: str, worker: int | None = None) -> bool:
    """Tell whether a mark names the run (and the worker, if given) anywhere in its chain."""
    if not mark:
        return False
    for link in mark.split("/"):
        run, _, number = link.partition(":")
        if run == run_id and (worker is None or number == str(worker)):
            return True
    return False
