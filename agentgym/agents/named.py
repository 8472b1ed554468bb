"""Agents of other projects by name, each in a virtual environment of its own with all versions pinned, made at its first use.

`packaged/` has the files of each, under its name: a program that starts it, its packages of PyPI, and those of npm, if any.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import TYPE_CHECKING

from agentgym.processes.child_process import supervised

if TYPE_CHECKING:
    from agentgym.core.env import Env

FOLDER = Path(__file__).with_name("packaged")
NAMES = tuple(sorted(file.stem.replace("_", "-") for file in FOLDER.glob("*.txt")))
INSTALL_SECONDS = 1800.0
TOOLS = {"mini-swe-agent": "bash"}  # of the environment, by which an agent does all its work

log = logging.getLogger(__name__)


def command_of(name: str) -> list[str]:
    """The command that starts an agent, which is installed first if need be. Raises ValueError if that fails."""
    # With -P, since the program's folder would hide the package of its name.
    return [str(_environment(name) / "bin" / "python"), "-P", str(_file(name, "py"))]


def check_tools(agent: str, env: Env) -> None:
    """Raise ValueError if an agent lacks the tools to act in an environment."""
    needed, inner = TOOLS.get(agent), env.unwrapped
    if needed is None or getattr(inner, "tools_at_reset", False):
        return
    has = [tool["function"]["name"] for tool in env.get_wrapper_attr("tools")]
    if needed in has:
        return
    raise ValueError(
        f"agent {agent!r} works by a tool {needed!r} alone, and {type(inner).__name__} has {', '.join(has) or 'no tools'}:"
        f" take an environment with a tool {needed!r}, or another agent, such as openai-agents"
    )


def _file(name: str, kind: str) -> Path:
    return FOLDER / f"{name.replace('-', '_')}.{kind}"


def _environment(name: str) -> Path:
    """The folder of the agent's virtual environment. Of two processes that want it, the second waits for the first."""
    pins = [file for kind in ("txt", "npm") if (file := _file(name, kind)).exists()]
    version = hashlib.sha256(b"".join(file.read_bytes() for file in pins) + sys.version.encode()).hexdigest()[:12]
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentgym" / "agents"
    folder = base / f"{name}-{version}"
    done = folder / "installed"
    if done.exists():
        return folder
    try:
        base.mkdir(parents=True, exist_ok=True)
        with (base / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                log.warning("installing the agent %s into %s: about a minute, once", name, folder)
                _install(folder, name)
                done.touch()
    except OSError as error:
        raise ValueError(f"agent {name!r} cannot be installed: {error}; XDG_CACHE_HOME names another place") from error
    except subprocess.SubprocessError as error:
        told = str(getattr(error, "stderr", "") or error).strip()[-1000:]
        raise ValueError(
            f"agent {name!r} cannot be installed into {folder}; is the package index within reach? {told}"
        ) from error
    return folder


def _uv() -> str | None:
    """uv, which takes a fifth of pip's time; None without it, or if pip's settings, which it does not read, choose the index."""
    beside = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    asked = [sys.executable, "-m", "pip", "config", "list"]
    told = subprocess.run(asked, check=False, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    return None if re.search(r"[.](index-url|no-index)=", told.stdout) else shutil.which("uv", path=beside)


def _install(folder: Path, name: str) -> None:
    uv, python = _uv(), f"{folder}/bin/python"
    venv.create(folder, clear=True, with_pip=uv is None)
    installer = [python, "-m", "pip", "--disable-pip-version-check", "install"]
    if uv is not None:
        installer = [uv, "pip", "install", "--native-tls", "--compile-bytecode", "--python", python]
    commands = [[*installer, "--quiet", "--no-deps", "--requirement", str(_file(name, "txt"))]]
    if (npm := _file(name, "npm")).exists():
        options = ["--silent", "--no-fund", "--no-audit", "--prefix", str(folder)]
        commands.append([f"{folder}/bin/npm", "install", *options, *npm.read_text().split()])
    for command in commands:
        subprocess.run(supervised(command), check=True, capture_output=True, text=True, timeout=INSTALL_SECONDS)
