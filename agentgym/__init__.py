"""agentgym: text environments for language-model agents, and the loop that runs agents in them.

Names are imported on first use, so `import agentgym` itself costs almost nothing.
"""

# ruff: noqa: F401 - type checkers alone read the imports below

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"
DISTRIBUTION = "agentgym-toolkit"
"""The name that package installers know. `agentgym` on the package index is another project."""

_MODULES = {
    "core.env": ("AsyncEnv", "Blocking", "Env", "Wrapper"),
    "core.messages": ("Message", "assistant", "user"),
    "core.players": ("PlayersEnv",),
    "core.tasks": ("Task", "TaskSet"),
    "core.registration": ("EnvSpec", "make", "register", "registry", "spec"),
    "core.trajectory": ("Group", "Tokens", "Trajectory", "Turn"),
    "tools.toolset": ("ToolSet", "tool"),
    "policies.base": ("Policy", "Reply", "ScriptedPolicy"),
    "policies.chat": ("ChatPolicy",),
    "rollout.episode": ("Limits", "run_episode", "run_many"),
    "checks.check_env": ("check_env",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}
__all__ = list(_HOME)

if TYPE_CHECKING:  # the same names, for programs that read types
    from agentgym.checks.check_env import check_env
    from agentgym.core.env import AsyncEnv, Blocking, Env, Wrapper
    from agentgym.core.messages import Message, assistant, user
    from agentgym.core.players import PlayersEnv
    from agentgym.core.registration import EnvSpec, make, register, registry, spec
    from agentgym.core.tasks import Task, TaskSet
    from agentgym.core.trajectory import Group, Tokens, Trajectory, Turn
    from agentgym.policies.base import Policy, Reply, ScriptedPolicy
    from agentgym.policies.chat import ChatPolicy
    from agentgym.rollout.episode import Limits, run_episode, run_many
    from agentgym.tools.toolset import ToolSet, tool


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'agentgym' has no attribute {name!r}")
    return getattr(importlib.import_module(f"agentgym.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
