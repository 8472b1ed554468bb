"""Shared by all adapters: importing the other package, suggesting names, and converting values to JSON."""

import difflib
import importlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from agentgym.core.registration import UnknownEnvError, adapters
from agentgym.core.tasks import Task, TaskSet
from agentgym_envs.splits import SEEDS, check_split


def imported(prefix: str, module: str | None = None) -> Any:
    try:
        return importlib.import_module(module or prefix)
    except ImportError as error:
        install = adapters[prefix].install if prefix in adapters else prefix
        raise ImportError(
            f"environments {prefix}:NAME need another package: pip install {install!r} ({error})"
        ) from error


def check_name(prefix: str, name: str, names: Iterable[str]) -> None:
    known = sorted(set(names))  # a game of PettingZoo may be in both of its registries
    if name in known:
        return
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5) or known[:8]
    raise UnknownEnvError(
        f"no environment {prefix + ':' + name!r}: there are {len(known)} names, among them {', '.join(near)}"
    )


def seed_tasks(prefix: str, name: str, split: str) -> TaskSet:
    """100,000 train and 1,000 test seeds. Two seeds may pose the same problem; that depends on the environment."""
    check_split(f"{prefix}:{name}", split)
    return TaskSet.generate(lambda seed: Task(f"{name}-{seed}", seed=seed), SEEDS[split], name=f"{name}/{split}")


def plain(value: Any) -> Any:
    """A value as JSON: arrays and tuples become lists; keys, NaN, infinities and other objects become texts."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return str(value)


def plain_info(info: Mapping[str, Any]) -> dict[str, Any]:
    """An environment's info as JSON values, with `success`, if given, as a bool."""
    made = {str(key): plain(value) for key, value in info.items()}
    return {**made, "success": bool(made["success"])} if "success" in made else made


def settings_key(settings: Mapping[str, Any]) -> str:
    if not isinstance(settings, Mapping):
        raise TypeError(f"settings must be a table of JSON values, not {settings!r:.200}")
    try:
        return json.dumps(dict(settings), sort_keys=True)
    except TypeError as error:
        raise TypeError(f"settings must be plain JSON values: {error}: {settings!r:.200}") from error
