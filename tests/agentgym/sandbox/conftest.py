"""Sandboxes for tests: everything that takes `sandbox` or `open_sandbox` runs on both back ends, and on a server's."""

import os
import shutil
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from opened import open_on
from pool_doubles import Maker

from agentgym.sandbox import SandboxSpec
from agentgym.sandbox.images import build as images
from agentgym.sandbox.pool import Places, SandboxPool

SCRIPT = Path(__file__).parents[3] / "scripts" / "docker-engine.sh"


@pytest.fixture(
    scope="session",
    params=[
        pytest.param("bubblewrap", marks=pytest.mark.bubblewrap),
        pytest.param("docker", marks=pytest.mark.docker),
        pytest.param("remote", marks=pytest.mark.bubblewrap),
    ],
)
def backend(request):
    return request.param


@pytest.fixture(scope="session")
def where(backend):
    """What `open_on` and `acquire` take for a back end: for the remote one, the URL of a server."""
    if backend != "remote":
        yield backend
        return
    from remote_sandboxes import SandboxServer

    with SandboxServer("--sandbox-backend", "bubblewrap", "--step-timeout", "1e9") as server:
        yield server.url


@pytest.fixture(scope="session")
def shared(where):
    """The one sandbox of a back end that most tests use, under its settings."""
    boxes = {}
    yield boxes
    for box in boxes.values():
        box.close()


@pytest.fixture
def sandbox(where, shared):
    """A sandbox with the default limits, empty. A test that leaves it broken costs the next one a new start."""
    box = shared.get("box")
    if box is None or not box.alive:
        box = shared["box"] = open_on(where, SandboxSpec())
    yield box
    if box.alive:
        box.reset()


@pytest.fixture
def open_sandbox(where):
    """Start sandboxes with limits of one's own; they are closed after the test."""
    boxes = []

    def start(**settings):
        boxes.append(open_on(where, SandboxSpec(**settings)))
        return boxes[-1]

    yield start
    for box in boxes:
        box.close()


@dataclass
class OwnEngine:
    """A Docker Engine that a test may kill."""

    folder: Path

    def start(self):
        """Start it, unless it runs; its address."""
        command = ["bash", SCRIPT, "start", str(self.folder)]
        started = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert started.returncode == 0, started.stderr
        return started.stdout.strip().removeprefix("export DOCKER_HOST=")

    def kill(self):
        """End by SIGKILL everything of it that may die: dockerd and containerd."""
        for pid_file in ("dockerd.pid", "exec/containerd/containerd.pid"):
            os.kill(int((self.folder / pid_file).read_text()), signal.SIGKILL)

    def remove(self):
        subprocess.run(["bash", SCRIPT, "stop", str(self.folder)], timeout=90, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture(scope="class")
def own_engine():
    """An engine of the test's own, with the python image; DOCKER_HOST names it."""
    if os.geteuid() or not shutil.which("dockerd"):
        pytest.skip("starting a Docker Engine takes root and dockerd")
    made = OwnEngine(Path(tempfile.mkdtemp(prefix="agentgym-engine-")))  # pytest's own are too long for a socket's name
    with pytest.MonkeyPatch.context() as patch:
        try:
            patch.setenv("DOCKER_HOST", made.start())
            images.build("python", docker=True)
            yield made
        finally:
            made.remove()


@pytest.fixture
def maker():
    return Maker()


@pytest.fixture
def pool_of(maker):
    pools = []

    def make(limit=4, open=maker, **settings):
        places = limit if isinstance(limit, Places) else Places(limit)
        pools.append(SandboxPool(open, places, name="test", **settings))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()
