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


# (file, ids, docker, force, rootfs, jobs, say) -> the images of a file's instances, or of some by their ids, `jobs` at a
# time; the rest as for `build`. ValueError or OSError: no such file or id.
Builder = Callable[[str, Iterable[str], bool | None, bool, bool, int, Callable[[str], None]], list[InstanceImage]]


def register_instance_images(name: str, builder: str) -> None:
    """Make a builder known by its "module:function", which is imported when needed."""
    _builders[name] = builder


def builder_of(name: str) -> Builder:
    """A builder by its name, imported. ValueError: there is none."""
    load_plugins()
    if name not in _builders:
        raise ValueError(
            f"no images of instances are called {name!r}; there are {', '.join(sorted(_builders)) or 'none'}"
        )
    builder: Builder = import_path(_builders[name])
    return builder
