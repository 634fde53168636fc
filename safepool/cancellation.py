"""The error of a task that was cancelled. A module of its own: workers need no futures.

Called by: the engine, and users as ``safepool.TaskCancelledError``.
"""

from __future__ import annotations

from concurrent.futures import CancelledError

from safepool.errors import SafePoolError


class TaskCancelledError(SafePoolError, CancelledError):
    """The task was cancelled by the program: it never ran, or its worker was ended with it."""
