"""The settings of a run: their schema, how they are composed, and what is checked before a run starts."""

from agent_train.config.schema import Config, ConfigError

__all__ = ["Config", "ConfigError"]
