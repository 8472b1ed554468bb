"""`agentgym serve --sandbox` in a process of its own, for tests."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from typing import ClassVar

SECONDS = 60.0  # by which anything must have happened, on any machine
LAST_WORDS_SECONDS = 5.0


class SandboxServer:
    """A server that a test starts, stops and kills. It is gone, with all its processes, when the `with` ends.

    Attributes:
        running: those that a `with` holds.
    """

    running: ClassVar = []

    def __init__(self, *options, env=None):
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the server
        command = [sys.executable, "-m", "agentgym.cli", "serve", "--sandbox", "--json", "--port", "0", *options]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self.errors, text=True, env={**os.environ, **(env or {})}
        )
        text = ""
        while not text.rstrip().endswith("}"):
            line = self.process.stdout.readline()
            text += line
            if not line:
                self.process.wait(SECONDS)
                raise AssertionError(f"no server: {self.said()}")
        self.url = json.loads(text)["url"]

    def said(self):
        """What it wrote on stderr."""
        self.errors.seek(0)
        return self.errors.read().decode()

    def sessions(self):
        """How many are open. A session outlives its sandbox by the end of its process."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=SECONDS) as answer:
            lines = dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if line[0] != "#")
        return int(float(lines["agentgym_sessions"]))

    def __enter__(self):
        self.running.append(self)
        return self

    def stop(self):
        """SIGTERM; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(SECONDS)

    def kill(self):
        """SIGKILL."""
        self.process.kill()
        self.process.wait(SECONDS)

    def __exit__(self, *_):
        self.running.remove(self)
        if self.process.poll() is None:
            self.process.kill()  # its workers and their sandboxes end with it
            self.process.wait(SECONDS)
        self.process.stdout.close()
        self.errors.close()


class CuttingProxy:
    """A double for a bad network: passes bytes to a server on, until it is told to cut, or to lose what the server says."""

    def __init__(self, url):
        self.server = ("127.0.0.1", int(url.rpartition(":")[2]))
        self.lose = 0  # of the server's next messages, how many are lost, and the connection with them
        self.refuse = False
        self.connections = 0
        self._open = set()
        self._passing = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.refuse:
                client.close()
                continue
            server = socket.create_connection(self.server)
            self.connections += 1
            pair = (client, server)
            self._open.update(pair)
            self._passing = [thread for thread in self._passing if thread.is_alive()]
            for way in (self._pass_on, self._pass_back):
                self._passing.append(threading.Thread(target=way, args=pair, daemon=True))
                self._passing[-1].start()

    def _pass_on(self, client, server):
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                server.sendall(data)
        self._end(client, server)

    def _pass_back(self, client, server):
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 16):
                if self.lose:
                    self.lose -= 1
                    break
                client.sendall(data)
        self._end(client, server)

    def _end(self, *pair):
        for end in pair:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
            self._open.discard(end)

    def cut(self):
        """Break all connections."""
        self._end(*list(self._open))

    def close(self):
        """Take no more connections, pass on what clients that have left said last, and break what is left.

        A close frame that is cut off here would be a session that waits for its client to come back.
        """
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        end = time.monotonic() + LAST_WORDS_SECONDS
        for thread in self._passing:
            thread.join(max(0.0, end - time.monotonic()))
        self.cut()
