"""What the items of a group are in a worker: calls, or pickles of their own.

An item whose types are plain travels inside the group's pickle. Any other one was pickled
when it was given to the pool, so that what cannot be unpickled fails alone.

Called by: the task loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from safepool import payload


class UnreadableItemError(Exception):
    """This item of a group cannot be unpickled, for ``reason``."""

    def __init__(self, reason: BaseException) -> None:
        super().__init__()
        self.reason = reason


def run_call(entry: Any) -> Any:
    """Run a call: function, arguments and keywords, or the pickle of these."""
    if type(entry) is bytes:
        entry = _loaded(entry)
    function, args, kwds = entry
    return function(*args, **kwds)


def for_sealed(function: Callable[[Any], Any]) -> Callable[[bytes], Any]:
    """Return ``function`` for an item that is a pickle of its own."""

    def unseal(data: bytes) -> Any:
        return function(_loaded(data))

    return unseal


def _loaded(data: bytes) -> Any:
    try:
        return payload.loads(data)
    except BaseException as error:
        raise UnreadableItemError(error) from None
