"""Signals: what workers inherit, what Ctrl-C does, and what a second one does not.

The terminal is real (a pty), so that Ctrl-C reaches the whole foreground group as it does
for a user.
"""

from __future__ import annotations

import os
import signal

from tests.kit.console import Console
from tests.kit.jail import Jail
from tests.kit.terminal import Terminal

PROMPT = 5.0
"""Seconds that an exit may take on a busy machine; the grace is 0.5 s."""

HANDLERS = """
    import socket
    from safepool import get_context

    def own_handler(number, frame):
        say("handler", str(number))

    def look(_):
        handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
        return (
            handlers == [signal.SIG_DFL, signal.SIG_DFL],
            signal.set_wakeup_fd(-1),
            sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        )

    def hold(_):
        say("holding")
        time.sleep(180)

    if __name__ == "__main__":
        reader, writer = socket.socketpair()
        reader.setblocking(False)
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno())
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, own_handler)
        pool = get_context(sys.argv[1]).Pool(2, grace=0.5)
        say("state", str(set(map(str, pool.map(look, range(6), 1)))))
        pool.map_async(hold, range(2), 1)
        sys.stdin.readline()
        pool.terminate()
        pool.join()
        try:
            noted = reader.recv(100)
        except BlockingIOError:
            noted = b""
        say("noted", str([number for number in noted if number != signal.SIGCHLD]))
"""


def test_workers_have_none_of_the_owners_signal_handling(method: str, jail: Jail) -> None:
    """Handlers and wake-up descriptor of the owner are reset; ending workers calls none."""
    owner = jail.script(HANDLERS, method)
    assert jail.hear("state")[0].text == "{'(True, -1, [])'}"
    jail.hear("holding", 2)
    owner.go()
    assert jail.hear("noted")[0].text == "[]"
    assert owner.wait() == 0, owner.errors()
    assert not [line for line in jail.heard if line.word == "handler"]


def test_idle_workers_survive_sigint(method: str, jail: Jail) -> None:
    """A stray Ctrl-C hits a worker that waits: it waits on, and silently."""
    console = Console(jail, method)
    before = console.meet()
    for pid, _ in before:
        os.kill(pid, signal.SIGINT)
    assert console.meet() == before
    assert "Traceback" not in console.owner.errors()


CTRL_C = """
    from safepool import get_context

    def hold(_):
        say("task")
        time.sleep(180)

    if __name__ == "__main__":
        with get_context(sys.argv[1]).Pool(2, grace=0.5) as pool:
            pool.map(hold, range(20), 1)
"""


def check_one_traceback(text: str) -> None:
    """One KeyboardInterrupt traceback, and no other words of workers."""
    assert text.count("KeyboardInterrupt") == 1, text
    assert text.count("Traceback (most recent call last)") == 1, text


def test_one_ctrl_c_in_a_map_is_enough(method: str, jail: Jail, terminal: Terminal) -> None:
    """One KeyboardInterrupt traceback, a prompt exit by SIGINT, nobody left."""
    owner = jail.script(CTRL_C, method, terminal=terminal.slave)
    jail.hear("task", 2)
    terminal.press_ctrl_c()
    assert owner.wait(PROMPT) == -signal.SIGINT, owner.errors()
    jail.assert_empty("after Ctrl-C", PROMPT)
    check_one_traceback(owner.errors())
    jail.hear("task", 2)
    assert len([line for line in jail.heard if line.word == "task"]) == 2, "a new task began"


def test_two_ctrl_c_in_a_row_leave_nobody(method: str, jail: Jail, terminal: Terminal) -> None:
    """The second Ctrl-C may cut the clean-up short in the owner; nobody is left all the same."""
    owner = jail.script(CTRL_C, method, terminal=terminal.slave)
    jail.hear("task", 2)
    terminal.press_ctrl_c()
    terminal.press_ctrl_c()
    owner.wait(PROMPT)
    jail.assert_empty("after two Ctrl-C", PROMPT)


SECOND = """
    from safepool import get_context
    from tests.kit import villains

    if __name__ == "__main__":
        pool = get_context(sys.argv[1]).Pool(2, grace=1)
        try:
            # The task may say that it is ready before this thread goes on.
            pool.apply_async(villains.ignores_term).get()
        except KeyboardInterrupt:
            say("first")
            pool.terminate()
            pool.join()
"""


def test_a_second_ctrl_c_during_the_clean_up_skips_nothing(
    method: str, jail: Jail, terminal: Terminal
) -> None:
    """Ctrl-C while the pool is being ended: the rest is ended all the same."""
    owner = jail.script(SECOND, method, terminal=terminal.slave)
    jail.hear("ready")
    terminal.press_ctrl_c()
    jail.hear("first")
    terminal.press_ctrl_c()
    owner.wait(PROMPT + 1)
    jail.assert_empty("after a second Ctrl-C", PROMPT + 1)


AGAIN = """
    from safepool import get_context

    def hold(_):
        say("task")
        time.sleep(180)

    if __name__ == "__main__":
        with get_context(sys.argv[1]).Pool(2, grace=0.5) as pool:
            try:
                pool.map(hold, range(2), 1)
            except KeyboardInterrupt:
                say("interrupted")
            say("again", str(pool.map_async(abs, range(-4, 0)).get(30)))
"""


def test_a_pool_works_on_after_a_ctrl_c(method: str, jail: Jail, terminal: Terminal) -> None:
    """In a notebook or a shell the interrupt ends the cell, not the pool."""
    owner = jail.script(AGAIN, method, terminal=terminal.slave)
    jail.hear("task", 2)
    terminal.press_ctrl_c()
    jail.hear("interrupted")
    assert jail.hear("again")[0].text == "[4, 3, 2, 1]"
    assert owner.wait() == 0, owner.errors()
