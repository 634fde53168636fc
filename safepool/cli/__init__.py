"""The command line: ``safepool`` and ``python -m safepool``.

Decides which subcommand runs, and what becomes of an error or of a reader that has seen
enough (``safepool ps | head``). Each subcommand has a module of its own, which is
imported only when it is asked for.

Exit statuses that all share: 2 wrong usage, 4 the registry or the system refused, 130
interrupted, 141 the reader of the output went away. What 0, 1 and 3 mean is said in the
subcommand's help and in ``docs/cli.md``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from safepool.cli.arguments import parse
from safepool.errors import SafePoolError

REFUSED = 4
_INTERRUPTED = 130
_READER_GONE = 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit status; ``arguments`` default to the process's."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        status: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # Say no more at exit either: the interpreter flushes once again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _READER_GONE
    except KeyboardInterrupt:
        return _INTERRUPTED
    except (SafePoolError, OSError) as error:
        print(f"safepool: {error}", file=sys.stderr)
        return REFUSED
    return status
