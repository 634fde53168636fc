"""A coordinator of modules: named, long-lived processes, each started when the last is ready.

    python examples/module_coordinator.py [SECONDS]

Runs until Ctrl-C or SECONDS are over. A module that dies is started again after a pause
that doubles each time; at the end all are stopped in the opposite order. Should the
coordinator itself be killed, with -9 if you like, no module stays: safepool's part.
"""

import random
import signal
import sys
import time
from multiprocessing.connection import wait

import safepool as mp


class Module:
    """One named process, how often it was started, and when it is due to start again."""

    def __init__(self, name, run, *arguments):
        self.name, self.run, self.arguments = name, run, arguments
        self.starts, self.due_at = 0, 0.0

    def start(self):
        """Start the process and wait until it says that it is ready."""
        ready, is_ready = mp.Pipe(duplex=False)
        what = (self.run, self.arguments, is_ready)
        self.process = mp.Process(target=run_module, args=what, name=self.name)
        self.process.start()
        self.starts, self.due_at = self.starts + 1, 0.0
        print(f"{self.name}: {'ready' if ready.poll(10) else 'late'}", flush=True)


def run_module(run, arguments, is_ready):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the coordinator's to answer
    is_ready.send(True)
    run(*arguments)


def supervise(modules, until):
    started = []
    try:
        for module in modules:
            module.start()
            started.append(module)
        while (now := time.monotonic()) < until:
            living = {module.process.sentinel: module for module in started if not module.due_at}
            look_at = min([now + 60, until, *(module.due_at or until for module in started)])
            for sentinel in wait(list(living), timeout=max(0.0, look_at - now)):
                dead = living[sentinel]
                dead.due_at = time.monotonic() + min(8.0, 0.25 * 2**dead.starts)
                print(f"{dead.name}: died, starts again soon", flush=True)
            for module in started:
                if 0 < module.due_at <= time.monotonic():
                    module.start()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    finally:
        signal.signal(signal.SIGINT, lambda *_: None)  # a second Ctrl-C leaves nobody behind
        for module in reversed(started):
            module.process.terminate()
            module.process.join()
            print(f"{module.name}: stopped", flush=True)


def sense(readings):
    while True:
        time.sleep(0.1)
        readings.put(random.gauss(20.0, 1.0))
        if random.random() < 0.05:
            sys.exit("the sensor fell off")


def print_readings(readings):
    while True:
        print(f"reading: {readings.get():.2f}", flush=True)


if __name__ == "__main__":
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else float("inf")
    queue = mp.Queue()
    modules = [Module("printer", print_readings, queue), Module("sensor", sense, queue)]
    supervise(modules, until=time.monotonic() + seconds)
