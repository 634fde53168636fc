"""Cuts a job's input into chunks and gives them to the engine.

For ``map`` in the caller's thread, for ``imap`` in a thread of its own: the user's
iterator may wait for anything, even for results of the same pool, and nobody else
waits with it. Each chunk is handed over as soon as it is there. A chunk that cannot be
pickled fails alone; an input that raises ends the job's input, and its error comes
where its next item would have been.

Holds the engine and the job, never the pool. Called by: the pool.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from safepool import payload
from safepool.engine import Engine
from safepool.jobs import Chunk, Job
from safepool.loop import signals_blocked
from safepool.streams import Stream


def make_chunk(
    job: Job, index: int, items: tuple[Any, ...], first: int, *, by_value: bool
) -> Chunk:
    """Pickle one chunk; ``first`` is the position of its first item in the input."""
    body = payload.dumps_items(items, first, by_value=by_value)
    # Only what names the main module may be unknown to a worker and needed a second time.
    again = not by_value and (payload.names_main(job.body) or payload.names_main(body))
    return Chunk(job, index, len(items), body, items if again else None)


def fill(
    engine: Engine,
    job: Job,
    items: Iterator[Any],
    chunksize: int,
    *,
    by_value: bool,
    may_pull: Callable[[], bool] | None = None,
    pulled: Callable[[int], None] | None = None,
) -> None:
    """Give the engine all chunks of an open job, then the end of its input."""
    index = 0
    failure: BaseException | None = None
    try:
        while may_pull is None or may_pull():
            piece = tuple(itertools.islice(items, chunksize))
            if not piece:
                break
            if pulled is not None:
                pulled(len(piece))
            try:
                chunk = make_chunk(job, index, piece, index * chunksize, by_value=by_value)
            except Exception as error:
                engine.add_failed(job, index, len(piece), error)
            else:
                engine.add(chunk)
            index += 1
            piece = chunk = None  # type: ignore[assignment]
    except Exception as error:
        failure = error
    except BaseException as error:
        failure = error
        if may_pull is None:
            # Ctrl-C or the like in the caller's own thread: it is the caller's, too.
            raise
    finally:
        engine.input_ended(job, index, failure)


def feed_in_background(
    engine: Engine,
    job: Job,
    stream: Stream,
    items: Iterator[Any],
    chunksize: int,
    *,
    by_value: bool,
) -> None:
    """Start the thread that fills an imap; it ends with the input or with the pool."""
    thread = threading.Thread(
        target=fill,
        args=(engine, job, items, chunksize),
        kwargs={
            "by_value": by_value,
            "may_pull": stream.wait_for_room,
            "pulled": stream.pulled,
        },
        name="safepool-feeder",
        daemon=True,
    )
    # Signals are for the program's own threads.
    with signals_blocked():
        thread.start()
