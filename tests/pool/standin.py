"""A worker source on multiprocessing's own processes, to test the engine without launchers.

It keeps the engine's part of the contract: a process that runs ``serve`` with its copy
of the socket, a sentinel that is readable at death, an exit code. What it does not do
is to end a worker's descendants.
"""

from __future__ import annotations

import multiprocessing
import socket
from typing import Any


class StandinSource:
    """Starts workers as plain processes; notes what was asked of it."""

    def __init__(self, method: str, target: Any, args: tuple[Any, ...]) -> None:
        self._context = multiprocessing.get_context(method)
        self._target = target
        self._args = args
        self.started: list[Any] = []
        self.closed = False
        self.fail_from: int | None = None

    def start(self, conn: socket.socket) -> Any:
        """Start one worker; OSError from the ``fail_from``-th on."""
        if self.fail_from is not None and len(self.started) >= self.fail_from:
            raise OSError("no more processes here")
        process: Any = self._context.Process(  # type: ignore[attr-defined]
            target=self._target, args=(conn, *self._args)
        )
        process.start()
        self.started.append(process)
        return process

    def check(self) -> None:
        """Nothing to say: nobody's workers are protected here."""

    def retiring(self, process: Any) -> None:
        """Nothing to do: nobody's descendants are ended here."""

    def close(self) -> None:
        """Note it."""
        self.closed = True


class StandinContext:
    """What SafePool asks of a context."""

    def __init__(self, method: str, fail_from: int | None = None) -> None:
        self._method = method
        self._fail_from = fail_from
        self.sources: list[StandinSource] = []

    def get_start_method(self) -> str:
        """The method that the processes are started with."""
        return self._method

    def worker_source(self, target: Any, args: tuple[Any, ...], policy: Any) -> StandinSource:
        """A new source."""
        source = StandinSource(self._method, target, args)
        source.fail_from = self._fail_from
        self.sources.append(source)
        return source
