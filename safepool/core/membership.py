"""Which of the processes in one look belong to a sweep, and how each was found.

Decides membership, nothing else. A process belongs when it is

* a *root*: named by its incarnation;
* *remembered*: a member in an earlier look, of this sweep or before it, that is still the
  same incarnation;
* *adopted*: a child of the subreaper whose whole subtree is swept;
* a *bearer* of the run's tag or mark that was born within the run's life;
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
    is_mark_of,
    is_tag_of_run,
    plain_tag,
    tag_of,
)
from safepool.core.values import dataclass


@dataclass(frozen=True)
class Target:
    """What a sweep is to end; every part may be left out.

    ``roots`` are named processes, asked first. ``known`` were seen below one of them
    before the sweep. ``subtree_of`` is a process whose every descendant belongs, itself
    never. ``run_id`` adds the bearers of that run's tag or mark: of the worker numbers in
    ``workers``, or of any when None, but only those that started between ``born_from`` and
    ``born_until`` (ticks since boot, inclusive; None: no upper bound). Nor do descendants
    belong that were born after ``born_until`` and before ``swept_from``, when this sweep began: a
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

    def is_of_another(self, row: ProcessRow) -> bool:
        """Was it born between the end of the run and the beginning of this sweep?"""
        return self.born_until is not None and self.born_until < row.start < self.swept_from


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
        and not is_detached_tag(row.tag)
    }


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
        if row.incarnation == top:
            continue
        if row.incarnation in target.roots:
            how[pid] = "named"
        elif reaper is not None and row.ppid == reaper.pid and row.start >= reaper.start:
            how[pid] = f"child of {reaper.pid}"
        elif row.incarnation in remembered or row.incarnation in target.known:
            how[pid] = "seen before"
        else:
            witness = _witness(target, tags, row)
            if witness is not None:
                how[pid] = witness
    return how


def _tags(target: Target) -> frozenset[int] | None:
    """The tags that count; None: those of any worker of the run."""
    if target.run_id is None or target.workers is None:
        return None
    return frozenset(tag_of(target.run_id, number) for number in target.workers)


def _witness(target: Target, tags: frozenset[int] | None, row: ProcessRow) -> str | None:
    """How tag or mark show that ``row`` comes from the run, or None."""
    run = target.run_id
    if run is None or row.start < target.born_from:
        return None
    if target.born_until is not None and row.start > target.born_until:
        return None
    tag = row.tag
    if tag is not None and is_tag_of_run(tag, run) and (tags is None or plain_tag(tag) in tags):
        return "tag"
    if target.workers is None:
        return "mark" if is_mark_of(row.mark, run) else None
    return "mark" if any(is_mark_of(row.mark, run, n) for n in target.workers) else None


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
