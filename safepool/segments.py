"""Large buffers on their way: unnamed files in memory, passed by descriptor.

One copy is made, into the file; the receiver maps it. There is no name, so whatever dies
leaves nothing behind: the kernel frees the file with the last descriptor and mapping.

Called by: parcels; channels and the task loop pass the descriptors.
"""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Sequence

from safepool.host import own
from safepool.host.mapping import map_file

_ALIGNMENT = 64
_MOST_AT_ONCE = 1 << 30
_MOST_DESCRIPTORS = 8
_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class Segment:
    """A file in memory; its descriptor is closed with the last reference to it."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)

    @classmethod
    def of(cls, buffers: Sequence[memoryview]) -> Segment:
        """Write buffers (bytes, contiguous) into a new one. Raises OSError: no memory, say."""
        segment = cls(own.unnamed_file("safepool-data"))
        offset = 0
        for buffer in buffers:
            done = 0
            while done < len(buffer):
                part = buffer[done : done + _MOST_AT_ONCE]
                done += os.pwrite(segment.fd, part, offset + done)
            offset = aligned(offset + len(buffer))
        return segment

    def map(self, sizes: Sequence[int], *, private: bool) -> list[memoryview]:
        """The buffers, in this process's memory, writable. ``private``: writes stay here."""
        offsets = []
        end = offset = 0
        for size in sizes:
            offsets.append(offset)
            end = offset + size
            offset = aligned(end)
        whole = map_file(self.fd, end, private=private)
        return [whole[at : at + size] for at, size in zip(offsets, sizes, strict=True)]


def receive(sock: socket.socket, size: int) -> tuple[bytes, list[Segment]]:
    """Read from a stream socket: bytes, and the segments that came with them, in order.

    Raises what ``recv`` raises. The kernel ends a read behind a descriptor, so there is room.
    """
    numbers = array.array("i")
    room = socket.CMSG_SPACE(_MOST_DESCRIPTORS * numbers.itemsize)
    data, ancillary, _, _ = sock.recvmsg(size, room, _CLOSE_ON_EXEC)
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
    for fd in numbers if not _CLOSE_ON_EXEC else ():
        os.set_inheritable(fd, False)
    return data, [Segment(fd) for fd in numbers]


def send_with(sock: socket.socket, data: bytes | memoryview, segment: Segment) -> int:
    """Send the beginning of ``data`` together with a segment; return how many bytes went.

    Raises what ``send`` raises.
    """
    rights = array.array("i", [segment.fd])
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
    return sock.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)


def aligned(offset: int) -> int:
    """Where the next buffer begins: arrays want their elements at even addresses."""
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
