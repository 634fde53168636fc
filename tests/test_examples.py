"""The examples: they do what their headers say, and nothing of them stays behind.

Each runs in a jail, which knows of everything that an example starts.
"""

from __future__ import annotations

import difflib
import re
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.kit import truth
from tests.kit.jail import Jail, Owner

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def start(jail: Jail, name: str, *arguments: str | Path) -> Owner:
    return jail.start([sys.executable, EXAMPLES / name, *arguments])


def finish(jail: Jail, example: Owner) -> str:
    """Wait for a good end; return what it printed."""
    assert example.wait() == 0, example.errors()
    jail.assert_empty("after the example")
    return example.errors()


def test_the_swapped_import_is_the_only_difference_and_changes_no_result(jail: Jail) -> None:
    """Before and after print the same; below the headers one line differs: the import."""
    names = ["01_swapped_import_before.py", "01_swapped_import_after.py"]
    before, after = (finish(jail, start(jail, name)) for name in names)
    assert before == after == "9592 primes below 100,000\n"
    old, new = [(EXAMPLES / n).read_text().split('"""\n', 1)[1].splitlines() for n in names]
    changed = [line for line in difflib.ndiff(old, new) if line[0] in "+-"]
    assert changed == ["- import multiprocessing as mp", "+ import safepool as mp"]


def test_the_swapped_import_leaves_nothing_when_it_is_killed(jail: Jail) -> None:
    """The header's claim: ``kill -9`` half way, and nothing is left."""
    example = start(jail, "01_swapped_import_after.py")
    # Owner, keeper, two workers, and what stands above them.
    truth.until(lambda: len(jail.pids()) >= 6, "the example does not get going")
    example.send(signal.SIGKILL)
    jail.assert_empty("after the kill")


def test_words_are_counted_over_a_folder(jail: Jail, tmp_path: Path) -> None:
    """The counts are those of a plain loop over the same files, folders inside included."""
    texts = tmp_path / "texts"
    (texts / "deeper").mkdir(parents=True)
    words = ["mountain", "mountains", "Mountain", "river-bank", "lakeside", "fjord", "überall"]
    for n in range(20):
        folder = texts / "deeper" if n % 2 else texts
        (folder / f"{n}.txt").write_text(" ".join(words[: n % 7 + 1]) + "\n", encoding="utf-8")
    expected: Counter[str] = Counter()
    for path in texts.rglob("*.txt"):
        expected.update(re.findall(r"[^\W\d_]{6,}", path.read_text(encoding="utf-8").lower()))
    first, *rest = finish(jail, start(jail, "word_counts.py", texts)).splitlines()
    assert first == f"{expected.total()} long words, {len(expected)} different ones, in 20 files"
    assert {word: int(n) for n, word in map(str.split, rest)} == dict(expected)


def test_words_are_counted_over_texts_that_the_example_makes(jail: Jail) -> None:
    """Without a folder it makes one, counts real prose, and removes the folder."""
    temporary = jail.folder / "tmp"
    temporary.mkdir()
    jail.environment["TMPDIR"] = str(temporary)
    printed = finish(jail, start(jail, "word_counts.py"))
    assert "in 8 files" in printed
    assert "argument" in printed
    assert not list(temporary.glob("word-counts-*"))


def test_a_folder_without_texts_is_one_clear_line(jail: Jail, tmp_path: Path) -> None:
    """An empty folder gives a message and no traceback."""
    example = start(jail, "word_counts.py", tmp_path)
    assert example.wait() == 1
    assert example.errors() == f"no *.txt file in {tmp_path}\n"


def test_modules_start_in_order_and_stop_in_the_opposite_one(jail: Jail) -> None:
    """Printer before sensor, readings in between, and the other way round at the end."""
    lines = finish(jail, start(jail, "module_coordinator.py", "1.5")).splitlines()
    assert lines[:2] == ["printer: ready", "sensor: ready"]
    assert any(line.startswith("reading: ") for line in lines)
    assert [line for line in lines if "stopped" in line] == ["sensor: stopped", "printer: stopped"]


def test_a_dead_module_is_started_again(jail: Jail) -> None:
    """The sensor fails sooner or later; then it is said to be ready a second time."""
    example = start(jail, "module_coordinator.py")
    truth.until(
        lambda: example.errors().count("sensor: ready") == 2, "the sensor is not started again"
    )
    assert "sensor: died" in example.errors()


@pytest.mark.parametrize("is_group", [True, False], ids=["whole group", "alone"])
def test_ctrl_c_stops_the_modules_in_order(jail: Jail, is_group: bool) -> None:
    """Ctrl-C, as the terminal sends it or to the coordinator alone: modules stop in order."""
    example = start(jail, "module_coordinator.py")
    example.wait_for_error("reading: ")
    (example.send_to_group if is_group else example.send)(signal.SIGINT)
    lines = finish(jail, example).splitlines()
    assert lines[-3:] == ["interrupted", "sensor: stopped", "printer: stopped"]


def test_a_killed_coordinator_leaves_no_module(jail: Jail) -> None:
    """The header's claim: ``kill -9``, and no module stays."""
    example = start(jail, "module_coordinator.py")
    example.wait_for_error("reading: ")
    example.send(signal.SIGKILL)
    jail.assert_empty("after the kill")
