"""A worker that dies takes its own descendants along before its replacement starts.

Ports, locks and memory of what it had started are free again when the next task runs.
The owner lives on in all of these tests.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from tests.kit import truth
from tests.kit.jail import Jail

PORT = """
    import socket, subprocess
    from safepool import get_context, WorkerLostError

    SERVER = '''
    import socket, sys, time
    s = socket.socket(); s.bind(("127.0.0.1", int(sys.argv[1]))); s.listen()
    print("up", flush=True); time.sleep(180)
    '''.replace("\\n    ", "\\n")

    def bind(port=0):
        s = socket.socket()
        s.bind(("127.0.0.1", port))
        s.listen()
        port = s.getsockname()[1]
        s.close()
        return port

    def serve(port):
        server = subprocess.Popen([sys.executable, "-S", "-E", "-c", SERVER, str(port)],
                                  stdout=subprocess.PIPE, start_new_session=True)
        server.stdout.readline()
        say("serving", str(server.pid))
        server.wait()

    if __name__ == "__main__":
        port = bind()
        with get_context(sys.argv[1]).Pool(1, grace=0.5) as pool:
            for _ in range(5):
                result = pool.apply_async(serve, (port,))
                try:
                    result.get(60)
                except WorkerLostError as error:
                    say("lost", f"{error.pid} {error.exitcode}")
                assert pool.apply(bind, (port,)) == port
                say("bound")
"""


def test_a_replacement_can_bind_the_port_of_the_killed_workers_subprocess(
    method: str, jail: Jail
) -> None:
    """The killed worker's server is gone before the next task runs, five times in a row."""
    owner = jail.script(PORT, method)
    for number in range(1, 6):
        worker = jail.hear("serving", number)[-1].pid
        os.kill(worker, signal.SIGKILL)
        assert jail.hear("lost", number)[-1].text == f"{worker} {-signal.SIGKILL}"
        jail.hear("bound", number)
    assert owner.wait() == 0, owner.errors()
    jail.assert_empty("after the pool", 10)


STRAYS = """
    from safepool import get_context
    from tests.kit import truth, villains

    def look(pids):
        return os.getpid(), [truth.describe(pid) for pid in pids if truth.is_alive(pid)]

    if __name__ == "__main__":
        with get_context(sys.argv[1]).Pool(1, grace=0.5) as pool:
            task = ("stray_of_killed_worker", "safepool", sys.argv[1], 0.5)
            for _ in range(3):
                first = pool.apply_async(villains.play, task)
                first.wait(60)
                pids = [int(pid) for pid in sys.stdin.readline().split()]
                say("look", str(pool.apply(look, (pids,))))
"""


def test_strays_of_a_killed_worker_are_gone_before_the_next_task(method: str, jail: Jail) -> None:
    """A new session and a double-forked daemon with an empty environment go with their worker."""
    owner = jail.script(STRAYS, method)
    for number in range(1, 4):
        jail.hear("ready", number)
        sleepers = [pid for pid in jail.pids() if truth.command_line(pid).startswith("/bin/sleep")]
        assert owner.process.stdin is not None
        owner.process.stdin.write(" ".join(map(str, sleepers)).encode() + b"\n")
        owner.process.stdin.flush()
        pid, alive = jail.hear("look", number)[-1].text.split(", ", 1)
        assert alive == "[])", (pid, alive)
    assert owner.wait() == 0, owner.errors()
    jail.assert_empty("after the pool", 10)


PROCESS = """
    from safepool import get_context
    from tests.kit import villains

    if __name__ == "__main__":
        method, villain, how = sys.argv[1:]
        process = get_context(method).Process(
            target=villains.play, args=(villain, "safepool", method, 0.5))
        process.start()
        sys.stdin.readline()
        if how == "sigkill":
            os.kill(process.pid, signal.SIGKILL)
        else:
            getattr(process, how)()
        process.join(60)
        say("ended", str(process.exitcode))
        sys.stdin.readline()
"""


ENDS = (
    ("daemon_empty_env", "sigkill", "-9"),
    ("daemon_empty_env", "terminate", "-15"),
    ("ignores_term", "terminate", "-9"),
    ("forker", "kill", "-9"),
)


def test_a_process_is_joined_when_its_tree_is_gone(method: str, tmp_path: Path) -> None:
    """After ``join`` the strays of a killed, terminated or stubborn process are gone as well."""
    with contextlib.ExitStack() as stack:
        running = []
        for villain, how, code in ENDS:
            folder = tmp_path / f"{villain}-{how}"
            folder.mkdir()
            jail = stack.enter_context(Jail(folder))
            running.append((jail, jail.script(PROCESS, method, villain, how), code))
        for jail, owner, _ in running:
            jail.hear("ready")
            owner.go()
        for jail, owner, code in running:
            assert jail.hear("ended")[0].text == code, owner.errors()
            left = [line for line in jail.living() if "sleep" in line or "villains.py" in line]
            assert not left, left
            owner.go()
            assert owner.wait() == 0, owner.errors()
            jail.assert_empty("after the process", 10)


STATUSES = """
    import subprocess
    from safepool import get_context

    def seven(_):
        return subprocess.run(["sh", "-c", "exit 7"]).returncode

    if __name__ == "__main__":
        with get_context(sys.argv[1]).Pool(2) as pool:
            result = pool.map_async(seven, range(60), 1)
            own = {seven(None) for _ in range(60)}
            say("codes", f"{own | set(result.get())}")
"""


def test_exit_statuses_of_users_own_children_are_not_stolen(method: str, jail: Jail) -> None:
    """``subprocess.run`` gives the real status in workers and in the owner."""
    owner = jail.script(STATUSES, method)
    assert jail.hear("codes")[0].text == "{7}"
    assert owner.wait() == 0, owner.errors()
