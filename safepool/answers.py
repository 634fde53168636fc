"""What a worker sends back: values and exceptions, as bytes.

Every way out of a task is an answer. A value that cannot be pickled becomes
multiprocessing's MaybeEncodingError; an exception travels with its remote traceback,
and with a text that stands for it should the owner be unable to read it.

Called by: the task loop.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Container
from types import TracebackType
from typing import Any

from safepool import payload
from safepool.parcels import Buffers, Packed, wrapped

_SMALL = frozenset({int, float, bool, complex, type(None)})


class _NotEncodedError(Exception):
    """A value cannot be pickled; carries what multiprocessing puts in its place."""

    def __init__(self, substitute: BaseException, reason: BaseException) -> None:
        super().__init__()
        self.substitute = substitute
        self.reason = reason


def _dumps(value: Any, buffers: Buffers | None = None, *, by_value: bool) -> bytes:
    """Pickle a result. By value only what the owner's main module defines and ours does not:
    a lambda as a result is an error in multiprocessing, and programs rely on that."""
    try:
        return payload.dumps_plain(value, buffers)
    except Exception as reason:
        # A lambda that came by value may have brought its own copy of a class along.
        is_a_copy = "not the same object as __main__" in str(reason)
        if not is_a_copy and not (by_value and "__main__" in str(reason)):
            raise
        if buffers is not None:
            buffers.found.clear()
        return payload.dumps_by_value(value, buffers)


def pack(value: Any, *, by_value: bool) -> Packed:
    """Pickle a result, with large buffers beside it, or raise what stands for it."""
    if type(value) in _SMALL:
        return pickle.dumps(value, 5)
    try:
        buffers = Buffers()
        data = _dumps(wrapped(value), buffers, by_value=by_value)
        try:
            return buffers.packed(data)
        except OSError:
            # No memory for it outside of the pickle, or no descriptor.
            return _dumps(value, by_value=by_value)
    except Exception as reason:
        raise _NotEncodedError(_not_encoded(reason, value), reason) from None


class _Shown:
    """Stands for an object in a message, also for one whose repr() fails."""

    def __init__(self, value: object) -> None:
        try:
            self._text = repr(value)
        except Exception as error:
            self._text = f"<{type(value).__name__} whose repr() raises {type(error).__name__}>"

    def __repr__(self) -> str:
        return self._text


class _WithReason:
    """Pickles what stands for a value together with the reason, which pickle would drop."""

    def __init__(self, substitute: BaseException, reason: BaseException) -> None:
        self._substitute = substitute
        self._reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return with_cause, (self._substitute, self._reason)


def with_cause(error: BaseException, cause: BaseException) -> BaseException:
    """In the owner: put both together again."""
    error.__cause__ = cause
    return error


class _WithCause:
    """Pickles an exception together with its remote traceback, which pickle alone would drop."""

    def __init__(self, error: BaseException, text: str) -> None:
        self._error = error
        self._text = text

    def __reduce__(self) -> tuple[Any, ...]:
        from multiprocessing import pool

        return pool.rebuild_exc, (self._error, self._text)  # type: ignore[attr-defined]


def _not_encoded(reason: Exception, value: object) -> BaseException:
    """What multiprocessing puts in the place of a value or exception that cannot be pickled."""
    from multiprocessing import pool

    error: BaseException = pool.MaybeEncodingError(reason, _Shown(value))  # type: ignore[attr-defined]
    return error


def error_body(error: BaseException, *, by_value: bool, hidden: Container[str]) -> bytes:
    """Pack an exception for the owner, with the text to fall back on if it cannot be read there.

    Frames of the files ``hidden`` are left out of the traceback.
    """
    if isinstance(error, _NotEncodedError):
        substitute = error.substitute
        try:
            data = _dumps(_WithReason(substitute, error.reason), by_value=by_value)
        except Exception:  # the reason cannot be pickled either; its text is in the substitute
            data = payload.dumps_plain(substitute)
        return pickle.dumps((data, repr(substitute), ""))
    trace = _user_frames(error.__traceback__, hidden)
    text = "".join(traceback.format_exception(type(error), error, trace))
    text = f'\n"""\n{text}"""'
    try:
        data = _dumps(_WithCause(error, text), by_value=by_value)
    except Exception as reason:
        data = payload.dumps_plain(_WithCause(_not_encoded(reason, error), text))
    return pickle.dumps((data, repr(_Shown(error)), text))


def _user_frames(trace: TracebackType | None, hidden: Container[str]) -> TracebackType | None:
    """Leave the frames of the task loop out of a traceback."""
    while trace is not None and trace.tb_frame.f_code.co_filename in hidden:
        trace = trace.tb_next
    return trace
