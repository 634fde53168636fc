"""The kill order against everything that the simulated kernel can think of."""

from __future__ import annotations

import os

from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.sim.copies import Copies
from tests.sim.machine import machine_for

EXAMPLES = int(os.environ.get("SAFEPOOL_SIM_EXAMPLES", "300"))


def test_every_promise_is_kept_whatever_happens() -> None:
    run_state_machine_as_test(
        machine_for(Copies()),
        settings=settings(max_examples=EXAMPLES, stateful_step_count=20, deadline=None),
    )
