"""The CPU quotas that bind this process, as its cgroups have them.

Every cgroup from this process's own up to the root may have one (cgroups(7); Linux's
Documentation/admin-guide/cgroup-v2.rst, cpu.max). Elsewhere there are none.

Does, decides nothing; raises no OSError. Called by: whoever checks a pool's arguments.
"""

from __future__ import annotations

from collections.abc import Iterator

from safepool.core.cpus import parse_cfs, parse_cpu_max


def cpu_quotas(proc: str = "/proc/self") -> list[float]:
    """Return them, in CPUs; none where nothing binds or nothing can be read."""
    found = []
    for folder, is_v2 in cgroup_folders(proc, "cpu"):
        if is_v2:
            quota = parse_cpu_max(read_text(f"{folder}/cpu.max"))
        else:
            period = read_text(f"{folder}/cpu.cfs_period_us")
            quota = parse_cfs(read_text(f"{folder}/cpu.cfs_quota_us"), period)
        if quota is not None:
            found.append(quota)
    return found


def cgroup_folders(proc: str, controller: str) -> Iterator[tuple[str, bool]]:
    """The folders of this process's cgroups that may have files of a controller, the own
    one first, then upwards; True for version 2."""
    paths = {}
    for line in read_text(f"{proc}/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" or controller in controllers.split(","):
            paths[number == "0"] = path
    for line in read_text(f"{proc}/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        is_v2 = kind[0] == "cgroup2"
        if is_v2 not in paths or not (is_v2 or _has(controller, kind)):
            continue
        root, mount = fields[3], fields[4]
        # What is mounted may be a part of the tree: that of a container.
        below = paths[is_v2]
        if root != "/":
            below = below[len(root) :] if below.startswith(root) else ""
        parts = [part for part in below.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            yield "/".join([mount.rstrip("/"), *parts[:depth]]), is_v2


def _has(controller: str, kind: list[str]) -> bool:
    return kind[0] == "cgroup" and controller in kind[2].split(",")


def read_text(path: str) -> str:
    """The text of a file of the system's; "" if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
