"""Run a function in another process, under a timeout that holds even if it computes in C with the interpreter lock held.

The function is trusted, its arguments are not; its result comes back as JSON, so this process runs nothing that a worker sends.
"""

import atexit
import contextlib
import importlib
import importlib.util
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, Pipe
from typing import Any

from agentgym.processes.child_process import restore_default_signals

START_SECONDS = 60.0  # for a worker to start and to import the function's module
WAIT_SECONDS = 300.0  # for a worker to become free; the calls before this one have timeouts too
MOST_WORKERS = min(8, os.cpu_count() or 1)
MEMORY = 4 << 30  # bytes of address space of one worker
_LONGEST_ANSWER = 256 << 20  # bytes
_AT_ONCE = 1 << 16  # bytes that the pipe takes whether or not the worker reads
_GRACE = 1.0  # seconds after its timeout at which a worker ends itself, if its caller is no longer there to kill it


class IsolatedCallError(RuntimeError):
    """The function raised; the message names the exception and the end of its traceback."""


class NoWorker(RuntimeError):
    """No worker was free, or ready, in time, or it ended too early: the function has not run."""


class _DiedEarly(NoWorker): ...


class WorkerDied(RuntimeError):
    """The function's process ended: it crashed, ran out of memory, or exited."""


def call_isolated(function: str | Callable[..., Any], *args: Any, timeout: float) -> Any:
    """The result of `function(*args)`, computed in a worker process. May be called from any thread.

    Workers are reused: the state that a function leaves in its modules stays for the next call. The result makes a round trip
    through JSON: tuples become lists, keys become strings.

    Args:
        function: "module:name", or a function that can be imported by its module and name.
        args: picklable values.
        timeout: seconds for the call alone, without waiting for a worker (`WAIT_SECONDS`) and starting it (`START_SECONDS`).

    Raises:
        TimeoutError: the timeout expired; the worker was killed.
        IsolatedCallError: the function raised, could not be imported, or returned a value that is not JSON.
        WorkerDied: the function's process ended.
        NoWorker: the function did not run at all.
        ValueError: the function has no importable name, or the timeout is not positive.
    """
    if not timeout > 0:
        raise ValueError(f"timeout must be positive, not {timeout!r}")
    name = function if isinstance(function, str) else reference(function)
    with contextlib.suppress(_DiedEarly), _worker() as worker:
        return worker.call(name, *args, timeout=timeout)
    # It may have been killed from outside since its last call. Nothing has run, so another may try.
    with _worker() as worker:
        return worker.call(name, *args, timeout=timeout)


def reference(function: Callable[..., Any]) -> str:
    """The name by which a worker imports a function of a module, "module:name" or "file.py:name"; ValueError for others."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "<lambda>")
    found: Any = sys.modules.get(str(module))
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not function:
        why = "it must be a function of a module, found by its name"
        raise ValueError(f"{name!r} cannot run in another process: {why}")
    if module != "__main__":
        return f"{module}:{name}"
    file = getattr(sys.modules["__main__"], "__file__", None)
    if not file:
        raise ValueError(f"{name!r} cannot run in another process: it was typed in; write it into a file")
    return f"{os.path.abspath(file)}:{name}"


class Worker:
    """A process that runs one call at a time, in `memory` bytes of address space. A context manager that kills it at the end."""

    def __init__(
        self, environ: Mapping[str, str] | None = None, memory: int | None = MEMORY, stderr: int | None = None
    ) -> None:
        self._pipe, theirs = Pipe()
        arguments = f"{theirs.fileno()}, {memory}"
        start = f"import sys; sys.path[:] = {sys.path!r}; from agentgym.processes.isolate import _serve; _serve({arguments})"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", start],
                stdin=subprocess.DEVNULL,
                stdout=2 if stderr is None else stderr,
                stderr=stderr,
                pass_fds=[theirs.fileno()],
                env=environ,
                start_new_session=True,
            )

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def call(self, name: str, *args: Any, timeout: float) -> Any:
        """The result of a function, named as `reference` does. Raises as `call_isolated` does."""
        until = time.monotonic() + START_SECONDS
        try:
            self._receive(START_SECONDS)  # it is ready, so it will take the request at once
            self._send(pickle.dumps((name, args, timeout)))
            loaded = self._receive(max(until - time.monotonic(), 0.0))
        except TimeoutError:
            raise NoWorker(f"{name}: a worker was not ready within {START_SECONDS:g} s") from None
        except (ConnectionError, WorkerDied):
            raise _DiedEarly(f"{name}: {self._death()} before the call") from None
        try:
            kind, value = loaded or self._receive(timeout)
        except TimeoutError:
            raise TimeoutError(f"{name}: no result within {timeout:g} s") from None
        if kind == "error":
            raise IsolatedCallError(f"{name}: {value}")
        return value

    def _send(self, request: bytes) -> None:
        if len(request) <= _AT_ONCE:
            self._pipe.send_bytes(request)
            return
        watchdog = threading.Timer(START_SECONDS, self._end)  # it may be stopped from outside before it has read all
        watchdog.start()
        try:
            self._pipe.send_bytes(request)
        finally:
            watchdog.cancel()

    def _receive(self, seconds: float) -> Any:
        try:
            if not self._pipe.poll(seconds):
                raise TimeoutError
            return json.loads(self._pipe.recv_bytes(_LONGEST_ANSWER))
        except (EOFError, ConnectionError):
            raise WorkerDied(self._death()) from None
        except TimeoutError:
            raise
        except (OSError, ValueError) as error:
            raise WorkerDied(f"a worker's answer cannot be read: {error}") from error

    def _death(self) -> str:
        try:
            code = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            return "the worker process closed its output"
        how = f"exited with {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"
        return f"the worker process {how}"

    def _end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> None:
        self._end()
        self._pipe.close()
        self._process.wait()

    def forget(self) -> None:
        self._pipe.close()
        self._process.returncode = 0  # else Popen would wait for what is no child of this process


_free = threading.BoundedSemaphore(MOST_WORKERS)
_idle: list[Worker] = []
_workers: set[Worker] = set()


@contextlib.contextmanager
def _worker() -> Iterator[Worker]:
    free = _free
    if not free.acquire(timeout=WAIT_SECONDS):
        raise NoWorker(f"no worker process was free within {WAIT_SECONDS:g} s")
    try:
        worker = _idle_worker() or Worker()
        _workers.add(worker)
        try:
            yield worker
        except IsolatedCallError:
            _idle.append(worker)
            raise
        except BaseException:
            _workers.discard(worker)
            worker.kill()
            raise
        _idle.append(worker)
    finally:
        free.release()


def _idle_worker() -> Worker | None:
    with contextlib.suppress(IndexError):
        while not (worker := _idle.pop()).alive:
            _workers.discard(worker)
            worker.kill()
        return worker
    return None


def close_workers() -> None:
    """Kill all workers. Running calls in other threads raise `WorkerDied`."""
    _idle.clear()
    for worker in tuple(_workers):
        with contextlib.suppress(OSError):
            worker.kill()
    _workers.clear()


def _begin_anew() -> None:
    global _free  # noqa: PLW0603 - a thread that is not here may hold the parent's
    for worker in _workers:
        with contextlib.suppress(OSError):
            worker.forget()
    _idle.clear()
    _workers.clear()
    _free = threading.BoundedSemaphore(MOST_WORKERS)


os.register_at_fork(after_in_child=_begin_anew)
atexit.register(close_workers)


def _serve(descriptor: int, memory: int | None) -> None:
    restore_default_signals()
    pipe = Connection(descriptor)
    if memory is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while True:
        pipe.send_bytes(b'"ready"')
        try:
            request = pipe.recv_bytes()
        except (EOFError, ConnectionError):
            return
        try:
            name, args, timeout = pickle.loads(request)
            function = _load(name)
            pipe.send_bytes(b"null")
            # The signal's default action ends the process even if Python's handlers would not run and the caller is gone.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, timeout + _GRACE)
            answer = json.dumps(["value", function(*args)])
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            answer = json.dumps(["error", _error_text(error)])
        pipe.send_bytes(answer.encode())
        signal.setitimer(signal.ITIMER_REAL, 0)


def _load(name: str) -> Callable[..., Any]:
    place, _, path = name.rpartition(":")
    found: Any = _module_of_file(place) if place.endswith(".py") else importlib.import_module(place)
    for part in path.split("."):
        found = getattr(found, part)
    if not callable(found):
        raise TypeError(f"{name} is {type(found).__name__}, no function")
    return found  # type: ignore[no-any-return]


def _module_of_file(file: str) -> Any:
    if file not in sys.modules:
        spec = importlib.util.spec_from_file_location("__isolated_main__", file)
        if spec is None or spec.loader is None:
            raise ImportError(f"{file} cannot be imported")
        module = importlib.util.module_from_spec(spec)
        sys.modules["__isolated_main__"] = module
        spec.loader.exec_module(module)
        sys.modules[file] = module
    return sys.modules[file]


def _error_text(error: BaseException) -> str:
    try:
        text = f"{type(error).__name__}: {error}"
        frames = traceback.extract_tb(error.__traceback__)
    except Exception as second:  # an exception that cannot even be written
        return f"{type(error).__name__}, which raised {type(second).__name__} when it was written"
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{text:.2000}{where}"
