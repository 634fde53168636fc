"""No net depends on another: each alone brings an ordinary worker down.

``SAFEPOOL_TEST_NETS`` is a hook for these tests: it leaves on only the nets that it
names. A worker in a task does not see that its owner's end of the task channel is closed
(the lifeline), so for it the last test is the negative control: with no other net it must
survive, which shows that these tests can fail.

Called off nets also leave safepool's own processes behind; the jail ends those.
"""

from __future__ import annotations

import signal

import pytest

from tests.kit import truth
from tests.kit.console import Console
from tests.kit.jail import Jail

BOUND = 10.5


def start_workers(jail: Jail, method: str, nets: str, *, busy: bool) -> Console:
    """Start two workers that have only these nets, each with a task or without."""
    console = Console(jail, method, environment={"SAFEPOOL_TEST_NETS": nets})
    if busy:
        console.ask("hold sleeper")
        console.ask("hold sleeper")
        jail.hear("ready", 2)
    return console


@pytest.mark.parametrize("net", ["launcher", "deathsig", "sidecar"])
def test_each_net_alone_ends_the_workers(method: str, net: str, jail: Jail) -> None:
    """The owner is SIGKILLed and one net is on: its workers, each in a task, are gone."""
    console = start_workers(jail, method, net, busy=True)
    workers = [line.pid for line in jail.hear("ready", 2)]
    console.owner.send(signal.SIGKILL)
    for pid in workers:
        assert truth.wait_gone(pid, BOUND), f"only {net} is on: {truth.describe(pid)}"


def test_the_lifeline_alone_ends_idle_workers(method: str, jail: Jail) -> None:
    """The owner is SIGKILLed and every other net is off: workers that wait see it and leave."""
    console = start_workers(jail, method, "lifeline", busy=False)
    workers = console.meet()
    console.owner.send(signal.SIGKILL)
    for pid, _ in workers:
        assert truth.wait_gone(pid, BOUND), truth.describe(pid)


@pytest.mark.parametrize("nets", ["none", "lifeline"])
def test_without_a_net_workers_stay(method: str, nets: str, jail: Jail) -> None:
    """Negative control: with the other nets off, workers in a task outlive their owner."""
    console = start_workers(jail, method, nets, busy=True)
    workers = [line.pid for line in jail.hear("ready", 2)]
    console.owner.send(signal.SIGKILL)
    assert truth.wait_gone(console.owner.pid)
    gone = [pid for pid in workers if truth.wait_gone(pid, 1)]
    assert not gone, f"a net is left that cannot be switched off; living: {jail.living()}"
