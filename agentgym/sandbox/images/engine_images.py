"""Images in the Docker Engine: building from a Dockerfile, loading a root folder, copying an image's files out."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentgym.sandbox.api import SandboxError
from agentgym.sandbox.backends import engine
from agentgym.sandbox.guest.guest_sandbox import SYSTEM_PATH

if TYPE_CHECKING:
    from docker import APIClient

BUILD_TIMEOUT = 900  # seconds without an answer from the engine
WAY_LABEL = "agentgym.way"  # of an image: how it was built
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def way_of(api: APIClient, tag: str) -> str | None:
    """How the image of this tag was built; None if the engine has no such image."""
    from docker.errors import ImageNotFound

    with engine.failures(f"looking for the image {tag}"):
        try:
            config = api.inspect_image(tag)["Config"] or {}
        except ImageNotFound:
            return None
    return (config.get("Labels") or {}).get(WAY_LABEL, "registry")


def base_of(dockerfile: Path) -> str:
    for line in dockerfile.read_text().splitlines():
        words = line.split()
        if words and words[0].upper() == "FROM":
            return next(word for word in words[1:] if not word.startswith("--"))
    raise SandboxError(f"{dockerfile} has no FROM line")


def unreachable(base: str) -> str | None:
    """The reason why the engine cannot get an image; None if it can."""
    try:
        probe = engine.client(engine.PROBE_TIMEOUT)
        if way_of(probe, base) is not None:
            return None
        with engine.failures("asking the registry"):
            probe.inspect_distribution(base)
    except SandboxError as error:
        return str(error)
    return None


def build(api: APIClient, folder: Path, tag: str, name: str, say: Callable[[str], None]) -> None:
    """Run a folder's Dockerfile. Its steps may use the network: the default bridge, or the host's where there is none."""
    with engine.failures(f"building {tag}"):
        bridged = bool(api.networks(names=["bridge"]))
        lines = api.build(
            path=str(folder),
            tag=tag,
            rm=True,
            forcerm=True,
            decode=True,
            timeout=BUILD_TIMEOUT,
            network_mode=None if bridged else "host",
            labels={WAY_LABEL: "registry", "agentgym.image": name},
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


def _tar(*arguments: str, **pipes: Any) -> subprocess.Popen[bytes]:
    if shutil.which("tar") is None:
        raise SandboxError("no tar on the PATH: install it, since it copies files into and out of Docker")
    return subprocess.Popen(["tar", *arguments], stderr=subprocess.PIPE, **pipes)


def load(api: APIClient, root: Path, tag: str, name: str, way: str) -> None:
    labels = f"LABEL {WAY_LABEL}={way} agentgym.image={name}"
    query = {"fromSrc": "-", "repo": tag, "changes": [labels, f"ENV PATH={SYSTEM_PATH}", "WORKDIR /workspace"]}
    owner = ("--owner=0", "--group=0", "--numeric-owner")
    url = f"{api.base_url}/v{api.api_version}/images/create"
    with _tar("-c", "-C", str(root), *owner, ".", stdout=subprocess.PIPE) as tar:
        blocks = iter(partial(tar.stdout.read, 1 << 20), b"")  # type: ignore[union-attr]
        try:
            with engine.failures(f"importing {tag}"):
                # Not the SDK's own import_image: it waits without end.
                answer = api.post(url, params=query, data=blocks, timeout=BUILD_TIMEOUT)
                answer.raise_for_status()
        except SandboxError:
            tar.kill()
            raise
        said = tar.stderr.read().decode(errors="replace") if tar.stderr else ""
    if tar.returncode:
        raise SandboxError(f"{root} cannot be packed: {said.strip()[-300:]}")
    if '"error"' in answer.text:
        raise SandboxError(f"importing {tag} failed: {answer.text.strip()[-300:]}")


def export(api: APIClient, tag: str, work: Path) -> Path:
    root = work / "rootfs"
    root.mkdir()
    with engine.failures(f"copying the files of {tag}"):
        container = api.create_container(tag, command=["true"], labels={"agentgym.copy": tag})["Id"]
        try:
            with _tar("-x", "-C", str(root), "--no-same-owner", "--exclude=dev/*", stdin=subprocess.PIPE) as tar:
                stdin: Any = tar.stdin
                with suppress(BrokenPipeError):  # tar has failed, and says below why
                    for block in api.export(container):
                        stdin.write(block)
                    stdin.close()
                said = tar.stderr.read().decode(errors="replace") if tar.stderr else ""
        finally:
            api.remove_container(container, force=True)
    if tar.returncode:
        raise SandboxError(f"the files of {tag} cannot be unpacked: {said.strip()[-300:]}")
    for name in ("proc", "sys", "dev", "tmp", "workspace", "private"):
        (root / name).mkdir(exist_ok=True)
    return root
