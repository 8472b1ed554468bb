"""The settings by dotted key, read from the schema: `learner.lr`, its type, its default, and what else the schema says."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, get_type_hints

from agent_train.config.schema import Config, Setting


@dataclass(frozen=True)
class Key:
    """One dotted key of the settings: its type, its default, and what else the schema says of it."""

    kind: Any
    default: Any
    setting: Setting


def settings(section: Any = None, prefix: str = "") -> dict[str, Key]:
    """Every dotted key of the settings, in the order of the schema; of a section alone if one is given."""
    found: dict[str, Key] = {}
    section = Config() if section is None else section
    kinds = get_type_hints(type(section))
    for each in dataclasses.fields(section):
        value, key = getattr(section, each.name), prefix + each.name
        if dataclasses.is_dataclass(value):
            found |= settings(value, f"{key}.")
        else:
            found[key] = Key(kinds[each.name], value, each.metadata["setting"])
    return found


def get(config: Any, key: str) -> Any:
    """The value of a dotted key."""
    return functools.reduce(getattr, key.split("."), config)


def default_config(mode: str = "rl", gpu: bool = False, context: int | None = None) -> Config:
    """The defaults of a mode on a machine, for a model that reads `context` tokens (None: not known)."""
    config = Config(mode=mode)
    for key, known in settings().items():
        said, value = known.setting, known.setting.by_mode.get(mode, known.default)
        if gpu and said.on_gpu is not None:
            value = said.on_gpu
        if context is not None and said.share_of_context:
            value = min(value, int(context * said.share_of_context))
        section, _, name = key.rpartition(".")
        setattr(get(config, section) if section else config, name, value)
    return config
