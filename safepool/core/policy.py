"""How processes are ended: the options of a pool and of a sweep, validated in one place.

Decides which values make sense, and what they mean at which end; nothing else.
Durations are in seconds.

Called by: the public faces, which check; launchers and the sidecar, which obey.
"""

from __future__ import annotations

from typing import Literal

from safepool.core.values import dataclass

DEFAULT_GRACE = 5.0
DEFAULT_KILL_TIMEOUT = 1.0

OnOwnerDeath = Literal["terminate", "kill"]
Strays = Literal["kill", "spare"]

_WORDS = {"on_owner_death": ("terminate", "kill"), "strays": ("kill", "spare")}

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


@dataclass(frozen=True)
class EndPolicy:
    """How the processes of one pool, or of one SafeProcess, are ended.

    ``grace``: seconds between SIGTERM and the forced end. ``on_owner_death``:
    "terminate" gives the same grace after the owner's end, "kill" none. ``strays``:
    what becomes of those that a worker leaves when it ends in order; "spare" lets
    them go.
    """

    grace: float = DEFAULT_GRACE
    on_owner_death: str = "terminate"
    strays: str = "kill"

    @property
    def last_grace(self) -> float:
        """Seconds of grace once the owner has ended."""
        return 0.0 if self.on_owner_death == "kill" else self.grace

    @property
    def spares(self) -> bool:
        """Are strays let go when their worker ends in order?"""
        return self.strays == "spare"

    def fields(self) -> tuple[float, str, str]:
        """The values in the order of the constructor, for a message."""
        return self.grace, self.on_owner_death, self.strays


def checked_policy(
    grace: float, on_owner_death: str = "terminate", strays: str = "kill"
) -> EndPolicy:
    """Return the policy, or raise ValueError or TypeError that says what is wrong."""
    return EndPolicy(
        checked_grace(grace),
        _one_of("on_owner_death", on_owner_death),
        _one_of("strays", strays),
    )


def _one_of(name: str, value: str) -> str:
    words = _WORDS[name]
    known = " or ".join(f'"{word}"' for word in words)
    if not isinstance(value, str):
        raise TypeError(f"{name} must be {known}, not {type(value).__name__}")
    if value not in words:
        raise ValueError(f"{name} must be {known}, not {value!r}")
    return value


def checked_grace(grace: float) -> float:
    """Return ``grace`` as a float, or raise ValueError or TypeError that says what is wrong."""
    if isinstance(grace, bool) or not isinstance(grace, (int, float)):
        raise TypeError(f"grace must be a number of seconds, not {type(grace).__name__}")
    if not grace >= 0:
        raise ValueError(f"grace must be 0 or more seconds, not {grace!r}; 0 kills at once")
    if grace > LONGEST_GRACE:
        raise ValueError(f"grace must be at most {LONGEST_GRACE:.0f} seconds, a week")
    return float(grace)
