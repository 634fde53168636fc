"""How owner and worker talk: one frame format, and the page that outlives a worker.

A frame is a fixed header (body length, task number, job, item, kind) and a body of
bytes. Both directions use it; what the fields mean depends on the kind:

    to the worker     FUNCTION job: body          the function of a job, once per worker
                      CALL     number: body       function, arguments, keywords
                      MAP      number job item    a chunk; ``item`` = the first item to run
                      STARMAP  number job item    likewise, each item is a call's arguments
                      FORGET   job                its function is no longer needed
    to the owner      READY                       the initializer has returned
                      INIT_FAILED: body           it has not: an error body
                      VALUE    number item: body  the pickle of one value
                      VALUES   number item: body  records, one pickle each, from ``item`` on
                      ERROR    number item: body  an error body; ends the task
                      BY_VALUE number item: body  likewise, because a name was not found here
                      UNREADABLE number item: body  likewise, as the task cannot be unpickled here

A *claim* is a task's number in a pipe of its own. Owner and worker both read from
that pipe; the kernel hands each claim to one of them only. So the worker knows what
it may begin, and the owner can take back what was not begun, without any lock.

A *page* is memory shared by one owner and one worker. The worker adds each value of
a chunk to it and then moves one number on. Whenever it dies, what is committed there
is what was finished. A value that comes again and again is there once, with a count.
Pure: the engine and the worker's task loop do the input and output.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
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

AGAIN: Final = 1 << 8
"""Added to the kind of a task that comes again, by value: its worker lacks names of the
owner's main module, so its results may have to go by value, too."""

_HEADER = struct.Struct("<QQQII")
_LENGTH = struct.Struct("<I")
_PAGE = struct.Struct("=IIQQ")
_COMMITTED = struct.Struct("=II")
_CLAIM = struct.Struct("=Q")

CLAIM_BYTES: Final = _CLAIM.size
PAGE_START: Final = _PAGE.size
PAGE_BYTES: Final = 1 << 16
LAST_WORDS_BYTES: Final = 1 << 15
"""Room behind the page, in the same file, for the traceback of a worker that dies of a fault."""
PAGE_REPEATS: Final = slice(4, 8)
"""Where a page counts how often its last record is repeated: a number of 32 bits."""
QUIT: Final = (1 << 64) - 1
"""The claim that tells a worker to leave."""


class Frame(NamedTuple):
    """One message; see the table above for the meaning of the fields."""

    kind: int
    number: int
    job: int
    item: int
    body: bytes


def header(kind: int, number: int, job: int, item: int, length: int) -> bytes:
    """The bytes that go before a body of ``length`` bytes."""
    return _HEADER.pack(length, number, job, item, kind)


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
            length, number, job, item, kind = _HEADER.unpack_from(buffer, at)
            end = at + _HEADER.size + length
            if end > size:
                self._missing = end - size
                break
            body = bytes(memoryview(buffer)[at + _HEADER.size : end])
            frames.append(Frame(kind, number, job, item, body))
            at = end
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


def claims(numbers: list[int]) -> bytes:
    """The bytes that put these task numbers on offer."""
    return struct.pack(f"={len(numbers)}Q", *numbers)


def split_claims(data: bytes) -> list[int]:
    """The task numbers in what was read from a claim pipe."""
    return [number for (number,) in _CLAIM.iter_unpack(data)]


class Page(NamedTuple):
    """What a worker had finished of a chunk but perhaps not sent."""

    number: int
    item: int
    body: bytes


def write_page(page: memoryview, number: int, item: int) -> None:
    """Make the page empty, for values of task ``number`` from ``item`` on."""
    # The count of used bytes goes first: a kill between the two leaves an empty page.
    page[0:8] = bytes(8)
    _PAGE.pack_into(page, 0, 0, 0, number, item)


def commit_page(page: memoryview, used: int) -> None:
    """Say that ``used`` bytes of records are complete, and the last is not repeated yet."""
    # One store of eight bytes: a kill leaves the old pair or the new one.
    page[0:8] = _COMMITTED.pack(used, 0)


def read_page(page: memoryview) -> Page:
    """What is committed."""
    used, repeats, number, item = _PAGE.unpack_from(page, 0)
    body = bytes(page[PAGE_START : PAGE_START + used]) + repeat(repeats)
    return Page(number, item, body)
