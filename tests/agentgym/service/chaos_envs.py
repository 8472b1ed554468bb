"""An environment that plays a small game, or fails in the way that its action names: what `agentgym serve` must stand."""

import ctypes
import os
import random
import signal
import subprocess
import sys
import threading
import time

from agentgym import Env, Task, TaskSet

LIFETIME = 3600.0  # far beyond every limit of a test


def hang(_):
    time.sleep(LIFETIME)


def spin(_):
    os.nice(19)  # the machine that runs tests has others to serve
    while True:
        pass


def deaf(_):
    """Hangs, and does not hear signals that can be ignored."""
    for which in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM):
        signal.signal(which, signal.SIG_IGN)
    time.sleep(LIFETIME)


def stop(_):
    """Stopped as by a debugger: only SIGKILL ends it."""
    os.kill(os.getpid(), signal.SIGSTOP)


def leave(_):
    os._exit(3)


def segv(_):
    ctypes.string_at(0)


def kill(_):
    os.kill(os.getpid(), signal.SIGKILL)


def fail(_):
    raise KeyError("no such move")


def shout(_):
    """Floods both streams."""
    for stream in (sys.stdout, sys.stderr):
        for _ in range(50):
            stream.write("x" * 10_000 + "\n")
        stream.flush()


def grow(words):
    """Takes memory, and keeps it."""
    words.append(bytearray(os.urandom(1 << 16) * 256))


def files(_):
    """Opens all the files that it may."""
    found = []
    try:
        while True:
            found.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        for fd in found:
            os.close(fd)


def shut(_):
    """Closes every descriptor but its standard streams: the client's connection as well."""
    os.closerange(3, 4096)


def thread(_):
    threading.Thread(target=time.sleep, args=(LIFETIME,)).start()


def child(_):
    """Leaves a process running, and a second one in a session of its own."""
    subprocess.Popen(["sleep", str(LIFETIME)])
    subprocess.Popen(["sleep", str(LIFETIME)], start_new_session=True)


def orphan(_):
    """Leaves a process whose parent has ended, in a session of its own: what calls itself a daemon."""
    subprocess.run(["sh", "-c", f"setsid sleep {LIFETIME} >/dev/null 2>&1 &"], check=True)


def bereave(words):
    """Dies at once, with processes left below it."""
    child(words)
    orphan(words)
    kill(words)


def slow(_):
    time.sleep(0.5)


FAULTS = {
    made.__name__: made
    for made in (
        hang,
        spin,
        deaf,
        stop,
        leave,
        segv,
        kill,
        fail,
        shout,
        grow,
        files,
        shut,
        thread,
        child,
        orphan,
        bereave,
        slow,
    )
}


class Chaos(Env):
    """Adds the numbers that it is told to a secret one. An action "fault NAME" does that fault first."""

    max_turns = 1 << 30

    @classmethod
    def default_tasks(cls, split="train"):
        return TaskSet.generate(lambda seed: Task(f"{split}-{seed}", seed=seed), range(1000), name=f"chaos/{split}")

    def __init__(self, tasks=None, render_mode=None):
        super().__init__(tasks, render_mode=render_mode)
        self._kept = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        self._sum = random.Random(f"{self.current_task.id}/{seed}").randrange(1 << 40)
        return [{"role": "user", "content": f"{self.current_task.id}: {self._sum}"}], {"secret": self._sum % 7}

    def step(self, action):
        word, _, rest = self.read(action).partition(" ")
        if word == "fault":
            FAULTS[rest](self._kept)
            return self.outcome(f"{rest} done", 0.0)
        if word == "flood":
            return self.outcome("x" * int(rest), 0.0)
        if word == "sleep":
            time.sleep(float(rest))
            return self.outcome(f"slept {rest}", 0.0)
        self._sum = (self._sum * 31 + int(rest)) % (1 << 61)
        end = word == "end"
        return self.outcome(f"now {self._sum}", (self._sum % 100) / 64, terminated=end, success=end)
