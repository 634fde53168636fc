"""Exits, interrupts and signals at moments that have hung other pools.

Ctrl-C while workers still import, signals between tasks, exits from signal handlers, an
owner that reaps whatever it finds. What a terminal does in general is tested in
tests/real/test_signals.py.
"""

from __future__ import annotations

import os
import random
import select
import signal
import textwrap

import pytest

from tests.kit import truth
from tests.kit.jail import Jail
from tests.kit.terminal import Terminal

BOUND = 10.5
PROMPT = 5.0
METHODS = ("fork", "spawn", "forkserver")


SLOW_MODULE = """
    import os, time
    with open(os.environ["TELL"], "a") as tell:
        tell.write(f"importing {os.getpid()} \\n")
    time.sleep(180)
    def work(x): return x
"""

IMPORTING = """
    from safepool import get_context

    def initialize():
        import slow

    if __name__ == "__main__":
        with get_context(sys.argv[1]).Pool(2, initialize, grace=0.5) as pool:
            pool.map(abs, range(20), 1)
"""


def test_ctrl_c_while_workers_are_importing(method: str, jail: Jail, terminal: Terminal) -> None:
    """Before the first task, too: one traceback, the owner's, a prompt exit, nobody left.

    Seen in the wild: https://github.com/zauberzeug/nicegui/pull/6027
    """
    (jail.folder / "slow.py").write_text(textwrap.dedent(SLOW_MODULE))
    owner = jail.script(IMPORTING, method, terminal=terminal.slave)
    jail.hear("importing", 2)
    terminal.press_ctrl_c()
    assert owner.wait(PROMPT) == -signal.SIGINT, owner.errors()
    jail.assert_empty("Ctrl-C during imports", PROMPT)
    assert owner.errors().count("Traceback (most recent call last)") == 1, owner.errors()
    assert owner.errors().count("KeyboardInterrupt") == 1, owner.errors()


BOOTSTRAP = """
    from safepool import get_context

    if __name__ == "__mp_main__":
        say("importing")
        time.sleep(180)

    if __name__ == "__main__":
        with get_context("spawn").Pool(2, grace=0.5) as pool:
            pool.map(abs, range(20), 1)
"""


def test_ctrl_c_while_workers_are_importing_the_main_module(jail: Jail, terminal: Terminal) -> None:
    """So early that no initializer could have ignored SIGINT yet: still one traceback.

    Seen in the wild: https://github.com/zauberzeug/nicegui/pull/6027
    """
    owner = jail.script(BOOTSTRAP, terminal=terminal.slave)
    jail.hear("importing", 2)
    terminal.press_ctrl_c()
    assert owner.wait(PROMPT) == -signal.SIGINT, owner.errors()
    jail.assert_empty("Ctrl-C during the main import", PROMPT)
    assert owner.errors().count("Traceback (most recent call last)") == 1, owner.errors()


STORM = """
    from safepool import get_context

    def ident(_):
        return os.getpid()

    def work(n):
        sum(range(200))
        return n

    if __name__ == "__main__":
        with get_context(sys.argv[1]).Pool(2, grace=0.5) as pool:
            say("workers", " ".join({str(pid) for pid in pool.map(ident, range(200), 1)}))
            interrupted = answered = turn = 0
            while not os.path.exists("enough"):
                results = [pool.apply_async(work, (n,)) for n in range(50)]
                for n, result in enumerate(results):
                    try:
                        assert result.get(30) == n
                        answered += 1
                    except KeyboardInterrupt:
                        interrupted += 1
                turn += 1
            assert pool.map(work, range(100)) == list(range(100))
            say("storm-over", f"{answered + interrupted == 50 * turn} {answered > 0}")
"""


def test_a_storm_of_interrupts(method: str, jail: Jail) -> None:
    """SIGINT at random moments between and within small tasks: each has one answer, no hang.

    Seen in the wild: https://github.com/marxin/cvise/pull/307
    """
    owner = jail.script(STORM, method)
    workers = [int(pid) for pid in jail.hear("workers")[0].text.split()]
    chance = random.Random(f"{method} storm")
    for _ in range(300):
        for pid in workers:
            os.kill(pid, signal.SIGINT)  # as long as the pool holds them they are no strangers
        select.select([], [], [], chance.random() * 0.004)
    (jail.folder / "enough").touch()
    assert jail.hear("storm-over")[0].text == "True True", owner.errors()
    assert owner.wait() == 0, owner.errors()
    assert "Traceback" not in owner.errors(), owner.errors()


HANDLED = """
    from safepool import WorkerLostError, get_context

    def leave(number, frame):
        sys.exit(9)

    def hold(n):
        signal.signal(signal.SIGTERM, leave)
        say("held")
        if n >= 0:
            time.sleep(180)

    if __name__ == "__main__":
        with get_context(sys.argv[1]).Pool(2, maxtasksperchild=1, grace=0.5) as pool:
            for _ in range(3):
                try:
                    pool.apply_async(hold, (1,)).get(60)
                except (SystemExit, WorkerLostError) as error:
                    say("caught", repr(error))
            say("result", str(pool.apply_async(abs, (-3,)).get(60)))
"""


def test_a_task_whose_signal_handler_exits(method: str, jail: Jail) -> None:
    """SIGTERM makes the task's own handler raise SystemExit: that ends the task, hangs nothing.

    Seen in the wild: https://github.com/uqfoundation/multiprocess/issues/220
    """
    owner = jail.script(HANDLED, method)
    for turn in range(1, 4):
        os.kill(jail.hear("held", turn)[-1].pid, signal.SIGTERM)
        caught = jail.hear("caught", turn)[-1].text
        assert caught.startswith(("SystemExit(9", "WorkerLostError(")), caught
    assert jail.hear("result")[0].text == "3"
    assert owner.wait() == 0, owner.errors()


DIES_EARLY = """
    from safepool import InitializerError, get_context

    def work():
        import deadly

    if __name__ == "__main__":
        context = get_context(sys.argv[1])
        process = context.Process(target=work)
        process.start()
        process.join(30)
        say("process", str(process.exitcode))
        try:
            context.Pool(2, initializer=work).map(abs, range(4))
        except InitializerError as error:
            say("pool", str("SIGKILL" in str(error)))
"""


def test_a_module_that_kills_the_process_while_it_is_imported(method: str, jail: Jail) -> None:
    """Nobody waits for a child that died at its start: the exit code and the error name the signal.

    Seen in the wild: https://github.com/Kludex/uvicorn/issues/1801
    """
    (jail.folder / "deadly.py").write_text("import os; os.kill(os.getpid(), 9)")
    owner = jail.script(DIES_EARLY, method)
    assert jail.hear("process")[0].text == "-9"
    assert jail.hear("pool")[0].text == "True"
    assert owner.wait() == 0, owner.errors()
    jail.assert_empty("after early deaths", BOUND)


REAPER = """
    from safepool import WorkerLostError, get_context

    def reap(number, frame):
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass

    def hold():
        say("held")
        time.sleep(180)

    if __name__ == "__main__":
        if sys.argv[2] == "handler":
            signal.signal(signal.SIGCHLD, reap)
        else:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        context = get_context(sys.argv[1])
        for _ in range(2):
            with context.Pool(2, grace=0.5) as pool:
                result = pool.apply_async(hold)
                try:
                    result.get(60)
                except WorkerLostError as error:
                    say("lost", str(error.exitcode))
                assert pool.map(abs, range(-4, 0)) == [4, 3, 2, 1]
            pool.join()
            process = context.Process(target=sys.exit, args=(7,))
            process.start()
            process.join(30)
            say("process", str(process.exitcode))
"""


@pytest.mark.parametrize("way", ["handler", "ignored"])
def test_an_owner_that_reaps_every_child(method: str, way: str, jail: Jail) -> None:
    """A SIGCHLD handler that waits for anybody, or SIG_IGN, takes no exit code from the pool.

    Seen in the wild: https://github.com/aio-libs/aiohttp/issues/7038
    """
    owner = jail.script(REAPER, method, way)
    for turn in range(1, 3):
        os.kill(jail.hear("held", turn)[-1].pid, signal.SIGKILL)
        assert jail.hear("lost", turn)[-1].text == "-9"
        assert jail.hear("process", turn)[-1].text == "7"
    assert owner.wait() == 0, owner.errors()
    assert "Traceback" not in owner.errors(), owner.errors()
    jail.assert_empty("after a reaping owner", BOUND)


ASYNCIO = """
    import asyncio
    from safepool import get_context

    async def main(pool):
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, say, "handler")
        codes = set()
        for number in range(20):
            results = [pool.apply_async(abs, (-number,)) for _ in range(4)]
            child = await asyncio.create_subprocess_exec("sh", "-c", "exit 7")
            codes.add(await child.wait())
            values = await asyncio.gather(*(asyncio.to_thread(r.get, 30) for r in results))
            assert values == [number] * 4
        say("codes", str(codes))
        pool.terminate()
        pool.join()

    if __name__ == "__main__":
        pool = get_context(sys.argv[1]).Pool(2, maxtasksperchild=5, grace=0.5)
        asyncio.run(main(pool))
        say("over")
"""


def test_an_asyncio_program_with_handlers_and_subprocesses(method: str, jail: Jail) -> None:
    """Its exit codes are its own, and ending workers does not set off its SIGTERM handler.

    Seen in the wild: https://github.com/Kludex/uvicorn/issues/548
    """
    owner = jail.script(ASYNCIO, method)
    assert jail.hear("codes")[0].text == "{7}"
    jail.hear("over")
    assert owner.wait() == 0, owner.errors()
    assert not [line for line in jail.heard if line.word == "handler"]


RAISES = """
    from safepool import get_context

    if __name__ == "__main__":
        for turn in range(10):
            try:
                with get_context("fork").Pool(4, grace=0.5) as pool:
                    pool.map(abs, range(100))
                    pending = pool.map_async(time.sleep, [180] * 8, 1)
                    raise ValueError(turn)
            except ValueError:
                pass
        say("over")
        pools = [get_context(method).Pool(2) for method in ("fork", "spawn", "forkserver")]
        for pool in pools:
            pool.map_async(time.sleep, [180] * 8, 1)
"""


def test_errors_in_the_block_and_open_pools_at_exit(jail: Jail) -> None:
    """Ten ``with`` blocks that raise, then an end of the script with pools at work: no hang.

    Seen in the wild: https://github.com/uqfoundation/pathos/issues/266
    """
    owner = jail.script(RAISES)
    jail.hear("over")
    assert owner.wait(PROMPT + 5) == 0, owner.errors()
    jail.assert_empty("after the script", BOUND)
    assert truth.state(owner.pid) == ""
