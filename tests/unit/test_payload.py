"""Payloads: what can go by name does, what cannot goes by value, the rest says why."""

from __future__ import annotations

import multiprocessing
import pickle
import subprocess
import sys
import threading
import types
from importlib.machinery import ModuleSpec
from multiprocessing import resource_sharer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from safepool import payload
from safepool.errors import TaskNotPicklableError

ROOT = str(Path(__file__).resolve().parents[2])


class Stubborn:
    """Its own pickling raises."""

    def __reduce__(self) -> Any:
        raise RuntimeError("not this one")


def by_name(value: int) -> int:
    return value + 1


def test_plain_values_and_functions() -> None:
    """Values come back equal, importable functions as themselves."""
    for value in (1, "a", None, [1, {"k": (2.5, b"x")}], {1, 2}):
        assert payload.loads(payload.dumps(value)) == value
    assert payload.loads(payload.dumps(by_name)) is by_name


def test_what_pickle_cannot_goes_by_value() -> None:
    """Lambdas and closures work, also deep inside an argument."""
    base = 10
    functions = {"f": [lambda x: x + base]}
    assert payload.loads(payload.dumps(functions))["f"][0](1) == 11


@pytest.mark.parametrize("by_value", [False, True])
def test_multiprocessing_reducers_are_used(by_value: bool) -> None:
    """A connection travels as multiprocessing sends it, beside a lambda as well."""
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        for value in ([theirs], [theirs, lambda: 0]):
            copy = payload.loads(payload.dumps(value, by_value=by_value))[0]
            with copy:
                assert isinstance(copy, Connection)
                copy.send("hello")
                assert ours.poll(30)
                assert ours.recv() == "hello"
    # It served the descriptor from a thread; what was pickled in vain goes with it.
    resource_sharer.stop(timeout=30)


def test_errors_name_the_part_and_the_reason() -> None:
    """The message says which argument cannot go, of which type, and pickle's own words."""
    lock = threading.Lock()
    with pytest.raises(TaskNotPicklableError, match=r"argument 1 .*lock.*cannot pickle"):
        payload.dumps_call(by_name, (1, lock), {}, by_value=False)
    with pytest.raises(TaskNotPicklableError, match="argument 'key'"):
        payload.dumps_call(by_name, (), {"key": lock}, by_value=False)
    with pytest.raises(TaskNotPicklableError, match="the function"):
        payload.dumps_call(lock.acquire, (), {}, by_value=False)
    with pytest.raises(TaskNotPicklableError, match="item 12 "):
        payload.dumps_items((1, 2, lock), 10, by_value=False)
    with pytest.raises(pickle.PicklingError) as caught:
        payload.dumps_function(lock.acquire, by_value=True)
    assert isinstance(caught.value.__cause__, TypeError)


def test_a_users_own_error_is_passed_on() -> None:
    """An exception that an object's pickling raises is the user's message, unchanged."""
    with pytest.raises(RuntimeError, match="not this one"):
        payload.dumps_call(by_name, (Stubborn(),), {}, by_value=False)


SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from safepool import payload
class Thing:
    def value(self): return 42
def function(): return Thing().value()
main = sys.modules["__main__"]
data = [payload.dumps(item, by_value=not payload.main_is_importable("spawn"))
        for item in (function, [Thing()])]
del main.function, main.Thing
print(payload.loads(data[0])(), payload.loads(data[1])[0].value())
"""


@pytest.mark.parametrize("how", ["-c", "-"])
def test_main_goes_by_value_when_nobody_can_import_it(how: str) -> None:
    """Functions and classes of ``python -c`` and of standard input need no main module there."""
    script = SCRIPT.format(root=ROOT)
    arguments = [how, script] if how == "-c" else [how]
    done = subprocess.run(
        [sys.executable, *arguments],
        input=script,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout.split()) == (0, ["42", "42"]), done.stderr


@pytest.mark.parametrize(
    ("file", "module", "expected"),
    [
        (__file__, None, True),
        ("<stdin>", None, False),
        (None, None, False),
        (__file__, "package.tool", True),
        (__file__, "package.__main__", False),
        (__file__, "__main__", False),
    ],
)
def test_which_main_modules_are_importable(
    monkeypatch: pytest.MonkeyPatch, file: str | None, module: str | None, expected: bool
) -> None:
    """Only a main module that multiprocessing imports in a spawned worker counts."""
    main = types.ModuleType("__main__")
    main.__file__ = file
    main.__spec__ = None if module is None else ModuleSpec(module, None)
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert payload.main_is_importable("spawn") is expected
    assert payload.main_is_importable("fork")
