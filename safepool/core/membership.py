"""Which of the processes in one look belong to a sweep, and how each was found.

Decides membership, nothing else. A process belongs when it is

* a *root*: named by its incarnation;
* *remembered*: a member in an earlier look, of this sweep or before it, that is still the
  same incarnation;
* *adopted*: a child of the subreaper whose whole subtree is swept;
* a *bearer* of the run's tag or mark that was born within the run's life;
* *contained*: in the run's cgroup, and born within the run's life;
* a descendant of any of these.

Never: a spared or detached process, pid 1 and below, a process whose start time is
unknown.
Parentage is believed only when the child is not older than its parent: rows are
read one after the other, and a parent's pid may have been handed out again in
between. The same rule breaks every circle that a torn look could show.

Called by: the planner.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Mapping

from safepool.core.identity import Incarnation, ProcessRow, Snapshot
from safepool.core.lineage import (
    is_detached_tag,
    is_helper_tag,
    is_mark_of,
    is_tag_of_run,
    plain_tag,
    tag_of,
)
from safepool.core.values import dataclass, replace


@dataclass(frozen=True)
class Target:
    """What a sweep is to end; every part may be left out.

    ``roots`` are named processes, asked first. ``known`` were seen below one of them
    before the sweep. ``subtree_of`` is a process whose every descendant belongs, itself
    never. ``run_id`` adds the bearers of that run's tag or mark: of the worker numbers in
    ``workers``, or of any when None; and who is in its cgroup, where the look says so. But
    only those that started between ``born_from`` and ``born_until`` (ticks
    since boot, inclusive; None: no upper bound). Nor do descendants belong that
    were born after ``born_until`` and before ``swept_from``, when this sweep began: a
    server of a dead run may have opened them for somebody else. ``spare`` is never signalled, and
    parentage does not lead through it; put the sweeping process in.
    """

    roots: frozenset[Incarnation] = frozenset()
    known: frozenset[Incarnation] = frozenset()
    subtree_of: Incarnation | None = None
    run_id: str | None = None
    workers: frozenset[int] | None = None
    born_from: int = 0
    born_until: int | None = None
    swept_from: int = 0
    spare: frozenset[Incarnation] = frozenset()

    def oldest_birth(self) -> int:
        """A tick (since boot) before which no member can have started.

        Roots, the children of the subreaper and bearers are not older than this by
        themselves, their descendants not by the rule of parentage. Of elders a look need
        not read tag and mark, so whatever else makes a member has to be counted in here:
        a tag that was not read cannot say that its bearer was let go.
        """
        heads = [each.start for each in (*self.roots, *self.known)]
        if self.subtree_of is not None:
            heads.append(self.subtree_of.start)
        if self.run_id is not None:
            heads.append(self.born_from)
        return min(heads, default=0)

    def is_of_another(self, row: ProcessRow) -> bool:
        """Was it born between the end of the run and the beginning of this sweep?"""
        return self.is_late(row) and row.start < self.swept_from

    def is_late(self, row: ProcessRow) -> bool:
        """Was it born after the end of the run, before or during this sweep?"""
        return self.born_until is not None and row.start > self.born_until


@dataclass(frozen=True)
class Found:
    """One living member of one look.

    ``how`` is the phrase for the report. ``is_top`` says that its parent is no
    living member. ``depth`` counts the members above it.
    """

    row: ProcessRow
    how: str
    is_top: bool
    depth: int


def find_members(
    target: Target, remembered: Collection[Incarnation], snapshot: Snapshot
) -> list[Found]:
    """Return the living members in ``snapshot``, parents before their children."""
    living = _eligible(target, snapshot)
    children: defaultdict[int, list[ProcessRow]] = defaultdict(list)
    for row in living.values():
        children[row.ppid].append(row)
    how = _heads(target, remembered, snapshot, living)
    queue = deque(living[pid] for pid in how)
    while queue:
        parent = queue.popleft()
        for child in children[parent.pid]:
            if child.pid in how or target.is_of_another(child):
                continue
            if child.start >= parent.start:
                how[child.pid] = f"child of {parent.pid}"
                queue.append(child)
    return _in_order(living, children, how)


def bears_nothing_late(target: Target, snapshot: Snapshot) -> bool:
    """Are all who bear the run's tag or mark, or are in its cgroup, its own as the sweep begins?

    If so, what bears them later was started by these, and needs no upper bound of birth:
    else a process that forks while it is being ended could lose its last children. One
    that was born in the meantime and whose parent is a bearer from the run's life has
    just been started by it; any other late one may be the child of somebody's shell.
    """
    unbounded = replace(target, born_until=None)
    tags = _tags(target)
    within = snapshot.inside or frozenset()
    bearers = {
        row.pid: row
        for row in snapshot.alive()
        if _witness(unbounded, tags, row, is_inside=row.incarnation in within)
    }
    for row in bearers.values():
        if target.is_late(row):
            parent = bearers.get(row.ppid)
            if target.is_of_another(row) or parent is None or target.is_late(parent):
                return False
    return True


def _eligible(target: Target, snapshot: Snapshot) -> dict[int, ProcessRow]:
    """The rows that may belong at all, by pid."""
    # Of a spared process whose start is not known, nobody with its pid can be told apart.
    vague = {spared.pid for spared in target.spare if not spared.start}
    return {
        row.pid: row
        for row in snapshot.alive()
        if row.pid > 1
        and row.start > 0
        and row.incarnation not in target.spare
        and row.pid not in vague
        and not (is_detached_tag(row.tag) and not _is_named_helper(target, row))
    }


def _is_named_helper(target: Target, row: ProcessRow) -> bool:
    """Is it a sidecar or launcher that this sweep names? A detached owner's bear its tag."""
    return is_helper_tag(row.tag) and row.incarnation in target.roots


def _heads(
    target: Target,
    remembered: Collection[Incarnation],
    snapshot: Snapshot,
    living: Mapping[int, ProcessRow],
) -> dict[int, str]:
    """Members that belong by themselves, not by a parent that does: pid to how."""
    top = target.subtree_of
    reaper = snapshot.find(top) if top is not None and top.start else None
    tags = _tags(target)
    how: dict[int, str] = {}
    for pid, row in living.items():
        name = row.incarnation
        if name == top:
            continue
        if name in target.roots:
            how[pid] = "named"
        elif reaper is not None and row.ppid == reaper.pid and row.start >= reaper.start:
            how[pid] = f"child of {reaper.pid}"
        elif name in remembered or name in target.known:
            how[pid] = "seen before"
        else:
            is_inside = snapshot.inside is not None and row.incarnation in snapshot.inside
            witness = _witness(target, tags, row, is_inside=is_inside)
            if witness is not None:
                how[pid] = witness
    return how


def _tags(target: Target) -> frozenset[int] | None:
    """The tags that count; None: those of any worker of the run."""
    if target.run_id is None or target.workers is None:
        return None
    return frozenset(tag_of(target.run_id, number) for number in target.workers)


def _witness(
    target: Target, tags: frozenset[int] | None, row: ProcessRow, *, is_inside: bool
) -> str | None:
    """How tag, mark or cgroup show that ``row`` comes from the run, or None."""
    run = target.run_id
    if run is None or row.start < target.born_from:
        return None
    if target.born_until is not None and row.start > target.born_until:
        return None
    tag = row.tag
    if tag is not None and is_tag_of_run(tag, run) and (tags is None or plain_tag(tag) in tags):
        return "tag"
    if target.workers is None:
        is_marked = is_mark_of(row.mark, run)
    else:
        is_marked = any(is_mark_of(row.mark, run, number) for number in target.workers)
    return "mark" if is_marked else "cgroup" if is_inside else None


def _in_order(
    living: Mapping[int, ProcessRow],
    children: Mapping[int, list[ProcessRow]],
    how: Mapping[int, str],
) -> list[Found]:
    """Members by depth, then pid, so that the same look always gives the same order."""
    tops = set()
    for pid in how:
        parent = living.get(living[pid].ppid)
        if parent is None or parent.pid not in how or not _is_child(living[pid], parent):
            tops.add(pid)
    depth = dict.fromkeys(tops, 0)
    queue = deque(sorted(tops))
    while queue:
        parent_pid = queue.popleft()
        for child in children.get(parent_pid, ()):
            if child.pid in how and child.pid not in depth:
                depth[child.pid] = depth[parent_pid] + 1
                queue.append(child.pid)
    return sorted(
        # Two processes of one clock tick can be torn into a circle that has no top.
        (Found(living[pid], how[pid], pid in tops, depth.get(pid, 0)) for pid in how),
        key=lambda found: (found.depth, found.row.pid),
    )


def _is_child(row: ProcessRow, parent: ProcessRow) -> bool:
    """Believe the parentage that the rows claim, unless the child is the older one."""
    return row.pid != parent.pid and row.start >= parent.start
