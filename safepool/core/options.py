"""What a program may ask for each of its tasks: time limits and further attempts.

Decides from numbers alone; who keeps the time and ends workers is the engine.

Called by: the pool and its views, the crew.
"""

from __future__ import annotations

from typing import Any, Literal

from safepool.core.values import dataclass, replace

MOST_STRIKES = 3
"""So many workers may die of one task. Then it is not tried again, whatever was asked for."""

LONGEST_DELAY = 60.0

_WORDS = ("fail", "abort")
OnWorkerLost = Literal["fail", "abort"]


@dataclass(frozen=True)
class TaskOptions:
    """See ``SafePool.options`` for what each means."""

    timeout: float | None = None
    deadline: float | None = None
    retries: int = 0
    retry_on: tuple[type[BaseException], ...] = ()
    retry_delay: float = 0.0
    on_worker_lost: str = "fail"
    max_pending: int | None = None
    priority: int = 0
    soft_timeout: float | None = None
    progress: bool | str = False
    is_alone: bool = False
    """Of a pool with ``max_rss``: what a worker uses is to be one task's."""

    @property
    def is_for_items(self) -> bool:
        """Does each item of a map have to travel alone?"""
        has_limit = self.timeout is not None or self.soft_timeout is not None
        return has_limit or self.retries > 0 or self.is_alone

    def delay_of_retry(
        self, attempts: int, strikes: int, error: BaseException, *, is_loss: bool
    ) -> float | None:
        """Seconds until the next attempt of a task that failed; None: there is none.

        ``attempts``: how often it was tried so far. ``strikes``: how many workers died of it.
        ``is_loss``: this one did.
        """
        if attempts > self.retries:
            return None
        if is_loss and strikes >= MOST_STRIKES:
            return None
        if not is_loss and not isinstance(error, self.retry_on):
            return None
        return min(LONGEST_DELAY, self.retry_delay * 2.0 ** (attempts - 1))


def checked_options(base: TaskOptions, changes: dict[str, Any]) -> TaskOptions:
    """Return ``base`` with ``changes``; a TypeError or ValueError names what is wrong."""
    for name in ("timeout", "deadline", "soft_timeout"):
        if changes.get(name) is not None:
            _check_seconds(name, changes[name], least_is_allowed=False)
    if "retry_delay" in changes:
        _check_seconds("retry_delay", changes["retry_delay"], least_is_allowed=True)
    _check_count("retries", changes.get("retries", 0), least=0)
    _check_count("priority", changes.get("priority", 0), least=None)
    if changes.get("max_pending") is not None:
        _check_count("max_pending", changes["max_pending"], least=1)
    if "retry_on" in changes:
        changes = {**changes, "retry_on": _classes(changes["retry_on"])}
    if not isinstance(changes.get("progress", False), (bool, str)):
        raise TypeError(
            f"progress must be True, False or a text, not {type(changes['progress']).__name__}"
        )
    word = changes.get("on_worker_lost", "fail")
    if word not in _WORDS:
        raise ValueError(f'on_worker_lost must be "fail" or "abort", not {word!r}')
    return replace(base, **changes)


def _check_seconds(name: str, value: Any, *, least_is_allowed: bool) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number of seconds, not {type(value).__name__}")
    if not (value > 0 or (least_is_allowed and value == 0)):
        least = "0 or more" if least_is_allowed else "more than 0"
        raise ValueError(f"{name} must be {least} seconds, not {value!r}")


def _check_count(name: str, value: Any, *, least: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, not {type(value).__name__}")
    if least is not None and value < least:
        raise ValueError(f"{name} must be {least} or more, not {value}")


def _classes(value: Any) -> tuple[type[BaseException], ...]:
    classes = value if isinstance(value, tuple) else (value,)
    for each in classes:
        if not (isinstance(each, type) and issubclass(each, BaseException)):
            raise TypeError(f"retry_on must be exception classes, not {each!r}")
    return classes
