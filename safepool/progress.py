"""A bar on stderr that shows how far a job is: done, failed, tried again, when it will end.

tqdm draws it (the extra ``safepool[progress]``); in a notebook it looks as bars do there.
The engine's thread moves it, and tqdm sees to it that this happens a few times a second.

Called by: the pool's methods (make it), the engine's thread.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

from safepool.results import Sink
from safepool.sinks import WrappedSink


@cache
def _bar_class() -> Any:
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ImportError(
            "progress needs tqdm, which is not installed: pip install 'safepool[progress]'"
        ) from error

    class Bar(tqdm):  # type: ignore[misc]
        """tqdm's own lock is a semaphore of multiprocessing's, and needs another process."""

        _lock = getattr(tqdm, "_lock", None) or threading.RLock()

    return Bar


class ProgressSink(WrappedSink):
    """Moves a bar for what goes through. Raises ImportError if tqdm is missing."""

    def __init__(self, inner: Sink, text: str, total: int | None, workers: int) -> None:
        super().__init__(inner)
        self._failed = 0
        self._retried = 0
        self._workers = workers
        self._bar = _bar_class()(total=total, desc=text or None, unit="task", leave=True)
        self._show_counts()

    def put(
        self,
        first: int,
        size: int,
        values: list[Any],
        errors: dict[int, BaseException] | None,
        step: int = 1,
    ) -> bool:
        """Take outcomes, and move."""
        if errors:
            self._failed += len(errors)
            self._show_counts()
        self._bar.update(size)
        return self._closed_if(super().put(first, size, values, errors, step))

    def input_ended(self, items: int, error: BaseException | None) -> bool:
        """Now it is known how many there are."""
        self._bar.total = items
        return self._closed_if(super().input_ended(items, error))

    def tried_again(self) -> None:
        """Count it."""
        self._retried += 1
        self._show_counts()
        super().tried_again()

    def fail(self, error: BaseException, *, tell: bool) -> None:
        """The bar stops where it is."""
        self._closed_if(True)
        super().fail(error, tell=tell)

    def _show_counts(self) -> None:
        words = [f"{self._workers} workers"]
        words += [f"{self._failed} failed"] if self._failed else []
        words += [f"{self._retried} retried"] if self._retried else []
        self._bar.set_postfix_str(", ".join(words), refresh=False)

    def _closed_if(self, is_over: bool) -> bool:
        if is_over:
            self._bar.close()
        return is_over
