"""One worker as its owner sees it: the process, the socket, the page.

Does the input and output that the engine asks for and decides nothing. All
descriptors are non-blocking at this end; what does not fit into the socket waits in
a queue until it is writable. The page is an unnamed file, so no way of dying leaves
anything behind.

Used by the engine: made in the constructor's thread or the engine's, then the
engine's alone.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
from collections import deque
from typing import Protocol

from safepool import worker_logs
from safepool.core import frames
from safepool.host import barrier, own
from safepool.loop import packet_pair
from safepool.segments import Segment, receive, send_with

Part = bytes | tuple[bytes, Segment]
"""What is sent: bytes, or bytes whose first one a segment goes with."""

_READ_BYTES = 1 << 18
_MOST_AT_ONCE = 1 << 24
_JOIN_SMALLER = 1 << 14


class WorkerProcess(Protocol):
    """What the engine needs of a process; a multiprocessing BaseProcess has it."""

    name: str

    @property
    def pid(self) -> int | None:
        """Its number; a started process has one."""

    @property
    def sentinel(self) -> int:
        """A descriptor that is readable once the process and its tree are gone."""

    @property
    def exitcode(self) -> int | None:
        """None while it lives; negative: the signal that ended it."""

    def is_alive(self) -> bool:
        """Tell whether it or something of its tree is there."""

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end."""

    def terminate(self) -> None:
        """Ask for the end of its tree, politely first; does not wait."""

    def kill(self) -> None:
        """Force the end of its tree; does not wait."""


class WorkerSource(Protocol):
    """Where workers come from: a launcher, behind this seam."""

    def start(self, conn: socket.socket) -> WorkerProcess:
        """Start a process that runs ``service.serve`` with its copy of ``conn``."""

    def check(self) -> None:
        """Raise if what it has started must not be given anything to do any more."""

    def retiring(self, process: WorkerProcess) -> None:
        """A process is about to be told to leave, since its work is done."""

    def close(self) -> None:
        """No more workers are needed; called after the last one is gone."""


class Channel:
    """The owner's end of one worker."""

    def __init__(self, worker: int, slot: int, source: WorkerSource, *, has_logs: bool) -> None:
        self.worker = worker
        self.slot = slot
        self.logs: socket.socket | None = None
        self.functions: set[int] = set()
        self.stale: list[int] = []
        self.retiring = False
        self.init_failed = False
        self.open = True
        self.has_barrier = False
        self.segments: deque[Segment] = deque()
        self._out: deque[tuple[memoryview, Segment | None]] = deque()
        self._decoder = frames.Decoder()
        with contextlib.ExitStack() as undo:
            self.socket, theirs = socket.socketpair()
            undo.callback(self.socket.close)
            with theirs, contextlib.ExitStack() as held:
                page_fd = own.unnamed_file("safepool-page")
                try:
                    size = frames.PAGE_BYTES + frames.LAST_WORDS_BYTES
                    os.ftruncate(page_fd, size)
                    self._page = mmap.mmap(page_fd, size)
                    undo.callback(self._page.close)
                    with memoryview(self._page) as page:
                        frames.write_slot(page, slot)
                    fds = [page_fd]
                    if has_logs:
                        self.logs, log_end = packet_pair()
                        undo.callback(self.logs.close)
                        held.enter_context(log_end)
                        fds.append(log_end.fileno())
                    socket.send_fds(self.socket, [b"\0"], fds)
                finally:
                    os.close(page_fd)
                self.socket.setblocking(False)
                self.process = source.start(theirs)
            self.pid = self.process.pid or 0
            self.sentinel = self.process.sentinel
            undo.pop_all()

    def send(self, parts: list[Part]) -> bool:
        """Send frames; False if not everything could be sent yet."""
        small: list[bytes] = []
        for part in parts:
            if isinstance(part, bytes) and len(part) < _JOIN_SMALLER:
                small.append(part)
                continue
            self._queue(small)
            small = []
            data, segment = (part, None) if isinstance(part, bytes) else part
            self._out.append((memoryview(data), segment))
        self._queue(small)
        return self.flush()

    def _queue(self, small: list[bytes]) -> None:
        if small:
            self._out.append((memoryview(b"".join(small)), None))

    def flush(self) -> bool:
        """Send what waits, as far as it goes without waiting; True when nothing is left."""
        while self._out and self.open:
            data, segment = self._out[0]
            try:
                if segment is None:
                    sent = self.socket.send(data, socket.MSG_NOSIGNAL)
                else:
                    sent = send_with(self.socket, data, segment)
            except BlockingIOError:
                return False
            except OSError:
                # The worker is dying; its sentinel says so, and what it had is dealt with then.
                self._out.clear()
                break
            if sent < len(data):
                self._out[0] = data[sent:], None
            else:
                self._out.popleft()
        return True

    def read(self) -> list[frames.Frame] | None:
        """The frames that have come; None: nothing is there now.

        ``open`` turns False at the end of the stream.
        """
        try:
            size = max(_READ_BYTES, min(self._decoder.missing, _MOST_AT_ONCE))
            data, segments = receive(self.socket, size)
            self.segments.extend(segments)
        except BlockingIOError:
            return None
        except OSError:
            # Reset by a worker that died with unread tasks.
            data = b""
        if not data:
            self.open = False
            return []
        return self._decoder.feed(data)

    def recall(self, number: int) -> frames.Page:
        """Have nothing begun any more of the tasks up to ``number``; return what the worker is at.

        What it is at goes on, if it has begun: it answers for that item, or with STOPPED.
        """
        with memoryview(self._page) as page:
            frames.recall(page, number)
            return frames.read_live_page(page, self._barrier)

    def is_at(self) -> int:
        """The number of the task that the worker has begun last."""
        with memoryview(self._page) as page:
            return frames.page_number(page)

    def _barrier(self) -> None:
        if self.has_barrier:
            barrier.everywhere()
        else:
            barrier.pause()

    def page(self) -> frames.Page:
        """What the worker has committed to the page; it is dead."""
        with memoryview(self._page) as page:
            return frames.read_page(page)

    def take_logs(self) -> bool:
        """Hand the worker's log records to the handlers here; False when there will be no more."""
        return self.logs is not None and worker_logs.take(self.logs)

    def last_words(self) -> str:
        """What the worker has written of a fault that it died of."""
        data = self._page[frames.PAGE_BYTES :].rstrip(b"\0")
        return data.decode(errors="replace")

    def signal(self, *, force: bool = False) -> None:
        """Ask for the end of the worker and its tree; does not wait."""
        try:
            if force:
                self.process.kill()
            else:
                self.process.terminate()
        except (OSError, ValueError):
            # Gone already, or closed by the user who got hold of it.
            return

    def close(self) -> None:
        """Close all descriptors; the process must be dead or given up."""
        self.open = False
        self._out.clear()
        self.segments.clear()
        self.socket.close()
        if self.logs is not None:
            self.logs.close()
        self._page.close()
