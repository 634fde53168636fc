"""The benchmark's page says what was measured."""

from __future__ import annotations

import json
from pathlib import Path

from tests.benchmarks import page

FIGURES = [
    {"row": "one_by_one", "pool": pool, "figures": {"per second": value}}
    for pool, value in (
        ("safepool.Pool (fork)", 300.0),
        ("multiprocessing.Pool (fork)", 100.0),
        ("safepool.Pool (fork)", 500.0),
        ("multiprocessing.Pool (fork)", 100.0),
        ("loky", 50.0),
    )
] + [{"row": "one_by_one", "pool": "billiard", "figures": None}]


def test_medians_and_ratios() -> None:
    """By the best of the others; who failed is left out."""
    found = page.medians(FIGURES)
    values = found["one_by_one", "per second"]
    assert values == {
        "safepool.Pool (fork)": 400.0,
        "multiprocessing.Pool (fork)": 100.0,
        "loky": 50.0,
    }
    assert page.ratio("per second", values, "safepool.Pool (fork)") == 4.0
    times = {"safepool.Pool (fork)": 1.0, "loky": 2.0}
    assert page.ratio("seconds", times, "safepool.Pool (fork)") == 0.5


def test_the_page(tmp_path: Path) -> None:
    """Figures, ratios, pictures, and what was measured on."""
    about = {
        "date": "2030-01-02",
        "python": "3.13.0",
        "kernel": "Linux 6",
        "cores": 2,
        "rounds": 2,
        "absent": ["billiard"],
    }
    results = tmp_path / "results.json"
    results.write_text(json.dumps({"about": about, "figures": FIGURES}))
    page.main(results, tmp_path)
    text = (tmp_path / "benchmarks.md").read_text()
    assert "| **safepool.Pool (fork)** | 400 /s | 4.00 |" in text
    assert "2030-01-02" in text
    assert "Not installed here: billiard" in text
    picture = (tmp_path / "benchmark-one-by-one.svg").read_text()
    assert picture.startswith("<svg")
    assert "400 /s" in picture
