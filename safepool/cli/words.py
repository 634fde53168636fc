"""How the command line shows numbers, times and tables, in plain text and in colour.

Plain text needs nothing but Python. Where ``rich`` is installed (``safepool[cli]``) and
standard output is a terminal that wants colour (not with NO_COLOR or TERM=dumb), tables
are coloured; what they say is the same.

Called by: the subcommands.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, TypeVar

from safepool import __version__

FORMAT = 1
"""The version of all JSON output. Keys may be added; a changed meaning gets a new number."""

_GAP = 2
_ELLIPSIS = "..."
_SHORTEST_LAST = 12
"""Columns that the last one keeps, however narrow the terminal is."""

T = TypeVar("T")


def print_json(body: Mapping[str, Any]) -> None:
    """Print one JSON object, with the versions of its form and of the program."""
    print(json.dumps({"format": FORMAT, "safepool": __version__, **body}, indent=2))


def duration(seconds: float | None) -> str:
    """A duration in the two largest units: 4.2 s, 3 min 5 s, 2 h 10 min, 5 d 3 h; "-": none."""
    if seconds is None:
        return "-"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h"


def size(count: int | None) -> str:
    """A number of bytes in binary units: 512 B, 3.4 MiB; "-": not known."""
    if count is None:
        return "-"
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def iso(seconds: float) -> str:
    """A time since 1970 as ISO 8601 in UTC."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")


def plural(count: int, noun: str) -> str:
    """1 process, 2 processes."""
    ending = "" if count == 1 else "es" if noun.endswith("s") else "s"
    return f"{count} {noun}{ending}"


def wants_colour(environment: Mapping[str, str] = os.environ) -> bool:
    """Is standard output a terminal whose user has not asked for plain text?"""
    is_plain = environment.get("NO_COLOR") or environment.get("TERM") == "dumb"
    return sys.stdout.isatty() and not is_plain


def has_rich() -> bool:
    """Is the extra installed?"""
    try:
        import rich  # noqa: F401
    except ImportError:
        return False
    return True


def width() -> int | None:
    """The columns of the terminal; None when standard output is none: nothing is cut then."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def table(header: Sequence[str], rows: Sequence[Sequence[str]], columns: int | None) -> list[str]:
    """Lines of a table, the last column cut to ``columns``; numbers stand to the right."""
    cells = [list(header), *map(list, rows)]
    widths = [max(len(row[at]) for row in cells) for at in range(len(header) - 1)]
    left = sum(widths) + _GAP * len(widths)
    lines = []
    for row in cells:
        parts = [cell.ljust(wide) for cell, wide in zip(row[:-1], widths, strict=True)]
        last = row[-1] if columns is None else cut(row[-1], columns - left)
        lines.append((" " * _GAP).join([*parts, last]).rstrip())
    return lines


def cut(text: str, columns: int) -> str:
    """The text in no more than ``columns``, but in as many as are needed to see what it is."""
    columns = max(columns, _SHORTEST_LAST)
    return text if len(text) <= columns else text[: columns - len(_ELLIPSIS)] + _ELLIPSIS


def print_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str] = ()
) -> None:
    """Print a table; ``styles`` are rich's, one for each row."""
    lines = table(header, rows, width())
    if not (wants_colour() and has_rich()):
        print("\n".join(lines))
        return
    from rich.console import Console

    Console().print(coloured(lines, styles), soft_wrap=True)


def coloured(lines: Sequence[str], styles: Sequence[str]) -> Any:
    """The lines as rich's text: a bold header, each row in its style."""
    from rich.text import Text

    text = Text(lines[0], style="bold")
    for line, style in zip(lines[1:], [*styles, *[""] * len(lines)], strict=False):
        text.append("\n")
        text.append(line, style=f"not bold {style}".strip())
    return text
