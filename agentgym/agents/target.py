"""Imports what a user names as `package.module:name`, also from the current directory."""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from agentgym.agents.named import NAMES
from agentgym.core.tracebacks import place_of


def find(target: str) -> tuple[Any, ModuleType]:
    """The named thing and its module. Raises ValueError if it is not there, or its import fails."""
    module = _module(target)
    found: Any = module
    for part in target.partition(":")[2].split("."):
        if not hasattr(found, part):
            near = ", ".join(name for name in vars(module) if not name.startswith("_")) or "nothing"
            raise ValueError(f"agent {target!r}: module {module.__name__!r} has no {part!r}; it has {near}"[:400])
        found = getattr(found, part)
    return found, module


def _module(target: str) -> ModuleType:
    name, colon, rest = target.partition(":")
    if name.endswith(".py"):
        raise ValueError(f"agent {target!r}: write {name[:-3].replace('/', '.')}:{rest or 'run'} for a file {name}")
    if not (colon and rest and all(part.isidentifier() for part in f"{name}.{rest}".split("."))):
        named = "" if colon else f", or one of {', '.join(NAMES)}"
        raise ValueError(f"agent {target!r}: write package.module:name{named}")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            where = f"looked in {Path.cwd()} and what is installed"
            raise ValueError(f"agent {target!r}: there is no module {error.name!r} ({where})") from error
        raise ValueError(f"agent {target!r}: module {name!r} needs {error.name!r}, which is not installed") from error
    except (Exception, SystemExit) as error:
        place = place_of(error, str(Path.cwd()))
        raise ValueError(f"agent {target!r}: importing it failed: {words_of(error)} ({place})") from error


def words_of(error: BaseException) -> str:
    """An error as one line."""
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return " ".join(f"{type(error).__name__}: {text}".split())[:500].removesuffix(":")
