"""Other Pythons for images: an interpreter that this machine has is copied, without installed packages, to `/opt`.

A folder's `python-version` names it ("3.9", or "3.9.18"). The image keeps its own `python3`, with which sandboxes start.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from agentgym.sandbox.api import SandboxError

FILE = "python-version"
ASK_SECONDS = 20.0
COMPILE_SECONDS = 600.0
# The library's own tests and bytecode, and packages that somebody has installed: they may be this project's, with its answers.
LEFT_OUT = ("site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib", "turtledemo")
_ASK = """
import json, os, sys, sysconfig
names = "LIBDIR", "INSTSONAME", "Py_ENABLE_SHARED"
paths = {name: sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "include")}
print(json.dumps({
    "version": sys.version.split()[0], "prefix": sys.base_prefix, "program": os.path.realpath(sys.executable),
    **paths, **{name: sysconfig.get_config_var(name) for name in names},
}))
"""


@dataclass(frozen=True)
class Interpreter:
    """A Python of this machine: `told` is what it said of itself."""

    version: str
    told: dict[str, str]

    @property
    def short(self) -> str:
        return ".".join(self.version.split(".")[:2])


def wanted(folder: Path) -> str:
    """The version that an image's folder asks for; "" for none. SandboxError if it is no version."""
    file = folder / FILE
    if not file.is_file():
        return ""
    text = file.read_text().strip()
    if not re.fullmatch(r"3\.\d{1,2}(\.\d{1,2})?", text):
        raise SandboxError(f"{file} says {text!r:.50}: write a version such as 3.9 or 3.9.18")
    return text


def find(version: str) -> Interpreter:
    """The newest interpreter of this version here. SandboxError if there is none: lists what there is, and what to do."""
    found = [interpreter for program in _programs() if (interpreter := _asked(program)) is not None]
    fitting = [each for each in found if f"{each.version}.".startswith(f"{version}.")]
    if not fitting:
        there = sorted({each.version for each in found}, key=_order)
        todo = f"`pyenv install {version}`, `uv python install {version}`, or put python{version} on the PATH"
        raise SandboxError(
            f"no Python {version} here to copy into the image; there are {', '.join(there) or 'none'}. Do one of: {todo}; "
            f"or give the folder a Dockerfile that has it, such as FROM python:{version}-slim"
        )
    return max(fitting, key=lambda each: _order(each.version))


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _programs() -> Iterator[Path]:
    home = Path.home()
    roots = [Path(os.environ.get("PYENV_ROOT") or home / ".pyenv", "versions")]
    roots += [Path(os.environ.get("UV_PYTHON_INSTALL_DIR") or home / ".local/share/uv/python")]
    seen = set()
    folders = [place / "bin" for root in roots if root.is_dir() for place in sorted(root.iterdir())]
    folders += [Path(place) for place in os.get_exec_path()] + [Path("/usr/bin"), Path("/usr/local/bin")]
    for folder in folders:
        for program in sorted(folder.glob("python3.*")) if folder.is_dir() else []:
            real = program.resolve()
            if re.fullmatch(r"python3\.\d+", program.name) and real not in seen and os.access(real, os.X_OK):
                seen.add(real)
                yield program


def _asked(program: Path) -> Interpreter | None:
    try:
        done = subprocess.run(
            [program, "-I", "-S", "-c", _ASK], capture_output=True, text=True, timeout=ASK_SECONDS, check=False, cwd="/"
        )
        told = json.loads(done.stdout) if done.returncode == 0 else None
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return Interpreter(told["version"], told) if told else None


def add(version: str, root: Path, say: Callable[[str], None], system: Path | None = None) -> None:
    """Copy an interpreter into a root folder: to `/opt/pythonX.Y`, with links in `/usr/local/bin`.

    `system`: the root folder that has Debian's libraries, if it is another one.
    """
    interpreter = find(version)
    short = interpreter.short
    told, place = interpreter.told, root / "opt" / f"python{short}"
    say(f"adding Python {interpreter.version} of {told['prefix']}")
    (place / "bin").mkdir(parents=True)
    (place / "lib").mkdir()
    shutil.copy(told["program"], place / "bin" / f"python{short}")
    for name in {told["stdlib"], told["platstdlib"]}:
        ignore = shutil.ignore_patterns(*LEFT_OUT)
        shutil.copytree(name, place / "lib" / f"python{short}", ignore=ignore, symlinks=False, dirs_exist_ok=True)
    (place / "lib" / f"python{short}" / "site-packages").mkdir(exist_ok=True)
    if Path(told["include"]).is_dir():
        shutil.copytree(told["include"], place / "include" / f"python{short}")
    if told["Py_ENABLE_SHARED"]:
        _add_library(Path(told["LIBDIR"], told["INSTSONAME"]), place, root, system or root)
    _rename(place, told["prefix"], f"/opt/python{short}")
    compile_all(interpreter, place / "lib")
    programs = root / "usr/local/bin"
    programs.mkdir(parents=True, exist_ok=True)
    for link in (f"python{short}", "python"):
        (programs / link).unlink(missing_ok=True)
        (programs / link).symlink_to(f"/opt/python{short}/bin/python{short}")


def compile_all(interpreter: Interpreter, folder: Path) -> None:
    """Bytecode for all modules in a folder: a sandbox cannot keep its own, and would compile at every start."""
    unchecked = ["--invalidation-mode", "unchecked-hash"] if _order(interpreter.version) >= (3, 7) else []
    command = [interpreter.told["program"], "-I", "-S", "-m", "compileall", "-q", *unchecked, str(folder)]
    # A package may hold a file for another Python, which does not compile: the rest does.
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(command, capture_output=True, timeout=COMPILE_SECONDS, check=False)


def _add_library(library: Path, place: Path, root: Path, system: Path) -> None:
    """The program looks for its library where it was built, then among the system's: a link is put there."""
    shutil.copy(library, place / "lib")
    for found in sorted((system / "usr/lib").glob("*-linux-gnu*")):
        folder = root / found.relative_to(system)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / library.name).unlink(missing_ok=True)
        (folder / library.name).symlink_to(f"/opt/{place.name}/lib/{library.name}")


def _rename(place: Path, old: str, new: str) -> None:
    """Replace the interpreter's old place in the files that extensions are compiled with."""
    if old == "/usr":
        return
    for file in [*place.rglob("_sysconfigdata*.py"), *place.rglob("Makefile")]:
        file.write_text(file.read_text(errors="surrogateescape").replace(old, new), errors="surrogateescape")
