"""docs/cli.md says what the program does: its options, its JSON keys, its layers."""

from __future__ import annotations

import argparse
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from safepool.cli import arguments
from safepool.layers import LAYERS
from tests.cli.test_runs import answer, by_role, held, kill_all_helpers, let_go, only_run
from tests.kit.jail import Jail

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
TABLES = PAGE.partition("\n## JSON\n")[2]


def subcommands() -> dict[str, argparse.ArgumentParser]:
    (choices,) = [a.choices for a in arguments._parser()._actions if isinstance(a.choices, dict)]
    return choices


def test_every_subcommand_and_option_is_in_the_reference() -> None:
    """Whoever adds one writes it down; and the page names none that is gone."""
    known = subcommands()
    listed = re.findall(r"^safepool (\w+) .*  ", PAGE.partition("```\n")[0], re.MULTILINE)
    assert sorted(listed) == sorted(known)
    options = {option for parser in known.values() for option in parser._option_string_actions}
    for option in options - {"-h", "--help", "--method"}:
        assert f"`{option}" in PAGE or f" {option}" in PAGE, option
    assert set(re.findall(r"`(--[a-z-]+)", PAGE)) <= options


@pytest.mark.parametrize("name", [n for n in subcommands() if n != "demo"])
def test_help_says_what_the_exit_statuses_mean(name: str) -> None:
    """Without the page at hand."""
    text = subcommands()[name].format_help()
    assert "xit" in text
    assert "status" in text


def test_every_layer_is_in_the_reference() -> None:
    """With its promise and what it needs, word for word."""
    for layer in LAYERS:
        row = re.search(rf"^\| {layer.name} \| (.*) \| (.*) \|$", PAGE, re.MULTILINE)
        assert row is not None, layer.name
        promise = row[1].replace("`", "")
        assert promise == layer.promise.replace("`", "")
        assert row[2].partition(";")[0].split(", ") == list(layer.needs)


def keys_of(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from keys_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from keys_of(inner)


def test_every_json_key_is_in_the_reference(jail: Jail) -> None:
    """And no key is there that nothing prints."""
    console, _ = held(jail, "fork")
    run = only_run(jail)
    let_go(jail)
    (jail.folder / "run" / "safepool" / f"{'a' * 32}.run").write_text("{}")
    bodies = [answer(jail, "ps"), answer(jail, "tree", run["id"]), answer(jail, "doctor")]
    kill_all_helpers(jail, console, run)
    assert by_role(answer(jail, "tree", run["id"])["run"]).keys() == {"stray"}
    bodies += [answer(jail, "sweep", "--dry-run", status=1)]
    bodies += [answer(jail, "stop", run["id"]), answer(jail, "log")]
    printed = {key for body in bodies for key in keys_of(body)}
    documented = set(re.findall(r"`(\w+)`", TABLES))
    assert printed - documented == set()
    values = {"null", "found", "ended", "stuck", "spared", *subcommands()}
    assert documented - printed - values == set()
    assert console.owner.wait() == -signal.SIGKILL
