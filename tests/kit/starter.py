"""An owner that SIGKILLs itself at the k-th step of a pool's start.

A step is one Python call inside the package while the pool is made and answers its
first task. It is counted by the interpreter (``sys.setprofile``), in this process
and this thread only, so the product needs no hook. Without ``--step`` it says how many
steps there are.

Called by: test_startup_kills.py, through a jail.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from types import FrameType

from tests.kit import villains


class Counter:
    """Counts calls into a package and ends this process at number ``last``."""

    def __init__(self, package: str, last: int) -> None:
        self.count = 0
        self._owner = os.getpid()
        self._last = last
        self._folder = os.path.dirname(importlib.import_module(package).__file__ or "") + os.sep

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(self._folder):
            return
        if os.getpid() != self._owner:
            sys.setprofile(None)  # a forked child has inherited the counter
            return
        self.count += 1
        if self.count == self._last:
            os.kill(self._owner, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--package", default="safepool")
    parser.add_argument("--method", default="fork")
    parser.add_argument("--step", type=int, default=0)
    options = parser.parse_args()
    counter = Counter(options.package, options.step)
    villains.say("begin")
    sys.setprofile(counter)
    pool = villains.make_pool(options.package, options.method, 2, 0.5)
    pool.apply(os.getpid)
    sys.setprofile(None)
    villains.say("steps", str(counter.count))
    pool.terminate()
    pool.join()


if __name__ == "__main__":
    main()
