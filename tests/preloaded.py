"""Commands of Python as forks of one process that has imported what they import, which takes most of the time of a short run.

`python preloaded.py SOCKET` is that process: it has one thread, answers who connects to the socket, and ends with its standard input.
A fork has the standard streams, environment, folder, session and process id of its own that a started command has, and
ends as one does. A command whose environment changes what an import does is started as ever instead.
"""

import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

PRELOADED = ("agent_train.config.compose", "agent_train.config.validation", "agent_train.learner.worker")
READY_SECONDS = 120.0
POLL_SECONDS = 0.02
# Read while something is imported, or before Python starts. Of the others PYTHONPATH is followed, and Ray sets the last one in who imports it.
READ_BY_IMPORTS = ("OMP_", "MKL_", "OPENBLAS_", "KMP_", "PYTHON", "LD_", "TORCH_", "PYTORCH_", "HF_", "TRANSFORMERS_")
FOLLOWED = ("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONBREAKPOINT")


class Forked:
    """A command that runs as a fork: what `subprocess.Popen` tells of one."""

    def __init__(self, answers: socket.socket, words: Sequence[str]) -> None:
        self._answers, self.args = answers, list(words)
        self.returncode: int | None = None
        self.pid = self._answer()

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            with selectors.DefaultSelector() as ends:
                ends.register(self._answers, selectors.EVENT_READ)
                if not ends.select(timeout):
                    raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = self._answer()
            self._answers.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _answer(self) -> int:
        told = self._answers.recv(4, socket.MSG_WAITALL)
        assert len(told) == 4, "the process that forks has ended"
        return int(struct.unpack("i", told)[0])


class Preloaded:
    """The process that forks, listening on a socket."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def start(
        self,
        words: Sequence[str],
        env: Mapping[str, str],
        cwd: Path | None = None,
        out: IO[bytes] | None = None,
        err: IO[bytes] | None = None,
    ) -> Forked:
        """`python *words` in a session of its own, which reads nothing and writes to these files."""
        answers = socket.socket(socket.AF_UNIX)
        answers.connect(str(self.path))
        asked = {"words": list(words), "env": dict(env), "cwd": str(cwd or Path.cwd())}
        with open(os.devnull, "r+b") as nothing:
            socket.send_fds(answers, [b"."], [(stream or nothing).fileno() for stream in (None, out, err)])
        answers.sendall(json.dumps(asked).encode())
        answers.shutdown(socket.SHUT_WR)
        return Forked(answers, words)

    def run(self, words: Sequence[str], env: Mapping[str, str], seconds: float, cwd: Path | None = None) -> str:
        """What `python *words` printed; it must end well."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            running = self.start(words, env, cwd, out, err)
            try:
                code = running.wait(seconds)
            finally:
                running.kill()
            out.seek(0)
            err.seek(0)
            told = out.read().decode()
            assert code == 0, told + err.read().decode()
        return told


@contextlib.contextmanager
def preloaded(env: Mapping[str, str]) -> Iterator[Preloaded]:
    """A process that forks, until the end of this block. What imports read of the environment is as `env` says, in its forks too."""
    with tempfile.TemporaryDirectory(prefix="fork-", dir="/tmp") as folder:  # names of sockets may have 107 characters
        path, log = Path(folder, "socket"), Path(folder, "log")
        with log.open("wb") as told:
            process = subprocess.Popen(
                [sys.executable, __file__, str(path)],
                env={**env, "OMP_NUM_THREADS": "1"},  # a process with threads cannot be forked
                stdin=subprocess.PIPE,
                stdout=told,
                stderr=told,
                start_new_session=True,
            )
        try:
            end = time.monotonic() + READY_SECONDS
            while not path.exists():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < end, "it takes too long to import"
                time.sleep(POLL_SECONDS)
            yield Preloaded(path)
        finally:
            process.communicate(timeout=READY_SECONDS)  # at the end of its standard input it kills what still runs


class _Server:
    """Forks for who connects, and tells each the process id and then the exit code."""

    def __init__(self, path: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path + ".new")
        self._listener.listen(64)
        os.rename(path + ".new", path)  # who finds it can connect
        self._events = selectors.DefaultSelector()
        self._events.register(self._listener, selectors.EVENT_READ)
        self._events.register(0, selectors.EVENT_READ)

    def next_child(self) -> dict[str, Any]:
        """Return in the next fork, with what was asked of it; end with standard input."""
        while True:
            for key, _ in self._events.select():
                if key.fd == 0:
                    self._kill()
                    sys.exit()
                elif key.fileobj is self._listener:
                    if (asked := self._fork()) is not None:
                        return asked
                else:
                    self._ended(key)

    def _fork(self) -> dict[str, Any] | None:
        answers, _ = self._listener.accept()
        _, streams, _, _ = socket.recv_fds(answers, 1, 3)
        asked = json.loads(b"".join(iter(lambda: answers.recv(1 << 16), b"")))
        assert len(os.listdir("/proc/self/task")) == 1, "an import has started a thread, which a fork would lack"
        if (pid := os.fork()) == 0:
            self._close(answers)
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            return asked
        for stream in streams:
            os.close(stream)
        with contextlib.suppress(OSError):
            answers.sendall(struct.pack("i", pid))
        self._events.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, answers))
        return None

    def _kill(self) -> None:
        """The tests are gone: nobody waits for what still runs."""
        for key in self._events.get_map().values():
            if key.data:
                os.kill(key.data[0], signal.SIGKILL)

    def _ended(self, key: selectors.SelectorKey) -> None:
        pid, answers = key.data
        _, status = os.waitpid(pid, 0)
        self._events.unregister(key.fd)
        os.close(key.fd)
        with contextlib.suppress(OSError), answers:
            answers.sendall(struct.pack("i", os.waitstatus_to_exitcode(status)))

    def _close(self, answers: socket.socket) -> None:
        """In a fork: all that is the server's."""
        for key in self._events.get_map().values():
            if key.data:
                os.close(key.fd)
                key.data[1].close()
        self._events.close()
        self._listener.close()
        answers.close()


def become(asked: dict[str, Any]) -> None:
    """In a fork: be the command that was asked for."""
    words, env = asked["words"], asked["env"]
    os.chdir(asked["cwd"])
    os.setsid()
    if _imports_would_differ(env):
        os.execve(sys.executable, [sys.executable, *words], env)
    _follow(os.environ.get("PYTHONPATH", ""), env.get("PYTHONPATH", ""))
    os.environ.clear()
    os.environ.update(env)
    random.seed()
    _run(words)


def _follow(before: str, now: str) -> None:
    """Search modules where this PYTHONPATH says, no longer where the one before did."""
    installed = [place for place in sys.path[1:] if place not in before.split(os.pathsep)]
    sys.path[1:] = [*filter(None, now.split(os.pathsep)), *installed]


def _run(words: list[str]) -> NoReturn:
    if words[0] == "-m":
        sys.argv, sys.path[0] = words[1:], os.getcwd()
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = words, os.path.dirname(words[0])
        runpy.run_path(words[0], run_name="__main__")
    sys.exit()


def _imports_would_differ(env: Mapping[str, str]) -> bool:
    names = {name for name in {*env, *os.environ} if name.startswith(READ_BY_IMPORTS) and name not in FOLLOWED}
    return any(env.get(name) != os.environ.get(name) for name in names)


if __name__ == "__main__":
    for module in PRELOADED:
        importlib.import_module(module)
    # Ray's core reads the environment once, which tells it a worker's job and a cluster's token.
    assert "ray" not in sys.modules, "forks have to load Ray themselves"
    gc.freeze()
    become(_Server(sys.argv[1]).next_child())
