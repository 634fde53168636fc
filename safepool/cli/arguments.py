"""The subcommands' arguments and help; what each one does is in a module of its own.

Called by: the command line's entry point.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from safepool import __version__
from safepool.core.policy import DEFAULT_GRACE, checked_grace

_Subcommands = argparse._SubParsersAction  # argparse has no public name for it


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options; ``run`` among them is the subcommand. Exits with 2 on wrong usage."""
    words = list(arguments)
    after: list[str] = []
    if words[:1] == ["run"] and "--" in words:
        # Versions of argparse differ in what they do with it.
        at = words.index("--")
        words, after = words[:at], words[at + 1 :]
        options = _parser().parse_args(words)
        options.command = [*options.command, "--", *after] if options.command else after
    else:
        options = _parser().parse_args(words)
    if words[:1] == ["run"] and not options.command:
        _parser().error("run needs a command: safepool run -- COMMAND [ARGUMENT ...]")
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="safepool",
        description="multiprocessing where nothing outlives its owner, however the owner ends.",
        epilog="Exit statuses of all: 2 wrong usage, 4 the registry or the system refused, "
        "130 interrupted. SUBCOMMAND --help says what the others mean.",
    )
    parser.add_argument("--version", action="version", version=f"safepool {__version__}")
    subcommands = parser.add_subparsers(title="subcommands", metavar="SUBCOMMAND", required=True)
    for add in (_add_run, _add_demo):
        add(subcommands)
    return parser


def _seconds(text: str) -> float:
    try:
        return checked_grace(float(text))
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None


def _add_grace(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "--grace",
        type=_seconds,
        default=DEFAULT_GRACE,
        metavar="SECONDS",
        help=f"{what} (default: %(default)g; 0: SIGKILL at once)",
    )


def _add_run(subcommands: _Subcommands[Any]) -> None:
    parser = subcommands.add_parser(
        "run",
        help="run any command so that nothing it starts outlives it",
        usage="safepool run [-h] [--grace SECONDS] -- COMMAND [ARGUMENT ...]",
        description=(
            "Runs COMMAND with this terminal and these pipes, as the shell would, and below a "
            "process that adopts whatever it leaves behind. What still runs when COMMAND ends is "
            "ended (SIGTERM, the grace, SIGKILL) and told on standard error; so is everything "
            "when safepool itself is killed, however. Signals are handed on to COMMAND. The exit "
            "status is that of COMMAND; if it died of a signal, safepool dies of the same. "
            "125: it could not be protected, 126: it cannot be executed, 127: it was not found."
        ),
    )
    _add_grace(parser, "seconds between SIGTERM and SIGKILL for what is left")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=_run_run)


def _run_run(options: argparse.Namespace) -> int:
    from safepool.cli import run

    return run.run_command(options.command, options.grace)


def _add_demo(subcommands: _Subcommands[Any]) -> None:
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
