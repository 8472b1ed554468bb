"""The root of a bubblewrap sandbox without a built image: programs and Python of this machine.

Of Python only the standard library is mounted: installed packages, above all this project's, hold hidden tests and answers.
Files of the project, its data and its caches are covered in mounted folders.
"""

import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from agentgym.sandbox.guest.project_files import PACKAGES, project_files

_USR = ("bin", "sbin", "libexec", "share")  # and lib, lib64 and the like; /usr/local and /usr/src stay hidden
_ETC = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "mime.types")


def host_python() -> Path:
    return Path(sys.base_prefix, "bin", "python3")


def host_root() -> list[str]:
    """Arguments of bwrap: the mounts and their covers."""
    shown = [*_system(), *_python()]
    options = folder_option("/etc")
    for name in _ETC:
        options += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    made: set[Path] = set()
    for entry in shown:
        for parent in reversed(entry.parents[:-1]):
            if parent not in made:
                made.add(parent)
                options += folder_option(str(parent))
        is_system_s = entry.parent in (Path("/"), Path("/usr"))
        options += same(entry, str(entry.parent)) if is_system_s else ["--ro-bind", str(entry), str(entry)]
    for folder in shown:
        if folder.is_dir() and not folder.is_symlink():
            options += _covers(folder)
    return options


def _covers(folder: Path) -> list[str]:
    options: list[str] = []
    secrets = [str(path) for path in _secrets() if path.is_relative_to(folder)]
    last = ""
    for path in sorted({*_installed(folder), *secrets}, key=lambda path: Path(path).parts):
        if not last or not Path(path).is_relative_to(last):  # else it is covered with the folder that it is in
            options += cover(path, os.path.isdir(path))
            last = path
    return options


def cover(path: str, is_folder: bool) -> list[str]:
    if is_folder:
        return ["--perms", "0555", "--size", "4096", "--tmpfs", path, "--remount-ro", path]
    return ["--ro-bind", "/dev/null", path]


def same(entry: Path, folder: str) -> list[str]:
    place = str(Path(folder, entry.name))
    if entry.is_symlink():
        return ["--symlink", os.readlink(entry), place]
    return ["--ro-bind", str(entry), place]


def folder_option(path: str) -> list[str]:
    """A folder that programs can go through; those that bubblewrap makes by itself are its user's alone."""
    return ["--perms", "0755", "--dir", path]


def _system() -> Iterator[Path]:
    for parent, names in (("/", ("bin", "sbin")), ("/usr", _USR)):
        for entry in sorted(Path(parent).iterdir()):
            if entry.is_dir() and (entry.name in names or entry.name.startswith("lib")):
                yield entry


def _python() -> Iterator[Path]:
    prefix = Path(sys.base_prefix)
    if prefix == Path("/usr"):
        return
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    yield from (path for name in ("python", "python3", version) if (path := prefix / "bin" / name).exists())
    folders = {Path(os.__file__).parent, Path(sys.base_exec_prefix, sys.platlibdir, version)}
    yield from (path for path in sorted(folders) if path.is_dir())
    yield from (path for path in sorted((prefix / "lib").glob("*.so*")) if path.exists())


@cache
def _installed(folder: Path) -> list[str]:
    """Asked once a process, as it takes a second: later packages go into folders that were found."""
    return list(project_files(str(folder), installed=True))


def _secrets() -> tuple[Path, ...]:
    home = os.path.expanduser("~")
    cache_home = os.environ.get("XDG_CACHE_HOME") or os.path.join(home, ".cache")
    places = [os.path.join(cache_home, name) for name in ("agentgym", "huggingface")]
    names = ("AGENTGYM_DATA", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_DATASETS_CACHE")
    places += [os.environ[name] for name in names if os.environ.get(name)]
    package = Path(__file__).resolve().parents[2]
    places += [str(package.parent / name) for name in PACKAGES]
    return tuple(path for path in (Path(place).expanduser().resolve() for place in places) if path.exists())
