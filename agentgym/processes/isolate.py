"""Run a function in another process, under a timeout that holds whatever the function does.

Symbolic mathematics and other code that is handed a model's text can compute for ever, in C and with the interpreter
lock held, where neither a thread nor a signal handler stops it. `call_isolated` runs such a function in a worker process,
kept for the next call, and kills the process when the time is up.

    call_isolated("math:factorial", 5, timeout=1.0)    # 120

The function is named, so that the worker can import it; it is trusted, its arguments are not. Its result comes back as
JSON, so that nothing a worker says is run here.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import importlib.util
import json
import os
import pickle
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from agentgym.processes.signals import restore_default_signals

START_SECONDS = 60.0  # that a worker may take to start, and to import the function's module
WAIT_SECONDS = 300.0  # that a call may wait for a worker: each of the calls before it is bounded too
MOST_WORKERS = 8
MEMORY = 4 << 30  # bytes of address space of one worker
LONGEST_ANSWER = 64 << 20  # bytes
_GRACE = 1.0  # seconds after which a worker ends itself, should nobody be left to kill it
_HEAD = 8  # bytes that hold the length of a frame


class IsolatedCallError(RuntimeError):
    """The function raised; the message names the exception and the end of its traceback."""


class NoWorker(RuntimeError):
    """No worker was free, or ready, in time, or it ended too early: the function has not run."""


class _DiedEarly(NoWorker):
    """A worker ended before it ran the function."""


class WorkerDied(RuntimeError):
    """The function ended its process: it crashed, was killed for want of memory, or exited."""


def call_isolated(function: str | Callable[..., Any], *args: Any, timeout: float) -> Any:
    """The result of `function(*args)`, computed in a worker process.

    Workers are started when they are needed, at most one for each core and `MOST_WORKERS`, are used again, and end with this
    process. What the function leaves in its modules is there for the next call. May be called from any thread.

    Args:
        function: "module:name", or a function that can be imported by its module and name.
        args: anything that can be pickled.
        timeout: seconds for the call alone. Starting a worker and importing the module may take `START_SECONDS` more, waiting
            for a free worker `WAIT_SECONDS`.

    Returns:
        The result as JSON carries it: tuples as lists, keys as texts.

    Raises:
        TimeoutError: the time was up; the worker was killed.
        IsolatedCallError: the function raised, could not be imported, or gave a result that JSON cannot carry.
        WorkerDied: its process ended.
        NoWorker: the function did not run at all.
        ValueError: the function cannot be named, or the timeout is not positive.
    """
    if not timeout > 0:
        raise ValueError(f"timeout must be positive, not {timeout!r}")
    name = function if isinstance(function, str) else reference(function)
    request = pickle.dumps((name, args, timeout))
    try:
        return _call(name, request, timeout)
    except _DiedEarly:  # perhaps killed from outside since its last call; nothing has run, so another may try
        return _call(name, request, timeout)


def _call(name: str, request: bytes, timeout: float) -> Any:
    worker = _pool.take()
    try:
        value = worker.call(name, request, timeout)
    except IsolatedCallError:
        _pool.give(worker)
        raise
    except BaseException:
        _pool.drop(worker)
        raise
    _pool.give(worker)
    return value


def reference(function: Callable[..., Any]) -> str:
    """The name by which a worker imports a function: "module:name", or "file.py:name" for one of the main script.

    Raises:
        ValueError: it is no function of a module: a lambda, a local one, a bound method.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "<lambda>")
    found: Any = sys.modules.get(str(module))
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not function:
        raise ValueError(
            f"{name!r} cannot run in another process: it must be a function of a module, found by its name"
        )
    if module != "__main__":
        return f"{module}:{name}"
    file = getattr(sys.modules["__main__"], "__file__", None)
    if not file:
        raise ValueError(f"{name!r} cannot run in another process: it was typed in; write it into a file")
    return f"{os.path.abspath(file)}:{name}"


# ---- the side of the caller


class _Worker:
    """A process that runs one call at a time."""

    def __init__(self) -> None:
        start = f"import sys; sys.path[:] = {sys.path!r}; from agentgym.processes.isolate import _serve; _serve()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", start],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("a worker was started without its pipes")
        self._to, self._from = self._process.stdin, self._process.stdout
        os.set_blocking(self._to.fileno(), False)
        os.set_blocking(self._from.fileno(), False)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def call(self, name: str, request: bytes, timeout: float) -> Any:
        started = time.monotonic()
        try:
            self._send(request, started + START_SECONDS)
            loaded = self._receive(started + START_SECONDS)
        except TimeoutError:
            raise NoWorker(f"{name}: a worker was not ready within {START_SECONDS:g} s") from None
        except WorkerDied as death:
            raise _DiedEarly(f"{name}: {death} before the call") from death
        if loaded is None:
            try:
                loaded = self._receive(time.monotonic() + timeout)
            except TimeoutError:
                raise TimeoutError(f"{name}: no result within {timeout:g} s") from None
        kind, value = loaded
        if kind == "error":
            raise IsolatedCallError(f"{name}: {value}")
        return value

    def _send(self, data: bytes, until: float) -> None:
        rest = memoryview(len(data).to_bytes(_HEAD, "big") + data)
        while rest:
            _wait(self._to.fileno(), select.POLLOUT, until)
            try:
                rest = rest[os.write(self._to.fileno(), rest) :]
            except BrokenPipeError:
                raise WorkerDied(self._death()) from None

    def _receive(self, until: float) -> Any:
        size = int.from_bytes(self._read(_HEAD, until), "big")
        if size > LONGEST_ANSWER:
            raise WorkerDied(f"a worker announced an answer of {size} bytes; {LONGEST_ANSWER} is the limit")
        try:
            return json.loads(self._read(size, until))
        except ValueError as error:
            raise WorkerDied(f"a worker's answer is no JSON: {error}") from error

    def _read(self, size: int, until: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            _wait(self._from.fileno(), select.POLLIN, until)
            chunk = os.read(self._from.fileno(), min(size - len(data), 1 << 20))
            if not chunk:
                raise WorkerDied(self._death())
            data += chunk
        return bytes(data)

    def _death(self) -> str:
        try:
            code = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            return "the worker process closed its output"
        if code >= 0:
            return f"the worker process exited with {code}"
        return f"the worker process was ended by {signal.Signals(-code).name}"

    def kill(self) -> None:
        """End the process and all that it started in its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._to.close()
        self._from.close()
        self._process.wait()

    def forget(self) -> None:
        """Let go of a process that belongs to the parent of this one."""
        self._to.close()
        self._from.close()
        self._process.returncode = 0  # else Popen would wait for what is no child of this process


def _wait(descriptor: int, event: int, until: float) -> None:
    poll = select.poll()
    poll.register(descriptor, event)
    left = until - time.monotonic()
    if left <= 0 or not poll.poll(left * 1000):
        raise TimeoutError


class _Pool:
    """The workers of this process: as many as there are calls at a time, up to the limit."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._free = threading.BoundedSemaphore(min(MOST_WORKERS, os.cpu_count() or 1))
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()

    def take(self) -> _Worker:
        if not self._free.acquire(timeout=WAIT_SECONDS):
            raise NoWorker(f"no worker process was free within {WAIT_SECONDS:g} s")
        try:
            worker = self._pop() or _Worker()
        except BaseException:
            self._free.release()
            raise
        with self._lock:
            self._busy.add(worker)
        return worker

    def _pop(self) -> _Worker | None:
        """An idle worker that is still there: one may have been killed from outside since its last call."""
        while True:
            with self._lock:
                worker = self._idle.pop() if self._idle else None
            if worker is None or worker.alive:
                return worker
            worker.kill()

    def give(self, worker: _Worker) -> None:
        with self._lock:
            self._busy.discard(worker)
            self._idle.append(worker)
        self._free.release()

    def drop(self, worker: _Worker) -> None:
        with self._lock:
            self._busy.discard(worker)
        worker.kill()
        self._free.release()

    def close(self) -> None:
        """Kill all workers; a call that is still running in another thread gets `WorkerDied`."""
        with self._lock:
            workers, self._idle = [*self._idle, *self._busy], []
        for worker in workers:
            with contextlib.suppress(OSError):
                worker.kill()

    def forget(self) -> None:
        """Begin anew in a forked child: the workers are the parent's, and a thread that is not here may hold the lock."""
        for worker in [*self._idle, *self._busy]:
            with contextlib.suppress(OSError):
                worker.forget()
        self._begin()


_pool = _Pool()
os.register_at_fork(after_in_child=_pool.forget)
atexit.register(_pool.close)


# ---- the side of the worker


def _serve() -> None:
    """Answer requests until the caller's end of the pipe is closed."""
    restore_default_signals()
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what the function prints is no answer
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while head := requests.read(_HEAD):
        body = requests.read(int.from_bytes(head, "big"))
        try:
            name, args, timeout = pickle.loads(body)
            function = _load(name)
            _write(answers, None)
            # The signal's own action ends the process also where Python's handlers would not get their turn, and also when
            # the caller is no longer there to kill it.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, timeout + _GRACE)
            answer = json.dumps(["value", function(*args)])
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            answer = json.dumps(["error", _told(error)])
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        _frame(answers, answer.encode())


def _load(name: str) -> Callable[..., Any]:
    """The function of a reference."""
    place, _, path = name.rpartition(":")
    found: Any = _module_of_file(place) if place.endswith(".py") else importlib.import_module(place)
    for part in path.split("."):
        found = getattr(found, part)
    if not callable(found):
        raise TypeError(f"{name} is {type(found).__name__}, no function")
    return found  # type: ignore[no-any-return]


def _module_of_file(file: str) -> Any:
    """A script as a module, run once per worker and not as the main one."""
    if file not in sys.modules:
        spec = importlib.util.spec_from_file_location("__isolated_main__", file)
        if spec is None or spec.loader is None:
            raise ImportError(f"{file} cannot be imported")
        module = importlib.util.module_from_spec(spec)
        sys.modules["__isolated_main__"] = module
        spec.loader.exec_module(module)
        sys.modules[file] = module
    return sys.modules[file]


def _told(error: BaseException) -> str:
    try:
        text = f"{type(error).__name__}: {error}"
        frames = traceback.extract_tb(error.__traceback__)
    except Exception as second:  # an exception that cannot even be written
        return f"{type(error).__name__}, which raised {type(second).__name__} when it was written"
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{text:.2000}{where}"


def _write(answers: Any, value: Any) -> None:
    _frame(answers, json.dumps(value).encode())


def _frame(answers: Any, data: bytes) -> None:
    answers.write(len(data).to_bytes(_HEAD, "big") + data)
    answers.flush()
