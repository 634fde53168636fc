"""What the kernel's counters of OOM kills allow to say of a worker that was killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from safepool.core.oom import OomKills, OomSuspicion, parse_oom_kills
from safepool.host.oom import oom_kills


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("low 0\nhigh 0\nmax 7\noom 3\noom_kill 2\noom_group_kill 1\n", 2),
        ("oom_kill_disable 0\nunder_oom 0\noom_kill 41\n", 41),
        ("pgfree 5\noom_kill 0\n", 0),
        ("", None),
        ("oom_kill many\n", None),
    ],
)
def test_the_count_is_found(text: str, count: int | None) -> None:
    """In the files of both versions and in vmstat, and nothing else is taken for it."""
    assert parse_oom_kills(text) == count


def test_each_kill_explains_one_death() -> None:
    """Two of three workers that got SIGKILL met the OOM killer; the third did not."""
    suspicion = OomSuspicion(OomKills(5, 9))
    now = OomKills(7, 11)
    assert ["this cgroup" in suspicion.hint(now) for _ in range(3)] == [True, True, False]
    assert suspicion.hint(now) == ""


def test_a_kill_elsewhere_on_the_machine_is_a_perhaps() -> None:
    """The counter of the cgroup says more than that of the machine."""
    assert "perhaps" in OomSuspicion(OomKills(5, 9)).hint(OomKills(5, 10))
    assert "probably" in OomSuspicion(OomKills(5, 9)).hint(OomKills(6, 10))
    assert "perhaps" in OomSuspicion(OomKills(None, 9)).hint(OomKills(None, 10))


def test_without_any_counter_the_reader_is_told_what_is_usual() -> None:
    """No counter is not the same as no kill."""
    assert "when memory runs out" in OomSuspicion(OomKills()).hint(OomKills())


def test_a_counter_that_went_back_starts_anew() -> None:
    """The process was moved to another cgroup: nothing is put down to a smaller count."""
    suspicion = OomSuspicion(OomKills(50, 9))
    assert suspicion.hint(OomKills(3, 9)) == ""
    assert "this cgroup" in suspicion.hint(OomKills(4, 9))


@pytest.mark.parametrize("version", [1, 2])
def test_the_counters_are_read_where_the_kernel_has_them(tmp_path: Path, version: int) -> None:
    """In the process's own cgroup, of either version, and in vmstat."""
    own = tmp_path / "mount" / "a" / "b"
    own.mkdir(parents=True)
    (tmp_path / "self").mkdir()
    kind = "cgroup2 cgroup2 rw" if version == 2 else "cgroup cgroup rw,memory"
    line = "0::/a/b" if version == 2 else "4:memory:/a/b"
    (tmp_path / "self" / "cgroup").write_text(f"{line}\n")
    mount = f"30 20 0:26 / {tmp_path / 'mount'} rw - {kind}\n"
    (tmp_path / "self" / "mountinfo").write_text(mount)
    (tmp_path / "vmstat").write_text("nr_free_pages 1\noom_kill 12\n")
    file = "memory.events" if version == 2 else "memory.oom_control"
    (own / file).write_text("oom_kill 3\n")
    assert oom_kills(str(tmp_path)) == OomKills(3, 12)
    (own / file).unlink()
    assert oom_kills(str(tmp_path)) == OomKills(None, 12)
