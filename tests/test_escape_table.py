"""docs/what-can-escape.md cannot rot: every cell names a test that exists, or a reason.

Cells about what tests/real/test_escapes.py plays say what that test expects, word by word.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.strays import STRAYS
from tests.real.test_escapes import ESCAPES, LAYERS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "what-can-escape.md"
KEY = re.compile(r"\[(\w+)\](?!\()")
SUBJECT = "-"
"""The cell of a worker that is itself the one who died."""


def tables(first: str) -> Iterator[tuple[list[str], list[list[str]]]]:
    """The tables of the page whose first column is headed ``first``: headings and rows."""
    text = PAGE.read_text(encoding="utf-8")
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        rows = [
            [cell.strip() for cell in line.strip("|\n").split("|")] for line in table.split("\n")
        ]
        head, _, *body = [row for row in rows if row != [""]]
        if head[0] == first:
            yield head, body


def node_ids() -> dict[str, str]:
    """What the keys stand for."""
    ((_, rows),) = tables("key")
    keys = {key: node.strip("`") for key, node in rows}
    assert len(keys) == len(rows), "a key stands there twice"
    return keys


def words() -> set[str]:
    """The words that the page explains, by which cells begin."""
    ((_, rows),) = tables("word")
    return {row[0] for row in rows}


def verdicts() -> Iterator[tuple[str, str, str]]:
    """Tactic, column and text of every cell that says what becomes of a process."""
    for head, rows in tables("tactic"):
        for row in rows:
            assert len(row) == len(head), row
            for column, cell in zip(head[1:], row[1:], strict=True):
                if column != "why":
                    yield row[0], column, cell


def test_the_page_has_tables() -> None:
    """The tests below read what they are meant to read."""
    assert len(list(tables("tactic"))) == 3
    assert len(list(verdicts())) > 80


@pytest.mark.parametrize("key", node_ids())
def test_every_test_that_the_page_names_exists(key: str) -> None:
    """Each key stands for a function in a file of tests, and something refers to it."""
    file, _, function = node_ids()[key].partition("::")
    source = (ROOT / file).read_text(encoding="utf-8")
    assert re.search(rf"^def {function}\(", source, re.MULTILINE), node_ids()[key]
    assert f"[{key}]" in PAGE.read_text(encoding="utf-8"), f"nothing refers to {key}"


def test_every_cell_names_a_test_or_a_reason() -> None:
    """A cell begins with a word that is explained; only a "no" may be without a test."""
    known, explained = node_ids(), words()
    for tactic, column, cell in verdicts():
        where = f"{tactic}, {column}: {cell!r}"
        if cell == SUBJECT:
            assert column == "worker dies", where
            continue
        word, _, rest = cell.partition(" ")
        keys = KEY.findall(cell)
        assert set(keys) <= known.keys(), where
        assert word.strip(":") in explained, where
        if word == f"{ESCAPES}:":
            assert len(KEY.sub("", rest).split()) >= 4, f"no reason: {where}"
        else:
            assert KEY.sub("", rest).strip() == "", f"a reason where none is needed: {where}"
            assert keys, f"no test: {where}"


def test_the_strays_are_found_as_the_page_says() -> None:
    """Every tactic that is played has a row, and each of its cells is what the test expects."""
    columns = {"owner dies": "owner", "worker dies": "worker", "launcher killed": "launcher"}
    seen = set()
    for tactic, column, cell in verdicts():
        name = tactic.partition(":")[0].strip("`")
        if not tactic.startswith("`"):
            continue
        situation = columns.get(column, "all")
        seen.add((name, situation))
        assert cell.partition(" ")[0].strip(":") == LAYERS[situation][name], (tactic, column)
    assert seen == {(name, situation) for name in STRAYS for situation in LAYERS}
