"""The real server, in a thread with a loop of its own, so that blocking clients can be tested as well."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from agentgym.core.registration import EnvSpec, spec
from agentgym.service.server.env_server import EnvServer, serve
from agentgym.service.server.settings import ServeSettings


def certificate(folder: Path, name: str = "localhost", names: str = "DNS:localhost,IP:127.0.0.1") -> dict[str, str]:
    """The files of a new certificate and its key, as settings of a server."""
    files = {"cert": str(folder / "cert.pem"), "key": str(folder / "key.pem")}
    words = f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN={name}"
    words += f" -addext subjectAltName={names}"
    command = [*words.split(), "-keyout", files["key"], "-out", files["cert"]]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return files


@contextmanager
def served(*ids: str, specs: Mapping[str, EnvSpec] = MappingProxyType({}), **settings: Any) -> Iterator[EnvServer]:
    """A server of these environments, and those of `specs`, at a free port; closed with all its processes at the end."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    envs = {**{id: spec(id) for id in ids}, **specs}
    try:
        settings = {"port": 0, **settings}
        server = asyncio.run_coroutine_threadsafe(serve(ServeSettings(envs=envs, **settings)), loop).result(60)
        try:
            yield server
        finally:
            asyncio.run_coroutine_threadsafe(server.close(), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()
