"""How a program was started, and what its workers see of it.

Archives, folders and interactive sessions as the main program; arguments, paths, flags,
environment and standard input as workers find them; output that is buffered when a worker
is forked. Plain scripts, ``-c``, ``-m`` and standard input are tested in tests/api.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
import zipfile

import pytest

from tests.kit.jail import PRELUDE, Jail

BOUND = 10.5

MAIN = """
    from safepool import get_context

    class Pair:
        def __init__(self, x): self.x = x

    def double(pair):
        return Pair(pair.x * 2)

    if __name__ == "__main__":
        for method in ("fork", "spawn", "forkserver"):
            with get_context(method).Pool(2, grace=0.5) as pool:
                assert [pair.x for pair in pool.map(double, [Pair(1), Pair(2)])] == [2, 4]
        say("worked", sys.argv[0])
"""


def test_programs_that_are_no_plain_script(jail: Jail) -> None:
    """A zip archive, a folder and ``runpy`` as the main program: functions and classes arrive.

    Seen in the wild: https://github.com/vllm-project/vllm/pull/43782
    """
    source = PRELUDE + textwrap.dedent(MAIN)
    folder = jail.folder / "folder"
    folder.mkdir()
    (folder / "__main__.py").write_text(source)
    archive = jail.folder / "archive.pyz"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("__main__.py", source)
    (jail.folder / "plain.py").write_text(source)
    runner = "import runpy; runpy.run_path('plain.py', run_name='__main__')"
    owners = [jail.start([sys.executable, *argv]) for argv in ([folder], [archive], ["-c", runner])]
    jail.hear("worked", len(owners), 60)
    for owner in owners:
        assert owner.wait() == 0, owner.errors()


LAMBDA = """
    from safepool import get_context

    class Pair:
        def __init__(self, x): self.x = x

    if __name__ == "__main__":
        for method in ("fork", "spawn", "forkserver"):
            with get_context(method).Pool(1, grace=0.5) as pool:
                assert pool.apply(lambda: Pair(3)).x == 3
        say("worked")
"""


def test_a_lambda_that_makes_objects_of_the_main_module(jail: Jail) -> None:
    """What it returns arrives, whichever way function and class have travelled.

    Seen in the wild: https://github.com/jupyter/notebook/issues/5261
    """
    owner = jail.script(LAMBDA)
    jail.hear("worked")
    assert owner.wait() == 0, owner.errors()


EDITOR = """
from safepool import get_context

def double(x):
    return 2 * x

__file__ = {unguarded!r}
for method in ("fork", "spawn", "forkserver"):
    with get_context(method).Pool(1, grace=0.5) as pool:
        say("result", str(pool.map(double, [21])))

"""

UNGUARDED = "import os\nopen('ran', 'a').write(f'{os.getpid()} ')\n"


def test_an_interactive_window_of_an_editor(jail: Jail) -> None:
    """A session whose ``__file__`` names an unguarded script: no worker runs that script.

    Seen in the wild: https://github.com/microsoft/vscode-jupyter/issues/13993
    """
    unguarded = jail.folder / "unguarded.py"
    unguarded.write_text(UNGUARDED)
    # Compiled as a cell is, in a __main__ that comes from no file.
    cell = PRELUDE + EDITOR.format(unguarded=str(unguarded))
    program = f"exec(compile({cell!r}, '<cell>', 'exec'))"
    owner = jail.start([sys.executable, "-c", program])
    assert {line.text for line in jail.hear("result", 3)} == {"[42]"}
    assert owner.wait() == 0, owner.errors()
    assert not (jail.folder / "ran").exists()


PATHS = """
    import pathlib
    from safepool import get_context

    def double(x):
        import beside
        return beside.FACTOR * x

    if __name__ == "__main__":
        sys.path.append(pathlib.Path("more").absolute())
        sys.path.insert(0, os.path.abspath("more"))
        for method in ("fork", "spawn", "forkserver"):
            with get_context(method).Pool(1, grace=0.5) as pool:
                say("result", str(pool.map(double, [3])))
"""


def test_a_path_object_in_the_module_path(jail: Jail) -> None:
    """``sys.path`` may hold what is no string; what was added to it at run time counts.

    Seen in the wild: https://github.com/python/cpython/issues/145898
    """
    (jail.folder / "more").mkdir()
    (jail.folder / "more" / "beside.py").write_text("FACTOR = 7\n")
    owner = jail.script(PATHS)
    assert {line.text for line in jail.hear("result", 3)} == {"[21]"}
    assert owner.wait() == 0, owner.errors()


INHERITED = """
    import json, warnings
    from safepool import get_context

    def state():
        return {
            "argv": sys.argv,
            "cwd": os.getcwd(),
            "path": [entry for entry in sys.path if "more" in entry],
            "executable": sys.executable,
            "flags": [sys.flags.optimize, sys.flags.dont_write_bytecode, sys.flags.no_user_site],
            "xoptions": sys._xoptions,
            "warnings": sys.warnoptions,
            "prefix": sys.prefix,
            "environ": {k: v for k, v in os.environ.items() if k != "SAFEPOOL_RUN"},
            "umask": os.umask(0o27),
        }

    AT_IMPORT = state()

    def look(_):
        return AT_IMPORT, state(), "SAFEPOOL_RUN" in os.environ

    if __name__ == "__main__":
        method = sys.argv[1]
        os.environ["SET_LATER"] = "yes"
        os.environ.pop("SET_EARLIER")
        sys.path.append(os.path.abspath("more"))
        os.chdir("other")
        own = state()
        with get_context(method).Pool(1, grace=0.5) as pool:
            at_import, in_task, has_mark = pool.map(look, [0])[0]
        say("mark", str(has_mark))
        say("task", json.dumps({k: [own[k], in_task[k]] for k in own if own[k] != in_task[k]}))
        if method != "fork":  # which imports nothing
            # multiprocessing puts the folder of the program in front of the path.
            say("import", json.dumps({k: [own[k], at_import[k]] for k in own
                                      if own[k] != at_import[k]}))
"""


@pytest.mark.parametrize("how", ["fork", "spawn", "forkserver"])
def test_what_workers_see_of_the_owners_state(how: str, jail: Jail) -> None:
    """Arguments, folder, path, flags, warnings and environment are the owner's of that moment.

    Seen in the wild: https://github.com/python/cpython/issues/143706
    """
    (jail.folder / "other").mkdir()
    options = ["-O", "-B", "-s", "-X", "dev", "-W", "ignore::ImportWarning"]
    source = jail.folder / "inherited.py"
    source.write_text(PRELUDE + textwrap.dedent(INHERITED))
    owner = jail.start(
        [sys.executable, *options, source, how, "--flag", "a b", ""],
        environment={"SET_EARLIER": "1"},
    )
    assert jail.hear("mark")[0].text == "True"
    assert jail.hear("task")[0].text == "{}"
    if how != "fork":
        assert jail.hear("import")[0].text == "{}"
    assert owner.wait() == 0, owner.errors()


LATER = """
    import multiprocessing
    from safepool import get_context

    def look(name):
        mark = f"{os.getpid()} {os.environ.get('SAFEPOOL_RUN', '')}"
        return os.environ.get(name), bool(mark.strip())

    if __name__ == "__main__":
        # Somebody else's fork server, born before any of this.
        stock = multiprocessing.get_context("forkserver")
        process = stock.Process(target=abs, args=(1,))
        process.start()
        process.join()
        context = get_context("forkserver")
        seen = []
        with context.Pool(1, maxtasksperchild=1, grace=0.5) as pool:
            for value in ("one", "two", "three"):
                os.environ["LATER"] = value
                with context.Pool(1, grace=0.5) as inner:
                    seen.append(inner.apply(look, ("LATER",)))
        say("seen", str(seen))
"""


def test_forkserver_workers_see_the_environment_of_today(jail: Jail) -> None:
    """Neither an older fork server nor an older pool decides what a new worker sees.

    Seen in the wild: https://github.com/motioneye-project/motioneye/pull/3254
    """
    owner = jail.script(LATER)
    assert jail.hear("seen")[0].text == "[('one', True), ('two', True), ('three', True)]"
    assert owner.wait() == 0, owner.errors()


UNFLUSHED = """
import sys
from safepool import get_context

print("main is imported", end=";")

def work(n):
    print("task", end=";")
    return n

if __name__ == "__main__":
    print("before", end=";")
    for n in range(2):
        with get_context(sys.argv[1]).Pool(2, grace=0.5) as pool:
            pool.map(work, range(4), 1)
            pool.close()
            pool.join()
        print("between", end=";")
        process = get_context(sys.argv[1]).Process(target=work, args=(1,))
        process.start()
        process.join()
    print("after", end=";")
"""


def test_buffered_output_is_written_once(method: str, jail: Jail) -> None:
    """What the owner had printed but not flushed when workers were made appears once.

    Seen in the wild: https://github.com/python/cpython/issues/98552
    """
    path = jail.folder / "unflushed.py"
    path.write_text(UNFLUSHED)
    environment = {k: v for k, v in jail.environment.items() if k != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [sys.executable, path, method],
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done
    words = done.stdout.split(";")
    assert [words.count(word) for word in ("before", "between", "after")] == [1, 2, 1], words
    assert words.count("task") == 2 * (4 + 1), words
    if method == "fork":
        assert words.count("main is imported") == 1, words
    else:
        # Once in the owner, and in each process that imports it; a fork server does so once.
        processes = 1 + 2 * (2 + 1)
        assert words.count("main is imported") <= processes, words


INPUT = """
    import subprocess
    from safepool import get_context

    def read(_):
        done = subprocess.run(["cat"], stdin=sys.stdin, capture_output=True, text=True, timeout=20)
        for fd in range(3):
            os.fstat(fd)
        return sys.stdin.read(), done.stdout, done.returncode

    def inner(queue, method):
        process = get_context(method).Process(target=tell, args=(queue,))
        process.start()
        process.join()

    def tell(queue):
        queue.put(read(0))

    if __name__ == "__main__":
        context = get_context(sys.argv[1])
        with context.Pool(1, grace=0.5) as pool:
            say("pool", str(pool.map(read, [0])))
        queue = context.SimpleQueue()
        process = context.Process(target=inner, args=(queue, sys.argv[1]))
        process.start()
        say("process", str(queue.get()))
        process.join()
        say("owner", sys.stdin.readline().strip())
"""


def test_standard_input_of_workers_and_of_their_workers(method: str, jail: Jail) -> None:
    """``sys.stdin`` is at its end and can be handed on; nobody takes the owner's input.

    Seen in the wild: https://github.com/Kludex/uvicorn/issues/877
    """
    owner = jail.script(INPUT, method)
    owner.go()
    assert jail.hear("pool")[0].text == "[('', '', 0)]"
    assert jail.hear("process")[0].text == "('', '', 0)"
    assert jail.hear("owner")[0].text == "go"
    assert owner.wait() == 0, owner.errors()


def closed_in_all_ways() -> list[str]:
    """Shell redirections that close each set of standard descriptors."""
    names = ["0<&-", "1>&-", "2>&-"]
    return [
        " ".join(name for bit, name in enumerate(names) if chosen >> bit & 1)
        for chosen in range(1, 8)
    ]


@pytest.mark.parametrize("end", ["returned", "killed"])
def test_owners_with_closed_standard_descriptors(end: str, jail: Jail) -> None:
    """Started by a service manager without stdin, stdout or stderr: all works and all goes.

    Seen in the wild: https://github.com/Kludex/uvicorn/issues/2679
    """
    source = """
        from safepool import get_context
        if __name__ == "__main__":
            for method in ("fork", "spawn", "forkserver"):
                with get_context(method).Pool(1, grace=0.5) as pool:
                    assert pool.map(abs, [-1]) == [1]
            pool = get_context("fork").Pool(1, grace=0.5)
            pool.apply_async(time.sleep, (180,))
            say("worked")
            if sys.argv[1] == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
    """
    for start in (0, 3):
        ways = closed_in_all_ways()[start : start + 4 - (start == 0)]
        owners = [
            jail.script(source, end, before=["sh", "-c", f'exec "$@" {way}', "sh"]) for way in ways
        ]
        for way, owner in zip(ways, owners, strict=True):
            code = owner.wait()
            assert code == (0 if end == "returned" else -9), (way, owner.errors())
        jail.hear("worked", start + len(ways))
    jail.assert_empty("after owners without standard descriptors", BOUND)
