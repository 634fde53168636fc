"""The promise itself: when the owner is gone, everything it started is gone.

Every way for an owner to end (``DEATHS``), under every start method, over everything that
a worker can be doing or have started (``CASTS`` of villains.py). One test is one method
and one death; its owners run at the same time. Ground truth is the jail's.

The bound is generous, since the machine may be busy: the claim is that nothing is left.
How quickly is another matter, and measured elsewhere.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.kit import truth
from tests.kit.jail import Jail, Owner
from tests.kit.owner import INSIDE, OUTSIDE
from tests.kit.villains import CASTS

GRACE = 0.5
DEFAULT_GRACE = 5.0
"""What a process has that belongs to no pool."""
MARGIN = 10.0

STATUS = {
    "return": 0,
    "exception": 1,
    "sys_exit": 3,
    "os_exit": 7,
    "segfault": -signal.SIGSEGV,
    "abort": -signal.SIGABRT,
    "sigterm": -signal.SIGTERM,
    "sigint": -signal.SIGINT,
    "sigint_group": -signal.SIGINT,
    "sighup": -signal.SIGHUP,
    "sigkill": -signal.SIGKILL,
    "stop_kill": -signal.SIGKILL,
}
"""How an owner without workers would end in each case; ours must end the same way."""


def bring_death(owner: Owner, death: str) -> None:
    """End the owner, or tell it to end itself."""
    if death in INSIDE:
        owner.go()
    elif death == "sigint_group":
        owner.send_to_group(signal.SIGINT)
    elif death == "stop_kill":
        owner.send(signal.SIGSTOP)
        truth.until(lambda: truth.state(owner.pid) == "T", "the owner does not stop")
        owner.send(signal.SIGKILL)
    else:
        owner.send(getattr(signal, death.upper()))


def check_cells(
    folder: Path, cells: Iterable[tuple[str, tuple[str, ...]]], bound: float, *arguments: str
) -> None:
    """Let owners die at the same time, one for each death and cast; nothing may be left."""
    with contextlib.ExitStack() as stack:
        running: list[tuple[str, tuple[str, ...], Jail, Owner]] = []
        for number, (death, cast) in enumerate(cells):
            place = folder / str(number)
            place.mkdir()
            jail = stack.enter_context(Jail(place))
            owner = jail.owner(*arguments, f"--death={death}", f"--cast={','.join(cast)}")
            running.append((death, cast, jail, owner))
        for _, cast, jail, _ in running:
            jail.hear("ready", len(cast))
            jail.hear("owner")
        for death, _, _, owner in running:
            bring_death(owner, death)
        for death, cast, jail, owner in running:
            what = f"{' '.join(arguments)}: {death} with {', '.join(cast)}"
            jail.assert_empty(what, bound, {owner.pid} if death == "exec" else ())
            if death == "exec":
                assert truth.command_line(owner.pid).startswith("/bin/sleep"), what
            else:
                assert owner.wait() == STATUS[death], f"{what}:\n{owner.errors()}"
            assert jail.cgroups() == [], what


@pytest.mark.parametrize("death", [*INSIDE, *OUTSIDE])
def test_nothing_survives_the_owner_of_a_pool(method: str, death: str, tmp_path: Path) -> None:
    """Owner of a pool ends: no worker and nothing that a worker started is left."""
    cells = [(death, cast) for cast in CASTS]
    check_cells(tmp_path, cells, GRACE + MARGIN, f"--method={method}")


def test_nothing_survives_the_owner_of_processes(method: str, tmp_path: Path) -> None:
    """Owner of SafeProcesses ends: none of them and nothing that they started is left."""
    everybody = ("idle", "gil_held", "ignores_term", "subprocess", "daemon", "daemon_empty_env")
    cells = [
        (death, cast)
        for death in ("return", "sigterm", "sigkill")
        for cast in (everybody, ("stray_of_killed_worker", "forker", "nested"))
    ]
    check_cells(tmp_path, cells, DEFAULT_GRACE + MARGIN, "--face=process", f"--method={method}")


def test_what_an_exec_leaves_is_the_new_program_alone(method: str, jail: Jail) -> None:
    """The owner's pid lives on in another program: that ends the run, and spares that program."""
    owner = jail.owner(f"--method={method}", "--death=exec", "--cast=new_session")
    jail.hear("ready")
    jail.hear("owner")
    before = truth.started(owner.pid)
    owner.go()
    jail.assert_empty("after exec", GRACE + MARGIN, {owner.pid})
    assert jail.pids() == [owner.pid]
    assert truth.started(owner.pid) == before
