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
    for add in (
        _add_run,
        _add_ps,
        _add_tree,
        _add_stop,
        _add_sweep,
        _add_log,
        _add_doctor,
        _add_demo,
    ):
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


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON; see docs/cli.md")


def _add_ps(subcommands: _Subcommands[Any]) -> None:
    parser = subcommands.add_parser(
        "ps",
        help="list the runs of this user, alive and dead",
        description="Lists the runs on record: whose they are, and what of them is alive. Memory "
        "is resident memory, what processes share included. Exit status 0.",
    )
    parser.add_argument(
        "--watch",
        nargs="?",
        type=_interval,
        const=1.0,
        metavar="SECONDS",
        help="look again and again until Ctrl-C (needs rich: pip install 'safepool[cli]')",
    )
    _add_json(parser)
    parser.set_defaults(run=_run_ps)


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r}: seconds from 0.1 to 3600 are wanted")
    return seconds


def _run_ps(options: argparse.Namespace) -> int:
    from safepool.cli import ps

    return ps.list_runs(as_json=options.json, watch=options.watch)


_RUN_HELP = "the beginning of a run's ID, or its owner's pid"


def _add_tree(subcommands: _Subcommands[Any]) -> None:
    parser = subcommands.add_parser(
        "tree",
        help="show the processes of one run",
        description="Shows the living processes of a run as a tree, with the role of each. Exit "
        "status 0; 2 if RUN means no run or more than one.",
    )
    parser.add_argument("name", metavar="RUN", help=_RUN_HELP)
    _add_json(parser)
    parser.set_defaults(run=_run_tree)


def _run_tree(options: argparse.Namespace) -> int:
    from safepool.cli import ps

    return ps.show_tree(options.name, as_json=options.json)


def _add_stop(subcommands: _Subcommands[Any]) -> None:
    parser = subcommands.add_parser(
        "stop",
        help="end one run: its owner, and with it everything",
        description="Ends the owner of a living run: SIGTERM, the grace, SIGKILL. Its launchers "
        "and its sidecar then end the rest, and this waits for them. Of a run whose owner is dead "
        "it ends what is left. Exit status 0: nothing is left; 2: RUN means no run or more than "
        "one, or one that may not be stopped; 3: something is left, and named.",
    )
    parser.add_argument("name", metavar="RUN", help=_RUN_HELP)
    _add_grace(parser, "seconds between SIGTERM and SIGKILL")
    parser.add_argument(
        "--wait",
        type=_seconds,
        metavar="SECONDS",
        help="how long to wait for the rest once the owner is gone (default: the grace + 3; pools "
        "that were made with a longer grace take longer)",
    )
    _add_json(parser)
    parser.set_defaults(run=_run_stop)


def _run_stop(options: argparse.Namespace) -> int:
    from safepool.cli import stop

    return stop.stop(options.name, options.grace, options.wait, as_json=options.json)


def _add_sweep(subcommands: _Subcommands[Any]) -> None:
    parser = subcommands.add_parser(
        "sweep",
        help="end what dead runs have left",
        description="Ends what is left of runs whose owner is proven dead, as every start of a "
        "run does. Living runs are not touched, nor what cannot be told apart. Exit status 0: "
        "nothing was left; 1: something was, and is ended (with --dry-run: would be); 3: "
        "something could not be ended.",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="say what would be ended, and signal nothing"
    )
    _add_grace(parser, "seconds between SIGTERM and SIGKILL")
    _add_json(parser)
    parser.set_defaults(run=_run_sweep)


def _run_sweep(options: argparse.Namespace) -> int:
    from safepool.cli import sweep

    return sweep.sweep(dry_run=options.dry_run, grace=options.grace, as_json=options.json)


def _add_log(subcommands: _Subcommands[Any]) -> None:
    parser = subcommands.add_parser(
        "log",
        help="show what was ended, when, why, and how to spare it",
        description="Shows the newest lines of the logs of all runs, or of one, newest first. "
        "Logs of runs that are over are kept for 30 days, 50 at most. Exit status 0; 2 if RUN "
        "means no log or more than one.",
    )
    parser.add_argument("name", metavar="RUN", nargs="?", help="the beginning of a run's ID")
    parser.add_argument(
        "-n", dest="lines", type=_count, default=50, metavar="N", help="lines (default: 50)"
    )
    _add_json(parser)
    parser.set_defaults(run=_run_log)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1")
    return int(text)


def _run_log(options: argparse.Namespace) -> int:
    from safepool.cli import log

    return log.show(options.name, options.lines, as_json=options.json)


def _add_doctor(subcommands: _Subcommands[Any]) -> None:
    parser = subcommands.add_parser(
        "doctor",
        help="say which layers of protection this machine and this user have",
        description="Tries each mechanism that safepool relies on, says which promise follows "
        "from it and what would improve it. Exit status 0: every promise holds; 1: one does not.",
    )
    _add_json(parser)
    parser.set_defaults(run=_run_doctor)


def _run_doctor(options: argparse.Namespace) -> int:
    from safepool.cli import doctor

    return doctor.examine(as_json=options.json)


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
