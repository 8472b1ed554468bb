"""Finds this project's files in a tree, to hide them: its packages hold hidden tests and answers.

It also runs as a program in a container, to search an image. It uses only the standard library.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator

PACKAGES = ("agentgym", "agentgym_envs", "agent_train")
_INSTALLED = ("site-packages", "dist-packages")
_KERNEL = ("/proc", "/sys", "/dev")


def project_files(root: str, installed: bool = False) -> Iterator[str]:
    """The project's folders, files and whole checkouts below `root`; with `installed`, also folders of installed packages."""
    for folder, folders, files in os.walk(root):
        if folder in _KERNEL:
            folders.clear()
            continue
        ours = [name for name in folders if _is_ours(name)]
        if folder != root and _is_checkout(ours, files):
            folders.clear()
            yield folder
            continue
        hidden = {name for name in folders if name in ours or (installed and name in _INSTALLED)}
        folders[:] = [name for name in folders if name not in hidden]
        yield from (os.path.join(folder, name) for name in sorted(hidden) if not _is_link(folder, name))
        yield from (os.path.join(folder, name) for name in files if _is_ours(name) and not _is_link(folder, name))


def _is_ours(name: str) -> bool:
    return "agentgym" in name or name.startswith(("agent_train", "agent-train"))


def _is_checkout(ours: list[str], files: list[str]) -> bool:
    return "pyproject.toml" in files and any(name in PACKAGES for name in ours)


def _is_link(folder: str, name: str) -> bool:
    return os.path.islink(os.path.join(folder, name))


if __name__ == "__main__":
    json.dump(list(project_files("/")), sys.stdout)
