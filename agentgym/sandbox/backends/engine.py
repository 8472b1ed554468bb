"""The Docker Engine: one client for the process, by the SDK `docker`, its failures as `SandboxError`, and its images.

The address is DOCKER_HOST (with DOCKER_TLS_VERIFY and DOCKER_CERT_PATH), else that of the Docker context in use, else the
usual socket.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentgym.core.install import pip_install
from agentgym.sandbox.api import SandboxError
from agentgym.sandbox.guest.guest_sandbox import SYSTEM_PATH

if TYPE_CHECKING:
    from docker import APIClient

CALL_TIMEOUT = 60  # seconds in which the engine must answer a call; many containers may be starting
PROBE_TIMEOUT = 5  # the same where nothing depends on the answer
CONNECTIONS = 64  # kept open at a time
COPY_LABEL = "agentgym.copy"  # of a container from which files are copied, or in which an image is made: its image
LONGEST_COPY = 3600.0  # seconds after which its build has ended
BUILD_TIMEOUT = 900  # seconds without an answer from the engine
WAY_LABEL = "agentgym.way"  # of an image: how it was built
COLOURS = re.compile(r"\x1b\[[0-9;]*m")

_clients: dict[tuple[int, str, float], APIClient] = {}


def _settings() -> dict[str, Any]:
    try:
        from docker import ContextAPI
        from docker.utils import kwargs_from_env
    except ImportError as error:
        todo = f"{pip_install('agentgym-toolkit[docker]')} ({error})"
        raise SandboxError(f"the docker back end needs the docker package: {todo}") from error
    settings = kwargs_from_env()
    if "base_url" not in settings:
        settings = ContextAPI.kwargs_from_context() | settings
    return settings


def address() -> str:
    return _settings().get("base_url") or "unix:///var/run/docker.sock"


def client(timeout: float = CALL_TIMEOUT) -> APIClient:
    """The process's client for the engine at `address()`. SandboxError: no engine answers, or no package `docker`."""
    settings = _settings()
    key = (os.getpid(), address(), timeout)
    if key not in _clients:
        from docker import APIClient

        if key[1].startswith("ssh://") and find_spec("paramiko") is None:
            raise SandboxError(f"reaching the Docker Engine at {key[1]} needs paramiko: pip install paramiko")
        with failures("connecting"):
            made = APIClient(version="auto", timeout=timeout, max_pool_size=CONNECTIONS, **settings)
        _clients.setdefault(key, made)
    return _clients[key]


def unavailable() -> str | None:
    """The reason why no engine can be used, in one line; None if one answers."""
    try:
        probe = client(PROBE_TIMEOUT)
        with failures("connecting"):
            probe.ping()
    except SandboxError as error:
        return str(error)
    return None


_holding = threading.Lock()
# By process and address, a connection that ends only when the engine does: since when, and the thread that waits for its end.
_held: dict[tuple[int, str], tuple[float, threading.Thread]] = {}


def hold() -> None:
    """Keep a connection to the engine, whose end tells of a restart. It may fail silently."""
    key = (os.getpid(), address())
    with _holding:
        if key in _held and _held[key][1].is_alive():
            return
        try:
            with failures("connecting"):
                events = client().events(filters={"type": ["daemon"]})
        except SandboxError:
            return

        def wait() -> None:
            with suppress(Exception):  # however it ends, it has ended
                deque(events, maxlen=0)

        thread = threading.Thread(target=wait, name="docker engine", daemon=True)
        since = time.monotonic()
        thread.start()
        _held[key] = since, thread


def unbroken_since(then: float) -> bool:
    """True if the engine answers and was not restarted since a moment of `time.monotonic`."""
    since, thread = _held.get((os.getpid(), address()), (math.inf, None))
    return thread is not None and since <= then and unavailable() is None and thread.is_alive()


@contextmanager
def failures(what: str) -> Iterator[None]:
    """Raises failures of the engine as a SandboxError that says what was tried, where, and why it failed."""
    from docker.errors import APIError, DockerException
    from requests.exceptions import RequestException, Timeout
    from urllib3.exceptions import HTTPError

    try:
        yield
    except (DockerException, RequestException, HTTPError, OSError) as error:
        if isinstance(error, APIError):
            how = f"refuses: {error.explanation or error}"
        else:
            how = "does not answer in time" if isinstance(error, Timeout) else f"does not answer: {_root(error)}"
        # The layers below the SDK's error say the same again, in pages of traceback.
        error.__cause__, error.__context__ = None, None
        raise SandboxError(f"{what}: the Docker Engine at {address()} {how}") from error


def _root(error: BaseException) -> str:
    seen: BaseException = error
    while (below := seen.__cause__ or seen.__context__) is not None:
        seen = below
    return f"{type(seen).__name__}: {seen}" if seen is not error else str(error)


def inspect_image(api: APIClient, tag: str) -> dict[str, Any] | None:
    from docker.errors import ImageNotFound

    with failures(f"looking for the image {tag}"):
        try:
            found: dict[str, Any] = api.inspect_image(tag)
        except ImageNotFound:
            return None
    return {**found, "Config": found["Config"] or {}}


def way_of(api: APIClient, tag: str) -> str | None:
    """How the image of this tag was built; None if the engine has no such image."""
    found = inspect_image(api, tag)
    return (found["Config"].get("Labels") or {}).get(WAY_LABEL, "registry") if found else None


def unreachable(base: str) -> str | None:
    """The reason why the engine cannot get an image; None if it can."""
    try:
        probe = client(PROBE_TIMEOUT)
        if inspect_image(probe, base) is None:
            with failures("asking the registry"):
                probe.inspect_distribution(base)
    except SandboxError as error:
        return str(error)
    return None


def build_image(api: APIClient, folder: Path, tag: str, say: Callable[[str], None]) -> None:
    """Run a folder's Dockerfile. Its steps may use the network: the default bridge, or the host's where there is none."""
    with failures(f"building {tag}"):
        bridged = bool(api.networks(names=["bridge"]))
        lines = api.build(
            path=str(folder),
            tag=tag,
            rm=True,
            forcerm=True,
            decode=True,
            timeout=BUILD_TIMEOUT,
            network_mode=None if bridged else "host",
            labels={WAY_LABEL: "registry"},
        )
        last: list[str] = []
        for line in lines:
            if "error" in line:
                what = " ".join(line["error"].split())
                raise SandboxError(f"{folder / 'Dockerfile'} failed: {'; '.join(last)}: {what}")
            for text in COLOURS.sub("", line.get("stream", "")).splitlines():
                if text.startswith("Step "):
                    say(text)
                if text.strip() and not text.startswith("Removing intermediate container"):
                    last = [*last[-2:], text.strip()]


def untag(api: APIClient, tag: str) -> bool:
    """Remove an image, or a name of it; False if a container has it."""
    from docker.errors import APIError, ImageNotFound

    with failures(f"removing {tag}"):
        try:
            api.remove_image(tag)
        except ImageNotFound:
            return True
        except APIError as error:
            if error.status_code != 409:
                raise
            return False
    return True


@contextmanager
def _tar(failure: str, *arguments: str, **pipes: int) -> Iterator[Any]:
    if shutil.which("tar") is None:
        raise SandboxError("no tar on the PATH: install it, since it copies files into and out of Docker")
    tar: Any
    # On a full disk tar has a line for each file: more than a pipe holds that is read at the end.
    with tempfile.TemporaryFile() as errors:
        with subprocess.Popen(["tar", *arguments], stderr=errors, **pipes) as tar:  # type: ignore[call-overload]
            try:
                yield tar
            except SandboxError:
                tar.kill()
                raise
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - 4096))
        said = errors.read().decode(errors="replace").strip()
    if tar.returncode:
        raise SandboxError(f"{failure}: {said[-300:]}")


@contextmanager
def _packed(root: Path, *options: str) -> Iterator[Iterator[bytes]]:
    """A root folder as the blocks of a tar archive."""
    packing = ("-c", "-C", str(root), "--owner=0", "--group=0", "--numeric-owner", *options, ".")
    with _tar(f"{root} cannot be packed", *packing, stdout=subprocess.PIPE) as tar:
        yield iter(partial(tar.stdout.read, 1 << 20), b"")


def load_image(api: APIClient, root: Path, tag: str, way: str) -> None:
    changes = [f"LABEL {WAY_LABEL}={way}", f"ENV PATH={SYSTEM_PATH}", "WORKDIR /workspace"]
    query = {"fromSrc": "-", "repo": tag, "changes": changes}
    url = f"{api.base_url}/v{api.api_version}/images/create"
    with _packed(root) as blocks, failures(f"importing {tag}"):
        # Not the SDK's own import_image: it waits without end.
        answer = api.post(url, params=query, data=blocks, timeout=BUILD_TIMEOUT)
        answer.raise_for_status()
    if '"error"' in answer.text:
        raise SandboxError(f"importing {tag} failed: {answer.text.strip()[-300:]}")


def add_layer(api: APIClient, base: str, root: Path, tag: str, way: str) -> None:
    """Make an image of another one and the files in `root`, as one layer more."""
    removed = [f"./{path.relative_to(root)}" for path in root.rglob("*") if path.is_char_device()]  # see `layers.py`
    leaving_out = [f"--exclude={path}" for path in removed]
    with failures(f"adding a layer to {base}"):
        command, offline = ["rm", "-f", "--", *removed], api.create_host_config(network_mode="none")
        labels = {COPY_LABEL: tag}
        container = api.create_container(
            base, command, labels=labels, host_config=offline, entrypoint=[], working_dir="/", user="0:0"
        )["Id"]
        try:
            with _packed(root, "--no-wildcards", *leaving_out) as blocks:
                api.put_archive(container, "/", blocks)
            if removed:
                api.start(container)
                if (ended := api.wait(container, timeout=CALL_TIMEOUT)["StatusCode"]) != 0:
                    raise SandboxError(f"files of {base} cannot be removed: rm ended with {ended}")
            said = f"LABEL {WAY_LABEL}={way} {COPY_LABEL}="
            repository, _, version = tag.rpartition(":")
            api.commit(container, repository, version, changes=[said, "CMD []", "WORKDIR /workspace"])
        finally:
            api.remove_container(container, force=True)


def export_image(api: APIClient, tag: str, work: Path) -> Path:
    root = work / "rootfs"
    root.mkdir()
    unpacking = ("-x", "-C", str(root), "--no-same-owner", "--anchored", "--exclude=dev/*")
    with failures(f"copying the files of {tag}"):
        container = api.create_container(tag, command=["true"], labels={COPY_LABEL: tag})["Id"]
        try:
            failure = f"the files of {tag} cannot be unpacked"
            # A broken pipe: tar has failed, and says why.
            with _tar(failure, *unpacking, stdin=subprocess.PIPE) as tar, suppress(BrokenPipeError):
                for block in api.export(container):
                    tar.stdin.write(block)
                tar.stdin.close()
        finally:
            api.remove_container(container, force=True)
    for name in ("proc", "sys", "dev", "tmp", "workspace", "private"):
        (root / name).mkdir(exist_ok=True)
    return root
