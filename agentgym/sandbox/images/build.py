"""Builds images, the root file systems of sandboxes, from the folders of `sandboxes/`.

`build` makes a Docker image and a root folder for bubblewrap, in one of two ways with the same programs: "registry" runs the
Dockerfile, "packages" unpacks Debian packages (`debian.py`) where no registry can be reached.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentgym.sandbox.api import SandboxError
from agentgym.sandbox.backends import engine
from agentgym.sandbox.guest.project_files import project_files
from agentgym.sandbox.images import debian

if TYPE_CHECKING:
    from docker import APIClient

WAYS = ("auto", "registry", "packages")
FORMAT = 1  # of what this file and `debian.py` make; another number makes every image anew


@dataclass(frozen=True)
class Recipe:
    """A folder of `sandboxes/`. `digest` is of all its files and of this machine's kind; a change gives another image."""

    name: str
    folder: Path
    digest: str

    @property
    def tag(self) -> str:
        return f"agentgym/{self.name}:{self.digest}"

    @property
    def place(self) -> Path:
        return cache_folder() / self.name / self.digest

    @property
    def packages(self) -> list[str]:
        lines = (self.folder / "packages.txt").read_text().splitlines()
        return [line for line in (line.split("#", 1)[0].strip() for line in lines) if line]

    @property
    def requirements(self) -> Path | None:
        path = self.folder / "requirements.txt"
        return path if path.exists() else None


@dataclass(frozen=True)
class Built:
    """A built image. `tag` is None where it was not built for Docker; `fresh` is False if nothing had to be built."""

    name: str
    way: str
    rootfs: Path
    tag: str | None
    bytes: int
    seconds: float
    fresh: bool


def image_folder() -> Path:
    """The folder `sandboxes/`: inside the package when installed from a wheel, else beside it in a checkout."""
    package = Path(__file__).resolve().parents[2]
    for folder in (package / "sandboxes", package.parent / "sandboxes"):
        if folder.is_dir():
            return folder
    raise SandboxError(f"the folder sandboxes/ is neither in {package} nor beside it: install agentgym again")


def image_names() -> list[str]:
    return sorted(p.name for p in image_folder().iterdir() if (p / "packages.txt").is_file())


def is_reference(image: str) -> bool:
    return "/" in image or ":" in image


def docker_tag(image: str) -> str:
    """The Docker image of a folder of `sandboxes/`, or the reference itself."""
    return image if is_reference(image) else recipe(image).tag


def docker_command(image: str) -> str:
    return f"docker pull {image}" if is_reference(image) else f"agentgym sandbox build {image}"


def recipe(name: str) -> Recipe:
    if name not in image_names():
        raise ValueError(f"there is no image {name!r}; there are {', '.join(image_names())}")
    folder = image_folder() / name
    digest = hashlib.sha256(f"{FORMAT} {platform.machine()}".encode())
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        content = path.read_bytes()
        digest.update(f"\n{path.relative_to(folder).as_posix()} {len(content)}\n".encode() + content)
    return Recipe(name, folder, digest.hexdigest()[:12])


def rootfs(name: str) -> Path | None:
    """The root folder of an image, or None if it is not built. ValueError if there is no such image."""
    place = recipe(name).place
    return place / "rootfs" if _record(place) else None


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "agentgym" / "sandboxes"


def build(
    name: str,
    how: str = "auto",
    *,
    docker: bool | None = None,
    force: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Built:
    """Make an image, unless it is there. Of two processes the second waits for the first.

    Args:
        how: "registry", "packages", or "auto": the registry if it answers, else packages.
        docker: whether to make a Docker image too; None: if an engine answers.
        force: rebuild it. Sandboxes that run from its root folder lose their files.

    Raises:
        ValueError: there is no such image or way.
        SandboxError: it cannot be built, or a Docker Engine is needed and does not answer. Nothing half-made is left.
    """
    if how not in WAYS:
        raise ValueError(f"unknown build method {how!r}: choose {', '.join(WAYS)}")
    if how == "registry" and docker is False:
        raise ValueError("from the registry, an image is built by Docker: without it, build from packages")
    what, started = recipe(name), time.monotonic()
    place = what.place
    with _locked(say):
        api = None
        if docker is None and how != "registry" and (reason := engine.unavailable()):
            say(f"no Docker image is made: {reason}")
        elif docker is not False:
            api = engine.client()
        kept = _record(place)
        if kept and (force or how not in ("auto", kept["way"])):
            kept = None
        tagged = engine.way_of(api, what.tag) if api else None
        if force or how not in ("auto", tagged):
            tagged = None
        fresh = kept is None or (api is not None and tagged is None)
        if kept is None and tagged is None:
            tagged = _make(what, how, api, say)
        if kept is None and tagged is not None and api is not None:
            with _work(place) as work:
                say("copying the image's files out of Docker")
                exported = engine.export_image(api, what.tag, work)
                if next(project_files(str(exported)), None):
                    api.remove_image(what.tag, force=True)
                _publish(exported, place, tagged)
        kept = _record(place)
        if kept is None:
            raise SandboxError(f"{place} was removed while {name} was being built")
        root, way = place / "rootfs", kept["way"]
        if api is not None and tagged is None:
            say("importing it into Docker")
            engine.load_image(api, root, what.tag, name, way)
    return Built(name, way, root, what.tag if api else None, kept["bytes"], time.monotonic() - started, fresh)


def _make(what: Recipe, how: str, api: APIClient | None, say: Callable[[str], None]) -> str | None:
    """Make a Docker image from the registry and return its way, or a root folder from packages."""
    way, why = _choose(what, how, api)
    say(f"from {'the registry' if way == 'registry' else 'Debian packages'}: {why}")
    if way == "registry" and api is not None:
        engine.build_image(api, what.folder, what.tag, what.name, say)
        return way
    with _work(what.place) as work:
        _publish(debian.unpack(what.packages, what.requirements, work, say), what.place, way)
    return None


def _choose(what: Recipe, how: str, api: APIClient | None) -> tuple[str, str]:
    if how != "auto":
        return how, "asked for"
    if api is None:
        return "packages", "no Docker image is made"
    base = base_of(what.folder / "Dockerfile")
    refusal = engine.unreachable(base)
    if refusal is None:
        return "registry", f"{base} is at hand"
    if missing := debian.missing_tools():
        why = f"{base} cannot be pulled ({refusal}), and there are no Debian packages here ({', '.join(missing)} not found)"
        todo = "Give the Docker Engine a way to a registry, or build on Debian or Ubuntu"
        raise SandboxError(f"{what.name} cannot be built: {why}. {todo}")
    return "packages", f"{base} cannot be pulled ({refusal})"


def base_of(dockerfile: Path) -> str:
    for line in dockerfile.read_text().splitlines():
        words = line.split()
        if words and words[0].upper() == "FROM":
            return next(word for word in words[1:] if not word.startswith("--"))
    raise SandboxError(f"{dockerfile} has no FROM line")


def _record(place: Path) -> dict[str, Any] | None:
    try:
        record: dict[str, Any] = json.loads((place / "image.json").read_text())
    except FileNotFoundError:
        return None
    return record


@contextmanager
def _work(place: Path) -> Iterator[Path]:
    work = place.parent / f"{place.name}.part"
    try:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        yield work
    except OSError as error:
        raise SandboxError(f"{place} cannot be made: {error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _publish(root: Path, place: Path, way: str) -> None:
    if not any(os.path.lexists(root / folder / "python3") for folder in ("usr/bin", "usr/local/bin")):
        raise SandboxError("the image has no python3 in /usr/bin or /usr/local/bin, which every sandbox needs")
    if found := next(project_files(str(root)), None):
        which = f"/{Path(found).relative_to(root)}, where programs would see hidden tests"
        todo = "leave it out of packages.txt, requirements.txt and the Dockerfile"
        raise SandboxError(f"the image holds files of agentgym, such as {which}: {todo}")
    finished = root.parent / "finished"
    finished.mkdir()
    size = sum(Path(folder, name).lstat().st_size for folder, _, names in os.walk(root) for name in names)
    root.rename(finished / "rootfs")
    (finished / "image.json").write_text(json.dumps({"way": way, "bytes": size, "made": time.time()}))
    if place.exists():
        place.rename(root.parent / "old")
    finished.rename(place)


@contextmanager
def _locked(say: Callable[[str], None]) -> Iterator[None]:
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise SandboxError(f"{folder} cannot be written to: {error}; XDG_CACHE_HOME names another place") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another build to end")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
