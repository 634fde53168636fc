"""The kit itself: a jail sees what plain multiprocessing leaves, and leaves nothing.

These are the negative controls of the kill tests. If one of them fails, the others
prove nothing.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.kit import truth
from tests.kit.cage import cgroup_folder
from tests.kit.jail import Jail

CAGES = ("cgroup", "keepers")


@pytest.fixture(params=CAGES)
def jail_folder(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A folder for a jail of each kind."""
    if request.param == "cgroup" and cgroup_folder() is None:
        pytest.skip("no cgroup can be made here")
    monkeypatch.setenv("SAFEPOOL_TEST_CAGE", request.param)
    return tmp_path


def test_multiprocessing_leaves_survivors_and_the_jail_sees_them(
    jail_folder: Path, method: str
) -> None:
    """Negative control: the kill tests do fail for a pool that is not ours."""
    with Jail(jail_folder) as jail:
        cast = "gil_held,new_session,daemon,daemon_empty_env"
        owner = jail.owner("--package=multiprocessing", f"--method={method}", f"--cast={cast}")
        jail.hear("ready", 4)
        owner.send(signal.SIGKILL)
        assert not jail.wait_empty(0.5), "nothing was left, so this shows nothing"
        pids = jail.pids()
        assert len([line for line in jail.living() if "sleep" in line]) == 3, jail.living()
        with pytest.raises(AssertionError, match="daemons were left"):
            jail.assert_empty("daemons were left", 0.1)
    assert not [truth.describe(pid) for pid in pids if truth.is_alive(pid)]


def test_a_jail_ends_a_process_that_forks_for_ever(jail_folder: Path) -> None:
    """Whatever a test leaves, its jail ends: also a process that forks faster than it is read."""
    with Jail(jail_folder) as jail:
        jail.owner("--package=multiprocessing", "--cast=forker,ignores_term")
        jail.hear("ready", 2)
        pids = jail.pids()
    assert not [truth.describe(pid) for pid in pids if truth.is_alive(pid)]


def test_a_jail_ends_its_owners_when_the_test_fails(jail_folder: Path) -> None:
    """A failing test leaves nothing either."""
    pids = []

    def failing_test() -> None:
        with Jail(jail_folder) as jail:
            pids.append(jail.script("say('ready'); time.sleep(60)").pid)
            jail.hear("ready")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing_test()
    assert not truth.is_alive(pids[0])


def test_an_owner_starts_with_default_signal_actions(jail_folder: Path) -> None:
    """Ctrl-C works in an owner although the test run itself may ignore it."""
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Jail(jail_folder) as jail:
            owner = jail.script(
                "say('ready', str(signal.getsignal(signal.SIGINT))); time.sleep(60)"
            )
            assert "default_int_handler" in jail.hear("ready")[0].text
            owner.send(signal.SIGINT)
            assert owner.wait() == -signal.SIGINT
            assert "KeyboardInterrupt" in owner.errors()
    finally:
        signal.signal(signal.SIGINT, previous)


def test_a_silent_owner_fails_the_test_at_once_with_its_error(jail_folder: Path) -> None:
    """A broken owner shows its traceback instead of a time-out."""
    with Jail(jail_folder) as jail:
        jail.script("raise LookupError('this is why')")
        with pytest.raises(AssertionError, match="this is why"):
            jail.hear("ready")


def test_a_jail_gives_back_what_it_held(jail_folder: Path) -> None:
    """No descriptor and no cgroup of a jail is left at its end."""
    before = truth.open_files()
    with Jail(jail_folder) as jail:
        jail.script("say('ready')")
        jail.hear("ready")
        jail.assert_empty()
    assert set(truth.open_files()) == set(before)
    folder = cgroup_folder()
    if folder is not None:
        assert not list(folder.glob(f"safepool-test-{os.getpid()}-*"))
