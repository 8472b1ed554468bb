"""Packages that benchmarks compare with, each in a virtual environment in the user's cache, which is made on the first run."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

TRL = "trl==1.16.0"
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), "1")


def peer_python(name: str, pins: Sequence[str], *options: str, beside: Sequence[str] = ()) -> Path:
    """The Python of a peer's virtual environment.

    Args:
        pins: what it has.
        options: of `pip install`.
        beside: what else it depends on.
    """
    mark = hashlib.sha256(" ".join((*pins, *beside, platform.python_version())).encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "agentgym" / "benchmarks" / f"{name}-{mark}"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        print(f"installing {name} into {folder}", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *options, *pins]
        done = subprocess.run(install, check=False, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{name} cannot be installed: {done.stderr[-2000:]}")
        (folder / "complete").touch()
    return python


def trl_python() -> Path:
    """The Python of TRL's virtual environment. All but TRL comes from this Python's own packages."""
    packages = sysconfig.get_path("purelib")
    shared = [f"{name}=={version(name)}" for name in ("torch", "transformers", "accelerate", "datasets")]
    python = peer_python("trl", [TRL], "--no-deps", beside=[packages, *shared])
    lib = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (python.parent.parent / "lib" / lib / "site-packages" / "shared.pth").write_text(f"{packages}\n")
    return python
