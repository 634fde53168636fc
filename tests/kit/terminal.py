"""A pseudo-terminal for owners under test: Ctrl-C reaches the whole foreground group."""

from __future__ import annotations

import os
import threading

_PATIENCE = 30.0


class Terminal:
    """``slave`` is for the owner, ``press_ctrl_c`` types into it."""

    def __init__(self) -> None:
        self._master, self.slave = os.openpty()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        """Drain what the terminal echoes, so that nobody blocks on it."""
        try:
            while os.read(self._master, 1024):
                pass
        except OSError:
            return  # the last user of the terminal is gone

    def press_ctrl_c(self) -> None:
        """Type it."""
        os.write(self._master, b"\x03")

    def close(self) -> None:
        """Let go; its users have to be gone."""
        os.close(self.slave)
        self._reader.join(_PATIENCE)
        os.close(self._master)
