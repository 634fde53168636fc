"""Descriptors, shared memory, semaphores, and forks of threaded owners.

Programs that make pools by the hundred, drop them, recycle workers, share memory and kill
whoever holds it: nothing piles up, nothing vanishes that is in use, nobody warns of what
the user cannot change.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.kit import truth
from tests.kit.jail import Jail

BOUND = 10.5

DROPPED = """
    import gc, resource, warnings
    from safepool import get_context
    from tests.kit import truth

    if __name__ == "__main__":
        method, count = sys.argv[1], int(sys.argv[2])
        warnings.simplefilter("ignore", ResourceWarning)
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        for n in range(count):
            assert get_context(method).Pool(2, grace=0.5).map(abs, [-n]) == [n]
        gc.collect()
        say("dropped")
        sys.stdin.readline()
"""


def test_pools_that_are_dropped_without_close(method: str, jail: Jail) -> None:
    """One pool per call, never closed, at most 64 descriptors: no "too many open files".

    Seen in the wild: https://github.com/python/cpython/issues/124706
    """
    owner = jail.script(DROPPED, method, str(40 if method == "fork" else 12))
    jail.hear("dropped", seconds=60)
    truth.until(lambda: len(jail.pids()) <= 2, f"workers are left: {jail.living()}", BOUND)
    owner.go()
    assert owner.wait() == 0, owner.errors()


RECYCLED = """
    import gc
    from safepool import get_context
    from tests.kit import truth

    def count(_):
        return os.getpid(), len(truth.children(os.getppid()))

    if __name__ == "__main__":
        gc.disable()
        with get_context(sys.argv[1]).Pool(2, maxtasksperchild=1, grace=0.5) as pool:
            answers = pool.map(count, range(4), 1)
            before = len(truth.open_files())
            for _ in range(int(sys.argv[2])):
                answers += pool.map(count, range(10), 1)
            say("workers", str(len({pid for pid, _ in answers}) == len(answers)))
            say("most", str(max(number for _, number in answers)))
            say("files", str(len(truth.open_files()) - before))
"""


def test_workers_that_are_replaced_after_each_task(method: str, jail: Jail) -> None:
    """Recycling adds no descriptor and no zombie, even without a garbage collector.

    Seen in the wild: https://github.com/pytorch/pytorch/issues/26344
    """
    owner = jail.script(RECYCLED, method, "10" if method == "fork" else "3")
    assert jail.hear("workers")[0].text == "True"
    assert int(jail.hear("most")[0].text) <= 4, "used-up workers pile up under their launcher"
    assert int(jail.hear("files")[0].text) <= 6, "two workers may be starting, with 3 files each"
    assert owner.wait() == 0, owner.errors()


CLOSED = """
    from safepool import get_context
    from tests.kit import truth

    if __name__ == "__main__":
        context = get_context(sys.argv[1])
        def one():
            process = context.Process(target=abs, args=(1,))
            process.start()
            process.join(30)
            process.close()
            return process
        kept = [one()]
        before = len(truth.open_files())
        kept += [one() for _ in range(int(sys.argv[2]))]
        # What belonged to the last launcher is let go of when its end has been seen.
        truth.until(lambda: len(truth.open_files()) <= before, "descriptors are left")
        say("done")
"""


def test_processes_that_are_kept_in_a_list(method: str, jail: Jail) -> None:
    """A closed process holds no descriptor, though the object itself lives on.

    Seen in the wild: https://github.com/python/cpython/issues/83716
    """
    owner = jail.script(CLOSED, method, "40" if method == "fork" else "8")
    jail.hear("done")
    assert owner.wait() == 0, owner.errors()


SEGMENT = """
    from multiprocessing.shared_memory import SharedMemory
    from safepool import get_context

    def make(size):
        segment = SharedMemory(create=True, size=size)
        segment.buf[0] = 42
        name = segment.name
        segment.close()
        return name

    def hold(_):
        say("held")
        time.sleep(180)

    if __name__ == "__main__":
        pool = get_context(sys.argv[1]).Pool(2, grace=0.5)
        where = sys.argv[2]
        name = make(1000) if where == "owner" else pool.apply(make, (1000,))
        segment = SharedMemory(name)
        assert segment.buf[0] == 42
        result = pool.map_async(hold, range(2), 1)
        say("segment", name)
        result.get()
"""


@pytest.mark.parametrize("where", ["owner", "worker"])
def test_shared_memory_of_a_killed_owner(method: str, where: str, jail: Jail) -> None:
    """A segment of the user's, made in the owner or in a worker, is not kept until the reboot.

    Seen in the wild: https://github.com/python/cpython/pull/13222
    """
    owner = jail.script(SEGMENT, method, where)
    name = jail.hear("segment")[0].text
    jail.hear("held", 2)
    assert Path("/dev/shm", name).exists()
    owner.send(signal.SIGKILL)
    jail.assert_empty("owner of a segment killed", BOUND)
    truth.until(lambda: not Path("/dev/shm", name).exists(), "the segment is kept")


ATTACHED = """
    from multiprocessing.shared_memory import SharedMemory
    from safepool import WorkerLostError, get_context

    def attach(name, last):
        segment = SharedMemory(name)
        segment.buf[0] += 1
        if last:
            os.kill(os.getpid(), signal.SIGKILL)
        segment.close()

    def make():
        segment = SharedMemory(create=True, size=1000)
        segment.buf[0] = 7
        segment.close()
        return segment.name

    if __name__ == "__main__":
        first = SharedMemory(create=True, size=1000) if sys.argv[2] == "before" else None
        with get_context(sys.argv[1]).Pool(1, grace=0.5, maxtasksperchild=3) as pool:
            made = SharedMemory(pool.apply(make))  # its maker may well be gone by now
            own = SharedMemory(create=True, size=1000)
            for segment in (own, made):
                segment.buf[0] = 0
                for last in (False, True, False):
                    try:
                        pool.apply(attach, (segment.name, last))
                    except WorkerLostError:
                        say("lost")
                # Attaching again shows that the name is still there.
                again = SharedMemory(segment.name)
                say("value", str(again.buf[0]))
                again.close()
                segment.close()
                segment.unlink()
        if first is not None:
            first.close()
            first.unlink()
"""


@pytest.mark.parametrize(
    ("how", "first"),
    [
        ("fork", "before"),
        ("fork", "after"),
        ("spawn", "before"),
        ("spawn", "after"),
        ("forkserver", "before"),
        ("forkserver", "after"),
    ],
)
def test_shared_memory_outlives_workers_that_were_attached(
    how: str, first: str, jail: Jail
) -> None:
    """A killed or recycled worker does not take the segment along; stderr has no false alarm.

    The first segment of all is made before the pool, or after it in a worker.
    Seen in the wild: https://github.com/python/cpython/pull/21516
    """
    owner = jail.script(ATTACHED, how, first)
    assert [line.text for line in jail.hear("value", 2)] == ["3", "3"], owner.errors()
    assert owner.wait() == 0, owner.errors()
    assert "leaked" not in owner.errors(), owner.errors()
    assert "Traceback" not in owner.errors(), owner.errors()


LOCKS = """
    import gc
    from safepool import get_context

    def use(lock, queue):
        with lock:
            queue.put(os.getpid())

    if __name__ == "__main__":
        context = get_context(sys.argv[1])
        queue = context.SimpleQueue()
        processes = []
        for _ in range(4):
            processes.append(context.Process(target=use, args=(context.Lock(), queue)))
            processes[-1].start()
            gc.collect()
        for process in processes:
            process.join()
        codes = {process.exitcode for process in processes}
        pids = {queue.get() for _ in processes if codes == {0}}
        say("same", str(pids == {process.pid for process in processes}))
        say("codes", str(codes))
"""


@pytest.mark.parametrize(
    "how",
    ["fork", "spawn", "forkserver"],
)
def test_a_lock_that_only_the_new_process_refers_to(how: str, jail: Jail) -> None:
    """``Process(args=(Lock(),)).start()`` and nothing kept: the child finds its lock.

    Seen in the wild: https://github.com/impredicative/irc-rss-feed-bot/issues/92
    """
    owner = jail.script(LOCKS, how)
    assert jail.hear("same")[0].text == "True", owner.errors()
    assert jail.hear("codes")[0].text == "{0}", owner.errors()
    assert owner.wait() == 0, owner.errors()
    assert owner.errors() == ""


HALFWAY = """
    import threading
    from safepool import WorkerLostError, get_context

    SIZE = 50_000_000

    class Deadly:
        '''Kills its process while a large result is on its way.'''
        def __init__(self, delay):
            self.delay = delay
        def __reduce__(self):
            threading.Timer(self.delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
            return bytes, ()

    def large(delay):
        return [Deadly(delay), bytes(SIZE)]

    if __name__ == "__main__":
        lost = 0
        with get_context("fork").Pool(2, grace=0.5) as pool:
            for step in range(12):
                result = pool.apply_async(large, (step * 0.004,))
                others = pool.map_async(abs, range(50), 1)
                try:
                    assert len(result.get(30)[1]) == SIZE
                except WorkerLostError:
                    lost += 1
                others.wait(30)
                assert others.ready()
        say("lost", str(lost))
"""


def test_a_worker_killed_while_it_sends_a_large_result(jail: Jail) -> None:
    """A frame that is cut off is a lost task, never an endless wait for the rest.

    Seen in the wild: https://github.com/python/cpython/issues/87971
    """
    owner = jail.script(HALFWAY)
    assert int(jail.hear("lost", seconds=60)[0].text) > 0, "no worker was killed in time"
    assert owner.wait() == 0, owner.errors()


PLACES = """
    from safepool import get_context

    if __name__ == "__main__":
        for method in ("fork", "spawn", "forkserver"):
            with get_context(method).Pool(1, grace=0.5) as pool:
                assert pool.map(abs, [-1, -2]) == [1, 2]
                manager = get_context(method).Process(target=abs, args=(1,))
                manager.start()
                manager.join()
                assert manager.exitcode == 0
        say("worked", sys.argv[1])
"""


def test_temporary_folders_of_any_length(jail: Jail) -> None:
    """Batch systems give long, read-only or deleted temporary folders: no socket path is needed.

    Seen in the wild: https://github.com/python/cpython/issues/149527
    """
    owners = []
    for length in (60, 107, 108, 200):
        folder = Path("/tmp", f"{os.getpid()}-{length}-".ljust(length - 5, "x"))
        place = jail.folder / folder.name[:250]
        place.mkdir(mode=0o700)
        places = {"TMPDIR": str(place), "XDG_RUNTIME_DIR": str(place)}
        owners.append(jail.script(PLACES, str(length), environment=places))
    gone = {"TMPDIR": "/nowhere/at/all"}
    owners.append(jail.script(PLACES, "deleted", environment=gone))
    jail.hear("worked", len(owners), 60)
    for owner in owners:
        assert owner.wait() == 0, owner.errors()


THREADS = """
    import logging, threading
    from safepool import get_context

    class Quiet(logging.Handler):
        def emit(self, record):
            self.format(record)

    def work(n):
        logging.getLogger("noise").warning("task %s", n)
        return n

    if __name__ == "__main__":
        logging.basicConfig(handlers=[Quiet()])
        over = threading.Event()
        def noise():
            while not over.is_set():
                logging.getLogger("noise").warning("noise")
        threads = [threading.Thread(target=noise) for _ in range(2)]
        for thread in threads:
            thread.start()
        with get_context(sys.argv[1]).Pool(2, maxtasksperchild=1, grace=0.5) as pool:
            result = pool.map_async(work, range(int(sys.argv[2])), 1)
            say("sum", str(sum(result.get(60))))
        over.set()
        for thread in threads:
            thread.join()
"""


def test_a_threaded_owner_that_logs_all_the_time(method: str, jail: Jail) -> None:
    """Workers start, log and are replaced while the owner's threads hold logging's locks: no hang.

    Seen in the wild: https://github.com/python/cpython/issues/84559
    """
    count = 60 if method == "fork" else 8
    owner = jail.script(THREADS, method, str(count))
    assert jail.hear("sum", seconds=60)[0].text == str(sum(range(count)))
    assert owner.wait() == 0, owner.errors()


WARNED = """
    from safepool import get_context

    if __name__ == "__main__":
        context = get_context(sys.argv[1])
        for _ in range(2):
            with context.Pool(2, maxtasksperchild=1, grace=0.5) as pool:
                assert pool.map(abs, range(-6, 0), 1) == [6, 5, 4, 3, 2, 1]
            process = context.Process(target=abs, args=(1,))
            process.start()
            process.join()
            assert process.exitcode == 0
        say("quiet")
"""


def test_no_warning_of_forks_that_the_user_did_not_ask_for(method: str, jail: Jail) -> None:
    """A program without threads of its own gets no DeprecationWarning about fork and threads.

    Seen in the wild: https://github.com/uqfoundation/multiprocess/issues/166
    """
    owner = jail.script(WARNED, method, environment={"PYTHONWARNINGS": "error::DeprecationWarning"})
    jail.hear("quiet")
    assert owner.wait() == 0, owner.errors()
    assert owner.errors() == ""
