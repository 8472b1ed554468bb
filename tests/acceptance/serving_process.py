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
    """A server. `url` is `http://127.0.0.1:PORT`, `token` what its clients show, where it asks for one."""

    process: subprocess.Popen[str]
    url: str
    token: str = ""

    def load(self) -> dict[str, Any]:
        """What /ready tells."""
        return dict(json.loads(self._get("/ready")))

    def opened(self) -> int:
        """Sessions that it has opened so far."""
        lines = self._get("/metrics").splitlines()
        return int(sum(float(x.split()[-1]) for x in lines if x.startswith("agentgym_sessions_opened_total")))

    def _get(self, path: str) -> str:
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        with urllib.request.urlopen(
            urllib.request.Request(f"{self.url}{path}", headers=headers), timeout=SECONDS
        ) as answer:
            return answer.read().decode()

    def kill(self) -> None:
        """SIGKILL, to it alone. What it started ends by itself."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        self.process.wait(SECONDS)
        _, alive = psutil.wait_procs(family, SECONDS)
        assert not alive, alive


@contextlib.contextmanager
def serving(*arguments: str, port: int = 0, token: str = "") -> Iterator[Serving]:
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
        yield Serving(process, json.loads(said)["url"], token)
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
