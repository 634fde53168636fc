"""What a launcher imports beforehand: told by the owner, done by the launcher, never its end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from safepool.preload import (
    LauncherSettings,
    gather_settings,
    read_settings,
    write_settings,
)
from tests.kit import truth

ROOT = str(Path(__file__).resolve().parents[2])


@pytest.mark.parametrize(
    "settings",
    [
        LauncherSettings(None),
        LauncherSettings(0.5),
        LauncherSettings(
            1.0, ("__main__", "json"), "/a/main.py", ("/x", ""), (("A", "1"), ("Ä", "\udc80"))
        ),
    ],
)
def test_settings_travel_through_a_descriptor(settings: LauncherSettings) -> None:
    """What is read is what was written; the descriptor is closed and was not inheritable."""
    before = truth.open_files()
    fd = write_settings(settings)
    assert not os.get_inheritable(fd)
    assert read_settings(fd) == settings
    assert truth.open_files() == before


def test_only_forkserver_needs_more_than_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spawn imports in the worker; forkserver gets paths (as text), environment and modules."""
    assert gather_settings("spawn", 0.5) == LauncherSettings(0.5)
    monkeypatch.setenv("OF_THE_TEST", "here")
    monkeypatch.setattr(sys, "path", [*sys.path, Path("/a/path/object")])
    settings = gather_settings("forkserver", None)
    assert settings.idle_after is None
    assert ("OF_THE_TEST", "here") in settings.environment
    assert "/a/path/object" in settings.sys_path
    assert "__main__" in settings.modules


PROGRAM = """
import sys
from safepool.preload import LauncherSettings, preload
preload(LauncherSettings(
    None, ("__main__", "breaks", "leaves", "missing", "works"), "main.py", (*sys.path, "."),
    (("OF_THE_OWNER", "1"),),
))
print("works" in sys.modules, "__mp_main__" in sys.modules, sys.modules["works"].seen)
"""


def test_a_module_that_cannot_be_imported_ends_nothing(tmp_path: Path) -> None:
    """Errors, ``sys.exit`` and missing modules are passed over; the rest is there.

    With the owner's environment set and its main module under the name that workers look for.
    """
    (tmp_path / "main.py").write_text("value = 1\n")
    (tmp_path / "breaks.py").write_text("1 / 0\n")
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(3)\n")
    (tmp_path / "works.py").write_text("import os\nseen = os.environ['OF_THE_OWNER']\n")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True True 1\n", "")
