"""An environment that does what it is told in its action: a double for every way in which an environment can fail."""

import asyncio
import atexit
import mmap
import os
import resource
import signal
import subprocess
import sys
import time

from agentgym import Env, Task, TaskSet


def forked():
    """Fork until the kernel allows no more; each child goes into a session of its own, and stays."""
    count = 0
    while True:
        try:
            child = os.fork()
        except OSError:
            return count
        if child == 0:
            os.setsid()
            time.sleep(3600)
        count += 1


class Panic(BaseException):
    """As libraries in Rust raise: no Exception, and its text cannot be had."""

    def __str__(self):
        raise ValueError


class Faulty(Env):
    """Answers "echo WORDS"; else hangs, dies, floods, raises. Counts its steps, so that one run twice can be seen."""

    max_turns = 1 << 30

    @classmethod
    def default_tasks(cls, split="train"):
        if split not in ("train", "test"):
            raise ValueError(f"no split {split!r}")
        return TaskSet.generate(lambda seed: Task(f"{split}-{seed}", seed=seed), range(2500), name=f"faulty/{split}")

    def init(self, task):
        if task.id == "hang":
            time.sleep(3600)
        super().init(task)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        return [{"role": "user", "content": f"task {self.current_task.id}"}], {"pid": os.getpid()}

    def step(self, action):  # noqa: C901 - one word after another
        text = self.read(action)
        word, _, rest = text.partition(" ")
        if word == "hang":
            while True:
                time.sleep(3600)
        if word == "spin":
            while True:
                pass
        if word == "exit":
            os._exit(int(rest))
        if word == "abort":
            os.kill(os.getpid(), signal.SIGKILL)
        if word == "sleep":
            time.sleep(float(rest))
        if word == "child":
            rest = str(subprocess.Popen(["sleep", "3600"]).pid)
        if word == "escape":  # into a session of its own, its parent gone
            rest = subprocess.check_output(["sh", "-c", "setsid sleep 3600 >&2 & echo $!"], text=True).strip()
        if word == "eat":  # so many MiB, all written to
            self.eaten = [bytearray(os.urandom(1024) * 1024) for _ in range(int(rest))]
        if word == "share":  # so many MiB of memory that is no process's own
            self.shared = mmap.mmap(-1, int(rest) << 20, flags=mmap.MAP_SHARED)
            for _ in range(int(rest)):
                self.shared.write(bytes(1 << 20))
        if word == "feed":  # so many MiB, each of them in a child
            eats = "import time; eaten = bytearray(b'x' * (1 << 20)); time.sleep(3600)"
            self.fed = [subprocess.Popen([sys.executable, "-Sc", eats]) for _ in range(int(rest))]
        if word == "fork":  # without end; how many there were
            rest = str(forked())
        if word == "limits":
            rest = f"{resource.getrlimit(resource.RLIMIT_CORE)[0]} {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}"
        if word == "raise":
            raise KeyError(rest)
        if word == "quit":
            raise SystemExit(rest)
        if word == "panic":
            raise Panic(rest)
        if word == "flood":
            rest = "x" * int(rest)
        if word == "until":  # a file is there
            while not os.path.exists(rest):
                time.sleep(0.005)
        if word == "note":
            with open(rest, "a") as notes:
                notes.write(f"{self.turn}\n")
        return self.outcome(f"{self.turn}: {rest}", 0.25, terminated=word == "end", success=word == "end")

    def expert_action(self):
        return f"echo {self.turn}"

    def random_action(self, rng):
        return f"echo {rng.random()} {rng.gauss(0, 1)}"

    def close(self):
        super().close()
        if where := os.environ.get("FAULTY_CLOSED"):
            with open(where, "a") as notes:
                notes.write("closed\n")


class NotMade(Faulty):
    """Cannot be made."""

    def __init__(self):
        raise OSError("there is no such database")


class Leaving(Faulty):
    """Ends its process as it is made."""

    def __init__(self):
        raise SystemExit("it needs a licence")


class Toolless(Faulty):
    """Cannot say which tools it has."""

    @property
    def tools(self):
        raise LookupError("there is no list of tools")


class OpenedByInit(Faulty):
    """Closes what its `init` has opened."""

    def init(self, task):
        super().init(task)
        self.file = open(os.devnull)  # noqa: SIM115

    def close(self):
        super().close()
        self.file.close()


class MadeSlowly(Faulty):
    """Its constructor takes so many seconds; the first step ends its episode."""

    def __init__(self, seconds):
        super().__init__()
        time.sleep(seconds)

    def step(self, action):
        return self.outcome("Done.", 1.0, terminated=True)


class Stubborn(Faulty):
    """Does not close."""

    def close(self):
        time.sleep(3600)


class Lingering(Faulty):
    """Its process takes as many seconds to exit as its action says."""

    def step(self, action):
        atexit.register(time.sleep, float(action))
        return super().step("echo")


class Later(Faulty):
    """All its methods are `async`, and must meet in one task."""

    async def init(self, task):
        self.home = asyncio.current_task()
        Env.init(self, task)

    async def reset(self, *, seed=None, options=None):
        await asyncio.sleep(0)
        return Faulty.reset(self, seed=seed, options=options)

    async def step(self, action):
        assert asyncio.current_task() is self.home
        return Faulty.step(self, action)
