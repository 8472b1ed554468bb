"""The docker back end: each sandbox is a container of a Docker Engine.

The container's first process is the guest. Its standard streams are one connection to the engine, which this process holds:
when it closes, however that happens, the guest reads the end of its input and ends, and the engine removes the container.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from agentgym.sandbox.api import GROUP_ID, MEGABYTE, PRIVATE, SOCKET, WORKSPACE, SandboxError, SandboxSpec
from agentgym.sandbox.backends import engine, limits, seccomp
from agentgym.sandbox.discovery import Found, found, marks
from agentgym.sandbox.guest.guest_sandbox import SYSTEM_PATH, GuestSandbox, SocketStream, greet, guest_command, source
from agentgym.sandbox.images import build as images

if TYPE_CHECKING:
    from docker import APIClient

SEARCH_SECONDS = 120.0  # in which a foreign image must be searched
GONE_SECONDS = 10.0  # in which a container that is being removed must have gone
# For the guest: to become the programs' user, and so to start and to kill them.
CAPABILITIES = ("SETUID", "SETGID")
PROTECTING = "CHOWN"  # to take files from programs, with a writable root
# Lets the guest make the kernel kill programs first when memory runs out; programs cannot undo it.
RESOURCE = "SYS_RESOURCE"
# With it System V segments go with the last program that uses them, and do not hold memory until `reset`.
FORCED = "kernel.shm_rmid_forced"
# A volume that is no place on a disk, but pseudo-terminals of the sandbox's own, and not more of them than it may have.
TERMINALS = "/dev/pts"
# An engine whose refusal says one of these lacks the right to pass on: sandboxes do without it.
WISHES = {RESOURCE: "apply caps", FORCED: FORCED, TERMINALS: "volume"}
STDERR = 2  # of the engine's stream
KEPT = 2000  # bytes of stderr
LABEL = "agentgym."
OWNED = {f"{LABEL}terminals": "1"}  # of volumes

# Accepts that programs can fill the disk of the engine.
UNLIMITED = "AGENTGYM_UNLIMITED_LAYERS"
_NO_LIMIT = (
    "so programs could fill its disk from a writable root. Use bubblewrap as root, put the engine's data on xfs mounted with "
    f"pquota, or accept it with {UNLIMITED}=1"
)

_log = logging.getLogger("agentgym.sandbox")
# Of foreign images, by their ids: what is covered in them; empty where they hold nothing of this project.
_covers: dict[str, list[str]] = {}
_refused: set[tuple[str, str]] = set()  # addresses of engines, and which of the wishes they cannot grant


def open_docker(spec: SandboxSpec, run: str) -> GuestSandbox:
    """Start a container and its guest. A foreign image is searched for this project first, once a process.

    SandboxError: the engine does not answer or refuses, the image is missing, or the guest does not come up.
    """
    images.used(spec.image)
    return _open(spec, run, _masked(spec.image, run))


def _open(spec: SandboxSpec, run: str, masked: Sequence[str] = ()) -> GuestSandbox:
    image = images.docker_tag(spec.image)
    api = engine.client()
    engine.hold()
    name = f"agentgym-{secrets.token_hex(6)}"
    try:
        known = engine.inspect_image(api, image) if images.is_reference(spec.image) else None
        settings = known["Config"].get("Env") or [] if known else []
        path = next((text.removeprefix("PATH=") for text in settings if text.startswith("PATH=")), SYSTEM_PATH)
        options = _info(api).get("SecurityOptions") or []
        user = limits.own_user(
            few=any(kind in option for option in options for kind in ("name=userns", "name=rootless"))
        )
        stream = _start(api, name, image, partial(_config, api, image, spec, run, user, masked))
    except BaseException as error:
        _remove_quietly(name)
        from docker.errors import ImageNotFound

        if isinstance(error.__cause__, ImageNotFound):
            todo = f"run `{images.docker_command(spec.image)}`"
            raise SandboxError(f"the Docker Engine at {engine.address()} has no image {image}: {todo}") from error
        if isinstance(error, SandboxError) and "python3" in str(error):
            raise SandboxError(f"the image {image} has no python3, which sandboxes require: {error}") from error
        raise
    return greet(
        stream,
        spec,
        name,
        path=path,
        again=partial(_open, spec, run, masked),
        limits={"nice": limits.PROGRAM_NICENESS, "user": user},
        reason=lambda: _reason(name, stream),
        on_close=lambda: _remove_quietly(name),
    )


def _masked(image: str, run: str) -> Sequence[str]:
    """The paths to cover in a foreign image, so that programs see no file of this project, whose tasks hold answers.

    Those that are built from a folder were searched when their files were copied.
    """
    if not images.is_reference(image) and images.rootfs(image) is not None:
        return ()
    api = engine.client()
    id = (engine.inspect_image(api, images.docker_tag(image)) or {}).get("Id", "")
    if id and id not in _covers:
        with closing(_open(SandboxSpec(image=image), run)) as box:
            search = box.exec(["python3", "-I", "-c", source("project_files")], timeout=SEARCH_SECONDS)
            with engine.failures("looking at its container"):
                usual = api.inspect_container(box.id)["HostConfig"].get("MaskedPaths") or []
        if not search.ok or search.truncated:
            why = "too slow" if search.timed_out else search.stderr[-300:] or "too many"
            what = "could not be searched for files of agentgym, which programs must not see"
            raise SandboxError(f"the image {image} {what}: {why}")
        found = json.loads(search.stdout)
        _covers[id] = [*usual, *found] if found else []
        if found:
            _log.info("the image %s holds agentgym: %s are covered", image, ", ".join(found))
    return _covers.get(id, ())


def _start(
    api: APIClient, name: str, image: str, config: Callable[[Sequence[str]], Mapping[str, Any]]
) -> AttachedStream:
    """Start a container with all wishes that the engine grants; `config` makes its settings of them."""
    where = engine.address()
    while True:
        wishes = [wish for wish in WISHES if (where, wish) not in _refused]
        try:
            with engine.failures(f"starting a sandbox of {image}"):
                api.create_container_from_config(config(wishes), name)
                # Before the start, so that nothing that it writes is missed.
                stream = AttachedStream(api.attach_socket(name, {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}))
                try:
                    api.start(name)
                except BaseException:
                    stream.close()
                    raise
                return stream
        except SandboxError as error:
            said = str(getattr(error.__cause__, "explanation", ""))
            if "storage-opt" in said:
                raise SandboxError(f"{error}: {_NO_LIMIT}") from error
            refused = next((wish for wish in wishes if WISHES[wish] in said), None)
            if refused is None:
                raise
        remove(name)
        if (where, refused) not in _refused:
            _log.info("the Docker Engine at %s cannot give %s: it is done without", where, refused)
        _refused.add((where, refused))


def _config(
    api: APIClient, image: str, spec: SandboxSpec, run: str, user: int, masked: Sequence[str], wishes: Sequence[str]
) -> Mapping[str, Any]:
    from docker.types import ContainerConfig, DriverConfig, LogConfig, Mount

    if spec.network and not api.networks(names=["bridge"]):
        why = f"the Docker Engine at {engine.address()} has no bridge network: it was started with --bridge=none"
        raise SandboxError(f"the sandbox needs a network, but {why}")
    mount = f"size={spec.disk},nr_inodes={limits.files_of(spec.disk)},nosuid,nodev,exec"
    devpts = DriverConfig("local", {"type": "devpts", "device": "devpts", "o": f"{limits.PTY_OPTIONS},gid=5"})
    host_config = api.create_host_config(
        auto_remove=True,
        mounts=[
            *(Mount(wish, None, driver_config=devpts, labels=OWNED) for wish in wishes if wish == TERMINALS),
            *([Mount(SOCKET, spec.socket, type="bind", read_only=True)] if spec.socket else []),
        ],
        init=False,
        network_mode="bridge" if spec.network else "none",
        ipc_mode="private",
        read_only=not spec.writable_root,
        storage_opt={"size": str(spec.disk)} if spec.writable_root and not _unlimited_layers() else None,
        tmpfs={
            WORKSPACE: f"{mount},mode=0755,uid={user},gid={GROUP_ID}",
            "/tmp": f"{mount},mode=1777",
            PRIVATE: f"{mount},mode=0755",
            "/dev/shm": f"{mount},mode=1777",  # the engine's own has no limit on files
        },
        mem_limit=spec.memory + limits.GUEST_MEMORY,
        memswap_limit=spec.memory + limits.GUEST_MEMORY,  # memory and swap together: no swap
        nano_cpus=int(min(spec.cpus, _info(api)["NCPU"]) * 1e9),  # the engine refuses to give more
        pids_limit=spec.pids + limits.GUEST_PROCESSES,
        cap_drop=["ALL"],
        cap_add=[*CAPABILITIES, *[PROTECTING] * spec.writable_root, *(wish for wish in wishes if wish == RESOURCE)],
        sysctls={wish: "1" for wish in wishes if wish == FORCED},
        security_opt=["no-new-privileges", f"seccomp={seccomp.docker_profile()}"],
        log_config=LogConfig(type="none"),
    )
    config: Mapping[str, Any] = ContainerConfig(
        api.api_version,
        image=image,
        command=[],
        entrypoint=guest_command(),
        user="0:0",
        working_dir="/",
        hostname="sandbox",
        stdin_open=True,  # and StdinOnce by that: it ends with its first connection
        stop_signal="SIGKILL",  # a stopping engine need not wait for the guest, which ignores other signals
        healthcheck={"test": ["NONE"]},
        labels={LABEL + key: value for key, value in marks(run).items()},
        host_config={**host_config, "MaskedPaths": list(masked)} if masked else host_config,
    )
    return config


def _unlimited_layers() -> bool:
    return os.environ.get(UNLIMITED) == "1"


def no_writable_root(image: str) -> str | None:
    """The reason why the engine gives an image no writable root with a limit; None if it does, or need not."""
    if _unlimited_layers():
        return None
    api, name = engine.client(), f"agentgym-{secrets.token_hex(6)}"
    try:
        with engine.failures("asking for a limited layer"):
            limited = api.create_host_config(storage_opt={"size": str(MEGABYTE)}, network_mode="none")
            api.create_container(image, ["true"], name=name, host_config=limited, labels={engine.COPY_LABEL: image})
    except SandboxError as error:
        if "storage-opt" not in str(getattr(error.__cause__, "explanation", "")):
            raise
        return f"the Docker Engine at {engine.address()} cannot limit a container's layer, {_NO_LIMIT}"
    finally:
        _remove_quietly(name)
    return None


@cache
def _info(api: APIClient) -> dict[str, Any]:
    info: dict[str, Any] = api.info()
    return info


def _reason(name: str, stream: AttachedStream) -> str:
    if said := stream.stderr.decode(errors="replace").strip():
        return f"it wrote: {said}"
    if (no_engine := engine.unavailable()) is not None:
        return no_engine
    from docker.errors import NotFound

    try:
        with engine.failures("looking at its container"):
            state = engine.client(engine.PROBE_TIMEOUT).inspect_container(name)["State"]
    except SandboxError as error:
        return "its container is gone" if isinstance(error.__cause__, NotFound) else str(error)
    killed = ", for want of memory" if state.get("OOMKilled") else ""
    return f"its container is {state.get('Status')} with exit code {state.get('ExitCode')}{killed}"


def _remove_quietly(name: str) -> None:
    try:
        remove(name)
    except SandboxError as error:
        _log.warning("sandbox %s was not removed: %s", name, error)


def remove(id: str) -> None:
    """Remove a container and all in it, if it is not gone already. Raises SandboxError if it stays."""
    from docker.errors import APIError, NotFound

    with engine.failures(f"removing the sandbox {id}"), suppress(NotFound):
        try:
            engine.client().remove_container(id, force=True, v=True)
        except APIError as error:
            if error.status_code != 409:  # 409: it is being removed already
                raise
        engine.client().wait(id, timeout=GONE_SECONDS, condition="removed")


def docker_sandboxes() -> list[Found]:
    api = engine.client(engine.PROBE_TIMEOUT)
    with engine.failures("listing sandboxes"):
        containers = api.containers(all=True, filters={"label": f"{LABEL}run"})
    sandboxes = []
    for container in containers:
        labels = {key.removeprefix(LABEL): value for key, value in container["Labels"].items()}
        # One that a killed engine was removing comes back without its name, or is in its list and nowhere else.
        if container["Names"] or not _is_gone(container["Id"]):
            name = (container["Names"] or [container["Id"]])[0].lstrip("/")
            sandboxes.append(found(name, "docker", labels))
    return sandboxes


def _is_gone(id: str) -> bool:
    from docker.errors import NotFound

    with engine.failures(f"looking at the container {id}"):
        try:
            engine.client(engine.PROBE_TIMEOUT).inspect_container(id)
        except NotFound:
            return True
    return False


def remove_unfinished() -> None:
    """Remove the pseudo-terminals of ended sandboxes, which a killed engine forgets, and the containers of killed builds."""
    from docker.errors import APIError

    with engine.failures("removing what sandboxes left"):
        api = engine.client()
        for container in api.containers(all=True, filters={"label": engine.COPY_LABEL}):
            # Images that were made in such a container have the label, too, with no value.
            if container["Labels"][engine.COPY_LABEL] and time.time() - container["Created"] > engine.LONGEST_COPY:
                _remove_quietly(container["Id"])
        for volume in api.volumes(filters={"label": list(OWNED), "dangling": True})["Volumes"] or []:
            try:
                api.remove_volume(volume["Name"])
            except APIError as error:
                if error.status_code not in (404, 409):  # it is gone, or a sandbox has it by now
                    raise


class AttachedStream(SocketStream):
    """A container's stdin and stdout, over the result of the SDK's `attach_socket`. `stderr` is the end of its stderr."""

    def __init__(self, attached: Any) -> None:
        # Over a Unix socket and plain TCP it is a file object around the socket, else the socket itself.
        super().__init__(getattr(attached, "_sock", attached))
        self._attached = attached
        self.stderr = b""
        self._received = bytearray()

    def receive(self, until: float) -> bytes:
        while data := super().receive(until):
            if out := self.stdout_of(data):
                return out
        return b""

    def stdout_of(self, data: bytes) -> bytes:
        # A frame is which stream, three zeros, its length in four bytes, big endian, and the content.
        self._received += data
        out = b""
        while (end := 8 + int.from_bytes(self._received[4:8], "big")) <= len(self._received):
            content = bytes(self._received[8:end])
            if self._received[0] == STDERR:
                self.stderr = (self.stderr + content)[-KEPT:]
            else:
                out += content
            del self._received[:end]
        return out

    def close(self) -> None:
        try:
            super().close()
        finally:
            # The SDK hangs the response on the file object; each holds the connection open.
            getattr(self._attached, "_response", self._attached).close()
