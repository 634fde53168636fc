"""A sink around a sink: takes note of what goes through, and changes nothing.

Called by: progress and bounds, which derive from it; the engine's thread.
"""

from __future__ import annotations

from typing import Any

from safepool.results import Sink


class WrappedSink:
    """Hands everything on to ``inner``; see :class:`safepool.results.Sink`."""

    def __init__(self, inner: Sink) -> None:
        self.inner = inner

    def begin(self) -> bool:
        """A unit goes to a worker."""
        return self.inner.begin()

    def put(
        self,
        first: int,
        size: int,
        values: list[Any],
        errors: dict[int, BaseException] | None,
        step: int = 1,
    ) -> bool:
        """Take outcomes."""
        return self.inner.put(first, size, values, errors, step)

    def input_ended(self, items: int, error: BaseException | None) -> bool:
        """There are so many items and no more."""
        return self.inner.input_ended(items, error)

    def tried_again(self) -> None:
        """A task has failed and gets another attempt."""
        self.inner.tried_again()

    def wake(self) -> None:
        """After a batch."""
        self.inner.wake()

    def lift_limit(self) -> None:
        """The pool was closed."""
        self.inner.lift_limit()

    def fail(self, error: BaseException, *, tell: bool) -> None:
        """Nothing more comes."""
        self.inner.fail(error, tell=tell)
