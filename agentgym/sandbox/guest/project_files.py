"""Finds this project's files in a tree, to hide them: they hold hidden tests and answers. Also runs as a program in an image."""

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
        if folder != root and "pyproject.toml" in files and any(name in PACKAGES for name in folders):  # a checkout
            folders.clear()
            yield folder
            continue
        hidden = {name for name in folders if _is_ours(name) or (installed and name in _INSTALLED)}
        folders[:] = [name for name in folders if name not in hidden]
        paths = [os.path.join(folder, name) for name in (*sorted(hidden), *filter(_is_ours, files))]
        yield from (path for path in paths if not os.path.islink(path))


def _is_ours(name: str) -> bool:
    return "agentgym" in name or name.startswith(("agent_train", "agent-train"))


if __name__ == "__main__":
    json.dump(list(project_files("/")), sys.stdout)
