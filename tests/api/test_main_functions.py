"""Functions and classes of the main program run in workers, however the program was started.

A script, ``python -c``, standard input, a module, a package, an interactive session, a
notebook: pickle can name what is in ``__main__`` in none or some of these, and a worker can
import it in none or some. The user need not know which.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = str(Path(__file__).resolve().parents[2])

DEFINITIONS = """\
import sys
import safepool

FACTOR = 3

class Point:
    def __init__(self, x):
        self.x = x

    def moved(self, by=1):
        return Point(self.x + by)

class Broken(Exception):
    def __init__(self, text, where):
        super().__init__(text, where)
        self.where = where

def early(point):
    return Point(point.x * FACTOR)

def fail(text):
    raise Broken(text, Point(7))

def exit_with(point):
    sys.exit(point.x)
"""

LATER = """\
OFFSET = 100

class Late(Point):
    pass

def late(n):
    return Late(n + OFFSET)
"""

USE = f"""\
def main(method):
    context = safepool.get_context(method)
    with context.Pool(1) as pool:
        result = pool.apply(early, (Point(4),))
        assert type(result) is Point and result.x == 12, result
        assert [p.x for p in pool.map(early, [Point(1), Point(2)])] == [3, 6]
        assert pool.map(lambda p: p.moved(by=FACTOR).x, [Point(1)]) == [4]
        assert [p.x for p in pool.imap(Point.moved, [Point(1)])] == [2]
        try:
            pool.apply(fail, ("as expected",))
        except Broken as error:
            assert error.args[0] == "as expected"
            assert type(error.where) is Point and error.where.x == 7
        else:
            raise AssertionError("no error")
        exec({LATER!r}, globals())
        result = pool.map(late, range(3), 3)
        assert [type(p) for p in result] == [Late] * 3, result
        assert [p.x for p in result] == [100, 101, 102]
        assert pool.apply(late, (5,)).moved().x == 106
        assert pool.apply(early, (Late(2),)).x == 6
    process = context.Process(target=exit_with, args=(Point(9),))
    process.start()
    process.join()
    assert process.exitcode == 9, process
    print("all is well")
"""

GUARD = """\
if __name__ == "__main__":
    main(METHOD)
"""

PROGRAM = DEFINITIONS + "\n" + USE + "\n" + GUARD

KERNEL = """\
# As a notebook's kernel does it: a module of the name __main__ that no file stands behind.
import sys
import types

module = types.ModuleType("__main__")
sys.modules["__main__"] = module
for number, cell in enumerate(sys.stdin.read().split("# next cell\\n")):
    exec(compile(cell, f"<cell {number}>", "exec"), module.__dict__)
"""


def run(arguments: list[str], folder: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run Python in a folder of its own."""
    return subprocess.run(
        [sys.executable, *arguments],
        input=stdin,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


Launch = Callable[[str, Path], subprocess.CompletedProcess[str]]


def as_script(method: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(PROGRAM.replace("METHOD", repr(method)))
    return run(["program.py"], folder)


def on_the_command_line(method: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return run(["-c", PROGRAM.replace("METHOD", repr(method))], folder)


def from_standard_input(method: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return run(["-"], folder, PROGRAM.replace("METHOD", repr(method)))


def as_a_module(method: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(PROGRAM.replace("METHOD", repr(method)))
    return run(["-m", "program"], folder)


def as_a_package(method: str, folder: Path) -> subprocess.CompletedProcess[str]:
    package = folder / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "constants.py").write_text("NOTHING = None\n")
    (package / "__main__.py").write_text(
        "from . import constants\n" + PROGRAM.replace("METHOD", repr(method))
    )
    return run(["-m", "package"], folder)


def in_an_interactive_session(method: str, folder: Path) -> subprocess.CompletedProcess[str]:
    blocks = (DEFINITIONS + "\n" + USE).replace("\n\n    ", "\n    ")
    return run(["-i", "-q"], folder, f"{blocks}\nmain({method!r})\n")


def in_a_notebook(method: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "kernel.py").write_text(KERNEL)
    cells = (DEFINITIONS, USE, f"main({method!r})\n")
    return run(["kernel.py"], folder, "# next cell\n".join(cells))


WAYS: list[Launch] = [
    as_script,
    on_the_command_line,
    from_standard_input,
    as_a_module,
    as_a_package,
    in_an_interactive_session,
    in_a_notebook,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_what_is_in_main_works_in_workers(way: Launch, method: str, tmp_path: Path) -> None:
    """Functions, classes, globals and exceptions of ``__main__``, made before and after the pool.

    As functions, arguments, results and errors; the types that come back are the owner's own.
    """
    done = way(method, tmp_path)
    assert (done.returncode, done.stdout) == (0, "all is well\n"), done.stderr
    if way is not in_an_interactive_session:  # there the prompts are on stderr
        assert done.stderr == ""
    else:
        assert "Traceback" not in done.stderr


LATE = """\
import safepool

def main():
    with safepool.get_context(METHOD).Pool(1) as pool:
        exec("class Late: pass\\ndef late(n): return Late()", globals())
        print({type(value) is Late for value in pool.map(late, range(30), 1)})
        print({type(value) is Late for value in pool.imap(late, range(30))})

if __name__ == "__main__":
    main()
"""


def test_every_chunk_may_return_a_late_class(method: str, tmp_path: Path) -> None:
    """A class that no worker has seen at its start comes back from each chunk of a map."""
    (tmp_path / "program.py").write_text(LATE.replace("METHOD", repr(method)))
    done = run(["program.py"], tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "{True}\n{True}\n", "")


CHANGED = """\
import safepool
with safepool.get_context(METHOD).Pool(1) as pool:
    got = []
    for text in ("first", "second"):
        exec(f"def redefined(n): return {text!r}, n", globals())
        got += [pool.apply(redefined, (1,)), pool.map(redefined, [2])[0]]
    print(got)
"""


def test_a_redefined_function_is_the_new_one(method: str, tmp_path: Path) -> None:
    """A cell is run again: the workers that have seen the old function run the new one."""
    done = run(["-c", CHANGED.replace("METHOD", repr(method))], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    expected = [("first", 1), ("first", 2), ("second", 1), ("second", 2)]
    assert done.stdout == f"{expected}\n"


UNGUARDED = """\
import safepool
print("top level", flush=True)
"""

USES = {
    "pool": "with safepool.get_context(METHOD).Pool(2) as pool:\n    print(pool.map(abs, [-1]))",
    "process": (
        "process = safepool.get_context(METHOD).Process(target=abs, args=(1,))\n"
        "process.start()\nprocess.join()\nraise SystemExit(process.exitcode)"
    ),
}


@pytest.mark.parametrize("use", sorted(USES))
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_script_without_a_guard_ends_with_advice(method: str, use: str, tmp_path: Path) -> None:
    """Workers that import it do not start workers: a few short advices, an error, no fork bomb."""
    code = USES[use].replace("METHOD", repr(method))
    (tmp_path / "program.py").write_text(UNGUARDED + code)
    done = run(["program.py"], tmp_path)
    assert done.returncode != 0
    assert 'if __name__ == "__main__"' in done.stderr or "__name__ == '__main__'" in done.stderr
    assert "RuntimeError" in done.stderr
    assert done.stdout.count("top level") <= 8
    assert len(done.stderr.splitlines()) < 400


def test_a_script_without_a_guard_works_under_fork(tmp_path: Path) -> None:
    """There the main module is not imported again."""
    code = USES["pool"].replace("METHOD", "'fork'")
    (tmp_path / "program.py").write_text(UNGUARDED + code)
    done = run(["program.py"], tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "top level\n[1]\n", "")
