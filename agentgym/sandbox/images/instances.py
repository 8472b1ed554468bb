"""Images for the instances of a data set: packages register what builds them, by name."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from agentgym.core.extensions import import_path
from agentgym.core.registration import load_plugins
from agentgym.sandbox.images.build import Built

_builders: dict[str, str] = {}


@dataclass(frozen=True)
class InstanceImage:
    """The image of one instance, or why it was not built."""

    instance: str
    built: Built | None = None
    error: str = ""


# (file, ids, docker, force, rootfs, jobs, say) -> the images; see `build_instances`.
Builder = Callable[[str, Iterable[str], bool | None, bool, bool, int, Callable[[str], None]], list[InstanceImage]]


def register_instance_images(name: str, builder: str) -> None:
    """Make a builder known by its "module:function", which is imported when needed."""
    _builders[name] = builder


def build_instances(
    name: str,
    file: str,
    only: Iterable[str] = (),
    *,
    docker: bool | None = None,
    force: bool = False,
    rootfs: bool = True,
    jobs: int = 2,
    say: Callable[[str], None] = lambda text: None,
) -> list[InstanceImage]:
    """Build the images of a file's instances, or of `only` some by their ids, `jobs` at a time.

    Raises:
        ValueError, OSError: no such builder, file or id.
    """
    load_plugins()
    if name not in _builders:
        raise ValueError(
            f"no images of instances are called {name!r}; there are {', '.join(sorted(_builders)) or 'none'}"
        )
    builder: Builder = import_path(_builders[name])
    return builder(file, only, docker, force, rootfs, jobs, say)
