"""What a launcher is told when it is made. Decides and does nothing.

Called by: the run and the sidecar, which fork launchers.
"""

from __future__ import annotations

from safepool.core.identity import CgroupName
from safepool.core.policy import EndPolicy
from safepool.core.values import dataclass


@dataclass(frozen=True)
class LauncherConfig:
    """What a launcher is told when it is made.

    ``idle_after``: seconds without a worker after which it leaves; None: it waits
    for the owner's word. ``one_shot``: it leaves after its first worker.
    ``open_files``: limits that workers get back; None: those of now. ``cgroup``: that of
    the run, in which there is one for this launcher's workers. ``owner_start``: with
    ``owner_pid`` the name of the owner for ever.
    """

    launcher_id: int
    run_id: str
    owner_pid: int
    owner_mark: str
    registry: str
    policy: EndPolicy
    idle_after: float | None = None
    one_shot: bool = False
    open_files: tuple[int, int] | None = None
    cgroup: CgroupName = CgroupName()
    owner_start: int = 0
