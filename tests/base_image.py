"""An image to build on with no registry and no network: our image of the search environment (numpy takes its libstdc++), with pip and packages of this environment in it."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

DOCKERFILE = """\
FROM {image}
COPY site /opt/site
# pip reads 0 here as --no-build-isolation.
ENV PYTHONPATH=/opt/site PIP_NO_INDEX=1 PIP_NO_DEPS=1 PIP_NO_BUILD_ISOLATION=0
RUN mkdir -p -m 1777 /tmp
"""
# What `pip install agentgym-toolkit` brings, and pip itself.
OF_AGENTGYM = (
    *(
        "aiohappyeyeballs",
        "aiohttp",
        "aiosignal",
        "argcomplete",
        "attrs",
        "cloudpickle",
        "Farama-Notifications",
        "frozenlist",
        "gymnasium",
    ),
    *("idna", "markdown-it-py", "mdurl", "multidict", "numpy", "pip", "propcache", "pygments", "PyYAML", "rich"),
    *("setuptools", "typing_extensions", "yarl"),
)


@contextlib.contextmanager
def base_image(client: Any, context: Path, packages: Iterable[str] = OF_AGENTGYM) -> Iterator[str]:
    """The tag of such an image, gone after the block; `context` is an empty folder."""
    from agentgym.sandbox.images import build as images

    for name in packages:
        package = distribution(name)
        for part in {file.parts[0] for file in package.files or []} - {".."}:
            source, target = Path(str(package.locate_file(part))), context / "site" / part
            if source.is_dir():
                shutil.copytree(
                    source, target, ignore=shutil.ignore_patterns("__pycache__", "tests", "*.pyi"), dirs_exist_ok=True
                )
            elif source.suffix == ".py":
                target.parent.mkdir(exist_ok=True)
                shutil.copy(source, target)
    (context / "Dockerfile").write_text(DOCKERFILE.format(image=images.docker_tag("search")), encoding="utf-8")
    tag = f"agentgym-test-base-{context.name}:{os.getpid()}".lower()
    client.images.build(path=str(context), tag=tag, rm=True, forcerm=True, network_mode="none")
    try:
        yield tag
    finally:
        client.images.remove(tag, force=True)
