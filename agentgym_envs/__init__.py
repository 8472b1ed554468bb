"""The environments that come with agentgym; modules are imported when an environment is made."""

from __future__ import annotations


def register_all() -> None:
    """Register all environments. This is the package's entry point in the group `agentgym.envs`."""
    from agentgym.datasets.catalogue import register_data
    from agentgym_envs.adapters import register_adapters
    from agentgym_envs.code import register_code
    from agentgym_envs.games import register_games
    from agentgym_envs.math import register_math
    from agentgym_envs.search import register_search
    from agentgym_envs.sql import register_sql

    register_adapters()
    register_code()
    register_data("agentgym_envs.data_sets:data_sets")
    register_games()
    register_math()
    register_search()
    register_sql()
