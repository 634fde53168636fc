"""How owner and worker talk: one frame format, and the page that outlives a worker.

A frame is a fixed header (body length, task number, job, item, end, kind) and a body of
bytes. Both directions use it; what the fields mean depends on the kind:

    to the worker     FUNCTION job: body          the function of a job, once per worker
                      CALL     number: body       function, arguments, keywords
                      MAP      number job item end: body   a chunk, of which the items from
                                                  ``item`` to before ``end`` are to be run
                      STARMAP  the same           each item is a call's arguments
                      GROUP    the same           tasks of their own; only they are in the body
                      CALLS    number item end: body   likewise, each is a call
                      SOFT     number: body       the soft timeout of the task that follows
                      FORGET   job                its function is no longer needed
                      QUIT                        leave
    to the owner      INITIALIZING                the initializer begins
                      READY job                   the initializer has returned; ``job``: 1 if a
                                                  barrier of the owner's reaches the worker
                      INIT_FAILED: body           it has not: an error body
                      VALUE    number item: body  the pickle of one value
                      VALUES   number item: body  records, one pickle each, from ``item`` on
                      ERROR    number item: body  an error body; ends the task, of a group the item
                      BY_VALUE number item: body  likewise, because a name was not found here
                      UNREADABLE number item: body  likewise, as the task cannot be unpickled here
                      STOPPED  number item        ``item`` and those behind it were not begun

A *page* is memory shared by one owner and one worker. The worker notes there which
task and item it is at, before it begins. It adds each value to it and then moves one number on.
Whenever it dies, what is committed there is what was finished. A value that comes again
and again is there once, with a count.

One cell of the page is the owner's: tasks up to the number there are *recalled*. The
worker reads it after it has noted an item and before it begins it; the owner reads
what is noted after it has written the cell, with a barrier between that both processors
see. So one of the two always knows of the other: what was not begun can be taken back,
without any lock. Pure: the engine and the worker's task loop do the input and output.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

FUNCTION: Final = 1
CALL: Final = 2
MAP: Final = 3
STARMAP: Final = 4
FORGET: Final = 5
READY: Final = 6
INIT_FAILED: Final = 7
VALUE: Final = 8
VALUES: Final = 9
ERROR: Final = 10
BY_VALUE: Final = 11
UNREADABLE: Final = 12
GROUP: Final = 13
CALLS: Final = 14
STOPPED: Final = 15
QUIT: Final = 16
INITIALIZING: Final = 17
SOFT: Final = 18

AGAIN: Final = 1 << 8
"""Added to the kind of a task that comes again, by value: its worker lacks names of the
owner's main module, so its results may have to go by value, too."""

SPLITS: Final = 1 << 9
"""Added to the kind of a task that stops between two items when it is recalled."""

SEALED: Final = 1 << 10
"""Added to GROUP: each item is a pickle of its own."""

PARCEL: Final = 1 << 11
"""Added to the kind of a frame whose first byte a descriptor goes with: of a segment that has
the large buffers of its pickle."""

KIND: Final = (1 << 8) - 1
"""What of a kind remains without these."""

_HEADER = struct.Struct("<QQQIII")
_LENGTH = struct.Struct("<I")
_PAGE = struct.Struct("=IIQQQQ")
_COMMITTED = struct.Struct("=II")
_SECONDS = struct.Struct("=d")
_CELL = struct.Struct("=Q")

PAGE_START: Final = _PAGE.size
PAGE_BYTES: Final = 1 << 16
LAST_WORDS_BYTES: Final = 1 << 15
"""Room behind the page, in the same file, for the traceback of a worker that dies of a fault."""
PAGE_REPEATS: Final = slice(4, 8)
"""Where a page counts how often its last record is repeated: a number of 32 bits."""
_NUMBER, _ITEM, _RECALL, _SLOT = slice(8, 16), slice(16, 24), slice(24, 32), slice(32, 40)
MOST_ITEMS: Final = 1 << 31
"""Items of one body: positions have 32 bits."""


class Frame(NamedTuple):
    """One message; see the table above for the meaning of the fields."""

    kind: int
    number: int
    job: int
    item: int
    body: bytes
    end: int


def header(kind: int, number: int, job: int, item: int, length: int, end: int = 0) -> bytes:
    """The bytes that go before a body of ``length`` bytes."""
    return _HEADER.pack(length, number, job, item, end, kind)


def seconds(value: float) -> bytes:
    """The body of SOFT."""
    return _SECONDS.pack(value)


def read_seconds(body: bytes) -> float:
    """What it says."""
    value: float = _SECONDS.unpack(body)[0]
    return value


class Decoder:
    """Puts frames together from pieces of any size, in order."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._missing = _HEADER.size

    @property
    def missing(self) -> int:
        """How many bytes the next frame needs at least, to choose a read size by."""
        return self._missing

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames that ``data`` completes."""
        buffer = self._buffer
        buffer += data
        if len(data) < self._missing:
            self._missing -= len(data)
            return []
        frames: list[Frame] = []
        at = 0
        size = len(buffer)
        while True:
            if size - at < _HEADER.size:
                self._missing = _HEADER.size - (size - at)
                break
            length, number, job, item, end, kind = _HEADER.unpack_from(buffer, at)
            stop = at + _HEADER.size + length
            if stop > size:
                self._missing = stop - size
                break
            body = bytes(memoryview(buffer)[at + _HEADER.size : stop])
            frames.append(Frame(kind, number, job, item, body, end))
            at = stop
        del buffer[:at]
        return frames


_REPEAT: Final = (1 << 32) - 1


def record(data: bytes) -> bytes:
    """One entry of a VALUES body or of a page; ``data`` is below 4 GiB."""
    return _LENGTH.pack(len(data)) + data


def repeat(times: int) -> bytes:
    """The entry that repeats the one before it so many times."""
    return _COMMITTED.pack(_REPEAT, times) if times else b""


def records(body: bytes) -> Iterator[tuple[bytes, int]]:
    """The entries of a VALUES body, each with how many times in a row it stands there."""
    at = 0
    last: bytes | None = None
    while at < len(body):
        (length,) = _LENGTH.unpack_from(body, at)
        at += _LENGTH.size
        if length == _REPEAT:
            (times,) = _LENGTH.unpack_from(body, at)
            at += _LENGTH.size
            assert last is not None
            yield last, 1 + times
            last = None
            continue
        if last is not None:
            yield last, 1
        last = body[at : at + length]
        at += length
    if last is not None:
        yield last, 1


class Page(NamedTuple):
    """What a worker had finished of a chunk but perhaps not sent."""

    number: int
    item: int
    body: bytes


def write_page(page: memoryview, number: int, item: int) -> None:
    """Note that the worker is at ``item`` of task ``number``; the page has no values."""
    # In this order: a kill, or a look, between two of them finds the old task without
    # values or at an item that is done, never the new one at a wrong item.
    page[0:8] = bytes(8)
    page[_ITEM] = _CELL.pack(item)
    page[_NUMBER] = _CELL.pack(number)


def write_slot(page: memoryview, slot: int) -> None:
    """The owner, before the worker starts: which number it has among those that live."""
    page[_SLOT] = _CELL.pack(slot)


def slot_of(page: memoryview) -> int:
    """The worker: its number."""
    slot: int = _CELL.unpack(bytes(page[_SLOT]))[0]
    return slot


def commit_page(page: memoryview, used: int) -> None:
    """Say that ``used`` bytes of records are complete, and the last is not repeated yet."""
    # One store of eight bytes: a kill leaves the old pair or the new one.
    page[0:8] = _COMMITTED.pack(used, 0)


def recall(page: memoryview, number: int) -> None:
    """The owner: nothing of the tasks up to ``number`` is to be begun any more."""
    page[_RECALL] = _CELL.pack(number)


def recall_cell(page: memoryview) -> memoryview:
    """The worker: where to read the number up to which tasks are recalled, at [0]."""
    return page[_RECALL].cast("Q")


def page_number(page: memoryview) -> int:
    """The number of the task that was begun last."""
    number: int = _CELL.unpack(bytes(page[_NUMBER]))[0]
    return number


def read_page(page: memoryview) -> Page:
    """What is committed, of a worker that is dead."""
    used, repeats, number, item, _, _ = _PAGE.unpack_from(page, 0)
    body = bytes(page[PAGE_START : PAGE_START + used]) + repeat(repeats)
    return Page(number, item, body)


def read_live_page(page: memoryview, barrier: Callable[[], None]) -> Page:
    """The same of a worker that may write meanwhile.

    ``barrier``: what the worker has stored before something that was read before the
    barrier can be read after it. Values are never changed below what is committed,
    except when the page is made empty; then its task or item is another one.
    """
    # The worker is at its last item, or will be: this is not for ever.
    while True:
        barrier()
        number = bytes(page[_NUMBER])
        barrier()
        item = bytes(page[_ITEM])
        used, repeats = _COMMITTED.unpack(bytes(page[0:8]))  # one load of eight bytes
        barrier()
        body = bytes(page[PAGE_START : PAGE_START + used])
        barrier()
        is_same = bytes(page[_NUMBER]) == number and bytes(page[_ITEM]) == item
        if is_same and _COMMITTED.unpack(bytes(page[0:8]))[0] >= used:
            return Page(_CELL.unpack(number)[0], _CELL.unpack(item)[0], body + repeat(repeats))
