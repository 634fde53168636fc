"""Protection comes before the first worker: an owner killed while its pool starts.

The owner is SIGKILLed at evenly spaced steps of the start (starter.py counts the calls
into the package, so the product has no hook for this) and at random moments, from
outside. Whenever it comes, nothing is left.
"""

from __future__ import annotations

import random
import select
import signal
import sys
import time
from pathlib import Path

from tests.kit.jail import Jail, Owner

STARTER = Path(__file__).parents[1] / "kit" / "starter.py"
STEPS = 24
MOMENTS = 8
AT_ONCE = 4
BOUND = 15


def start(jail: Jail, method: str, step: int = 0, package: str = "safepool") -> Owner:
    """Start an owner that ends at a step of its pool's start, or not."""
    options = (f"--package={package}", f"--method={method}", f"--step={step}")
    return jail.start((sys.executable, STARTER, *options))


def count_steps(jail: Jail, method: str) -> int:
    """How many steps an undisturbed start has."""
    owner = start(jail, method)
    steps = int(jail.hear("steps")[0].text)
    assert owner.wait() == 0, owner.errors()
    jail.assert_empty("after an undisturbed start", BOUND)
    return steps


def test_an_owner_killed_at_any_step_of_the_start_leaves_nothing(
    method: str, tmp_path: Path
) -> None:
    """SIGKILL at evenly spaced steps between the constructor and the first result."""
    (tmp_path / "count").mkdir()
    with Jail(tmp_path / "count") as jail:
        total = count_steps(jail, method)
    assert total >= 10, f"only {total} steps: this start was not seen"
    steps = sorted({1 + number * (total - 1) // (STEPS - 1) for number in range(STEPS)})
    for first in range(0, len(steps), AT_ONCE):
        batch = steps[first : first + AT_ONCE]
        folder = tmp_path / str(first)
        folder.mkdir()
        with Jail(folder) as jail:
            owners = [start(jail, method, step) for step in batch]
            statuses = [owner.wait() for owner in owners]
            jail.assert_empty(f"{method}: killed at steps {batch} of {total}", BOUND)
            assert set(statuses) <= {-signal.SIGKILL, 0}, [owner.errors() for owner in owners]


def test_an_owner_killed_at_a_random_moment_of_the_start_leaves_nothing(
    method: str, tmp_path: Path
) -> None:
    """SIGKILL from outside, at moments that no call of the owner marks."""
    (tmp_path / "measure").mkdir()
    with Jail(tmp_path / "measure") as jail:
        owner = start(jail, method)
        jail.hear("begin")
        began = time.monotonic()
        jail.hear("steps")
        lasts = time.monotonic() - began
        owner.wait()
    chance = random.Random(f"{method} start")
    for number in range(MOMENTS):
        folder = tmp_path / str(number)
        folder.mkdir()
        with Jail(folder) as jail:
            owner = start(jail, method)
            jail.hear("begin")
            moment = lasts * 1.2 * chance.random()
            select.select([], [], [], moment)  # the moment itself is what is tried here
            if owner.process.poll() is None:
                owner.send(signal.SIGKILL)
            jail.assert_empty(f"{method}: killed {moment:.4f} s after the start began", BOUND)
