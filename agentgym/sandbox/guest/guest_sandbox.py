"""The sandbox contract over calls to the guest, shared by all back ends: frames over a socket, each with a deadline."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shlex
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from agentgym.sandbox.api import MEGABYTE, WORKSPACE, Command, ExecResult, SandboxError, SandboxSpec, SandboxSpoiled
from agentgym.sandbox.archives import entries_of, host_files, tar_of

GRACE = 30.0  # seconds that the guest has beyond a step's own time: to interrupt, to kill, to answer on a busy machine
FILE_TIMEOUT = 60.0  # seconds for one part of a file
RESET_TIMEOUT = 60.0
START_SESSION = 30.0
PART = MEGABYTE  # bytes of a file in one frame
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# USER and LOGNAME are for programs that ask their environment: the user ids have no names in /etc/passwd.
ENVIRONMENT = {"HOME": WORKSPACE, "LANG": "C.UTF-8", "TMPDIR": "/tmp", "USER": "sandbox", "LOGNAME": "sandbox"}

CHUNK = 1 << 16
WAKING = 10.0  # seconds that a thread has to leave a stream that is closed under it
LARGEST_FRAME = 64 << 20  # bytes; a guest that claims more is not ours any more
# An interactive bash returns to its prompt after an interrupt, as a person's does; nothing of it is shown.
_SHELL = ("bash", "--noprofile", "--norc", "--noediting", "-i")
_SHELL_BEGIN = "PS1= PS2=; set +H; unset HISTFILE; __agentgym() { return $1; }"

Header = dict[str, Any]


class GuestRpc:
    """Remote procedure calls to a guest, one at a time. A failure closes it: later bytes could answer the failed call.

    `name` is the sandbox's, for errors. Calls after `close`, which any thread may call twice, raise SandboxError.
    """

    failures: tuple[type[Exception], ...] = (OSError, EOFError, ValueError)

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True

    def call(self, header: Header, payload: bytes = b"", *, timeout: float) -> tuple[Header, bytes]:
        """Send a call and wait for its answer: header and bytes. SandboxError if the guest is gone or late."""
        self.send(header, payload, timeout=timeout)
        return self.answer(header["do"], timeout=timeout)

    def send(self, header: Header, payload: bytes = b"", *, timeout: float) -> None:
        raise NotImplementedError

    def answer(self, call: str, *, timeout: float) -> tuple[Header, bytes]:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def failed(self, what: str, error: Exception) -> SandboxError:
        return SandboxError(f"{what}: {error}")

    def guarded(self, call: str, timeout: float, act: Callable[[float], Any]) -> Any:
        """Run a part of a call, given its deadline by `time.monotonic`."""
        if not self.alive:
            raise SandboxError(f"sandbox {self.name} is closed: cannot call {call!r}")
        try:
            return act(time.monotonic() + timeout)
        except TimeoutError:
            self.close()
            raise SandboxError(f"sandbox {self.name} did not answer {call!r} within {timeout:.1f} s") from None
        except SandboxError:
            raise
        except self.failures as error:
            if not self.alive:
                raise SandboxError(f"sandbox {self.name} was closed during {call!r}") from error
            self.close()
            raise self.failed(f"sandbox {self.name} failed in {call!r}", error) from error
        except BaseException:  # interrupted half way
            self.close()
            raise


class SocketStream:
    """Bytes to and from the guest over a connected socket. `close` from another thread ends a waiting `send` or `receive`."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._pid = os.getpid()
        self._in_use = threading.RLock()  # while a thread waits in the kernel for this socket

    def send(self, data: bytes, until: float) -> None:
        with self._in_use:
            self._socket.settimeout(max(until - time.monotonic(), 0.001))
            self._socket.sendall(data)

    def receive(self, until: float) -> bytes:
        """At least one byte; none at the end. TimeoutError after `until`, OSError if the other side is gone."""
        with self._in_use:
            self._socket.settimeout(max(until - time.monotonic(), 0.001))
            return self._socket.recv(CHUNK)

    def close(self) -> None:
        """End the stream. In a forked child this only lets go: the sandbox is the parent's."""
        if os.getpid() != self._pid:  # the lock may be held for ever by a thread that is not here
            self._socket.close()
            return
        with contextlib.suppress(OSError):  # the other side has closed already
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits; close alone does not
        # A woken thread looks its descriptor up again before it returns: were the number another file's by then, it would
        # wait for that one.
        free = self._in_use.acquire(timeout=WAKING)
        try:
            self._socket.close()
        finally:
            if free:
                self._in_use.release()


class Channel(GuestRpc):
    def __init__(self, stream: SocketStream, name: str, reason: Callable[[], str] = lambda: "") -> None:
        super().__init__(name)
        self._stream = stream
        self._reason = reason
        self._received = bytearray()

    def send(self, header: Header, payload: bytes = b"", *, timeout: float) -> None:
        text = json.dumps(header).encode()
        frame = struct.pack(">II", len(text), len(payload)) + text + payload
        self.guarded(header["do"], timeout, lambda until: self._stream.send(frame, until))

    def answer(self, call: str, *, timeout: float) -> tuple[Header, bytes]:
        return self.guarded(call, timeout, self._frame)

    def close(self) -> None:
        self.alive = False
        self._stream.close()

    def failed(self, what: str, error: Exception) -> SandboxError:
        known = self._reason()
        return SandboxError(f"{what}: {error}{known and '; ' + known}")

    def _frame(self, until: float) -> tuple[Header, bytes]:
        head, body = struct.unpack(">II", self._take(8, until))
        if head + body > LARGEST_FRAME:
            raise OSError(f"a frame of {head + body} bytes")
        header = json.loads(self._take(head, until))
        return header, self._take(body, until)

    def _take(self, size: int, until: float) -> bytes:
        while len(self._received) < size:
            data = self._stream.receive(until)
            if not data:
                raise EOFError("its guest has ended")
            self._received += data
        data = bytes(self._received[:size])
        del self._received[:size]
        return data


@cache
def source(name: str) -> str:
    return (Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8")


# In the order in which they import each other.
GUEST_MODULES = ("guest_programs", "guest_files", "guest_archives", "guest_protect")


@cache
def guest_source() -> bytes:
    return (
        "import sys, types\n"
        f"for name, text in {[(name, source(name)) for name in GUEST_MODULES]!r}:\n"
        "    module = sys.modules['agentgym.sandbox.guest.' + name] = types.ModuleType(name)\n"
        "    exec(compile(text, name + '.py', 'exec'), module.__dict__)\n"
        f"exec(compile({source('guest')!r}, 'guest.py', 'exec'))\n"
    ).encode()


def guest_command(python: str = "python3") -> list[str]:
    """The first process of a sandbox. It reads its program, `guest_source`, from its standard input."""
    size = len(guest_source())
    text = f"import os\ns = b''\nwhile len(s) < {size}: s += os.read(0, {size} - len(s)) or os._exit(1)\nexec(s)"
    return [python, "-I", "-S", "-c", text]


def greet(
    stream: SocketStream,
    spec: SandboxSpec,
    id: str,
    *,
    path: str = SYSTEM_PATH,
    limits: Mapping[str, Any] | None = None,
    reason: Callable[[], str] = lambda: "",
    on_close: Callable[[], None] | None = None,
    again: Callable[[], GuestSandbox] | None = None,
) -> GuestSandbox:
    """Give a guest its program and settings. SandboxError if it does not answer within `spec.start_timeout` seconds.

    Args:
        limits: `nice` of programs; `more`: resource limits by name; `user`: the programs' user id; `group`: the file that puts
            them into their control group.
        reason: what the back end knows about a guest that is gone.
        on_close: ends what the back end started; called once, also if this raises.
        again: starts another such sandbox, to replace one with a writable root.
    """
    channel = Channel(stream, id, reason)
    box = GuestSandbox(channel, spec, {}, on_close, again)
    hello = {
        "do": "hello",
        "env": {"PATH": path, **ENVIRONMENT, **spec.env},
        "output": spec.output,
        "idle_timeout": spec.idle_timeout,
        "limits": {"nice": 0, "file": spec.disk + MEGABYTE, "writable": spec.writable_root, **(limits or {})},
    }
    try:
        channel.guarded("begin", spec.start_timeout, lambda until: stream.send(guest_source(), until))
        box.facts = box.call(hello, timeout=spec.start_timeout)[0]
    except BaseException:
        box.close()
        raise
    return box


class GuestSandbox:
    """A `Sandbox` whose guest has its settings. `facts` is the guest's answer to them; `again` as for `greet`."""

    def __init__(
        self,
        channel: GuestRpc,
        spec: SandboxSpec,
        facts: Header,
        on_close: Callable[[], None] | None = None,
        again: Callable[[], GuestSandbox] | None = None,
    ) -> None:
        self.id = channel.name
        self.spec = spec
        self.facts = facts
        self.channel = channel
        self.resets = 0
        self._on_close = on_close
        self._again = again
        self._closed = False
        self._owner = os.getpid()

    @property
    def alive(self) -> bool:
        return self.channel.alive

    def exec(
        self,
        command: Command,
        *,
        stdin: bytes | str = b"",
        timeout: float = 10.0,
        cwd: str = WORKSPACE,
        env: Mapping[str, str] | None = None,
    ) -> ExecResult:
        argv = ["bash", "-c", command] if isinstance(command, str) else list(command)
        data = stdin.encode("utf-8", "surrogatepass") if isinstance(stdin, str) else stdin
        call = {"do": "exec", "argv": argv, "env": dict(env or {}), "cwd": cwd, "timeout": timeout}
        try:
            return result_of(*self.call(call, data, timeout=timeout + GRACE))[0]
        except OSError as error:
            code = 127 if isinstance(error, FileNotFoundError) else 126
            return ExecResult(code, "", f"{argv[0] if argv else ''}: {error.strerror}\n")

    def session(self, command: Command = "python") -> GuestSession:
        return GuestSession(self, command)

    def read(self, path: str, limit: int = 16 * MEGABYTE) -> bytes:
        return self._parts("read", path, limit)

    def write(self, path: str, data: bytes | str, mode: int = 0o644) -> None:
        content = _utf_8(data) if isinstance(data, str) else data
        for begin in range(0, max(len(content), 1), PART):
            call = {"do": "write", "path": path, "mode": mode, "part": begin, "last": begin + PART >= len(content)}
            self.call(call, content[begin : begin + PART], timeout=FILE_TIMEOUT, path=path)

    def upload(self, source: Path, path: str = WORKSPACE) -> None:
        source = Path(source)
        base = PurePosixPath(path) / source.name
        with host_files():
            if not source.exists() and not source.is_symlink():
                raise FileNotFoundError(f"nothing to upload at {source}")
            all_found = [source, *sorted(source.rglob("*"))]
        for found in all_found:
            place = str(base / found.relative_to(source).as_posix())
            if found.is_symlink():
                raise ValueError(f"{found} is a link: only files and folders are uploaded")
            if found.is_dir():
                self.call({"do": "folder", "path": place}, timeout=FILE_TIMEOUT, path=place)
            elif found.is_file():
                with host_files():
                    data, mode = found.read_bytes(), stat.S_IMODE(found.stat().st_mode) & 0o755
                self.write(place, data, mode)
            else:
                raise ValueError(f"{found} is neither a file nor a folder")

    def put_archive(
        self, data: bytes | str | os.PathLike[str], to: str = WORKSPACE, limit: int = 256 * MEGABYTE
    ) -> None:
        waiting, sent = bytearray(), 0
        for piece in itertools.chain(entries_of(data, limit), [None]):
            waiting += piece or b""
            while len(waiting) >= PART or piece is None:
                call = {"do": "unpack", "path": to, "part": sent, "last": piece is None and len(waiting) <= PART}
                self.call(call, bytes(waiting[:PART]), timeout=FILE_TIMEOUT, path=to)
                sent += PART
                del waiting[:PART]
                if call["last"]:
                    return

    def get_archive(self, path: str = WORKSPACE, limit: int = 256 * MEGABYTE) -> bytes:
        return tar_of(self._parts("pack", path, limit))

    def protect(self, paths: Sequence[str]) -> None:
        for path in paths:
            self.call({"do": "protect", "path": path}, timeout=FILE_TIMEOUT, path=path)

    def _parts(self, call: str, path: str, limit: int) -> bytes:
        self.channel.send({"do": call, "path": path, "limit": limit}, timeout=FILE_TIMEOUT)
        parts: list[bytes] = []
        while True:
            header, data = self._checked(call, *self.channel.answer(call, timeout=FILE_TIMEOUT), path)
            if not header.get("more"):
                return b"".join(parts)
            parts.append(data)

    def reset(self) -> None:
        self.resets += 1
        if self.spec.writable_root and self._again is not None:
            self._start_again(self._again)
            return
        try:
            left = self.call({"do": "reset"}, timeout=RESET_TIMEOUT)[0]["left"]
        except OSError as error:
            left = [str(error)]
        if left:
            self.close()
            raise SandboxSpoiled(f"sandbox {self.id} could not be emptied: {', '.join(left)}")

    def _start_again(self, again: Callable[[], GuestSandbox]) -> None:
        if not self.alive:
            raise SandboxError(f"sandbox {self.id} is closed: cannot call 'reset'")
        self._end()
        fresh = again()
        self.id, self.channel, self.facts, self._on_close = fresh.id, fresh.channel, fresh.facts, fresh._on_close
        if self._closed:  # by another thread, meanwhile
            self._end()
            raise SandboxError(f"sandbox {self.id} was closed during 'reset'")

    def ping(self, timeout: float = 10.0) -> None:
        self.call({"do": "ping"}, timeout=timeout)

    def close(self) -> None:
        self._closed = True
        self._end()

    def _end(self) -> None:
        self.channel.close()
        on_close, self._on_close = self._on_close, None
        if on_close is not None and os.getpid() == self._owner:  # in a forked child the sandbox is the parent's
            on_close()

    def call(
        self, header: Header, payload: bytes = b"", *, timeout: float, path: str | None = None
    ) -> tuple[Header, bytes]:
        """The guest's answer to a call; its failure is raised, with the path that the call was about."""
        return self._checked(header["do"], *self.channel.call(header, payload, timeout=timeout), path)

    def _checked(self, call: str, header: Header, payload: bytes, path: str | None) -> tuple[Header, bytes]:
        match header:
            case {"broken": why}:
                self.close()
                raise SandboxSpoiled(f"sandbox {self.id} failed in {call!r}: {why}")
            case {"spoiled": why}:
                raise SandboxSpoiled(f"sandbox {self.id} is spoiled, no {call!r}: {why}")
            case {"errno": number, "message": message}:
                raise OSError(number, message, path)
            case {"value": why}:
                raise ValueError(why if path is None else f"{path}: {why}")
        return header, payload


class GuestSession:
    def __init__(self, sandbox: GuestSandbox, command: Command) -> None:
        self._sandbox = sandbox
        self._resets = sandbox.resets
        self._kind = command if isinstance(command, str) else ""
        self._over = False
        self._last = 0
        argv, env, form = list(command), {}, "frame"
        match self._kind:
            case "python":
                argv = ["python3", "-c", source("python_driver")]
            case "shell":
                # A file of history that programs laid down would be read, or waited for, as the shell starts.
                argv, env, form = list(_SHELL), {"HISTFILE": ""}, "zero"
            case kind if kind:
                known = '"python", "shell", or a list of a program and its arguments'
                raise ValueError(f"unknown session kind {command!r}: {known}")
        call = {"do": "open", "argv": argv, "env": env, "form": form}
        self._number = sandbox.call(call, timeout=START_SESSION, path=argv[0] if argv else "")[0]["session"]
        if self._kind == "shell":
            begun = self._step(f"{_SHELL_BEGIN}\nprintf '0\\0' >&3\n".encode(), START_SESSION)[0]
            if self._ended:
                said = begun.stderr.strip()[-200:] or f"exit code {begun.exit_code}"
                raise SandboxSpoiled(f"sandbox {sandbox.id}: the shell did not start: {said}")

    @property
    def _ended(self) -> bool:
        return self._over or self._resets != self._sandbox.resets

    @property
    def alive(self) -> bool:
        return not self._ended and self._sandbox.alive

    def run(self, text: str, timeout: float = 10.0) -> ExecResult:
        if self._ended and self._sandbox.alive:
            raise ValueError("the session has ended")
        if self._kind == "shell":
            if "\0" in text:
                raise ValueError("a shell's command cannot hold a zero byte")
            data = _utf_8(f"__agentgym {self._last}\neval {shlex.quote(text)} </dev/null 3>&-\nprintf '%s\\0' $? >&3\n")
        else:
            data = text.encode("utf-8", "surrogatepass")
            data = len(data).to_bytes(4, "big") + data
        result, reply = self._step(data, timeout)
        if self._ended:  # an interactive shell says so
            return replace(result, stderr=result.stderr.removesuffix("exit\n")) if self._kind == "shell" else result
        if self._kind == "shell":
            self._last = int(reply) & 0xFF if re.fullmatch(rb"\d{1,3}", reply) else 1
            return replace(result, exit_code=self._last)
        if self._kind == "python":
            return replace(result, exit_code=int(reply != b"0"))
        return replace(result, exit_code=None, reply=reply.decode("utf-8", "replace"))

    def _step(self, data: bytes, timeout: float) -> tuple[ExecResult, bytes]:
        call = {"do": "step", "session": self._number, "timeout": timeout}
        try:
            header, payload = self._sandbox.call(call, data, timeout=timeout + GRACE)
        except ValueError:
            self._over = True
            raise
        self._over = header["ended"]
        return result_of(header, payload)

    def close(self) -> None:
        if self.alive:
            self._sandbox.call({"do": "drop", "session": self._number}, timeout=GRACE)
        self._over = True


def _utf_8(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # half of a surrogate pair, which a model may write
        return text.encode("utf-8", "surrogatepass")


def result_of(header: Header, payload: bytes) -> tuple[ExecResult, bytes]:
    """The result of a command, and the bytes of a session's reply."""
    parts, begin = [], 0
    for size in header["sizes"]:
        parts.append(payload[begin : begin + size])
        begin += size
    (stdout, cut_out), (stderr, cut_err) = map(joined, parts[0::2], parts[1::2], header["left_out"])
    how = (header["timed_out"], header["oom"], header["seconds"], cut_out or cut_err)
    return ExecResult(header["code"], stdout, stderr, *how), payload[begin:]


def joined(head: bytes, tail: bytes, left_out: int) -> tuple[str, bool]:
    """A captured stream as text, and whether its middle was left out. A character that the gap cuts in two is left out."""
    if not left_out:
        return (head + tail).decode("utf-8", "replace"), False
    begin = next((n for n, byte in enumerate(tail) if byte & 0xC0 != 0x80), len(tail))
    begin = begin if begin < 4 else 0  # else it is no text
    end = len(head)
    for n in range(1, min(4, end) + 1):
        byte = head[-n]
        if byte & 0xC0 != 0x80:  # where the last character begins, and how long it says it is
            length = 2 + (byte >= 0xE0) + (byte >= 0xF0) if byte >= 0xC0 else 1
            end -= n if length > n else 0
            break
    left_out += begin + len(head) - end
    first, last = head[:end].decode("utf-8", "replace"), tail[begin:].decode("utf-8", "replace")
    return f"{first}\n[{left_out} bytes left out]\n{last}", True
