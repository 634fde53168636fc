"""Lets strays go that a pool's policy spares: afterwards they are as detached ones are.

Each gets the tag that no sweep touches, which its children inherit, and a record in the
registry, the second witness. Between a look and the tag a process may have started
another; so it is looked again until two looks in a row find nobody new. One of which
the tag cannot be set (a set-user-ID program) has its record alone: what it starts later
is not known to be spared.

Not let go: the helpers and workers of an inner run, which end with it, and its strays.

Called by: the launcher and its roster. Sends no signal.
"""

from __future__ import annotations

from collections.abc import Callable

from safepool import registry
from safepool.core.identity import Incarnation, ProcessRow, Snapshot
from safepool.core.lineage import detached_tag, innermost, is_helper_tag, is_tag_of_run
from safepool.core.membership import Target, find_members
from safepool.core.planner import QUIET_LOOKS
from safepool.core.values import dataclass, replace
from safepool.host.base import Host
from safepool.host.release import put_outside, put_tag, working_directory

_PATIENCE = 0.5
"""Seconds after which a tree that starts processes all the time is not followed further."""


@dataclass(frozen=True)
class Released:
    """``names``: who was let go, with their command lines. ``is_all``: the last looks agreed."""

    names: dict[Incarnation, str]
    is_all: bool


class Sparing:
    """For one launcher: ``look`` reads its subtree, ``directory`` is the registry."""

    def __init__(
        self, host: Host, run_id: str, directory: str, look: Callable[[], Snapshot]
    ) -> None:
        self._host = host
        self._run_id = run_id
        self._directory = directory
        self._look = look

    def on_record(self) -> frozenset[Incarnation]:
        """The detached processes that the registry names, whoever has let them go."""
        return registry.detached_incarnations(self._directory, self._host)

    def let_go(self, target: Target) -> Released:
        """Let all members of ``target`` go; bounded, raises no OSError."""
        names: dict[Incarnation, str] = {}
        until = self._host.now() + _PATIENCE
        quiet = 0
        while quiet < QUIET_LOOKS:
            try:
                new = self._members(replace(target, spare=target.spare | names.keys()))
                for row in new:
                    names[row.incarnation] = self._host.command_line(row.pid)
                    self._release(row.incarnation, names[row.incarnation])
            except OSError:
                return Released(names, is_all=False)  # no descriptor to look with
            quiet = 0 if new else quiet + 1
            if self._host.now() > until:
                return Released(names, is_all=False)
        return Released(names, is_all=True)

    def _members(self, target: Target) -> list[ProcessRow]:
        found = find_members(target, (), self._look())
        return [each.row for each in found if _is_of_run(each.row, self._run_id)]

    def _release(self, process: Incarnation, command: str) -> None:
        put_tag(self._host, process, detached_tag(self._run_id))
        # One that stays inside is spared as well: then the cgroup is not used as a whole.
        put_outside(self._host, process)
        # A registry that cannot be written leaves the tag, which is enough.
        registry.note_detached(
            self._directory,
            self._host,
            process,
            self._run_id,
            [command],
            working_directory(process.pid),
            is_stray=True,
        )


def _is_of_run(row: ProcessRow, run_id: str) -> bool:
    """Is it a stray of this very run, and not of an inner one?"""
    if row.tag is not None:
        return is_tag_of_run(row.tag, run_id) and not is_helper_tag(row.tag)
    return row.mark is None or innermost(row.mark) == run_id
