"""`agentgym serve` as its user starts it: the installed command in a process of its own."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

COMMAND = str(Path(sys.executable).with_name("agentgym"))
SECONDS = 60.0


@dataclass
class Serving:
    """A server. `url` is `http://127.0.0.1:PORT`."""

    process: subprocess.Popen[str]
    url: str

    def load(self) -> dict[str, Any]:
        """What /ready tells."""
        with urllib.request.urlopen(f"{self.url}/ready", timeout=SECONDS) as answer:
            return dict(json.loads(answer.read()))

    def opened(self) -> int:
        """Sessions that it has opened so far."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=SECONDS) as answer:
            lines = answer.read().decode().splitlines()
        return int(sum(float(x.split()[-1]) for x in lines if x.startswith("agentgym_sessions_opened_total")))

    def kill(self) -> None:
        """SIGKILL, to it alone. What it started ends by itself."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        self.process.wait(SECONDS)
        _, alive = psutil.wait_procs(family, SECONDS)
        assert not alive, alive


@contextlib.contextmanager
def serving(*arguments: str, port: int = 0) -> Iterator[Serving]:
    """A server of these environments, and nothing left of it afterwards."""
    process = subprocess.Popen(
        [COMMAND, "serve", *arguments, "--port", str(port), "--json", "--drain-timeout", "0"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        said = ""
        while not said.endswith("}\n"):
            line = process.stdout.readline()  # type: ignore[union-attr]
            assert line, f"it ended with {process.wait(SECONDS)}: {said}"
            said += line
        yield Serving(process, json.loads(said)["url"])
    finally:
        family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.terminate()
        try:
            process.wait(SECONDS)
        finally:
            _, alive = psutil.wait_procs(family, SECONDS)
            for child in alive:
                child.kill()
        assert not alive, alive
