"""`agentgym serve` as a process of its own, what can be seen of it from outside, and a client that may do anything."""

import asyncio
import collections
import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from service_harness import handshake

from agentgym.service.worker.websocket import CLOSE, PING, PONG, TEXT, Frames, encoded

HERE = Path(__file__).parent
SECONDS = 90.0  # by which anything must have happened, on any machine
SPARE = 2
_SPARE = 'worker_states{state="spare"}'
_MARK = "AGENTGYM_TEST_MARK"


@dataclass
class Command:
    """A server that runs.

    Attributes:
        process: of the command.
        port: where it listens, on this machine.
        mark: in the environment of every process that comes from it.
        folder: its current folder; temp is in it, and log.
    """

    process: subprocess.Popen
    port: int
    mark: str
    folder: Path

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self):
        return self.process.pid

    def get(self, path):
        with urllib.request.urlopen(self.url + path, timeout=SECONDS) as answer:
            return answer.read().decode()

    def metrics(self):
        """Every number of /metrics, by its name and labels as they stand there."""
        lines = re.findall(r"^agentgym_(\S+) (\S+)$", self.get("/metrics"), re.MULTILINE)
        return {name: float(value) for name, value in lines}

    def ended(self):
        """How many sessions ended, by why."""
        found = collections.Counter()
        for name, value in self.metrics().items():
            if reason := re.match(r'sessions_ended_total.*[{,]reason="(\w+)"', name):
                found[reason[1]] += int(value)
        return found

    def processes(self):
        """Ids of all processes that come from it, wherever they went."""
        found = set()
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if folder.name.isdigit() and self.mark.encode() in (folder / "environ").read_bytes():
                    found.add(int(folder.name))
        return found

    @property
    def supervisor(self):
        """The id of the process that keeps the zygote."""
        [found] = [pid for pid in self.processes() if _parent(pid) == self.pid]
        return found

    @property
    def zygote(self):
        """The id of the process that workers are forked from."""
        supervisor = self.supervisor
        [found] = [pid for pid in self.processes() if _parent(pid) == supervisor]
        return found

    @property
    def workers(self):
        """The ids of all processes that were forked from it, workers and what tells tasks."""
        zygote = self.zygote
        return {pid for pid in self.processes() if _parent(pid) == zygote}


def _read(pid, name):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_bytes()
    return b""


def _parent(pid):
    rest = _read(pid, "stat").rpartition(b")")[2].split()
    return int(rest[1]) if rest else 0


def files_of(pid):
    """What a process has open: how many of each kind."""
    found = collections.Counter()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found[os.readlink(link).partition(":")[0]] += 1
    return found


def until(true, what):
    """Wait for something that comes by itself."""
    end = time.monotonic() + SECONDS
    while not (found := true()):
        assert time.monotonic() < end, f"not within {SECONDS:g} s: {what()}"
        time.sleep(0.05)
    return found


@contextlib.contextmanager
def serving_command(folder, *words, files=None):
    """The command, at a free port of this machine. At the end it is told to end, and nothing may be left of it.

    Args:
        folder: where it runs.
        words: environments and options.
        files: how many it may open.
    """
    mark = secrets.token_hex(8)
    temp = folder / "temp"
    temp.mkdir()
    path = os.pathsep.join([str(HERE), *sys.path])
    environ = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(temp), _MARK: mark}
    line = [sys.executable, "-m", "agentgym.cli", "serve", *words, "--port", "0", "--json"]
    if files:
        line = ["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh", *line]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=log, cwd=folder, env=environ, text=True)
    try:
        text = ""
        while not text.rstrip().endswith("}"):
            said = process.stdout.readline()
            assert said, f"it ended: {(folder / 'log').read_text()}"
            text += said
        command = Command(process, json.loads(text)["port"], mark, folder)
        yield command
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0
        until(lambda: not command.processes(), command.processes)
    finally:
        process.kill()
        process.wait(SECONDS)
        process.stdout.close()


def quiet(command):
    """Wait until a server has no session, all its spare workers, and none that is ending; what it holds then."""

    def is_quiet():
        metrics = command.metrics()
        return metrics["sessions"] == 0 and len(command.workers) == SPARE + 1 and metrics[_SPARE] == SPARE

    command.get("/envs")  # which starts the process that tells tasks
    until(is_quiet, lambda: (command.metrics(), seen(command)))
    found = None
    while found != (found := seen(command)):  # the server hears of an end a moment after the process is gone
        time.sleep(0.2)
    return found


def settled(command, before):
    """Wait until a server has no session, and no process and no file more than `before`, as `seen` told it."""
    until(lambda: command.metrics()["sessions"] == 0, command.metrics)
    until(lambda: seen(command) == before, lambda: (before, seen(command)))


def seen(command):
    """What a server holds: processes by how many there are of each command line, open files, temporary files."""
    lines = collections.Counter(_read(pid, "cmdline").split(b"\0")[:3][-1] for pid in command.processes())
    # One folder for each user of the machine stays, by design: of what sandboxes hold.
    temp = [name for name in os.listdir(command.folder / "temp") if name != f"agentgym-bubblewrap-{os.getuid()}"]
    return lines, files_of(command.pid), files_of(command.zygote), temp


class Raw:
    """A WebSocket, byte by byte if need be."""

    def __init__(self, reader, writer):
        self.reader = reader
        self.writer = writer
        self._frames = Frames(1 << 30, masked=False)

    @classmethod
    async def open(cls, port, path, headers=""):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        raw = cls(reader, writer)
        raw.write(handshake(path, headers))
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), SECONDS)
        raw.status = int(head.split()[1])
        return raw

    def write(self, data):
        self.writer.write(data)

    def send(self, value, opcode=TEXT):
        text = value if isinstance(value, str) else json.dumps(value)
        self.write(encoded(opcode, text.encode(), masked=True))

    async def frame(self):
        """The next frame, as opcode and payload; None at the end."""
        while (found := self._frames.next()) is None:
            try:
                data = await asyncio.wait_for(self.reader.read(1 << 16), SECONDS)
            except ConnectionError:
                data = b""
            if not data:
                return None
            self._frames.buffer += data
        return found

    async def receive(self):
        """The value of the next message."""
        while (found := await self.frame()) is not None and found[0] in (PING, PONG):
            pass
        assert found is not None, "the connection ended"
        assert found[0] == TEXT, found
        return json.loads(found[1])

    async def ask(self, value):
        self.send(value)
        return await self.receive()

    async def ended(self):
        """The texts that come until the end, and the close code; None for the code: there was none."""
        texts = []
        while (found := await self.frame()) is not None:
            if found[0] == CLOSE:
                return texts, int.from_bytes(found[1][:2], "big")
            if found[0] == TEXT:
                texts.append(found[1].decode())
        return texts, None

    def abort(self):
        self.writer.transport.abort()

    async def close(self):
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()
