"""Results of a pool in an event loop: ``await result``, ``async for item in pool.imap(...)``.

The engine's thread tells the loop that there is something to look at, and nothing else;
no thread waits. A cancelled ``await`` cancels its task, also one that runs: nobody else can
be waiting for it there.

Called by: results and iterators; imported when one is awaited, so that who does not use
asyncio does not load it.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from safepool.results import AsyncResult
    from safepool.streams import Stream


def _alarm() -> tuple[asyncio.Future[None], Any]:
    """A future of the running loop, and what any thread may call to have it done."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def finish() -> None:
        if not future.done():
            future.set_result(None)

    def ring() -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits there any more
            loop.call_soon_threadsafe(finish)

    return future, ring


async def result_of(result: AsyncResult) -> Any:
    """Return what the call returns, or raise what it raises."""
    future, ring = _alarm()
    result._when_done(ring)
    try:
        await future
    except asyncio.CancelledError:
        result._cancel_soon()
        raise
    return result.get(0)


async def next_of(stream: Stream) -> tuple[bool, Any]:
    """Return the next outcome; StopAsyncIteration at the end."""
    while True:
        future, ring = _alarm()
        # Before the look: what comes after it rings.
        stream.listener = ring
        try:
            return stream.take(0.0)
        except StopIteration:
            raise StopAsyncIteration from None
        except multiprocessing.TimeoutError:
            await future
