"""Builds images, the root file systems of sandboxes, from the folders of `sandboxes/` and any other.

`build` makes a Docker image and a root folder for bubblewrap, in one of two ways with the same programs: "registry" runs the
Dockerfile, "packages" unpacks Debian packages (`debian.py`) where no registry can be reached. A folder with a `base` is a layer
(`layers.py`): its root folder holds only what it adds, and its Docker image is one more layer on that of the base.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agentgym.sandbox.api import SandboxError, whole_number
from agentgym.sandbox.backends import engine
from agentgym.sandbox.guest.project_files import project_files
from agentgym.sandbox.images import debian, interpreters, layers, shelf

if TYPE_CHECKING:
    from docker import APIClient

WAYS = ("auto", "registry", "packages")
TAG = re.compile(r"agentgym/([a-z0-9][a-z0-9-]*):([0-9a-f]{12})")  # of an image that was built here or on a client
LAYER = "layer"  # how an image with a base is built
BYTES = "AGENTGYM_SANDBOX_IMAGES"  # that all root folders may take; by default half of their disk
FORMAT = 2  # of what this file and `debian.py` make; another number makes every image anew


@dataclass(frozen=True)
class Recipe:
    """An image's folder. `digest` is of all its files, of this machine's kind and of its base; a change gives another image."""

    name: str
    folder: Path
    digest: str
    base: Recipe | None = None  # the image below

    @property
    def tag(self) -> str:
        return f"agentgym/{self.name}:{self.digest}"

    @property
    def place(self) -> Path:
        return cache_folder() / self.name / self.digest

    @property
    def packages(self) -> list[str]:
        file = self.folder / "packages.txt"
        if not file.is_file():
            raise SandboxError(
                f"{self.folder} has no packages.txt: without a Docker Engine, nothing can be built from it"
            )
        lines = file.read_text().splitlines()
        return [line for line in (line.split("#", 1)[0].strip() for line in lines) if line]

    @property
    def requirements(self) -> Path | None:
        path = self.folder / "requirements.txt"
        return path if path.exists() else None


@dataclass(frozen=True)
class Built:
    """A built image; `tag` or `rootfs` is None where it was not built for Docker or bubblewrap. `fresh`: it had to be built."""

    name: str
    way: str
    rootfs: Path | None
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


def is_path(image: str) -> bool:
    """True for a folder's path: no Docker reference begins like one."""
    return image.startswith(("/", "./", "../"))


def is_reference(image: str) -> bool:
    return not is_path(image) and ("/" in image or ":" in image)


def docker_tag(image: str) -> str:
    """The Docker image of a folder, or the reference itself."""
    return image if is_reference(image) else recipe(image).tag


def docker_command(image: str) -> str:
    if TAG.fullmatch(image):
        return "agentgym sandbox build FOLDER"
    if is_path(image) and (command := layers.made_by(Path(image))):
        return command
    return f"docker pull {image}" if is_reference(image) else f"agentgym sandbox build {image}"


def recipe(image: str, above: tuple[Path, ...] = ()) -> Recipe:
    """The recipe of a name or a path. ValueError if there is no such image.

    `above`: the folders whose base it is.
    """
    if is_path(image):
        folder = Path(image).resolve()
        if not any((folder / file).is_file() for file in ("packages.txt", "Dockerfile", layers.BASE)):
            raise ValueError(f"{image}: an image's folder has a packages.txt or a Dockerfile, or a {layers.BASE}")
        name = re.sub(r"[^a-z0-9]+", "-", folder.name.lower()).strip("-") or "image"
    elif image in image_names():
        folder, name = image_folder() / image, image
    else:
        todo = "; the path of a folder begins with / or ./"
        raise ValueError(f"there is no image {image!r}; there are {', '.join(image_names())}{todo}")
    if folder in above:
        raise ValueError(f"{folder} is its own {layers.BASE}, by way of {above[-1]}")
    below = layers.base_of(folder)
    base = None if below is None else recipe(below, (*above, folder))
    digest = hashlib.sha256(f"{FORMAT} {platform.machine()}{f' {base.tag}' if base else ''}".encode())
    own = folder / "files"
    for path in sorted(p for p in folder.rglob("*") if not (base and p == folder / layers.BASE)):
        if path.is_symlink() and own in path.parents:
            digest.update(f"\n{path.relative_to(folder).as_posix()} -> {os.readlink(path)}\n".encode())
            continue
        if not path.is_file():
            continue
        content = path.read_bytes()
        runs = " +x" if path.stat().st_mode & 0o111 else ""
        digest.update(f"\n{path.relative_to(folder).as_posix()} {len(content)}{runs}\n".encode() + content)
    return Recipe(name, folder, digest.hexdigest()[:12], base)


def rootfs(image: str) -> Path | None:
    """The root folder of an image (its name, path or tag), or None if it is not built. ValueError if there is no such image."""
    tag = TAG.fullmatch(image)
    place = cache_folder() / tag[1] / tag[2] if tag else recipe(image).place
    return place / "rootfs" if shelf.read(place) else None


def layers_of(root: Path) -> tuple[Path, ...]:
    """An image's root folder and those of the images below it, the nearest first. SandboxError if one is gone."""
    found = [root]
    while tag := (shelf.read(found[-1].parent) or {}).get("base"):
        below = rootfs(tag)
        if below is None:
            raise SandboxError(f"{root.parent} needs the image {tag}, which is not there any more: build it again")
        found.append(below)
    return tuple(found)


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "agentgym" / "sandboxes"


def written_folder(files: Mapping[str, Path | str], place: Callable[[str], Path]) -> Path:
    """A folder of these files, links or texts, for `build`: at the place of their digest, and written unless it is there."""
    digest = hashlib.sha256()
    for name, file in sorted(files.items()):
        if isinstance(file, str):
            content = file.encode("utf-8", "surrogateescape")
        else:
            content = os.readlink(file).encode() if file.is_symlink() else file.read_bytes()
        runs = not isinstance(file, str) and not file.is_symlink() and file.stat().st_mode & 0o111
        digest.update(f"{name} {len(content)}{' +x' if runs else ''}\n".encode() + content)
    folder = place(digest.hexdigest()[:12])
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".part-", dir=folder.parent))
        for name, file in files.items():
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            if isinstance(file, str):
                (work / name).write_text(file, encoding="utf-8", errors="surrogateescape")
            else:
                shutil.copy(file, work / name, follow_symlinks=False)
        try:
            work.rename(folder)
        except OSError:  # another process was first
            shutil.rmtree(work)
            if not folder.is_dir():
                raise
    return folder


def build(
    name: str,
    how: str = "auto",
    *,
    docker: bool | None = None,
    force: bool = False,
    say: Callable[[str], None] = lambda text: None,
    fill: layers.Fill | None = None,
    rootfs: bool = True,
) -> Built:
    """Make an image, and those below it, unless it is there. Of two processes the second waits for the first.

    Args:
        name: of a folder of `sandboxes/`, or the path of any folder.
        how: "registry", "packages", or "auto": the registry if it answers, else packages.
        docker: whether to make a Docker image too; None: if an engine answers.
        force: rebuild it, and none below it. Sandboxes that run from its root folder lose their files.
        rootfs: whether to copy the files of an image that Docker builds, for bubblewrap.
        fill: puts files into the root folder of a layer, besides what its folder says; not called if that is there.

    Raises:
        ValueError: there is no such image or way.
        SandboxError: it cannot be built, or a Docker Engine is needed and does not answer. Nothing half-made is left.
    """
    if how not in WAYS:
        raise ValueError(f"unknown build method {how!r}: choose {', '.join(WAYS)}")
    if how == "registry" and docker is False:
        raise ValueError("from the registry, an image is built by Docker: without it, build from packages")
    what, started = recipe(name), time.monotonic()
    if what.base is not None:
        return _build_layer(what, what.base, how, docker, force, say, fill)
    place = what.place
    with locked(place.parent, say):
        api = None
        if docker is None and how != "registry" and (reason := engine.unavailable()):
            say(f"no Docker image is made: {reason}")
        elif docker is not False:
            api = engine.client()
        kept = shelf.read(place)
        if kept and (force or how not in ("auto", kept["way"])):
            kept = None
        tagged = engine.way_of(api, what.tag) if api and not force else None
        tagged = tagged if how in ("auto", tagged) else None
        fresh = (kept is None and (rootfs or tagged is None)) or (api is not None and tagged is None)
        if kept is None and tagged is None:
            tagged = _make(what, how, api, say)
        if kept is None and tagged is not None and api is not None:
            if not rootfs:
                size = (engine.inspect_image(api, what.tag) or {}).get("Size", 0)
                return Built(name, tagged, None, what.tag, size, time.monotonic() - started, fresh)
            _export(what, tagged, api, say)
        kept = shelf.read(place)
        if kept is None:
            raise SandboxError(f"{place} was removed while {name} was being built")
        root, way = place / "rootfs", kept["way"]
        if api is not None and tagged is None:
            say("importing it into Docker")
            engine.load_image(api, root, what.tag, way)
    _make_room(what, fresh, api, say)
    return Built(name, way, root, what.tag if api else None, kept["bytes"], time.monotonic() - started, fresh)


def _export(what: Recipe, way: str, api: APIClient, say: Callable[[str], None]) -> None:
    """Copy the files of a Docker image, for bubblewrap."""
    with _work(what.place) as work:
        say("copying the image's files out of Docker")
        exported = engine.export_image(api, what.tag, work)
        if next(project_files(str(exported)), None):
            api.remove_image(what.tag, force=True)
        _publish(exported, what, way)


def _build_layer(
    what: Recipe,
    base: Recipe,
    how: str,
    docker: bool | None,
    force: bool,
    say: Callable[[str], None],
    fill: layers.Fill | None,
) -> Built:
    started = time.monotonic()
    build(str(base.folder), how, docker=docker, say=lambda text: say(f"{base.name}: {text}"))
    with locked(what.place.parent, say):
        api = engine.client() if docker or (docker is None and engine.unavailable() is None) else None
        fresh = force or shelf.read(what.place) is None
        if fresh:
            below = rootfs(base.tag)
            if below is None:
                raise SandboxError(f"the image {base.tag} was removed while {what.name} was being built")
            with _work(what.place) as work:
                root = work / "rootfs"
                root.mkdir(mode=0o755)
                _make_layer(what, root, layers_of(below), fill, say)
                _publish(root, what, LAYER)
        if api is not None and (fresh or engine.way_of(api, what.tag) is None):
            say("adding it to Docker")
            engine.add_layer(api, base.tag, what.place / "rootfs", what.tag, LAYER)
            fresh = True
    _make_room(what, fresh, api, say)
    size = (shelf.read(what.place) or {}).get("bytes", 0)
    return Built(
        what.name, LAYER, what.place / "rootfs", what.tag if api else None, size, time.monotonic() - started, fresh
    )


def _make_room(what: Recipe, fresh: bool, api: APIClient | None, say: Callable[[str], None]) -> None:
    """Make room for a requested image: it is evicted last, and if it is new, others may be evicted for it."""
    used(what.tag)
    if fresh:
        most = whole_number(BYTES, shutil.disk_usage(what.place).total // 2)
        shelf.evict(cache_folder(), most, what.place, lambda tag: api is None or engine.untag(api, tag), say)


def used(image: str) -> None:
    """Count an image and those below it as used now, if their files are here."""
    root = rootfs(image) if not is_reference(image) or TAG.fullmatch(image) else None
    for file in shelf.hold(layer.parent for layer in layers_of(root)) if root is not None else ():
        file.close()


def _make_layer(
    what: Recipe, root: Path, below: Sequence[Path], fill: layers.Fill | None, say: Callable[[str], None]
) -> None:
    python, each = "", what
    while not python and each is not None:
        python, each = interpreters.wanted(each.folder), each.base  # type: ignore[assignment]
    layers.make(what.folder, root, below, python, fill, say)
    _add_files(what.folder / "files", root)
    layers.check(root, below)


def _make(what: Recipe, how: str, api: APIClient | None, say: Callable[[str], None]) -> str | None:
    """Make a Docker image from the registry and return its way, or a root folder from packages."""
    way, why = _choose(what, how, api)
    say(f"from {'the registry' if way == 'registry' else 'Debian packages'}: {why}")
    if way == "registry" and api is not None:
        engine.build_image(api, what.folder, what.tag, say)
        return way
    with _work(what.place) as work:
        python = interpreters.wanted(what.folder)
        if python:
            interpreters.find(python)  # before all is downloaded
        root = debian.unpack(what.packages, what.requirements, work, say)
        if python:
            interpreters.add(python, root, say)
        _add_files(what.folder / "files", root)
        _publish(root, what, way)
    return None


def _add_files(folder: Path, root: Path) -> None:
    """Copy an image's own files to where they are below its `files/`; links stay links, to what the image has there."""
    for file in sorted(path for path in folder.rglob("*") if path.is_symlink() or path.is_file()):
        place = root / file.relative_to(folder)
        if not place.parent.resolve().is_relative_to(root.resolve()):  # a link of a package would lead to this machine
            raise SandboxError(f"{file} cannot be added: its folder is a link in the image")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        if file.is_symlink():
            place.symlink_to(file.readlink())
        else:
            shutil.copyfile(file, place)
            place.chmod(file.stat().st_mode & 0o755 | 0o644)


def _choose(what: Recipe, how: str, api: APIClient | None) -> tuple[str, str]:
    if how != "auto":
        return how, "asked for"
    if not (what.folder / "Dockerfile").is_file():
        return "packages", "there is no Dockerfile"
    if api is None:
        return "packages", "no Docker image is made"
    base = base_of(what.folder / "Dockerfile")
    refusal = engine.unreachable(base)
    if refusal is None or not (what.folder / "packages.txt").is_file():
        return "registry", f"{base} is at hand" if refusal is None else "there is no packages.txt"
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


@contextmanager
def _work(place: Path) -> Iterator[Path]:
    work = place.parent / f"{place.name}{shelf.PART}"
    try:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        yield work
    except OSError as error:
        raise SandboxError(f"{place} cannot be made: {error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _publish(root: Path, what: Recipe, way: str) -> None:
    def has(program: str) -> bool:
        return any(os.path.lexists(root / folder / program) for folder in ("usr/bin", "usr/local/bin"))

    if what.base is None and not has("python3"):
        raise SandboxError("the image has no python3 in /usr/bin or /usr/local/bin, which every sandbox needs")
    python = "python" + ".".join(interpreters.wanted(what.folder).split(".")[:2])
    if python != "python" and not has(python):
        raise SandboxError(f"the image has no {python}, which {interpreters.FILE} asks for: add it in the Dockerfile")
    if found := next(project_files(str(root)), None):
        which = f"/{Path(found).relative_to(root)}, where programs would see hidden tests"
        todo = "leave it out of packages.txt, requirements.txt and the Dockerfile"
        raise SandboxError(f"the image holds files of agentgym, such as {which}: {todo}")
    finished = root.parent / "finished"
    finished.mkdir()
    size = sum(Path(folder, name).lstat().st_size for folder, _, names in os.walk(root) for name in names)
    root.rename(finished / "rootfs")
    base = {"base": what.base.tag} if what.base is not None else {}
    (finished / shelf.RECORD).write_text(json.dumps({"way": way, "bytes": size, "made": time.time(), **base}))
    if what.place.exists():
        what.place.rename(root.parent / "old")
    finished.rename(what.place)


@contextmanager
def locked(folder: Path, say: Callable[[str], None] = lambda text: None) -> Iterator[None]:
    """One process at a time, for what is made once in a folder. SandboxError: it cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / shelf.LOCK).open("w")
    except OSError as error:
        raise SandboxError(f"{folder} cannot be written to: {error}; XDG_CACHE_HOME names another place") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another build to end")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
