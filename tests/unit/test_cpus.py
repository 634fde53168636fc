"""How many workers by default: not more than there is processor time for."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safepool.core.cpus import default_size, parse_cfs, parse_cpu_max
from safepool.host.quota import cpu_quotas


@given(st.integers(1, 512), st.lists(st.floats(0.01, 1000), max_size=4))
def test_the_size_is_within_all_bounds(cpus: int, quotas: list[float]) -> None:
    """At least one; no more than usable CPUs, nor a whole one more than any quota."""
    size = default_size(cpus, quotas)
    assert 1 <= size.workers <= cpus
    assert all(size.workers < quota + 1 or size.workers == 1 for quota in quotas)
    assert str(cpus) in size.reason


def test_the_reason_names_what_binds() -> None:
    """A quota only if it is less than the CPUs."""
    assert default_size(8, [1.5, 4.0]) == (2, "a cgroup's quota of 1.5 CPUs, of 8 usable ones")
    assert default_size(2, [4.0]) == (2, "2 usable CPUs")


@pytest.mark.parametrize(
    ("text", "quota"),
    [("max 100000\n", None), ("150000 100000\n", 1.5), ("", None), ("x y", None), ("-1 1", None)],
)
def test_quotas_of_version_2(text: str, quota: float | None) -> None:
    """As the kernel writes them; what is something else binds nobody."""
    assert parse_cpu_max(text) == quota


def test_quotas_of_version_1() -> None:
    """-1 is no limit."""
    assert parse_cfs("-1\n", "100000\n") is None
    assert parse_cfs("50000\n", "100000\n") == 0.5
    assert parse_cfs("", "") is None


def stage(folder: Path, cgroup: str, mounts: list[str], files: dict[str, str]) -> list[float]:
    """The quotas of a process with these files."""
    (folder / "cgroup").write_text(cgroup)
    lines = [line.replace("MOUNT", str(folder)) for line in mounts]
    (folder / "mountinfo").write_text("\n".join(lines))
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return sorted(cpu_quotas(str(folder)))


def test_every_cgroup_up_to_the_root_counts(tmp_path: Path) -> None:
    """The own one need not be the one that binds."""
    quotas = stage(
        tmp_path,
        "0::/outer/inner\n",
        ["30 1 0:26 / MOUNT/v2 rw - cgroup2 cgroup2 rw"],
        {"v2/outer/cpu.max": "200000 100000", "v2/outer/inner/cpu.max": "max 100000"},
    )
    assert quotas == [2.0]


def test_a_container_sees_a_part_of_the_tree(tmp_path: Path) -> None:
    """Its mount begins at its own cgroup."""
    quotas = stage(
        tmp_path,
        "0::/docker/abc\n",
        ["30 1 0:26 /docker/abc MOUNT/v2 rw - cgroup2 cgroup2 rw"],
        {"v2/cpu.max": "50000 100000"},
    )
    assert quotas == [0.5]


def test_version_1_beside_version_2(tmp_path: Path) -> None:
    """The controller may be in either; others do not count."""
    quotas = stage(
        tmp_path,
        "4:cpu,cpuacct:/job\n3:cpuset:/other\n0::/\n",
        [
            "31 1 0:27 / MOUNT/cpu rw - cgroup cgroup rw,cpu,cpuacct",
            "32 1 0:28 / MOUNT/set rw - cgroup cgroup rw,cpuset",
            "30 1 0:26 / MOUNT/v2 rw - cgroup2 cgroup2 rw",
        ],
        {"cpu/job/cpu.cfs_quota_us": "300000", "cpu/job/cpu.cfs_period_us": "100000"},
    )
    assert quotas == [3.0]


def test_where_there_is_nothing_to_read_nothing_binds(tmp_path: Path) -> None:
    """Another system, or a /proc that shows nothing."""
    assert cpu_quotas(str(tmp_path)) == []
