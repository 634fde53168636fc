"""Fresh copies of the deciding and the sweeping code, whole or with one fault put in.

The copies know only each other, so a fault in one reaches nobody outside; a play gets the
copies to run. ``advance`` of the copied planner is asked twice each time, since the same
input must give the same step, and tells ``listener`` what it was shown and said.
"""

from __future__ import annotations

import builtins
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import safepool
from tests.sim.promises import PromiseError

PACKAGE = Path(safepool.__file__).parent
COPIED = (
    "safepool.core.membership",
    "safepool.core.planner",
    "safepool.core.containment",
    "safepool.sweeper",
)
"""In the order in which they import each other."""

Listener = Callable[[Any, float, Any], None]


class Fault(NamedTuple):
    """``old``, which must be there just once, is replaced by ``new`` in a module's text."""

    module: str
    old: str
    new: str


class Copies:
    """One set of copies; ``sweeper`` and ``planner`` are its modules."""

    def __init__(self, *faults: Fault) -> None:
        copies: dict[str, ModuleType] = {}
        for name in COPIED:
            copies[name] = _copy(name, [fault for fault in faults if fault.module == name], copies)
        unknown = {fault.module for fault in faults} - copies.keys()
        assert not unknown, f"no copy is made of {unknown}"
        self.planner = copies["safepool.core.planner"]
        self.sweeper = copies["safepool.sweeper"]
        self.listener: Listener = lambda snapshot, now, step: None
        self._advance = self.planner.advance
        self.planner.advance = self._listen  # type: ignore[attr-defined]

    def _listen(self, state: Any, snapshot: Any, now: float) -> Any:
        step = self._advance(state, snapshot, now)
        if self._advance(state, snapshot, now) != step:
            raise PromiseError("the same input gives the same step", f"{state}, {snapshot}")
        self.listener(snapshot, now, step)
        return step


def _copy(name: str, faults: Sequence[Fault], copies: Mapping[str, ModuleType]) -> ModuleType:
    """Run a module's text again, with faults put in and with copies for its imports."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    text = Path(spec.origin).read_text(encoding="utf-8")
    for fault in faults:
        count = text.count(fault.old)
        assert count == 1, f"{name} has {count} times, not once: {fault.old}"
        text = text.replace(fault.old, fault.new)

    def import_copy(
        wanted: str, space: Any = None, local: Any = None, names: Any = (), level: int = 0
    ) -> Any:
        if wanted in copies and names:
            return copies[wanted]
        real = builtins.__import__(wanted, space, local, names, level)
        inner = {
            one: copies[f"{wanted}.{one}"] for one in names or () if f"{wanted}.{one}" in copies
        }
        return SimpleNamespace(**{**vars(real), **inner}) if inner else real

    module = ModuleType(name)
    module.__dict__["__builtins__"] = {**vars(builtins), "__import__": import_copy}
    exec(compile(text, spec.origin, "exec"), module.__dict__)
    return module
