"""Cuts a job's input into chunks and gives them to the engine.

For ``map`` in the caller's thread, for ``imap`` in a thread of its own: the user's
iterator may wait for anything, even for results of the same pool, and nobody else
waits with it. Each chunk, or single item, is handed over as soon as it is there. One that cannot be
pickled fails alone; an input that raises ends the job's input, and its error comes
where its next item would have been.

Holds the engine and the job, never the pool. Called by: the pool.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from safepool import payload
from safepool.core import frames
from safepool.engine import Engine
from safepool.groups import MOST_SEALED, SCALARS, Pile, is_plain
from safepool.jobs import Chunk, Job
from safepool.loop import signals_blocked
from safepool.parcels import is_large
from safepool.streams import Stream


def make_chunk(
    job: Job, items: tuple[Any, ...], first: int, *, by_value: bool, may_split: bool = False
) -> Chunk:
    """Pickle one chunk; ``first`` is the position of its first item in the input."""
    body = payload.dumps_items(items, first, by_value=by_value)
    # Only what names the main module may be unknown to a worker and needed a second time.
    again = not by_value and (payload.names_main(job.body) or payload.names_main(body))
    return Chunk(job, first, len(items), body, items if again else None, may_split=may_split)


def fill(
    engine: Engine,
    job: Job,
    items: Iterator[Any],
    chunksize: int,
    *,
    by_value: bool,
    stream: Stream | None = None,
) -> None:
    """Give the engine all chunks of an open job, then the end of its input."""
    first = 0
    failure: BaseException | None = None
    chunksize = min(chunksize, frames.MOST_ITEMS)
    try:
        while stream is None or stream.wait_for_room():
            piece = tuple(itertools.islice(items, chunksize))
            if not piece:
                break
            if stream is not None:
                stream.pulled(len(piece))
            _add(engine, job, piece, first, by_value=by_value, may_split=stream is None)
            first += len(piece)
            piece = None  # type: ignore[assignment]
    except Exception as error:
        failure = error
    except BaseException as error:
        failure = error
        if stream is None:
            # Ctrl-C or the like in the caller's own thread: it is the caller's, too.
            raise
    finally:
        engine.input_ended(job, first, failure)


def _add(
    engine: Engine,
    job: Job,
    items: tuple[Any, ...],
    first: int,
    *,
    by_value: bool,
    may_split: bool,
) -> None:
    try:
        chunk = make_chunk(job, items, first, by_value=by_value, may_split=may_split)
    except Exception as error:
        engine.add_failed(job, first, len(items), error)
    else:
        engine.add(chunk)


class _Piler:
    """Gives the engine the items of an imap one by one; it takes as many as it can use."""

    def __init__(self, engine: Engine, job: Job, stream: Stream, *, by_value: bool) -> None:
        self._engine = engine
        self._job = job
        self._stream = stream
        self._by_value = by_value
        self._pile = Pile(job, 0, sealed=False)
        self._place = 0

    def run(self, items: Iterator[Any]) -> None:
        """Read all of the input, as there is room for it."""
        failure: BaseException | None = None
        try:
            while room := self._stream.wait_for_room():
                # All at once: what counts is that nobody reads more.
                self._stream.pulled(room)
                if self._pull(items, room) < room:
                    break
        except BaseException as error:
            failure = error
        finally:
            self._engine.input_ended(self._job, self._place, failure)

    def _pull(self, items: Iterator[Any], room: int) -> int:
        """Read ``room`` items; fewer if there are no more."""
        start = self._place
        scalars = SCALARS
        pile = self._pile_for(sealed=False)
        for item in itertools.islice(items, room):
            if type(item) in scalars or is_plain(item):
                if pile.sealed:
                    pile = self._pile_for(sealed=False)
                pile.items.append(item)
                self._place += 1
                if not pile.is_noticed:
                    pile.is_noticed = True
                    self._engine.notice(pile)
            else:
                self._seal(item)
                pile = self._pile
        return self._place - start

    def _seal(self, item: Any) -> None:
        """Pickle an item, and add it to a pile of such; or let it travel alone."""
        place = self._place
        self._place += 1
        if is_large(item):
            self._alone(item, place)
            return
        try:
            data = payload.dumps_item(item, place, by_value=self._by_value)
        except Exception as error:
            self._pile = Pile(self._job, self._place, sealed=False)
            self._engine.add_failed(self._job, place, 1, error)
            return
        names_main = not self._by_value and payload.names_main(data)
        if names_main or len(data) > MOST_SEALED:
            self._alone(item, place)
            return
        pile = self._pile
        if not pile.sealed:
            pile = self._pile = Pile(self._job, place, sealed=True)
        pile.items.append(data)
        if not pile.is_noticed:
            pile.is_noticed = True
            self._engine.notice(pile)

    def _alone(self, item: Any, place: int) -> None:
        self._pile = Pile(self._job, self._place, sealed=False)
        _add(self._engine, self._job, (item,), place, by_value=self._by_value, may_split=False)

    def _pile_for(self, *, sealed: bool) -> Pile:
        if self._pile.sealed != sealed:
            self._pile = Pile(self._job, self._place, sealed=sealed)
        return self._pile


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
    target: Callable[[], None]
    if chunksize == 1 and not job.options.is_for_items:
        target = partial(_Piler(engine, job, stream, by_value=by_value).run, items)
    else:
        target = partial(fill, engine, job, items, chunksize, by_value=by_value, stream=stream)
    thread = threading.Thread(target=target, name="safepool-feeder", daemon=True)
    # Signals are for the program's own threads.
    with signals_blocked():
        thread.start()
