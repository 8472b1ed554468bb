"""Sandboxes for clients on other machines: their limits, the images of a server, and the sandbox of a session."""

import contextlib
import math
import resource
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentgym.sandbox.api import MEGABYTE, SandboxError, SandboxSpec
from agentgym.sandbox.backends import select as backends
from agentgym.sandbox.guest.guest_sandbox import GuestSandbox
from agentgym.sandbox.images import build as images

with contextlib.suppress(ImportError):  # here, so that workers share it
    import docker as _sdk  # noqa: F401

_sweeping = threading.Lock()


@dataclass(frozen=True)
class Most:
    """The most that a server gives one sandbox; see `SandboxSpec`."""

    cpus: float = 4.0
    memory: int = 4096 * MEGABYTE
    pids: int = 1024
    disk: int = 1024 * MEGABYTE
    output: int = 8 * MEGABYTE
    network: bool = False


@dataclass(frozen=True)
class Total:
    """The limits of all sandboxes of a server together. 0: no limit."""

    cpus: float = 0.0
    memory: int = 0
    count: int = 0


class ServedSandbox:
    """The sandbox of one session; `box` is None before `start`. `most` limits it, `total` all of the server together."""

    def __init__(self, backend: str | None, most: Most, total: Total = Total()):
        self.backend = backend
        cpus, memory = min(most.cpus, total.cpus or most.cpus), min(most.memory, total.memory or most.memory)
        self.most = replace(most, cpus=cpus, memory=memory)
        self.total = total
        self.box: GuestSandbox | None = None

    @classmethod
    def of_settings(cls, kwargs: Mapping[str, Any]) -> "ServedSandbox":
        return cls(kwargs.get("backend"), Most(**kwargs.get("most", {})), Total(**kwargs.get("total", {})))

    def spec_of(self, record: Mapping[str, Any], longest_start: float) -> SandboxSpec:
        """The `SandboxSpec` that a client asks for. ValueError: it is invalid, or asks for more than this server gives."""
        defaults = vars(SandboxSpec())
        if unknown := record.keys() - defaults.keys():
            raise ValueError(f"a sandbox has no setting {min(unknown)!r:.50}")
        spec = SandboxSpec(**record)
        for name, default in defaults.items():
            value = getattr(spec, name)
            if type(default) in (int, float):
                numbers = (int,) if type(default) is int else (int, float)
                if type(value) not in numbers or not (math.isfinite(value) and value > 0):
                    raise ValueError(f"{name}={value!r:.50} cannot be")
        env = spec.env
        if not isinstance(env, dict) or not all(isinstance(word, str) for word in [*env, *env.values()]):
            raise ValueError("env holds texts")
        if not isinstance(spec.image, str) or {type(spec.network), type(spec.writable_root)} != {bool}:
            raise ValueError("image is a text, network and writable_root true or false")
        if spec.socket != "":
            raise ValueError("socket: a server gives a sandbox none of its machine's sockets")
        _check_image(spec.image)
        for name, most in vars(self.most).items():
            if getattr(spec, name) > most:
                raise ValueError(f"{name}={getattr(spec, name)}: this server gives a sandbox {most} (--sandbox-most)")
        return replace(spec, start_timeout=min(spec.start_timeout, longest_start))

    def start(self, spec: SandboxSpec, run: str) -> dict[str, Any]:
        _let_go()
        backend = chosen(self.backend, spec.image, spec.writable_root)
        name = "".join(letter for letter in run if letter.isprintable())[:100] or backends.run_label()
        self.box = backends.opener(backend)(spec, name)
        return {"sandbox": self.box.id, "backend": backend, "facts": self.box.facts}

    def close(self) -> None:
        if self.box is not None:
            self.box.close()


def _check_image(image: str) -> None:
    """ValueError for a path, which would be read on the server."""
    if images.is_path(image):
        raise ValueError(f"image={image!r:.100}: a server takes names and Docker references, and no paths")


def _let_go() -> None:
    """Lift the worker's limits, which bubblewrap's guest would inherit: it has its own, and programs are killed first."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("0")
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def chosen(backend: str | None, image: str, writable_root: bool = False) -> str:
    try:
        return backends.choose(backend, image, writable_root).name
    except (SandboxError, ValueError) as error:
        raise SandboxError(f"{error}. Built here: {', '.join(built(backend)) or 'none'}") from error


def built(backend: str | None) -> list[str]:
    found = []
    for name in images.image_names():
        with contextlib.suppress(SandboxError, ValueError):
            backends.choose(backend, name)
            found.append(name)
    return found


def told(settings: Mapping[str, Any], image: str | None) -> dict[str, Any]:
    """The answer to `GET /sandboxes`; with `image`, the back end that has it, or ValueError. Sweeps the sandboxes of killed processes."""
    held = ServedSandbox.of_settings(settings)

    def sweep() -> None:
        with _sweeping:
            backends.remove_dead()

    if not _sweeping.locked():
        threading.Thread(target=sweep, name="sandbox cleanup", daemon=True).start()
    if image is not None:
        _check_image(image)
        try:
            return {"image": image, "backend": chosen(held.backend, image)}
        except SandboxError as error:
            raise ValueError(str(error)) from error
    return {"images": built(held.backend), "most": vars(held.most), "total": vars(held.total)}
