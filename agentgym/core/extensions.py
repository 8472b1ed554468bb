"""Extension points: what users may add, by a name, by `package.module:attribute`, or by an entry point of their package."""

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from typing import Any

from agentgym.core.tracebacks import place_of, text_of_error
from agentgym.core.usage_error import nearest

PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def import_module(module: str, path: str) -> Any:
    """The module that a path names. Raises ImportError, also for what the module's own code raises."""
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        why = text_of_error(error)
        if not isinstance(error, ImportError):
            why = f"{type(error).__name__}: {getattr(error, 'msg', why)} ({place_of(error)})"
        raise ImportError(f"cannot import module {module!r} of {path!r}: {why}") from error


def import_path(path: str) -> Any:
    module, _, attribute = path.partition(":")
    found = import_module(module, path)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ImportError(f"module {module!r} has no {attribute!r} ({path!r})")
        found = getattr(found, part)
    return found


@dataclass(frozen=True)
class ExtensionPoint:
    """The implementations of one thing ("policy loss") by name: shipped ones, and entry points of a group. Nothing is imported early.

    A package adds `mine` by `[project.entry-points."agentgym.losses"] mine = "pkg.mod:mine"`; shipped names stay as they are.
    """

    noun: str
    group: str
    shipped: Mapping[str, str]

    @cached_property
    def names(self) -> dict[str, str]:
        installed = {point.name: point.value for point in metadata.entry_points(group=self.group)}
        return {**self.shipped, **{name: path for name, path in installed.items() if name not in self.shipped}}

    def path(self, name: str) -> str:
        """The path of a name, or the name itself if it is a path. Raises ValueError with the nearest names."""
        if name in self.names:
            return self.names[name]
        if PATH.fullmatch(name):
            return name
        known = f"Known are {', '.join(self.names)}; your own" if self.names else "Yours"
        form = f"{known} is named as package.module:function"
        raise ValueError(f"unknown {self.noun} {name!r}{nearest(name, self.names) or ':'} {form}")

    def load(self, name: str) -> Any:
        path = self.path(name)
        try:
            found = import_path(path)
        except ImportError as error:
            raise ValueError(f"{self.noun} {name!r}: {error}") from error
        if not callable(found):
            raise ValueError(f"{self.noun} {name!r} is a {type(found).__name__}, not a function")
        return found
