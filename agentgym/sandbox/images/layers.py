"""Image layers: a folder with a `base` adds Python packages, another Python or files to another image. Nothing of the base is copied.

In its root folder, a device 0:0 stands for a file that the image below has and this one has not, as for the kernel's overlays.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from agentgym.sandbox.api import SandboxError
from agentgym.sandbox.images import debian, interpreters

BASE = "base"  # the file that names the image below
MADE_BY = "made-by"  # the file that names the command whose program fills the layer
INSTALL_SECONDS = 900.0
PIP_OF_3_6 = "pip==21.3.1"  # the last one; that which comes with Python 3.6 knows no wheels of today
_NOT_HERE = ("packages.txt", "Dockerfile")

Fill = Callable[[Path], None]  # puts files into the root folder of a layer


def base_of(folder: Path) -> str | None:
    """The image below, as a name or an absolute path; None if there is none. ValueError if the folder is no layer."""
    if not (folder / BASE).is_file():
        return None
    if wrong := next((name for name in _NOT_HERE if (folder / name).is_file()), None):
        raise ValueError(f"{folder} has a {BASE}, so it takes no {wrong}: the base is built from that")
    text = (folder / BASE).read_text().strip()
    if not text or "\n" in text:
        raise ValueError(f"{folder / BASE} says {text!r:.50}: write the name of an image, or the path of its folder")
    return text if "/" not in text else str((folder / text).resolve())


def made_by(folder: Path) -> str:
    file = folder / MADE_BY
    return file.read_text().strip() if file.is_file() else ""


def make(
    folder: Path, root: Path, below: Sequence[Path], python: str, fill: Fill | None, say: Callable[[str], None]
) -> None:
    """Put what a folder adds into an empty root folder.

    Args:
        below: the root folders of the images below, the nearest first.
        python: the version of the folder's own interpreter, or of the nearest below; "" for Debian's.
        fill: adds what no file of the folder says.
    """
    command = made_by(folder)
    if command and fill is None:
        raise SandboxError(f"{folder} cannot be built alone: run `{command}`")
    if interpreters.wanted(folder):
        interpreters.add(python, root, say, below[-1])
    requirements = folder / "requirements.txt"
    if requirements.is_file():
        say(f"adding the Python packages of {requirements.name}")
        if python:
            install(requirements, root, python)
        else:
            debian.install(requirements, root, debian.python_of(below[-1]))
    if fill is not None:
        fill(root)


def install(requirements: Path, root: Path, python: str) -> None:
    """Install packages for an interpreter of this machine, whose copy is at /opt/pythonX.Y, by its own pip."""
    found = interpreters.find(python)
    short = found.short
    target = root / "opt" / f"python{short}" / "lib" / f"python{short}" / "site-packages"
    target.mkdir(parents=True, exist_ok=True)
    options = ["--no-deps", "--no-compile", "--disable-pip-version-check", "--no-warn-script-location", "--quiet"]
    pip, wanted = ["-m", "pip"], [*options, "--target", str(target), "-r", str(requirements)]
    with tempfile.TemporaryDirectory() as work:
        if found.short == "3.6":
            _pip(found, pip, [*options, "--target", work, PIP_OF_3_6])
            pip = [str(Path(work, "pip"))]
        _pip(found, pip, wanted)
    _move_scripts(target / "bin", root / "usr/local/bin", f"/opt/python{short}/bin/python{short}")
    interpreters.compile_all(found, target)


def _pip(interpreter: interpreters.Interpreter, pip: Sequence[str], options: Sequence[str]) -> None:
    command = [interpreter.told["program"], "-I", *pip, "install", *options]
    what = f"{options[-1]} cannot be installed by Python {interpreter.version}"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False, cwd="/")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxError(f"{what}: {error}") from error
    if done.returncode:
        raise SandboxError(f"{what}: {' '.join(done.stderr.strip().splitlines()[-3:]):.500}")


def _move_scripts(made: Path, programs: Path, python: str) -> None:
    """Put console scripts on the PATH; they name the interpreter that installed them."""
    if not made.is_dir():
        return
    programs.mkdir(parents=True, exist_ok=True)
    for script in sorted(path for path in made.iterdir() if path.is_file()):
        begin, line_end, rest = script.read_bytes().partition(b"\n")
        if begin.startswith(b"#!") and b"python" in begin:
            begin = b"#!" + python.encode()
        place = programs / script.name
        place.unlink(missing_ok=True)
        place.write_bytes(begin + line_end + rest)
        place.chmod(0o755)
    shutil.rmtree(made)


def check(root: Path, below: Sequence[Path]) -> None:
    """SandboxError if a folder of a layer would hide a link, or a file, of an image below."""
    for folder, _, _ in os.walk(root):
        name = Path(folder).relative_to(root)
        for lower in below:
            place = lower / name
            if place.is_symlink() or (place.exists() and not place.is_dir()):
                raise SandboxError(f"/{name} cannot be added: it is a link or a file in the image below")
