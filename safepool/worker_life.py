"""What a pool's worker does before its first task and after its last one.

Checked in the owner, carried to the worker, done there.

Called by: the pool (checks), the task loop (begins and finishes).
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

from safepool.core.lineage import MARK_VARIABLE
from safepool.core.values import dataclass

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
"""What OpenMP and the usual BLAS libraries read, when they are loaded."""


@dataclass(frozen=True)
class WorkerLife:
    """See :class:`safepool.SafePool` for what each means."""

    initializer: Callable[..., object] | None = None
    initargs: tuple[Any, ...] = ()
    finalizer: Callable[..., object] | None = None
    finalargs: tuple[Any, ...] = ()
    init_timeout: float | None = None
    exit_timeout: float | None = None
    environment: tuple[tuple[str, str | None], ...] = ()
    inner_threads: int | None = None
    log_levels: tuple[tuple[str, int], ...] | None = None

    def begin(self) -> None:
        """In the worker: put the environment on, and call the initializer; raises its error."""
        change_environment(os.environ, self.environment)
        if self.inner_threads is not None:
            _limit_loaded_libraries(self.inner_threads)
        if self.initializer is not None:
            self.initializer(*self.initargs)

    def finish(self) -> None:
        """In the worker: call the finalizer. Its error goes to stderr, as a process's does."""
        if self.finalizer is not None:
            try:
                self.finalizer(*self.finalargs)
            except BaseException:
                traceback.print_exc()


def change_environment(environment: Any, changes: Iterable[tuple[str, str | None]]) -> None:
    """Set variables, or remove those whose new value is None."""
    for name, value in changes:
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value


_limits = ExitStack()


def _limit_loaded_libraries(threads: int) -> None:
    """Limit libraries that were loaded before the variables were set: after a fork, mostly."""
    try:
        import threadpoolctl
    except ImportError:
        return
    _limits.enter_context(threadpoolctl.threadpool_limits(threads))


def checked_life(
    initializer: Callable[..., object] | None,
    initargs: Iterable[Any],
    finalizer: Callable[..., object] | None,
    finalargs: Iterable[Any],
    init_timeout: float | None,
    exit_timeout: float | None,
    env: Mapping[str, str | None] | None,
    inner_threads: int | None,
    log_to_owner: bool,
) -> WorkerLife:
    """Return the life that was asked for; a TypeError or ValueError names what is wrong."""
    if finalizer is not None and not callable(finalizer):
        raise TypeError("finalizer must be a callable")
    for name, seconds in (("init_timeout", init_timeout), ("exit_timeout", exit_timeout)):
        _check_seconds(name, seconds)
    changes = [] if env is None else _checked_environment(env)
    if inner_threads is not None:
        if isinstance(inner_threads, bool) or not isinstance(inner_threads, int):
            raise TypeError(f"inner_threads must be an int, not {type(inner_threads).__name__}")
        if inner_threads < 1:
            raise ValueError(f"inner_threads must be at least 1, not {inner_threads}")
        named = {name for name, _ in changes}
        changes += [(name, str(inner_threads)) for name in THREAD_VARIABLES if name not in named]
    log_levels = None
    if log_to_owner:
        from safepool.worker_logs import levels

        log_levels = levels()
    return WorkerLife(
        initializer,
        tuple(initargs),
        finalizer,
        tuple(finalargs),
        init_timeout,
        exit_timeout,
        tuple(changes),
        inner_threads,
        log_levels,
    )


def _check_seconds(name: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number of seconds, not {type(value).__name__}")
    if not value > 0:
        raise ValueError(f"{name} must be more than 0 seconds, not {value!r}")


def _checked_environment(env: Any) -> list[tuple[str, str | None]]:
    if not isinstance(env, Mapping):
        raise TypeError(f"env must be a mapping, not {type(env).__name__}")
    for name, value in env.items():
        if not isinstance(name, str) or not (value is None or isinstance(value, str)):
            raise TypeError(f"env must map str to str or None, not {name!r} to {value!r}")
        if not name or "=" in name or "\0" in name or "\0" in (value or ""):
            raise ValueError(f"env: {name!r} cannot be the name of a variable with this value")
        if name == MARK_VARIABLE:
            raise ValueError(
                f"env must leave {MARK_VARIABLE} alone: it marks the run that a process belongs to"
            )
    return list(env.items())
