"""Compares pools side by side: ``python -m tests.benchmarks.run --out results.json``.

Each figure comes from a process of its own. Rounds are interleaved: each pool in turn, again
and again, so that a busy minute hits all of them. A pool that fails or hangs has no figure
in that row. ``python -m tests.benchmarks.page results.json`` makes a page of it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.benchmarks.pools import POOLS, is_installed
from tests.benchmarks.rows import ROWS

_LIMIT = 90.0


def measure(row: str, pool: str) -> dict[str, float] | None:
    """One row with one pool; None if that failed or took too long."""
    command = [sys.executable, "-m", "tests.benchmarks.one", row, pool]
    # In a run of its own: whatever happens, nothing of it is left.
    command = [sys.executable, "-m", "safepool", "run", "--", *command]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT)
    except subprocess.TimeoutExpired:
        return None
    if ended.returncode:
        return None
    figures: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return figures


def main(arguments: list[str] | None = None) -> None:
    """Measure what was asked for, and write it down."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.run")
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS))
    parser.add_argument(
        "--pools", nargs="*", default=[name for name in POOLS if is_installed(name)]
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("results.json"))
    given = parser.parse_args(arguments)
    figures: list[dict[str, Any]] = []
    for row in given.rows:
        for number in range(given.rounds):
            for pool in given.pools:
                found = measure(row, pool)
                print(f"{row:16} {number + 1} {pool:30} {found or 'none'}", flush=True)
                figures.append({"row": row, "pool": pool, "figures": found})
    about = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "python": platform.python_version(),
        "kernel": f"{platform.system()} {platform.release()}",
        "cores": os.cpu_count(),
        "rounds": given.rounds,
        "absent": [name for name in POOLS if name not in given.pools],
    }
    given.out.write_text(json.dumps({"about": about, "figures": figures}, indent=1))


if __name__ == "__main__":
    main()
