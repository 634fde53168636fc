"""Turns tasks and results into bytes and back.

Pickle with multiprocessing's own reducers comes first: it is quick, and sockets,
connections and proxies travel as they do in multiprocessing. cloudpickle comes when
that fails (lambdas, closures, classes made in functions), and at once when a
worker cannot import the owner's main module (``python -c``, standard input, a
notebook): then whatever pickle would name as ``__main__.something`` goes by value.

An exception that a user's own ``__reduce__`` raises is passed on as it is: it is the
user's message. Only "this cannot be pickled" becomes TaskNotPicklableError.

Called by: the pool and its feeder (owner), the task loop (worker), and whoever
pickles a process for spawn.
"""

from __future__ import annotations

import copyreg
import functools
import io
import os
import pickle
import sys
from collections import ChainMap
from collections.abc import Mapping
from importlib.machinery import BuiltinImporter
from multiprocessing import spawn
from multiprocessing.reduction import ForkingPickler
from typing import Any

from safepool.errors import TaskNotPicklableError
from safepool.parcels import Buffers, Packed, Parcel, wrapped

_PROTOCOL = 5
_MAIN = b"__main__"
_NOT_PICKLABLE = (pickle.PicklingError, AttributeError, TypeError)
_PLAIN = frozenset({int, float, bool, str, bytes, complex, type(None)})

# ForkingPickler keeps the reducers that multiprocessing's modules register in this dict;
# its own constructor copies it for every object, which costs more than a small pickle.
_REDUCERS: dict[type, Any] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
_DISPATCH = ChainMap(_REDUCERS, copyreg.dispatch_table)

loads = pickle.loads


def dumps_plain(value: Any, buffers: Buffers | None = None) -> bytes:
    """Pickle with multiprocessing's reducers and nothing else.

    ``buffers``: gets the large buffers, which are not in the pickle then.
    Raises whatever pickle or the object's own methods raise.
    """
    if type(value) in _PLAIN:
        return pickle.dumps(value, _PROTOCOL)
    file = io.BytesIO()
    pickler = pickle.Pickler(file, _PROTOCOL, buffer_callback=buffers)
    pickler.dispatch_table = _DISPATCH
    pickler.dump(value)
    return file.getvalue()


def dumps_by_value(value: Any, buffers: Buffers | None = None) -> bytes:
    """Pickle so that functions and classes of ``__main__`` go as code, not as names."""
    file = io.BytesIO()
    _value_pickler()(file, _PROTOCOL, buffer_callback=buffers).dump(value)
    return file.getvalue()


@functools.cache
def _value_pickler() -> Any:
    """Cloudpickle's pickler with multiprocessing's reducers; imported at first use."""
    import cloudpickle

    table = ChainMap(_REDUCERS, cloudpickle.Pickler.dispatch_table)
    # It must be a class attribute: pickle's C code reads the table in the constructor.
    return type("ValuePickler", (cloudpickle.Pickler,), {"dispatch_table": table})


def dumps_packed(value: Any, *, by_value: bool) -> Packed:
    """Pickle a task: as ``dumps``, with large buffers beside it."""
    buffers = Buffers()
    data = dumps(wrapped(value), by_value=by_value, buffers=buffers)
    try:
        return buffers.packed(data)
    except OSError:
        # No memory for it outside of the pickle, or no descriptor.
        return dumps(value, by_value=by_value)


def dumps(value: Any, *, by_value: bool = False, buffers: Buffers | None = None) -> bytes:
    """Pickle ``value``, with cloudpickle where pickle cannot.

    ``by_value``: the other side does not have this process's main module; see
    :func:`main_is_importable`. Raises the first error when neither can do it.
    """
    try:
        data = dumps_plain(value, buffers)
    except _NOT_PICKLABLE as error:
        try:
            return dumps_by_value(value, _fresh(buffers))
        except Exception:
            # pickle's own words are the ones that users know how to look up.
            raise error from None
    if by_value and _MAIN in data:
        return dumps_by_value(value, _fresh(buffers))
    return data


def _fresh(buffers: Buffers | None) -> Buffers | None:
    """Forget what an attempt that failed has found."""
    if buffers is not None:
        buffers.found.clear()
    return buffers


def names_main(data: Packed) -> bool:
    """Tell whether a pickle may need something from ``__main__`` where it is read."""
    return _MAIN in (data.head if isinstance(data, Parcel) else data)


def main_is_importable(method: str) -> bool:
    """Tell whether workers of this start method have the owner's main module.

    Under fork they have it as it was at the pool's start. Under spawn and
    forkserver they import it, which needs a file or a module name.
    """
    if method == "fork":
        return True
    main = sys.modules.get("__main__")
    name = getattr(getattr(main, "__spec__", None), "name", None)
    if name is not None:
        # multiprocessing does not import the __main__.py of a package, folder or archive again.
        return bool(name.rpartition(".")[2] != "__main__")
    if getattr(main, "__loader__", None) is BuiltinImporter:
        return False  # -c, standard input, a prompt: whatever __file__ was set to
    # Standard input has a __file__, too, of a name that is no file; ipython's is its own.
    path = str(getattr(main, "__file__", None) or "")
    return os.path.isfile(path) and os.path.basename(path) != "ipython"


def preparation_data(name: str) -> dict[str, Any]:
    """What a spawned worker must know before it unpickles, as multiprocessing gathers it.

    Without a main module that is no file (a program from standard input). Raises
    RuntimeError, with multiprocessing's advice, while a worker imports its main module.
    """
    data: dict[str, Any] = spawn.get_preparation_data(name)
    if not main_is_importable("spawn"):
        data.pop("init_main_from_path", None)
    return data


def dumps_function(function: Any, *, by_value: bool) -> bytes:
    """Pickle the function of a job; TaskNotPicklableError says why not."""
    return _named(function, "the function", by_value)


def dumps_call(function: Any, args: Any, kwds: Mapping[str, Any], *, by_value: bool) -> Packed:
    """Pickle one call; TaskNotPicklableError names the part that cannot go, and why."""
    call = (function, args, kwds)
    try:
        return dumps_packed(call, by_value=by_value)
    except _NOT_PICKLABLE:
        _named(function, "the function", by_value)
        for position, value in enumerate(args):
            _named(value, f"argument {position}", by_value)
        for name, value in kwds.items():
            _named(value, f"argument {name!r}", by_value)
        return _named(call, "the call", by_value)


def dumps_items(items: tuple[Any, ...], first: int, *, by_value: bool) -> Packed:
    """Pickle a chunk of a map; ``first`` is the position of its first item, for messages."""
    try:
        return dumps_packed(items, by_value=by_value)
    except _NOT_PICKLABLE:
        for position, value in enumerate(items, first):
            _named(value, f"item {position}", by_value)
        return _named(items, f"the items from {first} on", by_value)


def dumps_item(item: Any, place: int, *, by_value: bool) -> bytes:
    """Pickle one item of a map; ``place`` is its position, for messages."""
    return _named(item, f"item {place}", by_value)


def _named(value: Any, what: str, by_value: bool) -> bytes:
    """Pickle one part of a task, with an error that names the part."""
    try:
        return dumps(value, by_value=by_value)
    except _NOT_PICKLABLE as error:
        kind = type(value).__name__
        raise TaskNotPicklableError(
            f"{what} of the task ({kind}) cannot be sent to a worker: "
            f"{type(error).__name__}: {error}"
        ) from error
