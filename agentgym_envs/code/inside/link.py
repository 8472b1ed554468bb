"""The grader's connection to a submission: fresh processes, requests with time limits, and proxies of its objects.

All pipes, and the nursery that forks the processes, are created before the grader reads a test. So no process that runs
a submission's code ever had a test in its memory.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import select
import signal
import time

from agentgym_envs.code.inside.candidate import serve
from agentgym_envs.code.inside.values import LIMIT, Foreign, decode, encode, frame_of, give_back

TYPE_CHECKING = False  # typing takes longer to import than all the rest
if TYPE_CHECKING:
    from typing import Any

PROCESSES = 12  # per grading
_KEPT = 4000  # bytes of printed output


class Lost(BaseException):
    """A request got no answer. Not an Exception, so no test can mistake it for an expected error."""


class Ended(BaseException):
    """The submission raised an exception that ends a program, such as SystemExit."""


def _close(*fds: int) -> None:
    for fd in fds:
        os.close(fd)


class Nursery:
    def __init__(self, memory: int):
        # Pipes for requests, replies and prints: the submission's ends and the grader's ends.
        channels = []
        for _ in range(PROCESSES):
            (take, ask), (hear, reply), (read, write) = os.pipe(), os.pipe(), os.pipe()
            channels.append(((take, reply, write), (ask, hear, read)))
        orders, answers = os.pipe(), os.pipe()
        if os.fork() == 0:
            try:
                _fork_on_demand(channels, orders[0], answers[1], memory)
            finally:
                os._exit(0)
        _close(orders[0], answers[1], *(fd for theirs, _ in channels for fd in theirs))
        self._orders, self._answers = orders[1], answers[0]
        self._free = iter([ours for _, ours in channels])

    def alive(self) -> bool:
        """True while it runs: only its end makes the pipe of its answers readable now."""
        return not select.select([self._answers], [], [], 0)[0]

    def fork(self) -> tuple[int, int, int, int]:
        """A new process: its id, and its pipes (requests, replies, prints)."""
        ours = next(self._free, None)
        if ours is None:
            raise Lost("it ended too often")
        try:
            os.write(self._orders, b"+")
            ready, _, _ = select.select([self._answers], [], [], 5.0)
            answer = os.read(self._answers, 4) if ready else b""
        except OSError:
            answer = b""
        pid = int.from_bytes(answer, "big")
        if pid == 0:
            raise Lost("no process can be started any more")
        return pid, *ours


def _fork_on_demand(channels: list[Any], orders: int, answers: int, memory: int) -> None:
    """The nursery's main loop: for each byte of orders, fork and answer the process id, 0 on failure."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    _close(*(fd for _, ours in channels for fd in ours))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    for place, ((requests, replies, prints), _) in enumerate(channels):
        if not os.read(orders, 1):
            return
        try:
            pid = os.fork()
        except OSError:
            os.write(answers, bytes(4))
            continue
        if pid:
            os.write(answers, pid.to_bytes(4, "big"))
            _close(requests, replies, prints)
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        os.dup2(prints, 1)
        os.dup2(prints, 2)
        later = (fd for theirs, _ in channels[place + 1 :] for fd in theirs)
        _close(prints, *later, orders, answers)
        serve(requests, replies, memory)
        return


class Link:
    def __init__(self, nursery: Nursery, program: tuple[str, str, list[str]], timeout: float, budget: float):
        self.nursery, self.program, self.timeout = nursery, program, timeout
        self.end = time.monotonic() + budget
        self.output = bytearray()
        self.generation = 0  # how many processes there were
        self.slow = False  # True once a request took too long
        self.alive = False
        self._objects: dict[int, Remote] = {}
        self._callbacks: list[Any] = []

    def start(self) -> list[str]:
        """Load the submission in a new process, and return the names that it defines."""
        self.generation += 1
        self._objects, self._callbacks = {}, []
        self._pid, self._requests, self._replies, self._prints = self.nursery.fork()
        os.set_blocking(self._requests, False)
        os.set_blocking(self._prints, False)
        self.alive = True
        reply = self._exchange(["load", "", list(map(self._encode, (*self.program, {})))])
        if not _is(reply, "value", 2):
            self.stop()
            raise LoadError(_text(reply))
        defined = self._decode(reply[1][0])
        return [name for name in self.program[2] if name in defined]

    def stop(self) -> None:
        if not self.alive:
            return
        self.alive = False
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(OSError):  # it has ended already
                kill(self._pid, signal.SIGKILL)
        self._drain()
        _close(self._requests, self._replies, self._prints)

    def ask(self, verb: str, target: int | str, /, *args: Any, **kwargs: Any) -> Any:
        """Send a request; mutable arguments are updated in place."""
        given = [*args, kwargs]
        reply = self._exchange([verb, target, [self._encode(item) for item in given]])
        if not _is(reply, "value", 2):
            raise self._raised(reply)
        try:
            result, after = reply[1]
            for item, data in zip(given, after, strict=True):
                if data is not None:
                    give_back(item, self._decode(data))
            return self._decode(result)
        except (Foreign, ValueError, TypeError, KeyError) as error:
            raise self._lost(f"it gave no value: {error}") from None

    def _raised(self, reply: Any) -> BaseException:
        if not _is(reply, "raise", 4) or not isinstance(reply[1], str):
            return self._lost("it did not answer in the form of an answer")
        kind = getattr(builtins, reply[1], None)
        if not isinstance(kind, type) or not issubclass(kind, BaseException):
            kind = Exception
        if not issubclass(kind, Exception):
            return Ended(_text(reply))
        try:
            error = kind(*(self._decode(arg) for arg in reply[2]))
        except Exception:
            error = kind() if kind is not Exception else Exception(_text(reply))
        error.shown = _text(reply)  # type: ignore[attr-defined]
        return error

    def _exchange(self, message: Any) -> Any:
        """Send a message and wait for its answer; meanwhile run the callbacks that the submission calls."""
        if not self.alive:
            raise Lost("it has ended")
        deadline = min(time.monotonic() + self.timeout, self.end)
        try:
            self._send(frame_of(message), deadline)
            while True:
                reply = self._receive(deadline)
                if not _is(reply, "callback", 3):
                    return reply
                self._send(frame_of(self._called_back(*reply[1:])), deadline)
        except (ValueError, OSError, RecursionError) as error:
            raise self._lost(f"it ended without an answer ({error})") from None

    def _called_back(self, key: Any, items: Any) -> list[Any]:
        try:
            *args, kwargs = [self._decode(item) for item in items]
            return ["result", self._encode(self._callbacks[key](*args, **kwargs))]
        except Exception as error:
            try:
                return ["error", type(error).__name__, [self._encode(arg) for arg in error.args]]
            except TypeError:
                return ["error", type(error).__name__, [str(error)]]

    def _send(self, data: bytes, deadline: float) -> None:
        rest = memoryview(data)
        while rest:
            if self._wait(self._requests, select.POLLOUT, deadline):
                rest = rest[os.write(self._requests, rest[:65536]) :]

    def _receive(self, deadline: float) -> Any:
        size = int.from_bytes(self._read(4, deadline), "big")
        if size > LIMIT:
            raise ValueError("its answer is too long")
        return json.loads(self._read(size, deadline))

    def _read(self, size: int, deadline: float) -> bytes:
        parts = []
        while size:
            if not self._wait(self._replies, select.POLLIN, deadline):
                continue
            part = os.read(self._replies, min(size, 1 << 20))
            if not part:
                raise ValueError("exited")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _wait(self, fd: int, event: int, deadline: float) -> bool:
        """Wait until a pipe is ready, reading what the submission prints."""
        left = deadline - time.monotonic()
        if left <= 0:
            self.slow = True
            raise self._lost(f"it took longer than {self.timeout:g} s")
        poll = select.poll()
        poll.register(fd, event)
        poll.register(self._prints, select.POLLIN)
        ready = dict(poll.poll(left * 1000))
        if self._prints in ready and not self._drain() and fd not in ready:
            time.sleep(0.001)  # it closed its output: that pipe stays ready
        return fd in ready

    def _drain(self) -> bool:
        """Read what was printed, up to 1 MiB; only the beginning is kept."""
        for _ in range(16):
            try:
                part = os.read(self._prints, 65536)
            except BlockingIOError:
                return True
            if not part:
                return False
            self.output += part[: max(0, _KEPT + 1 - len(self.output))]
        return True

    def _lost(self, why: str) -> Lost:
        self.stop()
        return Lost(why)

    def _encode(self, value: Any) -> Any:
        def refer(item: Any) -> list[Any]:
            if type(item) is Remote:
                return ["object", item._key]
            if not callable(item):
                raise TypeError(f"a test cannot pass a {type(item).__name__} to a submission")
            self._callbacks.append(item)
            return ["callback", len(self._callbacks) - 1]

        return encode(value, refer)

    def _decode(self, data: Any) -> Any:
        def resolve(mark: list[Any]) -> Any:
            tag, key = mark
            if tag == "callback":
                return self._callbacks[key]
            if tag != "object" or type(key) is not int:
                raise Foreign(f"no value has the mark {tag!r:.50}")
            return self._objects.setdefault(key, Remote(self, key))

        return decode(data, resolve)


class LoadError(Exception):
    """A submission cannot be loaded; the agent sees the text."""


class Remote:
    """A proxy of a submission's object: a function, class, instance or iterator.

    It equals only itself, is always true and has no order: a submission cannot influence a comparison.
    """

    __slots__ = ("_key", "_link")

    def __init__(self, link: Link, key: int):
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_key", key)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._link.ask("call", self._key, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._link.ask("getattr", self._key, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._link.ask("setattr", self._key, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._link.ask("getitem", self._key, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._link.ask("setitem", self._key, key, value)

    def __iter__(self) -> Any:
        return self._link.ask("iter", self._key)

    def __next__(self) -> Any:
        return self._link.ask("next", self._key)

    def __len__(self) -> int:
        size = self._link.ask("len", self._key)
        if type(size) is not int:
            raise TypeError("len() gave no int")
        return size

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return "an object of the submission"


def _is(reply: Any, kind: str, size: int) -> bool:
    return isinstance(reply, list) and len(reply) == size and reply[0] == kind


def _text(reply: Any) -> str:
    return str(reply[3])[:2000] if _is(reply, "raise", 4) else "it gave no answer"
