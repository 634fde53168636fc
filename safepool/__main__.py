"""Lets ``python -m safepool`` do what the ``safepool`` command does."""

from __future__ import annotations

import sys

from safepool.cli import main

if __name__ == "__main__":
    sys.exit(main())
