"""How processes are ended: the options of a sweep, validated in one place.

Decides which values make sense; nothing else. Durations are in seconds.
"""

from __future__ import annotations

from safepool.core.values import dataclass

DEFAULT_GRACE = 5.0
DEFAULT_KILL_TIMEOUT = 1.0

LONGEST_GRACE = 7 * 86400.0
"""Seconds. What waits longer than poll(2) can count (2**31 ms) would have to wait in pieces."""


@dataclass(frozen=True)
class StopPolicy:
    """``grace``: seconds between SIGTERM and the forced end, 0 for no polite phase.

    ``kill_timeout``: seconds after the grace by which the sweep ends, whatever is
    left; what is left then is reported as stuck.
    """

    grace: float = DEFAULT_GRACE
    kill_timeout: float = DEFAULT_KILL_TIMEOUT


def checked_grace(grace: float) -> float:
    """Return ``grace`` as a float, or raise ValueError or TypeError that says what is wrong."""
    if isinstance(grace, bool) or not isinstance(grace, (int, float)):
        raise TypeError(f"grace must be a number of seconds, not {type(grace).__name__}")
    if not grace >= 0:
        raise ValueError(f"grace must be 0 or more seconds, not {grace!r}; 0 kills at once")
    if grace > LONGEST_GRACE:
        raise ValueError(f"grace must be at most {LONGEST_GRACE:.0f} seconds, a week")
    return float(grace)
