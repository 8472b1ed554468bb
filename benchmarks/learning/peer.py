"""TRL, installed from the package index into a virtual environment of its own in the user's cache."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

TRL = "trl==1.16.0"
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), "1")


def trl_python() -> Path:
    """The Python of TRL's virtual environment, which is made where there is none. All but TRL comes from this Python's own."""
    packages = sysconfig.get_path("purelib")
    shared = (
        TRL,
        packages,
        *(f"{name}=={version(name)}" for name in ("torch", "transformers", "accelerate", "datasets")),
    )
    mark = hashlib.sha256(" ".join((*shared, platform.python_version())).encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "agentgym" / "benchmarks" / f"trl-{mark}"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        print(f"installing {TRL} into {folder}", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", TRL]
        subprocess.run(install, check=True)
        own = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
        (own / "shared.pth").write_text(f"{packages}\n")
        (folder / "complete").touch()
    return python
