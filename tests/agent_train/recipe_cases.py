"""Settings of recipes, composed once each: composing takes a fifth of a second."""

import copy
import functools

import yaml

from agent_train.config.compose import compose


@functools.cache
def composed(name):
    return compose(["+env=frozen_lake", "engine=embedded", f"algorithm={name}"])


def settings_of(*overrides):
    """As `compose` of `key=value`, without its checks; `algorithm=NAME` chooses the recipe."""
    pairs = dict(override.split("=", 1) for override in overrides)
    config = copy.deepcopy(composed(pairs.pop("algorithm", "grpo")))
    for key, text in pairs.items():
        *sections, name = key.split(".")
        section = functools.reduce(getattr, sections, config)
        if isinstance(section, dict):
            section[name] = yaml.safe_load(text)
        else:
            assert hasattr(section, name), f"no setting {key}"
            setattr(section, name, yaml.safe_load(text))
    return config
