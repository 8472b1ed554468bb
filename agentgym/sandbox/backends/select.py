"""`acquire`: the choice of a back end, and the pools that all environments of a process share; the removal of what is left.

"auto" takes docker if an engine answers, has the image and grants what the spec asks for, else bubblewrap if it works. A sandbox
ends with the process that made it, because its guest loses its standard input; some remain, for example where the Docker Engine was killed too.
"""

import atexit
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from agentgym.core.extensions import ExtensionPoint
from agentgym.core.usage_error import closest
from agentgym.sandbox.api import Sandbox, SandboxError, SandboxesInUse, SandboxSpec, whole_number
from agentgym.sandbox.backends import bubblewrap, docker, engine
from agentgym.sandbox.discovery import Found
from agentgym.sandbox.guest.guest_sandbox import GuestSandbox
from agentgym.sandbox.images import build as images
from agentgym.sandbox.leases import Lease
from agentgym.sandbox.pool import Places, Room, SandboxPool

PROBE_SECONDS = 20.0  # in which a fresh sandbox must have started and run a program
KEPT_SECONDS = 2.0  # for which an answer holds: many sandboxes may be lost at once
# A back end is a function `(spec: SandboxSpec, run: str) -> Sandbox` that opens one; `run` is the label of its run.
BACKENDS = ExtensionPoint(
    "sandbox back end",
    "agentgym.sandboxes",
    {
        "docker": "agentgym.sandbox.backends.docker:open_docker",
        "bubblewrap": "agentgym.sandbox.backends.bubblewrap:open_bubblewrap",
    },
)
ENGINE_SECONDS = 2.0  # in which a Docker Engine must answer to be chosen by "auto"
IDLE_SECONDS = 300.0  # after which an unused sandbox is closed
REMOTE_IDLE_SECONDS = 60.0  # and one of a server's, which others may want
URL = ("http://", "https://")
LIMIT = 64  # sandboxes of a process at a time, unless AGENTGYM_SANDBOXES says otherwise
# Their memory together, in that of the machine, unless AGENTGYM_SANDBOX_MEMORY says otherwise: few use all that they may.
OVERCOMMITTED = 2

_log = logging.getLogger("agentgym.sandbox")


class Health:
    """The health of one back end, asked by any thread. `unbroken_since`: it has run without a restart since then."""

    def __init__(self, open: Callable[[], Sandbox], unbroken_since: Callable[[float], bool]):
        self._open = open
        self._unbroken_since = unbroken_since
        self._asking = threading.Lock()
        self._up = False
        self._asked = -KEPT_SECONDS

    def up_since(self, then: float) -> bool:
        """True if the back end was up since a moment and is up now: a fresh sandbox starts and runs `true`."""
        if not self._unbroken_since(then):
            return False
        with self._asking:
            if time.monotonic() >= self._asked + KEPT_SECONDS:
                self._up = self._probe()
                self._asked = time.monotonic()
        return self._up and self._unbroken_since(then)

    def _probe(self) -> bool:
        found: list[bool] = []

        def look() -> None:
            try:
                with closing(self._open()) as box:
                    found.append(box.exec(["true"]).ok)
            except SandboxesInUse:
                found.append(True)
            except (SandboxError, OSError) as error:
                _log.warning("the sandboxes' back end is down: %s", error)

        thread = threading.Thread(target=look, name="sandbox health", daemon=True)
        thread.start()
        thread.join(PROBE_SECONDS)
        return found == [True]


@dataclass(frozen=True)
class Choice:
    """A back end (for sandboxes of servers, their URLs), and why it was taken, to follow "because"."""

    name: str
    reason: str


class _ProcessState:
    """The sandboxes and pools of this process. A fork begins with none: its parent's stay its parent's."""

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        self.lock = threading.RLock()
        self.choices: dict[tuple[str | None, str, str, bool], Choice] = {}
        self.pools: dict[tuple[Any, ...], SandboxPool] = {}
        self.places: Places | None = None
        self.bubblewrap_works = False


process_state = _ProcessState()
os.register_at_fork(after_in_child=process_state.begin_anew)


def acquire(
    spec: SandboxSpec, backend: str | None = None, timeout: float = 110.0, *, patience: float = 0.0, first: bool = False
) -> Lease:
    """A clean sandbox from the process's pool of equal specs; `close` gives it back.

    Args:
        backend: "docker", "bubblewrap", "auto", the URL of a server of sandboxes or several joined by commas, "remote" for
            those of AGENTGYM_SANDBOX_URL, or None for AGENTGYM_SANDBOX, else "auto".
        timeout: seconds to wait for one. The default is just under what `Limits` gives `init`, so that this error, which
            says why, comes first.
        patience: seconds more for which it waits while others have all the room.
        first: come before all who ask without it, as where an episode cannot end without a second sandbox.

    Raises:
        SandboxError: no back end can be used here, or there was no sandbox in time; says what failed.
        ValueError: there is no such back end or image.
    """
    return _pool(choose(backend, spec.image, spec.writable_root).name, spec).acquire(timeout, patience, first)


def prepare(spec: SandboxSpec, backend: str | None = None) -> None:
    """Begin to start a sandbox that `acquire` will soon ask for, if there is room. Raises as `choose` does."""
    _pool(choose(backend, spec.image, spec.writable_root).name, spec).prepare()


def choose(backend: str | None = None, image: str = "python", writable_root: bool = False) -> Choice:
    """The back end for an image, and for a writable root if that is wanted; a choice that succeeded is kept.

    Raises:
        SandboxError: none can be used here; says what to install or to start.
        ValueError: there is no such back end or image.
    """
    wanted = backend if backend is not None else os.environ.get("AGENTGYM_SANDBOX") or "auto"
    source = "it was asked for" if backend is not None else "AGENTGYM_SANDBOX says so"
    wanted = check_backend(wanted, "AGENTGYM_SANDBOX" if backend is None else "sandbox")
    with process_state.lock:
        choice = process_state.choices.get((backend, wanted, image, writable_root))
        if choice is None:
            choice = _best(image, writable_root) if wanted == "auto" else Choice(wanted, source)
            if wanted != "auto" and (why_not := _why_not(wanted, image, writable_root)) is not None:
                what = f"no sandbox of image {image!r} by {wanted}, and {source}"
                raise SandboxError(f"{what}: {why_not}; or take another back end")
            process_state.choices[backend, wanted, image, writable_root] = choice
            _log.info("sandboxes of image %r: %s, because %s", image, choice.name, choice.reason)
    return choice


def describe(backend: str | None = None, image: str = "python", writable_root: bool = False) -> str:
    """The choice in a line for people: "docker, because ...". Raises as `choose` does."""
    choice = choose(backend, image, writable_root)
    return f"{choice.name}, because {choice.reason}"


def check_backend(name: str, what: str = "sandbox") -> str:
    """The name of a back end; of servers, their URLs. ValueError: there is no such one; says the nearest valid name."""
    if name == "remote" or name.startswith(URL):
        from agentgym.sandbox.backends.remote import urls_of

        return urls_of(name, what)
    valid = (*BACKENDS.names, "auto", "remote")
    if name not in valid and ":" not in name:
        known = f"{', '.join(valid)}, http://HOST:PORT and package.module:function"
        raise ValueError(f"{what}={name}: no such back end: did you mean {closest(name, valid)}? There are {known}")
    return name


def close_pools(timeout: float = 3.0) -> None:
    with process_state.lock:
        places = process_state.places
        process_state.places = None
        process_state.pools.clear()
    if places is not None:
        places.close(timeout)


def run_label() -> str:
    return os.environ.get("AGENTGYM_RUN") or f"{os.getpid()}-{time.strftime('%Y%m%d-%H%M%S')}"


def _best(image: str, writable_root: bool) -> Choice:
    no_docker = _why_not("docker", image, writable_root)
    if no_docker is None:
        tag = images.docker_tag(image)
        return Choice("docker", f"the engine at {engine.address()} answers and has the image {tag}")
    no_bubblewrap = _why_not("bubblewrap", image, writable_root)
    if no_bubblewrap is None:
        return Choice("bubblewrap", f"it works here and docker does not: {no_docker}")
    todo = f"start a Docker Engine and run `{images.docker_command(image)}`"
    if not images.is_reference(image):
        todo = f"install bubblewrap (apt install bubblewrap), or {todo}"
    raise SandboxError(f"no sandbox for programs: {todo}. docker: {no_docker}; bubblewrap: {no_bubblewrap}")


def _why_not(name: str, image: str, writable_root: bool) -> str | None:
    """The reason why a back end cannot be used for an image, or not with a writable root; None if it can."""
    if name.startswith(URL):
        from agentgym.sandbox.backends import remote

        return remote.why_not(name, image)
    if name not in BACKENDS.shipped:
        BACKENDS.load(name)
        return None
    try:
        if name == "docker":
            tag = images.docker_tag(image)
            todo = f"the engine at {engine.address()} has no image {tag}: run `{images.docker_command(image)}`"
            if engine.way_of(engine.client(ENGINE_SECONDS), tag) is None:
                return todo
            return docker.no_writable_root(tag) if writable_root else None
        if images.is_reference(image) and not images.TAG.fullmatch(image):
            return f"it has no Docker images such as {image}"
        images.rootfs(image)
        if not process_state.bubblewrap_works and (why_not := bubblewrap.usable()):
            return why_not
        process_state.bubblewrap_works = True
        found = bubblewrap.image_root(image)
        return bubblewrap.no_writable_root(image, found) if writable_root else None
    except SandboxError as error:
        return str(error)
    return None


def _pool(name: str, spec: SandboxSpec) -> SandboxPool:
    key = (name, *((k, tuple(sorted(v.items())) if k == "env" else v) for k, v in vars(spec).items()))
    with process_state.lock:
        if process_state.places is None:
            process_state.places = Places(_all_room())
            atexit.register(close_pools)
            threading.Thread(target=remove_dead, name="sandbox cleanup", daemon=True).start()
        if key not in process_state.pools:
            open_one, run = opener(name), run_label()
            probe = replace(spec, start_timeout=PROBE_SECONDS)
            unbroken_since = engine.unbroken_since if name == "docker" else lambda then: True
            process_state.pools[key] = SandboxPool(
                lambda: open_one(spec, run),
                process_state.places,
                size=_size(name, spec),
                name=f"{name} {spec.image!r}",
                idle_seconds=REMOTE_IDLE_SECONDS if name.startswith(URL) else IDLE_SECONDS,
                up_since=Health(lambda: open_one(probe, run), unbroken_since).up_since,
            )
        return process_state.pools[key]


def _all_room() -> Room:
    """The room of this process's sandboxes. ValueError: a variable is wrong."""
    memory = OVERCOMMITTED * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    known = next(folder for folder in (images.cache_folder(), *images.cache_folder().parents) if folder.is_dir())
    defaults = {
        "AGENTGYM_SANDBOXES": LIMIT,
        "AGENTGYM_SANDBOX_MEMORY": memory,
        "AGENTGYM_SANDBOX_DISK": max(shutil.disk_usage(known).free, 1),
    }
    return Room(*(whole_number(name, default) for name, default in defaults.items()))


def _size(name: str, spec: SandboxSpec) -> Room:
    """The room that a sandbox takes on this machine. Under bubblewrap files count towards `memory`; docker keeps a writable root on disk."""
    if name.startswith(URL):
        return Room()
    return Room(1, spec.memory, spec.disk if name == "docker" and spec.writable_root else 0)


def opener(name: str) -> Callable[[SandboxSpec, str], GuestSandbox]:
    if name.startswith(URL):
        from agentgym.sandbox.backends.remote import open_remote

        return partial(open_remote, name)
    opens: Callable[[SandboxSpec, str], GuestSandbox] = BACKENDS.load(name)
    return opens


def sandboxes() -> tuple[list[Found], dict[str, str]]:
    """All sandboxes on this machine, oldest first, and the reason for each back end that could not be asked."""
    found, unasked = [], {}
    for backend, ask in (("docker", docker.docker_sandboxes), ("bubblewrap", bubblewrap.bubblewrap_sandboxes)):
        try:
            found += ask()
        except SandboxError as error:
            unasked[backend] = str(error)
    return sorted(found, key=lambda each: each.started), unasked


def remove_sandbox(found: Found) -> None:
    (docker if found.backend == "docker" else bubblewrap).remove(found.id)


def cleanup(*, everything: bool = False, run: str | None = None) -> tuple[list[Found], dict[str, str]]:
    """Remove the sandboxes whose process has ended on this host. SandboxError if one stays. Returns as `sandboxes`.

    `everything`: also those whose process lives, or is on another host. `run`: all of this run, and no others.
    """
    removed, errors = [], []
    all_found, unasked = sandboxes()
    for found in all_found:
        if (found.run == run) if run is not None else (everything or not found.alive):
            try:
                remove_sandbox(found)
                removed.append(found)
            except SandboxError as error:
                errors.append(str(error))
    for backend, remove_rest in (("docker", docker.remove_unfinished), ("bubblewrap", bubblewrap.remove_unfinished)):
        try:
            if backend not in unasked:
                remove_rest()
        except SandboxError as error:
            errors.append(str(error))
    if errors:
        raise SandboxError(f"{len(errors)} sandboxes could not be removed: {errors[0]}")
    return removed, unasked


def remove_dead() -> None:
    try:
        removed, _ = cleanup()
    except SandboxError as error:
        _log.warning("sandboxes of dead processes: %s", error)
    else:
        if removed:
            _log.info("removed %d sandboxes that dead processes had left", len(removed))
