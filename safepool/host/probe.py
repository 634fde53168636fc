"""What this system can do, asked once by trying it on this process itself.

Changes nothing. Called by: the choice of a backend.
"""

from __future__ import annotations

import os
import signal
import sys

from safepool.host.procfs import STARVED


def why_not_linux() -> str:
    """Why the linux backend cannot work here: it needs pidfds (Linux 5.3).

    "" when it can. A lack of descriptors says nothing about the kernel.
    """
    if sys.platform != "linux":
        return f"this is {sys.platform}, not Linux"
    if not hasattr(os, "pidfd_open") or not hasattr(signal, "pidfd_send_signal"):
        return "this Python was built without pidfd_open"
    try:
        fd = os.pidfd_open(os.getpid())
    except OSError as error:
        return "" if error.errno in STARVED else f"pidfd_open is refused: {error.strerror}"
    try:
        signal.pidfd_send_signal(fd, 0)
    except OSError as error:
        return f"pidfd_send_signal is refused: {error.strerror}"
    finally:
        os.close(fd)
    return ""
