"""One row with one pool, in this process: prints its figures as JSON."""

from __future__ import annotations

import json
import sys

from tests.benchmarks.pools import POOLS
from tests.benchmarks.rows import OPENS_ITSELF, ROWS, WORKERS, work


def main(row: str, name: str) -> None:
    """Measure."""
    pool = POOLS[name]
    if row in OPENS_ITSELF:
        figures = ROWS[row](pool)
    else:
        pool.open(WORKERS)
        pool.one_by_one(work, [0.01] * WORKERS)
        figures = ROWS[row](pool)
        pool.close()
    print(json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
