"""Which runs a sidecar takes for left-overs of earlier ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from safepool import registry
from safepool.core.identity import Incarnation
from safepool.core.record import Judgement, RunRecord, Verdict
from safepool.host.linux import LinuxHost
from safepool.leftovers import start_up_sweeps
from safepool.registry import RunFiles

OWN = "0123456789abcdef0123456789abcdef"
OTHER = "fedcba9876543210fedcba9876543210"


def dead_run(run_id: str) -> registry.FoundRun:
    owner = Incarnation(os.getpid(), 1)
    record = RunRecord(run_id, "", "", "", 0, 0, owner, (), "", 1, 0.0, 5.0)
    return registry.FoundRun(run_id, "", Judgement(Verdict.DEAD, ""), record, ())


def test_the_sidecars_own_run_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner may be dead before the sidecar is up: that is an end like any other."""
    monkeypatch.setattr(registry, "scan", lambda *_: [dead_run(OWN), dead_run(OTHER)])
    claimed = []

    def claim(files: RunFiles) -> bool:
        claimed.append(files.run_id)
        return True

    monkeypatch.setattr(RunFiles, "claim", claim)
    files = RunFiles.attach(str(tmp_path), OWN)
    sweeps = start_up_sweeps(files, LinuxHost(), frozenset(), print, print)
    assert claimed == [OTHER]
    for task in sweeps:
        task.sweep.close()
