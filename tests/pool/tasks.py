"""Task functions that tests send to workers, importable there under every start method."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any


def square(x: int) -> int:
    return x * x


def add(x: int, y: int = 0) -> int:
    return x + y


def identity(x: Any) -> Any:
    return x


def pid(_: Any = None) -> int:
    return os.getpid()


def raise_it(error: BaseException) -> None:
    raise error


def kill_self(_: Any = None, number: int = signal.SIGKILL) -> None:
    os.kill(os.getpid(), number)
    time.sleep(60)  # until it arrives


def sleep(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def note(folder: str, item: int, killer: int) -> int:
    """Leave one file per run of an item; the killer's worker dies of it."""
    with open(Path(folder) / f"{item}-{os.getpid()}-{time.monotonic_ns()}", "x"):
        pass
    if item == killer:
        kill_self()
    return item


def leave(folder: str, name: object) -> None:
    """Say that something has happened."""
    (Path(folder) / str(name)).touch()


def meet(folder: str, item: int) -> int:
    """Return when the neighbour, which differs in the last bit, runs as well."""
    leave(folder, item)
    wait_for_file(str(Path(folder) / str(item ^ 1)))
    return item


def wait_at(folder: str, item: int, slow: int) -> int:
    """Return the item at once, but the slow one when the file "go" is there."""
    if item == slow:
        leave(folder, "slow")
        wait_for_file(str(Path(folder) / "go"))
    return item


def first_waits_for_last(folder: str, item: int, last: int) -> int:
    """The first item returns when the last one has run."""
    leave(folder, item)
    if item == 0:
        wait_for_file(str(Path(folder) / str(last)))
    return item


def sleep_softly(seconds: float) -> str:
    """Sleep, and say what came between."""
    try:
        time.sleep(seconds)
    except TimeoutError as error:
        return type(error).__name__
    return "slept"


def sleep_twice(seconds: float) -> None:
    """Take no notice of the first exception."""
    sleep_softly(seconds)
    time.sleep(seconds)


def has_timer(_: Any = None) -> bool:
    """Is a timer set, or a handler for it?"""
    is_default = signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    return signal.getitimer(signal.ITIMER_REAL)[0] > 0 or not is_default


class Unreadable:
    """Can be pickled, and not unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return refuse, ()


def refuse() -> None:
    raise LookupError("this cannot be read")


def wait_for_file(path: str, bound: float = 30.0) -> bool:
    """Wait until another task or the test has made a file."""
    until = time.monotonic() + bound
    while not Path(path).exists():
        if time.monotonic() > until:
            raise TimeoutError(path)
        time.sleep(0.005)
    return True


def touch(path: str) -> None:
    Path(path).touch()


def touch_and_hang(path: str) -> None:
    touch(path)
    time.sleep(60)


class UnreadableError(Exception):
    """Pickles, but cannot be made again from what it pickled."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


class Stubborn:
    """Cannot be pickled, and says so in its own way."""

    def __reduce__(self) -> Any:
        raise RuntimeError("not this one")


class FailsToLoad:
    """Pickles, but its unpickling raises what it is told to."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        return raise_it, (self.error,)


def make_fails_to_load(error: BaseException) -> FailsToLoad:
    return FailsToLoad(error)


def return_lambda() -> Any:
    return lambda: 0


def fork_and_return_twice() -> int:
    """Both copies come back; the copy must not answer, too."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
    return child


def close_everything() -> None:
    os.closerange(3, 4096)
    time.sleep(60)
