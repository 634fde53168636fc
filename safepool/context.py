"""The contexts: multiprocessing's own, with safe processes and pools.

``get_context(method)`` gives one context per start method. Queues, locks, events,
pipes, managers, values and shared memory are multiprocessing's, so they mix with
everything that the standard library makes. Hand a context to any library that takes
one.

Called by: users, through ``safepool``; :mod:`safepool.pool`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from multiprocessing import context as mp_context
from multiprocessing import get_start_method
from typing import TYPE_CHECKING, Any

from safepool.core.policy import DEFAULT_GRACE, EndPolicy, OnOwnerDeath, Strays
from safepool.process import ForkSafeProcess, ForkServerSafeProcess, SpawnSafeProcess
from safepool.worker_source import WorkerSource

if TYPE_CHECKING:
    from safepool.pool import SafePool


class SafeContextMixin:
    """What safepool adds to a context of multiprocessing."""

    _name: str

    def Pool(  # noqa: N802 - the name is multiprocessing's
        self,
        processes: int | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: Iterable[Any] = (),
        maxtasksperchild: int | None = None,
        *,
        grace: float = DEFAULT_GRACE,
        on_owner_death: OnOwnerDeath = "terminate",
        strays: Strays = "kill",
        **settings: Any,
    ) -> SafePool:
        """Return a SafePool with this start method; arguments as for SafePool."""
        from safepool.pool import SafePool

        return SafePool(
            processes,
            initializer,
            initargs,
            maxtasksperchild,
            context=self,
            grace=grace,
            on_owner_death=on_owner_death,
            strays=strays,
            **settings,
        )

    def worker_source(
        self, target: Callable[..., None], args: tuple[Any, ...], policy: EndPolicy
    ) -> WorkerSource:
        """Where a pool gets its workers from."""
        return WorkerSource(self._name, target, args, policy)

    def get_context(self, method: str | None = None) -> Any:
        """Return this context, or the safe one of another start method."""
        return self if method is None else get_context(method)


# The stubs type Pool by multiprocessing's own class, whose interface SafePool has.
class ForkSafeContext(SafeContextMixin, mp_context.ForkContext):  # type: ignore[misc]
    """Start method fork."""

    Process = ForkSafeProcess  # type: ignore[assignment]


class SpawnSafeContext(SafeContextMixin, mp_context.SpawnContext):  # type: ignore[misc]
    """Start method spawn."""

    Process = SpawnSafeProcess  # type: ignore[assignment]


class ForkServerSafeContext(SafeContextMixin, mp_context.ForkServerContext):  # type: ignore[misc]
    """Start method forkserver."""

    Process = ForkServerSafeProcess  # type: ignore[assignment]


_CONTEXTS: dict[str, Any] = {
    "fork": ForkSafeContext(),
    "spawn": SpawnSafeContext(),
    "forkserver": ForkServerSafeContext(),
}


def get_context(method: str | None = None) -> Any:
    """Return the safe context of a start method.

    Without an argument: of the method that multiprocessing uses here
    (``multiprocessing.set_start_method`` decides, else the running Python's default).

    Raises:
        ValueError: there is no such start method.

    Example::

        ctx = safepool.get_context("spawn")
        with ctx.Pool(4) as pool:
            print(pool.map(abs, [-1, -2]))
    """
    name = get_start_method() if method is None else method
    try:
        return _CONTEXTS[name]
    except (KeyError, TypeError):
        known = ", ".join(_CONTEXTS)
        raise ValueError(f"cannot find context for {method!r}; there are {known}") from None


def __getattr__(name: str) -> Any:
    """What else ``multiprocessing.context`` has: ``mp.context`` is one module for the user."""
    return getattr(mp_context, name)
