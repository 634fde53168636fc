"""How the engine's thread waits, and how other threads wake it.

``Watch`` is a poll object with a reader for each descriptor. ``Inbox`` is a queue of
events with a bell that is rung only when the engine sleeps. Putting an event in takes
no lock that a thread could hold for long, and none that the same thread could not
take twice: finalizers and signal handlers may do it at any instruction.

Used by the engine and its crew.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from safepool.latch import Latch

T = TypeVar("T")

_PATIENCE = 30.0
"""Seconds to wait for an answer of the engine's, which a callback of the user's may hold up."""

Reader = Callable[[int], None]
Event = tuple[Callable[..., None], tuple[Any, ...]]


class Watch:
    """Which descriptors are waited for, and who reads them."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._readers: dict[int, Reader] = {}

    def add(self, fd: int, reader: Reader) -> None:
        """Call ``reader`` with the events when ``fd`` is readable or at its end."""
        self._readers[fd] = reader
        self._poll.register(fd, select.POLLIN)

    def writable_too(self, fd: int, *, wanted: bool) -> None:
        """Wait for room to write as well, or no longer."""
        if fd in self._readers:
            self._poll.modify(fd, select.POLLIN | select.POLLOUT if wanted else select.POLLIN)

    def remove(self, fd: int) -> None:
        """Forget ``fd``; nothing if that was done before."""
        if self._readers.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def serve(self, ready: list[tuple[int, int]]) -> None:
        """Call the readers of what is ready."""
        for fd, events in ready:
            # A reader may have removed others that were ready.
            reader = self._readers.get(fd)
            if reader is not None:
                reader(events)

    def look(self, timeout: float | None) -> list[tuple[int, int]]:
        """Wait at most ``timeout`` seconds; return what is ready."""
        # Rounded up to a millisecond: a deadline that is not quite over must not spin.
        return self._poll.poll(None if timeout is None else timeout * 1000 + bool(timeout))


class Answer(Generic[T]):
    """What the engine says to another thread that has asked."""

    def __init__(self, otherwise: T) -> None:
        self._is_there = Latch()
        self._answer = otherwise

    def put(self, answer: T) -> None:
        """The engine: answer."""
        self._answer = answer
        self._is_there.set()

    def get(self) -> T:
        """The other thread: wait for it. What it has otherwise is the answer of an engine that
        has ended, or is held up."""
        self._is_there.wait(_PATIENCE)
        return self._answer


class Inbox:
    """Events for one thread, from any."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._bell, self._ear = socket.socketpair()
        self._bell.setblocking(False)
        self._ear.setblocking(False)
        # Held for one send only; reentrant, since a finalizer may ring in the midst of a ring.
        self._lock = threading.RLock()
        self._sleeping = False
        self.ended = False

    def fileno(self) -> int:
        """Readable when somebody has rung."""
        return self._ear.fileno()

    def put(self, handler: Callable[..., None], *arguments: Any) -> bool:
        """Any thread: leave an event; False if nobody will take it any more."""
        self._events.append((handler, arguments))
        if self._sleeping:
            self._sleeping = False
            # The lock keeps the descriptor from being closed under a ring.
            with self._lock:
                if not self.ended:
                    with contextlib.suppress(BlockingIOError):  # full of rings not heard yet
                        self._bell.send(b"\0")
        return not self.ended

    def take(self) -> Iterator[Event]:
        """The events that are there; each is given to one taker only."""
        while True:
            try:
                event = self._events.popleft()
            except IndexError:
                return
            yield event
            del event

    @contextlib.contextmanager
    def asleep(self) -> Iterator[bool]:
        """Whoever puts an event in meanwhile rings; True if one is there already."""
        self._sleeping = True
        try:
            yield bool(self._events)
        finally:
            self._sleeping = False

    def hear(self) -> None:
        """Take the rings that were rung."""
        with contextlib.suppress(BlockingIOError):
            self._ear.recv(4096)

    def end(self) -> None:
        """Take no more events; those that still come are returned by ``take``."""
        with self._lock:
            self.ended = True
            self._bell.close()
            self._ear.close()
