"""The owner of the kill tests: makes a pool (or processes), then dies as it is told.

    owner.py --method spawn --death sigkill --cast forker,idle

With a death from outside it waits for its results, as a program would; it is the test
that sends the signal. With one from inside it waits for a line on standard input. The
villains (villains.py) say ``ready`` by themselves; for an idle worker the owner does.

``--package multiprocessing`` is the negative control.

Called by: ``Jail.owner``.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import os
import sys
import threading
from typing import Any

from tests.kit import villains

INSIDE = ("return", "exception", "sys_exit", "os_exit", "segfault", "abort", "exec")
OUTSIDE = ("sigterm", "sigint", "sigint_group", "sighup", "sigkill", "stop_kill")

held: list[Any] = []
"""Keeps the pool or the processes until the interpreter ends, as a global does."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--package", default="safepool")
    parser.add_argument("--method", default="fork")
    parser.add_argument("--face", choices=("pool", "process"), default="pool")
    parser.add_argument("--death", choices=(*INSIDE, *OUTSIDE), default="sigkill")
    parser.add_argument("--cast", default="idle")
    parser.add_argument("--grace", type=float, default=0.5)
    return parser.parse_args()


def open_pool(options: argparse.Namespace, cast: list[str]) -> list[Any]:
    """Make the pool and give each villain a worker; returns the pending results."""
    pool = villains.make_pool(options.package, options.method, max(2, len(cast)), options.grace)
    held.append(pool)
    results = []
    for name in cast:
        if name == "idle":
            pool.map(int, range(8))
            villains.say("ready", "idle")
        else:
            task = (name, options.package, options.method, options.grace)
            results.append(pool.apply_async(villains.play, task))
    return results


def start_processes(options: argparse.Namespace, cast: list[str]) -> None:
    """Start one process for each villain; for an idle one, one that only sleeps."""
    context = importlib.import_module(options.package).get_context(options.method)
    for name in cast:
        if name == "idle":
            process = context.Process(target=villains.held, args=("ready",), daemon=True)
        else:
            task = (name, options.package, options.method, options.grace)
            process = context.Process(target=villains.play, args=task, daemon=True)
        process.start()
        held.append(process)


def wait_for_death(results: list[Any]) -> None:
    """Wait as a program waits for its results; the villains' never come."""
    for result in results:
        with contextlib.suppress(Exception):  # a killed worker's task may fail; wait for the others
            result.get()
    threading.Event().wait()


def die(death: str) -> None:
    """End in one of the ways that a process can choose itself."""
    if death == "exception":
        raise RuntimeError("nobody catches this")
    if death == "sys_exit":
        sys.exit(3)
    if death == "os_exit":
        os._exit(7)
    if death == "segfault":
        ctypes.string_at(0)
    if death == "abort":
        os.abort()
    if death == "exec":
        os.execv(villains.SLEEP[0], villains.SLEEP)


def main() -> None:
    options = arguments()
    cast = options.cast.split(",")
    results: list[Any] = []
    if options.face == "pool":
        results = open_pool(options, cast)
    else:
        start_processes(options, cast)
    villains.say("owner")
    if options.death in INSIDE:
        sys.stdin.readline()
        die(options.death)
    else:
        wait_for_death(results)


if __name__ == "__main__":
    main()
