"""Who came from whom, remembered beyond the death of those in between.

Where the kernel gives orphans to the system's first process, parentage is lost with
each parent. What was below a *head* (a worker, a launcher) in any look stays its kin as
long as it is the same incarnation, wherever it is later.

Decides from looks, and reads nothing itself. Called by: the census.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Mapping

from safepool.core.identity import Incarnation, ProcessRow, Snapshot


def trace(
    known: Mapping[Incarnation, Incarnation], heads: Collection[Incarnation], snapshot: Snapshot
) -> dict[Incarnation, Incarnation]:
    """Return the head of each living process that is or was below one.

    ``known`` is the result of the look before; who is not alive in ``snapshot`` is left
    out. Parentage is believed only when the child is not older than its parent.
    """
    living = {row.incarnation: row for row in snapshot.alive() if row.pid > 1 and row.start}
    children: defaultdict[int, list[ProcessRow]] = defaultdict(list)
    for row in living.values():
        children[row.ppid].append(row)
    kin = {name: head for name, head in known.items() if name in living and name not in heads}
    queue = deque((living[name], name) for name in heads if name in living)
    queue.extend((living[name], head) for name, head in kin.items())
    while queue:
        parent, head = queue.popleft()
        for child in children[parent.pid]:
            name = child.incarnation
            if name not in kin and name not in heads and child.start >= parent.start:
                kin[name] = head
                queue.append((child, head))
    return kin
