"""Runs the items of a chunk or group in a worker; a value is safe from its death at once.

A value is committed to the page that the worker shares with its owner before the next
item begins. So whenever the worker dies, the owner knows which items were finished and
which one was running. What this costs decides how fast a map of quick items is: the
commit of a value that was the last one, too (``None``, mostly), is one store into the page.
Between two items it is one load that tells whether the owner has recalled the rest.

Called by: the task loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from safepool.answers import pack
from safepool.copies import Copies
from safepool.core import frames
from safepool.parcels import Packed, Parcel

_NOTHING = object()
_MOST_IN_PAGE = frames.PAGE_BYTES - frames.PAGE_START - 64

_UNCHANGING = frozenset({type(None), bool, int, float, complex, str, bytes})
"""Types whose values are as good as a copy."""


class Interrupts(Protocol):
    """Lets Ctrl-C in while ``in_task`` is true, and makes it false then."""

    in_task: bool


NEVER: Final = (0,)
"""The recall cell of what is not to be left in its midst."""


class ItemRun:
    """One chunk or group at work.

    ``recall[0]``: the number up to which tasks are recalled. ``item``: the first to run; the
    page says so already. ``send`` takes (kind, number, item, body), a frame for the owner.
    """

    def __init__(
        self,
        page: memoryview,
        recall: Sequence[int] | memoryview,
        number: int,
        item: int,
        send: Callable[[int, int, int, Packed], None],
        copies: Copies,
    ) -> None:
        self._page = page
        self._recall = recall
        self._repeats = page[frames.PAGE_REPEATS].cast("I")
        self._number = number
        self._send = send
        self._copies = copies
        self._recorded = self._first = item
        self._used = 0

    @property
    def item(self) -> int:
        """The first item that is not finished; the page is right wherever Ctrl-C came."""
        return self._recorded + self._repeats[0]

    def run(
        self,
        function: Any,
        items: Sequence[Any],
        interrupts: Interrupts,
        *,
        star: bool,
        by_value: bool,
    ) -> None:
        """Run these items, of which the first is ``item``, or those before the recall.

        Raises what one of them raises, and then stops.
        """
        own = self._copies.own
        cell = self._repeats
        recall, number = self._recall, self._number
        repeats = cell[0]
        last: Any = _NOTHING
        try:
            interrupts.in_task = True
            for item in items:
                if recall[0] >= number:
                    return
                value = function(*item) if star else function(item)
                if value is last and own[0]:
                    repeats += 1
                    cell[0] = repeats
                    continue
                interrupts.in_task = False
                self._copies.end_if_one()
                self._add(pack(value, by_value=by_value))
                last = value if self._used and type(value) in _UNCHANGING else _NOTHING
                repeats = 0
                interrupts.in_task = True
        finally:
            interrupts.in_task = False
            self._copies.end_if_one()

    def _add(self, data: Packed) -> None:
        """Commit one more value, behind those that repeat the one before it."""
        if isinstance(data, Parcel):
            self._send_alone(data)
            return
        repeats = self._repeats[0]
        entry = frames.repeat(repeats) + frames.record(data)
        start = frames.PAGE_START + self._used
        if start + len(entry) > frames.PAGE_BYTES:
            if len(data) > _MOST_IN_PAGE:
                self._send_alone(data)
                return
            self.flush()
            entry = frames.record(data)
            start, repeats = frames.PAGE_START, 0
        self._page[start : start + len(entry)] = entry
        self._used = start + len(entry) - frames.PAGE_START
        frames.commit_page(self._page, self._used)
        self._recorded += repeats + 1

    def _send_alone(self, data: Packed) -> None:
        """A value that does not fit the page goes to the owner at once."""
        self.flush()
        self._send(frames.VALUE, self._number, self._recorded, data)
        self._recorded += 1
        self._begin_page()

    def flush(self) -> None:
        """Send what there is. The page is emptied after that: the owner drops what it knows."""
        if self._used:
            self._recorded = self.item
            self._send(frames.VALUES, self._number, self._first, frames.read_page(self._page).body)
            self._begin_page()

    def skip(self) -> None:
        """The item has an answer of another kind; nothing may be left in the page."""
        self._recorded += 1
        self._begin_page()

    def _begin_page(self) -> None:
        self._used = 0
        self._first = self._recorded
        frames.write_page(self._page, self._number, self._recorded)
