"""``safepool doctor`` and ``pool.protection``: the same layers, and they say what is so."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from typing import Any

import pytest

from safepool.layers import LAYERS, Protection, states
from tests.kit.jail import Jail

DOCTOR = [sys.executable, "-m", "safepool", "doctor"]


def ask(jail: Jail, *before: str, tag_limit: int | None = None) -> tuple[int, Any]:
    def bound_tag() -> None:
        if tag_limit is not None:
            resource.setrlimit(resource.RLIMIT_RTTIME, (tag_limit, tag_limit))

    ran = subprocess.run(
        [*before, *DOCTOR, "--json"],
        env=jail.environment,
        capture_output=True,
        timeout=120,
        preexec_fn=bound_tag,
    )
    assert ran.stderr == b"", ran.stderr
    return ran.returncode, json.loads(ran.stdout)


def missing(report: Any) -> set[str]:
    return {layer["name"] for layer in report["layers"] if not layer["holds"]}


EXTRA = {layer.name for layer in LAYERS if layer.is_extra}


def test_here_every_promise_holds(jail: Jail) -> None:
    """The tests of this suite show it, so the doctor has to say it; and nothing is left."""
    status, report = ask(jail)
    assert status == 0
    assert report["degraded"] is False
    assert [layer["name"] for layer in report["layers"]] == [layer.name for layer in LAYERS]
    assert missing(report) <= EXTRA
    works = {each["name"] for each in report["mechanisms"] if each["works"]}
    for layer in LAYERS:
        assert layer.is_extra or works.issuperset(layer.needs), layer
    ran = jail.start(DOCTOR)
    assert ran.wait() == 0
    jail.assert_empty("after the doctor", 0.0)
    assert "every promise holds" in ran.errors()
    assert list((jail.folder / "run" / "safepool").iterdir()) == []


def test_every_need_of_a_layer_is_probed(jail: Jail) -> None:
    """A layer that needs what nobody tries would always seem to hold."""
    _, report = ask(jail)
    probed = {each["name"] for each in report["mechanisms"]}
    for layer in LAYERS:
        assert probed.issuperset(layer.needs), layer


def test_a_bound_tag_is_missed_by_doctor_and_pool(jail: Jail) -> None:
    """An administrator's limit on RLIMIT_RTTIME: both name the layer, and the reason."""
    status, report = ask(jail, tag_limit=10**9)
    assert status == 1
    assert missing(report) == {"tag"} | (missing(report) & EXTRA)
    (finding,) = [each for each in report["mechanisms"] if each["name"] == "tag"]
    assert "hard limit" in finding["detail"]
    assert "rttime" in finding["improvement"]
    owner = jail.script(
        """
        import resource
        from safepool import get_context
        if __name__ == "__main__":
            resource.setrlimit(resource.RLIMIT_RTTIME, (10**9, 10**9))
            with get_context("spawn").Pool(1) as pool:
                pool.apply(abs, [1])
                states = pool.protection.layers
                say("missing", str({s.name: s.reason for s in states if not s.holds}))
        """
    )
    assert owner.wait() == 0, owner.errors()
    found = eval(jail.hear("missing")[0].text)
    assert found.keys() - EXTRA == {"tag"}
    assert "hard limit" in found["tag"]


def test_a_registry_in_the_way_is_missed(jail: Jail) -> None:
    """With what to do about it."""
    (jail.folder / "run" / "safepool").write_text("")
    status, report = ask(jail)
    assert status == 1
    assert missing(report) - EXTRA == {"registry"}
    (finding,) = [each for each in report["mechanisms"] if each["name"] == "registry"]
    assert "not a directory" in finding["detail"]
    assert "XDG_RUNTIME_DIR" in finding["improvement"]


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare(1)")
def test_a_foreign_proc_is_missed(jail: Jail) -> None:
    """In a pid namespace without a /proc of its own, processes cannot be told apart."""
    if subprocess.run(["unshare", "-pf", "true"], capture_output=True).returncode:
        pytest.skip("may not make pid namespaces")
    status, report = ask(jail, "unshare", "-pf")
    assert status == 1
    assert {"launcher", "sidecar"} <= missing(report)
    (finding,) = [each for each in report["mechanisms"] if each["name"] == "proc"]
    assert "--mount-proc" in finding["improvement"]


def test_protection_names_every_layer() -> None:
    """What a run knows of itself, by the doctor's names; a wrong name is refused."""
    whole = Protection(sidecar=True, launcher=True)
    assert [state.name for state in whole.layers] == [layer.name for layer in LAYERS]
    assert {state.name for state in whole.layers if not state.holds} <= EXTRA
    alone = Protection(sidecar=False, launcher=True, reason="no interpreter")
    lacking = {state.name: state.reason for state in alone.layers if not state.holds}
    assert lacking.keys() - EXTRA == {"sidecar"}
    assert lacking["sidecar"] == "no interpreter"
    with pytest.raises(ValueError, match="watchdog"):
        states({"watchdog": "there is none"})
