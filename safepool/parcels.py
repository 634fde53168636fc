"""Pickles whose large buffers travel beside them, in a segment.

Pickle protocol 5 hands the memory of arrays out (https://peps.python.org/pep-0574/); bytes and
bytearrays it copies, so large ones are wrapped, where a task or a result has them
directly or in a tuple. Deeper ones travel in the pickle.

Whoever receives a parcel has memory of his own: an array can be written to, and nobody else
sees that.

Called by: payload (packs), the task loop and deliveries (open).
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from typing import Any

from safepool.segments import Segment

LARGE = 1 << 18
"""Bytes from which on a buffer goes beside the pickle."""

_COUNT = struct.Struct("<I")
_MOST_WRAPPED = 64


class Parcel:
    """A pickle and the segment with its buffers; as long as both together."""

    __slots__ = ("head", "nbytes", "segment")

    def __init__(self, head: bytes, segment: Segment, nbytes: int) -> None:
        self.head = head
        self.segment = segment
        self.nbytes = nbytes

    def __len__(self) -> int:
        return self.nbytes


Packed = bytes | Parcel


class Buffers:
    """Collects the large buffers of one pickle; see ``pickle.Pickler(buffer_callback=)``."""

    def __init__(self) -> None:
        self.found: list[memoryview] = []

    def __call__(self, buffer: pickle.PickleBuffer) -> bool:
        """Return True for what is to stay in the pickle."""
        try:
            raw = buffer.raw()
        except BufferError:
            return True  # not contiguous
        if raw.nbytes < LARGE:
            return True
        self.found.append(raw)
        return False

    def packed(self, head: bytes) -> Packed:
        """The pickle with what was found. Raises OSError when there is no memory for it."""
        if not self.found:
            return head
        sizes = [raw.nbytes for raw in self.found]
        table = _COUNT.pack(len(sizes)) + struct.pack(f"<{len(sizes)}Q", *sizes)
        head = table + head
        return Parcel(head, Segment.of(self.found), len(head) + sum(sizes))


def opened(data: bytes, segment: Segment, *, private: bool) -> Any:
    """Unpickle a parcel. ``private``: the segment may be opened once more, elsewhere."""
    (count,) = _COUNT.unpack_from(data)
    start = _COUNT.size + 8 * count
    sizes = struct.unpack_from(f"<{count}Q", data, _COUNT.size)
    buffers = segment.map(sizes, private=private)
    return pickle.loads(memoryview(data)[start:], buffers=buffers)


class _Large:
    """Bytes, or a bytearray, that pickle is to hand out."""

    def __init__(self, value: bytes | bytearray) -> None:
        self._value = value

    def __reduce__(self) -> tuple[Any, ...]:
        make: Callable[..., Any] = type(self._value)
        return make, (pickle.PickleBuffer(self._value),)


def wrapped(value: Any, depth: int = 3) -> Any:
    """The same with large bytes wrapped, directly or in tuples; the very same if there are none."""
    kind = type(value)
    if kind is bytes or kind is bytearray:
        return _Large(value) if len(value) >= LARGE else value
    if kind is not tuple or not depth or len(value) > _MOST_WRAPPED:
        return value
    items = [wrapped(item, depth - 1) for item in value]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    return tuple(items)


def is_large(value: Any) -> bool:
    """Is it sure, without pickling it, that a buffer of it goes beside the pickle?"""
    nbytes = getattr(value, "nbytes", 0)
    return (isinstance(nbytes, int) and nbytes >= LARGE) or wrapped(value) is not value
