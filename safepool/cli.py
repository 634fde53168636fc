"""The command line: ``safepool`` and ``python -m safepool``.

Decides which subcommand runs and what its exit status means; each subcommand does
its work in a module of its own, which is imported only when it is asked for. A
subcommand is one function that adds its parser and sets ``run``: a callable that
takes the parsed arguments and returns the exit status.

Exit status: 0 all went well, 1 the subcommand failed (its own help says when),
2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from safepool import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit status; ``arguments`` default to the process's."""
    options = _parser().parse_args(arguments)
    status: int = options.run(options)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="safepool",
        description="multiprocessing where nothing outlives its owner, however the owner ends.",
    )
    parser.add_argument("--version", action="version", version=f"safepool {__version__}")
    subcommands = parser.add_subparsers(title="subcommands", metavar="COMMAND", required=True)
    for add in (_add_demo,):
        add(subcommands)
    return parser


def _add_demo(subcommands: argparse._SubParsersAction[Any]) -> None:
    demo = subcommands.add_parser(
        "demo",
        help="kill the owner of a pool and show what is left of it, with safepool and without",
        description=(
            "Starts a pool of four workers, each of which holds a process of its own, kills the "
            "owner with SIGKILL and shows how long each process lasted; then does the same with "
            "multiprocessing.Pool and clears up what stays. Takes a few seconds. Exit status 0 "
            "only if nothing of safepool's was left."
        ),
    )
    demo.add_argument(
        "--method",
        choices=("fork", "spawn", "forkserver"),
        default="fork",
        help="the start method of both pools (default: %(default)s)",
    )
    demo.set_defaults(run=_run_demo)


def _run_demo(options: argparse.Namespace) -> int:
    from safepool import demo

    method: str = options.method
    return demo.show(method)
