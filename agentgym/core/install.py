"""The `pip install` commands of messages: with a checkout they name its folder, since no index has agentgym yet."""

import json
import shlex
from importlib import metadata
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import url2pathname

from agentgym import DISTRIBUTION


def pip_install(requirement: str = DISTRIBUTION) -> str:
    """The command that installs a requirement; agentgym and its extras come from the checkout in use, if any."""
    name, bracket, extras = requirement.partition("[")
    if name == DISTRIBUTION and (checkout := _checkout()):
        *options, folder = checkout
        return shlex.join(["pip", "install", *options, folder + bracket + extras])
    return shlex.join(["pip", "install", requirement])


def _checkout() -> list[str]:
    """Pip's arguments for the checkout that runs or was installed; empty if agentgym came from an index or a wheel."""
    here = Path(__file__).resolve().parents[2]
    if (here / "pyproject.toml").is_file():
        return ["-e", str(here)]
    try:
        source = json.loads(metadata.distribution(DISTRIBUTION).read_text("direct_url.json") or "{}")
    except metadata.PackageNotFoundError:
        return []
    return [url2pathname(urlparse(source["url"]).path)] if "dir_info" in source else []
