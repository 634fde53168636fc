"""Makes a page and pictures of results: ``python -m tests.benchmarks.page results.json``."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from tests.benchmarks.pools import is_ours
from tests.benchmarks.rows import HIGHER_IS_BETTER, ROWS

DOCS = Path(__file__).resolve().parents[2] / "docs"
Medians = dict[tuple[str, str], dict[str, float]]
_BAR, _STEP, _LABEL = 380, 24, 210


def medians(figures: list[dict[str, Any]]) -> Medians:
    """By (row, name of the figure): the median of each pool over the rounds."""
    gathered: dict[tuple[str, str], dict[str, list[float]]] = {}
    for one in figures:
        for name, value in (one["figures"] or {}).items():
            gathered.setdefault((one["row"], name), {}).setdefault(one["pool"], []).append(value)
    return {
        key: {pool: statistics.median(values) for pool, values in pools.items()}
        for key, pools in gathered.items()
    }


def ratio(name: str, values: dict[str, float], pool: str) -> float | None:
    """The pool's figure by the best peer's, above 1 where more is better, below where less is."""
    peers = [value for peer, value in values.items() if not is_ours(peer)]
    if not peers:
        return None
    best = max(peers) if name in HIGHER_IS_BETTER else min(peers)
    return values[pool] / best if best else None


def shown(name: str, value: float) -> str:
    """A figure for people."""
    if name == "per second":
        return f"{value:,.0f} /s"
    if name == "memory":
        return f"{value / (1 << 20):,.1f} MiB"
    if name in ("descriptors", "threads"):
        return f"{value:.0f}"
    if name == "cpu":
        return f"{value * 100:.1f} %"
    return f"{value * 1e6:,.0f} us" if value < 0.001 else f"{value * 1000:,.1f} ms"


def table(key: tuple[str, str], values: dict[str, float]) -> str:
    """One row of the comparison."""
    _, name = key
    lines = ["| pool | median | by the best peer |", "| --- | --- | --- |"]
    for pool in sorted(values, key=lambda pool: values[pool], reverse=name in HIGHER_IS_BETTER):
        by_best = ratio(name, values, pool)
        word = f"{by_best:.2f}" if is_ours(pool) and by_best is not None else ""
        mark = "**" if is_ours(pool) else ""
        lines.append(f"| {mark}{pool}{mark} | {shown(name, values[pool])} | {word} |")
    return "\n".join(lines)


def picture(title: str, name: str, values: dict[str, float]) -> str:
    """Bars, ours darker, as SVG."""
    most = max(values.values()) or 1.0
    height = _STEP * (len(values) + 1) + 10
    size = f'width="{_LABEL + _BAR + 110}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
        f'<rect width="100%" height="100%" fill="white"/><text x="6" y="17">{title}</text>',
    ]
    for place, pool in enumerate(values, 1):
        top = place * _STEP + 4
        width = max(1.0, _BAR * values[pool] / most)
        colour = "#1f5fa8" if is_ours(pool) else "#b9c4d0"
        parts.append(
            f'<text x="6" y="{top + 14}">{pool}</text>'
            f'<rect x="{_LABEL}" y="{top}" width="{width:.1f}" height="16" fill="{colour}"/>'
            f'<text x="{_LABEL + width + 6:.1f}" y="{top + 13}">{shown(name, values[pool])}</text>'
        )
    return "\n".join([*parts, "</svg>"])


PICTURES = {
    ("imap_unordered", "per second"): "imap_unordered of no-ops, chunksize 1",
    ("one_by_one", "per second"): "no-op calls, submitted one by one",
    ("array_100_mb", "seconds"): "an array of 100 MB, there and back",
    ("lost_worker", "reported"): "until a lost worker is reported",
}


def main(results: Path, docs: Path = DOCS) -> None:
    """Write benchmarks.md and its pictures."""
    data = json.loads(results.read_text())
    about, found = data["about"], medians(data["figures"])
    machine = f"{about['cores']} cores, {about['kernel']}, CPython {about['python']}"
    text = [
        "# Benchmarks",
        "",
        "```sh",
        "python -m tests.benchmarks.run --out results.json",
        "python -m tests.benchmarks.page results.json",
        "```",
        "",
        f"Measured on {about['date']}: {machine}, two workers.",
        f"Medians of {about['rounds']} interleaved rounds, each figure from a process of its own.",
        "What counts are the ratios: machines differ, and this one had other work, too.",
        "A pool without a figure failed or hung in that row.",
        "",
    ]
    if about["absent"]:
        text += [f"Not installed here: {', '.join(about['absent'])}.", ""]
    for key, values in found.items():
        row, name = key
        text += [f"## {row.replace('_', ' ')}: {name}", ""]
        text += [(ROWS[row].__doc__ or "").strip(), ""]
        if key in PICTURES:
            file = f"benchmark-{row.replace('_', '-')}.svg"
            (docs / file).write_text(picture(PICTURES[key], name, values))
            text += [f"![{PICTURES[key]}]({file})", ""]
        text += [table(key, values), ""]
    (docs / "benchmarks.md").write_text("\n".join(text).rstrip() + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
