"""How many workers a pool has, and how much memory each: what was asked for, checked.

Called by: the pool.
"""

from __future__ import annotations

from typing import Any

from safepool.core.staffing import Staff
from safepool.core.values import dataclass

IDLE_TIMEOUT = 6 * 3600.0
"""Seconds after which a worker without work leaves when nobody says anything: what a program
has forgotten does not hold its memory for ever."""


@dataclass(frozen=True)
class SizeSettings:
    """See :class:`safepool.SafePool` for what each means."""

    size: int
    lifetime: int | None = None
    lazy: bool = False
    idle_timeout: float | None = IDLE_TIMEOUT
    max_rss: int | None = None

    def staff(self) -> Staff:
        """The staff of a new pool."""
        return Staff(self.size, lazy=self.lazy, idle_timeout=self.idle_timeout)


def checked_sizes(
    size: int, lifetime: int | None, lazy: Any, idle_timeout: Any, max_rss: Any
) -> SizeSettings:
    """Return the settings; a TypeError or ValueError names what is wrong."""
    if not isinstance(lazy, bool):
        raise TypeError(f"lazy must be True or False, not {lazy!r}")
    for name, value, kinds in (
        ("idle_timeout", idle_timeout, (int, float)),
        ("max_rss", max_rss, (int,)),
    ):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, kinds):
            what = "a number of seconds" if float in kinds else "a number of bytes"
            raise TypeError(f"{name} must be {what}, not {type(value).__name__}")
        if not value > 0:
            raise ValueError(f"{name} must be more than 0, not {value!r}")
    return SizeSettings(size, lifetime, lazy, idle_timeout, max_rss)
