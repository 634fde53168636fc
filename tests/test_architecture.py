"""The shape of the code, read from its syntax trees: who may import what, and who may signal.

``LAYERS`` is the order: a module imports only what stands above it in the table. A new
module needs a line there; to move one, move its line. The few imports against the order
are in ``UPWARD`` with the reason, and only inside functions. Imports for type checkers
alone do not count.

The last tests start fresh interpreters and look at what an import has loaded.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "safepool"

LAYERS: list[tuple[str, ...]] = [
    ("safepool.errors",),
    # Decides.
    ("safepool.core", "safepool.core.values"),
    ("safepool.core.identity", "safepool.core.lineage", "safepool.core.policy"),
    ("safepool.core.wire", "safepool.core.frames", "safepool.core.commands"),
    ("safepool.core.dealing", "safepool.core.lanes"),
    ("safepool.core.levels", "safepool.core.staffing"),
    ("safepool.core.ledger",),
    ("safepool.core.options", "safepool.core.agenda", "safepool.core.cpus"),
    ("safepool.core.oom",),
    ("safepool.core.membership", "safepool.core.planner", "safepool.core.record"),
    ("safepool.core.detached_record", "safepool.core.containment", "safepool.core.kinship"),
    # Does.
    ("safepool.host", "safepool.host.base", "safepool.host.prctl", "safepool.host.procfs"),
    ("safepool.host.linux", "safepool.host.portable", "safepool.host.probe"),
    ("safepool.host.choose",),
    ("safepool.host.own",),
    ("safepool.host.title", "safepool.host.cgroup", "safepool.host.container"),
    ("safepool.host.quota", "safepool.host.barrier"),
    ("safepool.host.oom",),
    ("safepool.host.own_signals", "safepool.host.vitals", "safepool.host.release"),
    ("safepool.host.tree_memory",),
    ("safepool.registry.lock", "safepool.registry.place", "safepool.registry.files"),
    ("safepool.registry.look", "safepool.registry.detached", "safepool.registry.forgetting"),
    ("safepool.registry",),
    ("safepool.host.mapping", "safepool.segments", "safepool.parcels"),
    ("safepool.sweeper", "safepool.payload", "safepool.sparing", "safepool.census"),
    ("safepool.detachment",),
    # What runs in workers, launchers and the sidecar.
    ("safepool.surroundings", "safepool.in_flight", "safepool.loop", "safepool.telling"),
    ("safepool.preload", "safepool.bootstrap"),
    ("safepool.answers", "safepool.copies", "safepool.last_words"),
    ("safepool.item_run", "safepool.entries"),
    ("safepool.worker_logs", "safepool.current"),
    ("safepool.worker_life", "safepool.worker_signals"),
    ("safepool.soft_limit",),
    ("safepool.service",),
    ("safepool.launcher_config", "safepool.launcher_container"),
    ("safepool.roster", "safepool.launcher_watch", "safepool.leftovers"),
    ("safepool.run_sweeps", "safepool.sweeping"),
    ("safepool.launcher",),
    ("safepool.launcher_start",),
    ("safepool.sidecar",),
    # The owner's side of a run.
    ("safepool.at_exit",),
    ("safepool.latch", "safepool.layers", "safepool.run_container"),
    ("safepool.launcher_link", "safepool.tracker", "safepool.voice"),
    ("safepool.sidecar_link", "safepool.sidecar_keeper"),
    ("safepool.monitor",),
    ("safepool.run",),
    ("safepool.process",),
    ("safepool.worker_source",),
    # The pool.
    ("safepool.cancellation", "safepool.stats"),
    ("safepool.awaiting",),
    ("safepool.results",),
    ("safepool.streams", "safepool.sinks"),
    ("safepool.progress", "safepool.bounds"),
    ("safepool.waiting", "safepool.channel", "safepool.jobs"),
    ("safepool.groups", "safepool.vigils", "safepool.size_settings"),
    ("safepool.limits", "safepool.losses", "safepool.deliveries", "safepool.sender"),
    ("safepool.resending", "safepool.memory_watch", "safepool.picture"),
    ("safepool.crew", "safepool.intake"),
    ("safepool.engine",),
    ("safepool.feeder", "safepool.serial"),
    ("safepool.submission",),
    ("safepool.arguments",),
    ("safepool.calls",),
    ("safepool.pool",),
    ("safepool.executor",),
    ("safepool.context",),
    ("safepool",),
    # The command line.
    ("safepool.demo_owner", "safepool.demo"),
    ("safepool.inventory", "safepool.run_logs"),
    ("safepool.stopping", "safepool.probes"),
    ("safepool.cli.words",),
    ("safepool.cli.choose",),
    ("safepool.cli.run", "safepool.cli.ps", "safepool.cli.log", "safepool.cli.doctor"),
    ("safepool.cli.sweep",),
    ("safepool.cli.stop",),
    ("safepool.cli.arguments",),
    ("safepool.cli",),
    ("safepool.__main__",),
]

UPWARD: dict[tuple[str, str], str] = {
    ("safepool.pool", "safepool.context"): "a pool without a context takes the default one",
}

PURE = {
    "__future__", "binascii", "bisect", "collections", "collections.abc", "dataclasses", "enum",
    "functools", "heapq", "itertools", "json", "marshal", "math", "operator", "re", "struct",
    "typing",
}  # fmt: skip
"""What the core may import: nothing that knows of time, files, processes or chance."""

EFFECTS = {"open", "print", "input", "exec", "eval", "compile", "breakpoint", "__import__"}

SIGNALLING = {
    "os": {"kill", "killpg"},
    "signal": {"pidfd_send_signal", "raise_signal", "pthread_kill", "sigqueue"},
}
# The second raises signals in its own process, and can mean no other; the probe sends
# itself no signal: number 0.
MAY_SIGNAL = {
    "safepool.host.linux", "safepool.host.own_signals", "safepool.host.portable",
    "safepool.host.probe",
}  # fmt: skip
# They come with objects that signal when asked to.
SIGNALLING_OBJECTS = {"subprocess", "psutil"}
# It imports subprocess for its strays, and terminates a pool.
MAY_TERMINATE = {"safepool.demo_owner"}

# Which modules may import a package at all; for the second, inside functions only.
ONLY_IN = {"psutil": {"safepool.host.portable"}, "cloudpickle": {"safepool.payload"}}

# The wall clock may be set while we wait. It serves for ages of files, and for people.
MAY_ASK_WALL_CLOCK = {
    "safepool.registry.detached", "safepool.registry.files", "safepool.run", "safepool.voice",
    "safepool.inventory", "safepool.host.own",
}  # fmt: skip
# The demonstration sleeps for its reader, and its strays have nothing else to do.
MAY_SLEEP = {"safepool.demo", "safepool.demo_owner"}

LONGEST_MODULE = 400
LONGEST_FUNCTION = 70
EMPTY_NAMES = {"util", "utils", "manager", "managers", "helper", "helpers", "misc", "common"}


@dataclass(frozen=True)
class Import:
    """One import: ``target`` is a module, as far as it can be told from the text."""

    target: str
    line: int
    is_in_function: bool


def name_of(path: Path) -> str:
    """The dotted name of a module's file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
ORDER = {name: place for place, name in enumerate(name for layer in LAYERS for name in layer)}
CORE = [name for name in MODULES if name.startswith("safepool.core.")]


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(), str(MODULES[module]))


@cache
def nodes_of(module: str) -> list[tuple[ast.AST, bool]]:
    """All nodes of a module, each with whether it runs later than the module's import."""
    return list(walk(tree_of(module), is_in_function=False))


def walk(node: ast.AST, *, is_in_function: bool) -> Iterator[tuple[ast.AST, bool]]:
    """All nodes below, less what only type checkers see."""
    for child in ast.iter_child_nodes(node):
        is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from walk(ast.Module(child.orelse, []), is_in_function=is_in_function)
        else:
            yield child, is_in_function
            yield from walk(child, is_in_function=is_in_function or is_function)


def imports_of(module: str) -> Iterator[Import]:
    """What a module imports; ``from safepool import x`` is x if that is a module."""
    for node, is_in_function in nodes_of(module):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, is_in_function)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}:{node.lineno}: write imports in full"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                target = inner if inner in MODULES else str(node.module)
                yield Import(target, node.lineno, is_in_function)


def test_every_module_has_one_place_in_the_order() -> None:
    """A module that nobody gave a layer is not checked, so it must not be."""
    listed = [name for layer in LAYERS for name in layer]
    assert len(listed) == len(set(listed))
    assert set(MODULES) - set(listed) == set(), "give these a line in LAYERS"
    assert set(listed) - set(MODULES) == set(), "these are gone: take their lines out of LAYERS"


def test_imports_point_downwards() -> None:
    """A module knows only what lies below it, so the lower ones can be understood alone."""
    wrong = []
    for module in MODULES:
        for found in imports_of(module):
            if found.target in ORDER and ORDER[found.target] >= ORDER[module]:
                is_permitted = (module, found.target) in UPWARD and found.is_in_function
                wrong += [] if is_permitted else [f"{module}:{found.line} {found.target}"]
    assert wrong == []


def test_every_exception_from_the_order_is_used() -> None:
    """An import against the order that has been mended leaves no permit behind."""
    used = {(module, found.target) for module in MODULES for found in imports_of(module)}
    assert set(UPWARD) - used == set()


def test_the_core_is_pure() -> None:
    """It gets all that it knows as arguments and does nothing but return a value."""
    wrong = []
    for module in CORE:
        wrong += [
            f"{module}:{found.line} imports {found.target}"
            for found in imports_of(module)
            if found.target not in PURE and not found.target.startswith("safepool.core.")
        ]
        wrong += [
            f"{module}:{node.lineno} calls {node.func.id}"
            for node, _ in nodes_of(module)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            if node.func.id in EFFECTS
        ]
    assert wrong == []


def uses(module: str, owner: str, names: set[str]) -> list[str]:
    """Where a module uses some names of another, by attribute or by import."""
    found = []
    for node, _ in nodes_of(module):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == owner and node.attr in names:
                found.append(f"{module}:{node.lineno} {owner}.{node.attr}")
        elif isinstance(node, ast.ImportFrom) and node.module == owner:
            taken = {alias.name for alias in node.names} & (names | {"*"})
            found += [f"{module}:{node.lineno} {owner}.{name}" for name in taken]
        elif isinstance(node, ast.Import):
            # Under another name its use could not be seen.
            renamed = [alias for alias in node.names if alias.name == owner and alias.asname]
            found += [f"{module}:{node.lineno} {owner} as {alias.asname}" for alias in renamed]
    return found


def endings_by_object(module: str) -> list[str]:
    """Where a module calls what a Popen or psutil's Process signals by; it does so by number."""
    if all(found.target not in SIGNALLING_OBJECTS for found in imports_of(module)):
        return []
    return [
        f"{module}:{node.lineno} .{node.func.attr}()"
        for node, _ in nodes_of(module)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if node.func.attr in {"kill", "terminate", "send_signal", "suspend", "resume"}
    ]


def test_signals_are_sent_in_one_place() -> None:
    """All signals go through the host, by pidfd and to a verified incarnation."""
    wrong = []
    for module in MODULES:
        sent = [
            place for owner, names in SIGNALLING.items() for place in uses(module, owner, names)
        ]
        sent += [] if module in MAY_TERMINATE else endings_by_object(module)
        if module in MAY_SIGNAL:
            assert sent, f"{module} sends none: this test is blind, or the permit is idle"
        else:
            wrong += sent
    assert wrong == []


def test_heavy_packages_have_one_door() -> None:
    """Import psutil only in the portable host; cloudpickle only in payload, at need."""
    wrong = []
    for module in MODULES:
        for found in imports_of(module):
            package = found.target.partition(".")[0]
            is_late = found.is_in_function or package != "cloudpickle"
            if module not in ONLY_IN.get(package, {module}) or not is_late:
                wrong.append(f"{module}:{found.line} {package}")
    assert wrong == []


def test_nothing_waits_by_the_wall_clock_or_by_sleeping() -> None:
    """The clock is monotonic, and waiting is for an event with a bound."""
    wrong = []
    for module in MODULES:
        if module not in MAY_ASK_WALL_CLOCK:
            wrong += uses(module, "time", {"time", "time_ns"})
        if module not in MAY_SLEEP:
            wrong += uses(module, "time", {"sleep"})
    assert wrong == []


def test_modules_and_functions_can_be_read_in_one_go() -> None:
    """A file that grows beyond its ceiling has two subjects, a function two steps."""
    lengths = {module: len(path.read_text().splitlines()) for module, path in MODULES.items()}
    assert {name: n for name, n in lengths.items() if n > LONGEST_MODULE} == {}
    functions = {
        f"{module}:{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for module in MODULES
        for node, _ in nodes_of(module)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    assert {name: n for name, n in functions.items() if n > LONGEST_FUNCTION} == {}


def test_names_say_what_a_thing_is() -> None:
    """No module or class is a "manager" or "helper": the name would say nothing."""
    names = {name for module in MODULES for name in module.split(".")}
    for module in MODULES:
        names |= {node.name for node, _ in nodes_of(module) if isinstance(node, ast.ClassDef)}
    for name in names:
        words = {word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)}
        assert not words & EMPTY_NAMES, name


def test_every_module_begins_with_what_it_is_for() -> None:
    """The header says what the file decides or does."""
    assert [module for module in MODULES if not ast.get_docstring(tree_of(module))] == []


# -- what an import loads -------------------------------------------------------------------


def loaded_by(statement: str) -> set[str]:
    """The modules that a fresh interpreter has after a statement but not before.

    Without site-packages' own start-up files (-S), which import things of their own.
    """
    script = (
        "import sys; sys.path[:0] = sys.argv[1:]; before = set(sys.modules)\n"
        f"{statement}\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    folders = [str(ROOT), *(path for path in sys.path if "site-packages" in path)]
    done = subprocess.run(
        [sys.executable, "-S", "-E", "-c", script, *folders],
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    )
    return set(done.stdout.split())


def test_importing_the_package_loads_nothing_heavy() -> None:
    """A worker, and a program that may never make a pool, pay for nothing else."""
    loaded = loaded_by("import safepool; assert safepool.__version__")
    assert "safepool" in loaded
    heavy = {"multiprocessing", "psutil", "cloudpickle", "concurrent.futures", "ctypes", "logging"}
    assert loaded & heavy == set()
    assert [name for name in loaded if name.startswith("safepool.")] == []


def test_the_sidecar_is_light() -> None:
    """It starts within the time of a bare interpreter, and has little that could fail."""
    loaded = loaded_by("import safepool.sidecar")
    assert "safepool.sidecar" in loaded
    heavy = {
        "psutil", "cloudpickle", "concurrent.futures", "multiprocessing.pool",
        "multiprocessing.managers", "asyncio", "ctypes", "logging", "pathlib", "subprocess",
        "tempfile", "random", "argparse",
    }  # fmt: skip
    assert loaded & heavy == set()


@pytest.mark.parametrize("name", ["SafePool", "SafeProcess", "get_context"])
def test_first_use_does_not_load_what_may_not_be_needed(name: str) -> None:
    """Nothing of cloudpickle comes before pickle fails, nor psutil where there is /proc."""
    loaded = loaded_by(f"import safepool; safepool.{name}")
    assert loaded & {"psutil", "cloudpickle", "concurrent.futures", "asyncio"} == set()
