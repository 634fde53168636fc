"""Reading Linux's process table: the files of /proc, and the walk of one subtree.

Plain ``os.open`` and ``os.read``, since a look is taken several times per sweep and
has to be cheap also with a thousand processes.

* A line of the table is /proc/PID/stat, split after the *last* ``)``: a process may
  name itself anything.
* The subtree comes from /proc/PID/task/TID/children. proc(5): what it lists is
  only sure while no child ends. So a list is read again when one of its children
  has vanished, and that of the top until nobody new is in it, since orphans arrive there
  during the walk. A kernel without these files gets a walk over all of /proc.
* All of /proc is listed again until nobody new is in it: what forks and exits while the
  lines are read was in the first list under a number that has nobody by now.
* Each line is handed out as soon as it is read. What else the look wants to know of that
  process is then asked at once: tags that are read after all lines are asked in vain of
  one that forks and exits in between, and it is seen under none of its numbers.
* A process that vanishes while it is read, or may not be read, is no error. A lack of
  descriptors or memory is: a look that is cut short must not pass for a whole one.

Called by: the Linux host.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from typing import NamedTuple

from safepool.core.identity import DEAD_STATES, ProcessRow

_VANISHED = frozenset({errno.ENOENT, errno.ESRCH, errno.ENOTDIR})
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM})
STARVED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})

# Positions in /proc/PID/stat, counted from the state letter (proc(5), field 3).
_STATE, _PPID, _GROUP, _SESSION, _THREADS, _START = 0, 1, 2, 3, 17, 19

CHUNK = 1 << 16
_REREADS = 3


class Stat(NamedTuple):
    """What /proc/PID/stat tells, less the pid."""

    start: int
    ppid: int
    state: str
    group: int
    session: int
    threads: int

    @property
    def is_alive(self) -> bool:
        """True unless it is a zombie or gone."""
        return self.state not in DEAD_STATES

    def row(self, pid: int, tag: int | None = None, mark: str | None = None) -> ProcessRow:
        """The row of the look, with the witnesses that were read beside."""
        return ProcessRow(
            pid, self.start, self.ppid, self.state, self.group, self.session, tag, mark
        )


def read(path: str, most: int) -> bytes | None:
    """The first ``most`` bytes; None when the file is gone or may not be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in STARVED:
            raise
        return None
    try:
        # A short read is not the end: the kernel hands out lists a page at a time.
        parts = []
        while most > 0 and (data := os.read(fd, min(most, CHUNK))):
            parts.append(data)
            most -= len(data)
        return b"".join(parts)
    except OSError as error:
        if error.errno in _VANISHED | _FORBIDDEN:
            return None
        raise
    finally:
        os.close(fd)


def read_stat(pid: int) -> Stat | None:
    """What the kernel says of ``pid`` now; None when it is not there."""
    data = read(f"/proc/{pid}/stat", CHUNK)
    if not data:
        return None
    fields = data[data.rindex(b")") + 2 :].split(None, _START + 1)
    state, threads = fields[_STATE].decode(), int(fields[_THREADS])
    if state == "Z" and threads > 1:
        # Only its first thread has ended (pthread_exit); the process lives.
        state = "S"
    return Stat(
        int(fields[_START]),
        int(fields[_PPID]),
        state,
        int(fields[_GROUP]),
        int(fields[_SESSION]),
        threads,
    )


def read_everybody() -> Iterator[tuple[int, Stat]]:
    """Every process that is visible, each as soon as it is read, and none twice."""
    listed: set[str] = set()
    for _ in range(_REREADS):
        new = [name for name in os.listdir("/proc") if name.isdecimal() and name not in listed]
        if not new:
            break
        listed.update(new)
        for pid in map(int, new):
            stat = read_stat(pid)
            if stat is not None:
                yield pid, stat


def walk_children(top: int) -> Iterator[tuple[int, Stat]]:
    """``top`` and all its descendants, from the kernel's lists of children, each as it is read.

    The dead are not asked for children: the kernel gives these away before it calls the
    parent dead.
    """
    own = read_stat(top)
    if own is None:
        return
    yield top, own
    known = {top}
    waiting = [(top, own)]
    for _ in range(_REREADS):
        while waiting:
            for child, stat in _read_children(*waiting.pop(), known):
                yield child, stat
                if stat.is_alive:
                    waiting.append((child, stat))
        is_quiet = True
        for child, stat in _read_children(top, own, known):
            yield child, stat
            # A zombie as well: it may have handed over to another while the list was read.
            is_quiet = False
            if stat.is_alive:
                waiting.append((child, stat))
        if is_quiet:
            break


def _read_children(pid: int, parent: Stat, known: set[int]) -> Iterator[tuple[int, Stat]]:
    """The children of ``pid`` that are not ``known``, and add them to those."""
    for _ in range(_REREADS):
        is_sure = True
        for child in _list_children(pid, parent.threads):
            if child in known:
                continue
            stat = read_stat(child)
            if stat is None:
                is_sure = False
                continue
            known.add(child)
            yield child, stat
        if is_sure:
            break


def _list_children(pid: int, threads: int) -> list[int]:
    """The pids of the children of all threads of ``pid``."""
    tids = [str(pid)]
    if threads > 1:
        try:
            tids = os.listdir(f"/proc/{pid}/task")
        except OSError as error:
            if error.errno in STARVED:
                raise
    children = []
    for tid in tids:
        listed = read(f"/proc/{pid}/task/{tid}/children", 1 << 24)
        children += [int(word) for word in listed.split()] if listed else []
    return children


def walk_parents(top: int) -> Iterator[tuple[int, Stat]]:
    """The same as ``walk_children`` by the parent of every process there is."""
    everybody = dict(read_everybody())
    stats = {top: everybody[top]} if top in everybody else {}
    size = 0
    while len(stats) > size:
        size = len(stats)
        stats.update((pid, stat) for pid, stat in everybody.items() if stat.ppid in stats)
    yield from stats.items()
