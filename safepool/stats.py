"""What a pool is doing, in numbers, at one moment.

Called by: the engine, which takes the picture; users read it.
"""

from __future__ import annotations

from safepool.core.values import dataclass


@dataclass(frozen=True)
class WorkerStats:
    """One worker. ``state``: "starting" (not past its initializer), "idle", "busy", or
    "leaving". ``task``: the name of the function that it runs or is about to, "" for none.
    ``since``: seconds since it got that. ``memory``: resident bytes, None if that cannot be read.
    """

    pid: int
    state: str
    task: str
    since: float | None
    memory: int | None


@dataclass(frozen=True)
class PoolStats:
    """``queued``: items that wait for a worker. ``running``: workers that have some. ``done``,
    ``failed``: items that ended well, and with an error. ``lost``: workers that died while
    they ran one. ``retried``: further attempts that were made.
    """

    queued: int
    running: int
    done: int
    failed: int
    lost: int
    retried: int
    workers: tuple[WorkerStats, ...]
