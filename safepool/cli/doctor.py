"""``safepool doctor``: which layers of protection this machine and this user have.

Called by: the command line.
"""

from __future__ import annotations

import sys

from safepool import __version__, layers
from safepool.cli import words
from safepool.host import choose
from safepool.host.linux import LinuxHost
from safepool.probes import Finding, versions
from safepool.probes import examine as probe

HOLDS = 0
DEGRADED = 1


def examine(*, as_json: bool) -> int:
    """Try the mechanisms and tell; 0 if every promise holds."""
    if sys.platform != "linux":
        print("safepool doctor: safepool needs Linux 5.3 or later so far", file=sys.stderr)
        return DEGRADED
    findings = probe(LinuxHost())
    lacking = {each.mechanism: each.detail for each in findings if not each.works}
    found = layers.states_for(lacking, choose.name())
    is_degraded = layers.is_degraded(found)
    if as_json:
        _print_json(findings, found, is_degraded=is_degraded)
    else:
        _print(findings, found, is_degraded=is_degraded)
    return DEGRADED if is_degraded else HOLDS


def _print(
    findings: list[Finding], found: tuple[layers.LayerState, ...], *, is_degraded: bool
) -> None:
    about = versions()
    about_it = f"safepool {__version__}, Python {about['python']}, {about['system']}"
    print(f"{about_it}, {choose.name()} backend\n")
    rows = [(_mark(each), each.what, each.detail) for each in findings]
    words.print_table(("", "MECHANISM", "FOUND"), rows, [_style(row[0]) for row in rows])
    print()
    marks = [
        "ok" if state.holds else "none" if state.layer.is_extra else "MISSING" for state in found
    ]
    rows = [
        (mark, state.name, state.layer.promise) for mark, state in zip(marks, found, strict=True)
    ]
    words.print_table(("", "LAYER", "PROMISE"), rows, [_style(mark) for mark in marks])
    print()
    for each in findings:
        # Of the portable backend nothing would be improved by it.
        if not each.works and each.improvement and choose.name() == "linux":
            print(f"to improve: {each.what}: {each.improvement}")
    print("some promises do not hold" if is_degraded else "every promise holds")


def _mark(finding: Finding) -> str:
    return "ok" if finding.works else "none" if finding.is_extra else "MISSING"


def _style(mark: str) -> str:
    return {"ok": "", "none": "dim"}.get(mark, "bold red")


def _print_json(
    findings: list[Finding], found: tuple[layers.LayerState, ...], *, is_degraded: bool
) -> None:
    body = {
        "versions": versions(),
        "backend": choose.name(),
        "degraded": is_degraded,
        "mechanisms": [
            {
                "name": each.mechanism,
                "what": each.what,
                "works": each.works,
                "detail": each.detail,
                "improvement": each.improvement or None,
                "extra": each.is_extra,
            }
            for each in findings
        ],
        "layers": [
            {
                "name": state.name,
                "promise": state.layer.promise,
                "holds": state.holds,
                "reason": state.reason or None,
                "extra": state.layer.is_extra,
            }
            for state in found
        ],
    }
    words.print_json(body)
