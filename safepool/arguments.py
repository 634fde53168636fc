"""Which arguments of a pool make sense, and the errors for those that do not.

Decides before anything is started. Raises ValueError or TypeError that names the
argument.

Called by: :mod:`safepool.pool`.
"""

from __future__ import annotations

import logging
import operator
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from safepool.core import cpus
from safepool.host.quota import cpu_quotas


def checked_size(
    processes: int | None,
    initializer: Callable[..., object] | None,
    maxtasksperchild: int | None,
) -> int:
    """Check the arguments that multiprocessing has as well; return the number of workers."""
    count = default_size() if processes is None else integer("processes", processes)
    if count < 1:
        raise ValueError("Number of processes must be at least 1")
    if maxtasksperchild is not None and (
        not isinstance(maxtasksperchild, int) or maxtasksperchild <= 0
    ):
        raise ValueError("maxtasksperchild must be a positive int or None")
    if initializer is not None and not callable(initializer):
        raise TypeError("initializer must be a callable")
    return count


def checked_chunksize(chunksize: int) -> int:
    """Return the number of items that make one task."""
    size = integer("chunksize", chunksize)
    if size < 1:
        raise ValueError(f"Chunksize must be 1+, not {chunksize}")
    return size


def integer(name: str, value: Any) -> int:
    """Return a whole number, or raise a TypeError that names the argument."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {type(value).__name__}") from None


def default_size() -> int:
    """The number of workers when nobody says; the logger ``safepool`` tells why, for debugging."""
    if getattr(sys.flags, "cpu_count", -1) > 0:
        return usable_cpus()  # the user has said how many there are (-X cpu_count)
    size = cpus.default_size(usable_cpus(), cpu_quotas())
    logging.getLogger("safepool").debug("%d workers: %s", size.workers, size.reason)
    return size.workers


def usable_cpus() -> int:
    """The number of CPUs that this process may use."""
    count: Callable[[], int | None] | None = getattr(os, "process_cpu_count", None)
    if count is not None:
        return count() or 1
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0)) or 1
    return os.cpu_count() or 1


def all_of(iterable: Iterable[Any]) -> tuple[Sequence[Any], BaseException | None]:
    """The items of a map, and the error of an input that raised.

    As in multiprocessing the error comes out of the result if the input has a length,
    else at once. A length is not believed: one that lies would be waited for for ever.
    """
    if isinstance(iterable, (list, tuple, range)):
        return iterable, None
    try:
        return list(iterable), None
    except Exception as error:
        if not hasattr(iterable, "__len__"):
            raise
        return (), error
