"""Whatever happens to the registry's files: nobody is called dead for it, nothing is lost.

Two bare owners have written their runs down; one lives, one was SIGKILLed. Their files
are damaged, exchanged and replaced in every way that a file can be, and then looked at.
The rules hold for all of it: looking never fails; only the dead owner's whole record with
a true lock file beside it says "dead"; every file that claims to be a record is
reported with a reason; and nothing that is not old is removed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from safepool import registry
from safepool.core.identity import Incarnation
from safepool.core.record import Member, RunRecord, Unreadable, Verdict, parse_record
from safepool.registry import files as files_module
from tests.real.test_registry import HERE, HOST, Owner, new_id

PARTS = ("run", "lock", "member", "log")


@dataclass(frozen=True)
class Originals:
    """The files as they were written. The locks themselves are those of living processes."""

    folder: Path
    stage: Path
    living: str
    dead: str

    def lay_out(self) -> None:
        """Put whole copies on the stage; the lock files are the originals by a second name."""
        remove(self.stage)
        self.stage.mkdir(mode=0o700)
        for path in self.folder.iterdir():
            if path.suffix == ".lock":
                path.chmod(0o1600)
                os.chown(path, os.geteuid(), -1)
                path.write_bytes(b"")
                os.link(path, self.stage / path.name)
            else:
                shutil.copy2(path, self.stage / path.name)

    def path(self, run_id: str, part: str) -> Path:
        """Where a part of a run lies on the stage."""
        return next(p for p in self.stage.iterdir() if p.name == self.name(run_id, part))

    def name(self, run_id: str, part: str) -> str:
        """The name of a part of a run's files."""
        suffix = "m.4711-815-worker-3" if part == "member" else part
        return f"{run_id}.{suffix}"


def remove(folder: Path) -> None:
    """Remove a folder and what is in it, folders without permissions too."""
    if folder.exists():
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o700)
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Originals]:
    """A living and a dead run, each with a member and a log."""
    base = tmp_path_factory.mktemp("damage")
    folder = registry.directory({"XDG_RUNTIME_DIR": str(base)})
    living, dead = Owner(folder, new_id()), Owner(folder, new_id())
    try:
        dead.kill()
        for owner in (living, dead):
            files = registry.RunFiles.attach(folder, owner.run_id)
            assert files.add_member(Member("worker", Incarnation(4711, 815), 3)) is None
            assert files.append_log("text") is None
        yield Originals(Path(folder), base / "stage", living.run_id, dead.run_id)
    finally:
        living.end()
        dead.end()


# -- what can happen to a file ----------------------------------------------------------------

Harm = Callable[[Path], None]


def write(change: Callable[[bytes], bytes]) -> Harm:
    """Change the content."""

    def harm(path: Path) -> None:
        with contextlib.suppress(OSError):  # it has become a folder, a pipe without reader, a loop
            if stat.S_ISREG(path.lstat().st_mode):
                path.write_bytes(change(path.read_bytes()))

    return harm


def replace_by(make: Callable[[Path], object]) -> Harm:
    """Put something else in its place."""

    def harm(path: Path) -> None:
        take_away(path)
        make(path)

    return harm


def take_away(path: Path) -> None:
    """Remove whatever is there."""
    if path.is_dir() and not path.is_symlink():
        path.chmod(0o700)
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def listen(path: Path) -> None:
    """Make a socket of that name; its path would be too long, so from within the folder."""
    with socket.socket(socket.AF_UNIX) as made:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            made.bind(f"/proc/self/fd/{folder}/{path.name}")
        finally:
            os.close(folder)


def flip(place: int, bits: int) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        where = place % max(1, len(data))
        return (
            data[:where]
            + bytes(byte ^ bits for byte in data[where : where + 1])
            + data[where + 1 :]
        )

    return change


def moved_aside(path: Path) -> None:
    """Leave a link to where it is now."""
    aside = path.with_name(f"{path.name}.aside")
    if path.exists() and not path.is_symlink():
        path.replace(aside)
        path.symlink_to(aside)


def owned_by(uid: int) -> Harm:
    def harm(path: Path) -> None:
        if os.geteuid() == 0:  # a user can give nothing away
            os.chown(path, uid, -1, follow_symlinks=False)

    return harm


def with_mode(mode: int) -> Harm:
    return lambda path: None if path.is_symlink() or not path.exists() else path.chmod(mode)


places = st.integers(0, 2000)
harms: st.SearchStrategy[Harm] = st.one_of(
    places.map(lambda length: write(lambda data: data[:length])),
    places.map(lambda length: write(lambda data: data[:length].ljust(len(data), b"\0"))),
    st.builds(flip, places, st.integers(1, 255)).map(write),
    st.binary(max_size=200).map(lambda extra: write(lambda data: data + extra)),
    st.binary(max_size=200).map(lambda other: write(lambda data: other)),
    st.just(write(lambda data: data * 2)),
    st.just(write(lambda data: b"")),
    st.sampled_from(
        [
            take_away,
            moved_aside,
            replace_by(os.mkfifo),
            replace_by(os.mkdir),
            replace_by(listen),
            replace_by(lambda path: path.symlink_to("/nowhere")),
            replace_by(lambda path: path.symlink_to("/dev/zero")),
            replace_by(lambda path: path.symlink_to(path)),
            replace_by(lambda path: path.write_bytes(b"")),
            owned_by(4242),
        ]
    ),
    st.sampled_from([0o000, 0o400, 0o200, 0o666, 0o7777]).map(with_mode),
)
names = st.text(string.printable.replace("/", "") + "\udc80\u00e9", min_size=1, max_size=40)


@st.composite
def disorder(draw: st.DrawFn) -> list[Callable[[Originals], None]]:
    """Up to three things that happen to the files, one after the other."""
    steps: list[Callable[[Originals], None]] = []
    part = st.tuples(st.sampled_from(["living", "dead"]), st.sampled_from(PARTS))
    for _ in range(draw(st.integers(1, 3))):
        source = draw(part)
        kind = draw(st.sampled_from(["harm", "harm", "copy", "rename", "link"]))
        if kind == "harm":
            steps.append(harmed(source, draw(harms)))
        else:
            target = draw(
                part | names | names.map(lambda text: f"{text}.run") | st.just(f"{'0' * 32}.run")
            )
            steps.append(moved(kind, source, target))
    return steps


def harmed(source: tuple[str, str], harm: Harm) -> Callable[[Originals], None]:
    def step(originals: Originals) -> None:
        path = where(originals, source)
        if os.path.lexists(path):
            harm(path)

    return step


def moved(
    kind: str, source: tuple[str, str], target: tuple[str, str] | str
) -> Callable[[Originals], None]:
    """Copy, rename or link a file over another or to a new name."""
    act: dict[str, Callable[[Path, Path], object]] = {
        "copy": lambda a, b: shutil.copy2(a, b, follow_symlinks=False),
        "rename": os.replace,
        "link": lambda a, b: os.link(a, b, follow_symlinks=False),
    }

    def step(originals: Originals) -> None:
        a, b = where(originals, source), where(originals, target)
        if a == b or b.name in (".", "..") or not os.path.lexists(a) or is_special(a):
            return
        take_away(b)
        act[kind](a, b)

    return step


def is_special(path: Path) -> bool:
    """Tell whether it is neither a file nor a link: it cannot be copied."""
    mode = path.lstat().st_mode
    return not stat.S_ISREG(mode) and not stat.S_ISLNK(mode)


def where(originals: Originals, target: tuple[str, str] | str) -> Path:
    if isinstance(target, str):
        return originals.stage / target
    owner, part = target
    run_id = originals.living if owner == "living" else originals.dead
    return originals.stage / originals.name(run_id, part)


# -- what holds all the same ------------------------------------------------------------------


def content(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Everything in a folder: its kind, its file and what is in it."""
    found = {}
    for path in folder.iterdir():
        status = path.lstat()
        is_readable = stat.S_ISREG(status.st_mode) and os.access(path, os.R_OK)
        data = path.read_bytes() if is_readable else b""
        found[path.name] = (status.st_mode, status.st_ino, data)
    return found


def is_plain_of_ours(path: Path) -> bool:
    status = path.lstat()
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


@example([harmed(("dead", "lock"), replace_by(os.mkfifo))])
@example([harmed(("dead", "lock"), owned_by(4242))])
@example([moved("copy", ("dead", "run"), "NOT AN ID.run")])
@example([moved("rename", ("dead", "lock"), ("living", "lock"))])
@example([moved("link", ("living", "lock"), ("dead", "lock"))])
@settings(max_examples=300)
@given(disorder())
def test_no_damage_makes_a_run_dead_or_lost(
    originals: Originals, steps: list[Callable[[Originals], None]]
) -> None:
    """Cut, flipped, exchanged, renamed, given away, replaced by pipe, link, folder or socket."""
    originals.lay_out()
    for step in steps:
        step(originals)
    stage = originals.stage
    before = content(stage)
    found = registry.scan(str(stage), HERE, HOST)
    assert {os.path.basename(run.path) for run in found} == {
        name for name in before if name.endswith(".run")
    }
    for run in found:
        assert run.judgement.reason
        assert run.judgement.verdict is not Verdict.DEAD or proves_death(originals, run)
        if isinstance(run.record, Unreadable):
            assert run.judgement.verdict is Verdict.UNKNOWN
    registry.prune(str(stage))
    assert content(stage) == before
    check_old_debris(originals, before)
    remove(stage)


def check_old_debris(originals: Originals, before: dict[str, tuple[int, int, bytes]]) -> None:
    """Two hours later only what has neither a record nor a lock that somebody holds is removed."""
    held = (originals.folder / f"{originals.living}.lock").stat().st_ino
    for path in originals.stage.iterdir():
        old = path.lstat().st_mtime - 2 * files_module.DEBRIS_AGE
        os.utime(path, (old, old), follow_symlinks=False)
    registry.prune(str(originals.stage))
    after = content(originals.stage)
    for name in before.keys() - after.keys():
        run_id = name.removeprefix(".").partition(".")[0]
        assert f"{run_id}.run" not in before, name
        assert before.get(f"{run_id}.lock", (0, 0))[1] != held, name
        assert not name.endswith(".log"), name


def proves_death(originals: Originals, run: registry.FoundRun) -> bool:
    """The whole record of the dead owner, in its place, with its lock file beside it."""
    whole = parse_record((originals.folder / f"{originals.dead}.run").read_bytes(), originals.dead)
    assert isinstance(whole, RunRecord)
    lock = originals.stage / f"{originals.dead}.lock"
    return (
        run.run_id == originals.dead
        and run.record == whole
        and is_plain_of_ours(Path(run.path))
        and is_plain_of_ours(lock)
    )


def test_whole_files_are_told_apart(originals: Originals) -> None:
    """The stage of the test above: untouched, one run is live and one dead."""
    originals.lay_out()
    found = registry.scan(str(originals.stage), HERE, HOST)
    assert {run.run_id: run.judgement.verdict for run in found} == {
        originals.living: Verdict.LIVE,
        originals.dead: Verdict.DEAD,
    }
    assert all(run.members for run in found)
