"""``safepool.detached`` in the place of ``subprocess.Popen``: the same but for its run."""

from __future__ import annotations

import inspect
import logging
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import safepool
from safepool import registry
from safepool.core.lineage import MARK_VARIABLE, extend, is_detached_tag
from safepool.host.linux import LinuxHost
from tests.kit import truth

HOST = LinuxHost()
BOUND = 30


def on_record() -> list[int]:
    return [record.process.pid for record in registry.detached_processes(folder(), HOST)]


def folder() -> str:
    return registry.directory()


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> str:
    """This process looks like the worker of a run."""
    run_id = "ab" * 16
    monkeypatch.setenv(MARK_VARIABLE, extend(None, run_id, 1))
    return run_id


def test_it_takes_the_arguments_of_popen() -> None:
    """In the same order and with the same defaults, but for the session of its own."""
    ours = list(inspect.signature(safepool.detached).parameters.values())
    theirs = list(inspect.signature(subprocess.Popen).parameters.values())
    for mine, other in zip(ours[:-1], theirs, strict=False):
        assert (mine.name, mine.kind) == (other.name, other.kind)
        assert mine.default == (True if mine.name == "start_new_session" else other.default)
    assert ours[-1].kind is inspect.Parameter.VAR_KEYWORD
    assert all(each.kind is inspect.Parameter.KEYWORD_ONLY for each in theirs[len(ours) - 1 :])


def test_it_is_a_popen() -> None:
    """``isinstance``, ``communicate``, text, the context manager and exit statuses work."""
    with safepool.detached(["cat"], stdin=-1, stdout=-1, text=True, encoding="utf-8") as cat:
        assert isinstance(cat, subprocess.Popen)
        assert cat.poll() is None
        assert cat.communicate("hello", BOUND) == ("hello", None)
    assert cat.returncode == 0
    shell = safepool.detached("exit 7", shell=True)
    assert shell.wait(BOUND) == 7
    assert shell.poll() == 7
    with safepool.detached(["sleep", "60"]) as sleep:
        with pytest.raises(subprocess.TimeoutExpired):
            sleep.wait(0.01)
        sleep.kill()
    assert sleep.returncode == -signal.SIGKILL


@pytest.mark.parametrize("how", ["keyword", "position", "bytes", "environment"])
def test_tag_and_mark_say_that_it_left(how: str, marked: str) -> None:
    """Before its program runs the mark is out of its environment, however that was given, and
    the tag is that of the detached; the user's own preexec_fn has run as well."""
    env = {"PATH": os.environ["PATH"], "KEPT": "yes", MARK_VARIABLE: "x"}
    program = ["sh", "-c", f'test -z ${MARK_VARIABLE} && test "$KEPT" = yes && pwd && read -r x']

    def in_child() -> None:
        os.chdir("/")

    os.environ["KEPT"] = "yes"
    try:
        if how == "position":
            process = safepool.detached(
                program, -1, None, -1, -1, None, in_child, True, False, None, env
            )
        elif how == "environment":
            process = safepool.detached(program, stdin=-1, stdout=-1, preexec_fn=in_child)
        else:
            raw = {os.fsencode(k): os.fsencode(v) for k, v in env.items()}
            process = safepool.detached(
                program,
                stdin=-1,
                stdout=-1,
                preexec_fn=in_child,
                env=raw if how == "bytes" else env,
            )
    finally:
        del os.environ["KEPT"]
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"/\n"
        assert is_detached_tag(HOST.read_tag(process.pid))
        assert HOST.read_mark(process.pid) is None
        assert os.getsid(process.pid) == process.pid
        (record,) = [
            r for r in registry.detached_processes(folder(), HOST) if r.process.pid == process.pid
        ]
        assert record.run_id == marked
        assert record.argv == tuple(program)
        assert not record.is_stray
    assert os.environ[MARK_VARIABLE] == extend(None, marked, 1)
    assert not is_detached_tag(resource.getrlimit(resource.RLIMIT_RTTIME)[0])


def test_the_session_can_be_kept() -> None:
    """``start_new_session=False`` leaves it at the terminal."""
    with safepool.detached(["cat"], stdin=-1, start_new_session=False) as process:
        assert os.getsid(process.pid) == os.getsid(0)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="process_group came with Python 3.11")
def test_a_process_group_takes_the_place_of_the_session() -> None:
    """The two exclude each other, so the one that was asked for wins."""
    with safepool.detached(["cat"], stdin=-1, process_group=0) as process:
        assert os.getpgid(process.pid) == process.pid
        assert os.getsid(process.pid) == os.getsid(0)


def test_it_is_on_record_until_it_is_gone(tmp_path: Path) -> None:
    """Listed while it lives; struck off by ``wait``, or by the next look when nobody waits."""
    with safepool.detached(["cat"], stdin=-1, cwd=tmp_path) as process:
        (record,) = registry.detached_processes(folder(), HOST)
        assert (record.process.pid, record.argv, record.cwd) == (
            process.pid,
            ("cat",),
            str(tmp_path),
        )
        assert record.process in registry.detached_incarnations(folder(), HOST)
    assert [name for name in os.listdir(folder()) if "detached" in name] == []
    with safepool.detached(["sleep", "60"]) as process:
        process.kill()
        assert truth.wait_gone(process.pid)
        assert registry.detached_processes(folder(), HOST, tidy=False) == []
        assert len([name for name in os.listdir(folder()) if "detached" in name]) == 1
        assert on_record() == []
        assert [name for name in os.listdir(folder()) if "detached" in name] == []


def test_a_program_that_does_not_exist_is_not_on_record() -> None:
    """The error is Popen's."""
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        safepool.detached(["no-such-program"])
    assert on_record() == []


def test_dropping_the_object_is_no_mistake(recwarn: pytest.WarningsRecorder) -> None:
    """Nobody has to wait for it: no ResourceWarning, as Popen gives one."""
    reader, writer = os.pipe()
    pid = safepool.detached(["cat"], stdin=reader).pid
    os.close(reader)
    assert truth.is_alive(pid)
    os.close(writer)
    assert truth.wait_gone(pid)
    subprocess._cleanup()  # type: ignore[attr-defined]
    assert [str(each.message) for each in recwarn] == []
    assert on_record() == []


def test_without_a_registry_it_starts_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A registry that others can write is refused; the process has its tag all the same."""
    (tmp_path / "safepool").mkdir(mode=0o777)
    (tmp_path / "safepool").chmod(0o777)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with (
        caplog.at_level(logging.WARNING, "safepool"),
        safepool.detached(["cat"], stdin=-1) as process,
    ):
        assert is_detached_tag(HOST.read_tag(process.pid))
    (line,) = caplog.messages
    assert str(process.pid) in line
    assert "not on record" in line
    assert os.listdir(tmp_path / "safepool") == []


BOUNDED = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_RTTIME, (10**9, 10**9))
import safepool
if sys.argv[1:]:
    os.environ["SAFEPOOL_RUN"] = sys.argv[1]
try:
    process = safepool.detached(["true"])
except safepool.ProtectionError as error:
    print(error)
else:
    print("started", process.wait())
"""


@pytest.mark.parametrize("mark", ["", extend(None, "ab" * 16, 1)])
def test_a_hard_limit_below_the_tag(mark: str) -> None:
    """In a worker an error that names the limit, before anything starts; elsewhere nobody's
    sweep has to spare it, so it starts."""
    arguments = [mark] if mark else []
    done = subprocess.run(
        [sys.executable, "-c", BOUNDED, *arguments], capture_output=True, text=True, timeout=BOUND
    )
    assert done.stderr == ""
    if mark:
        assert "RLIMIT_RTTIME is 1000000000" in done.stdout
    else:
        assert done.stdout == "started 0\n"
