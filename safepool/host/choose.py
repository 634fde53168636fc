"""Which backend this process works with, and its host.

Decided once in a process, at its first pool or process, from ``SAFEPOOL_BACKEND``
(auto, linux or portable) and from what the kernel can do; *auto* takes linux where
pidfds work. A fork keeps the choice in its memory; what is exec'd is told by whoever
starts it, so a program that changes its environment afterwards changes nothing.

Safe in threads: whoever comes second decides the same. Called by: the run (decides), the
sidecar and spawned workers (are told), all others (ask).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from safepool.errors import ProtectionError

if TYPE_CHECKING:
    from safepool.host.linux import LinuxHost
    from safepool.host.portable import PortableHost

VARIABLE = "SAFEPOOL_BACKEND"
BACKENDS = ("auto", "linux", "portable")

_name = ""
_host: LinuxHost | PortableHost | None = None


def name() -> str:
    """Return "linux" or "portable", decided now if it was not yet.

    Raises ProtectionError: the variable names no backend, or one that cannot work here.
    """
    if not _name:
        use(_decide(os.environ.get(VARIABLE) or "auto"))
    return _name


def use(backend: str) -> None:
    """Work with this backend from now on, whatever the environment says."""
    global _name, _host
    _name, _host = backend, None


def is_portable() -> bool:
    """Tell whether nothing but psutil may be relied on."""
    return name() == "portable"


def host() -> LinuxHost | PortableHost:
    """Return the host of the chosen backend. Raises ProtectionError as ``name`` does."""
    global _host
    if _host is None:
        _host = _make(name())
    return _host


def _make(backend: str) -> LinuxHost | PortableHost:
    if backend == "linux":
        from safepool.host.linux import LinuxHost

        return LinuxHost()
    try:
        from safepool.host.portable import PortableHost
    except ImportError as error:
        raise ProtectionError(f"the portable backend needs psutil: {error}") from error
    return PortableHost()


def _decide(wanted: str) -> str:
    if wanted not in BACKENDS:
        raise ProtectionError(
            f"{VARIABLE}={wanted!r} names no backend; it may be {', '.join(BACKENDS[:-1])} "
            f"or {BACKENDS[-1]}"
        )
    if wanted == "portable":
        return wanted
    from safepool.host.probe import why_not_linux

    problem = why_not_linux()
    if not problem:
        return "linux"
    if wanted == "linux":
        raise ProtectionError(
            f"the linux backend cannot work: {problem}; {VARIABLE}=auto takes the portable one"
        )
    return "portable"
