"""How one call is given to the engine: plain, sealed, or alone.

Plain and sealed ones may travel in a group (see groups). A call with options, a large one,
and one that a worker may not be able to read without another form, travels alone.

Called by: the pool, in the submitter's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from safepool import payload
from safepool.core import frames
from safepool.core.options import TaskOptions
from safepool.engine import Engine
from safepool.groups import MOST_SEALED, Call, Functions
from safepool.jobs import PLAIN, Chunk, Job
from safepool.results import Sink
from safepool.serial import SerialEngine


def submit(
    engine: Engine | SerialEngine,
    functions: Functions,
    sink: Sink,
    func: Callable[..., Any],
    args: Iterable[Any],
    kwds: Mapping[str, Any],
    options: TaskOptions,
) -> Job:
    """Begin a call whose outcome goes to ``sink``; what cannot be pickled is its outcome."""
    if options is PLAIN and functions.make_plain(func, args, kwds):
        call = Call(sink, func, args, {}, None)
        engine.call(call)
        return call
    try:
        body = payload.dumps_call(func, args, kwds, by_value=functions.by_value)
    except Exception as error:
        engine.refuse(sink, error)
        return Job(sink, frames.CALL, func, b"", options)
    names_main = not functions.by_value and payload.names_main(body)
    may_join = options is PLAIN and isinstance(body, bytes) and len(body) <= MOST_SEALED
    if may_join and not names_main:
        assert isinstance(body, bytes)
        call = Call(sink, func, args, kwds, body)
        engine.call(call)
        return call
    job = Job(sink, frames.CALL, func, b"", options)
    engine.submit(job, Chunk(job, 0, 1, body, (func, args, kwds) if names_main else None))
    return job
