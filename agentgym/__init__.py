"""agentgym: text environments for language-model agents, and the loop that runs agents in them.

Names are imported on first use, so `import agentgym` itself costs almost nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
DISTRIBUTION = "agentgym-toolkit"
"""The name that package installers know. `agentgym` on the package index is another project."""

_HOME = {
    "Env": "core",
    "Wrapper": "core",
    "Message": "messages",
    "Task": "tasks",
    "TaskSet": "tasks",
    "EnvSpec": "registration",
    "register": "registration",
    "make": "registration",
    "spec": "registration",
    "registry": "registration",
    "tool": "tools",
    "ToolSet": "tools",
    "Policy": "policy",
    "Reply": "policy",
    "ChatPolicy": "chat",
    "ScriptedPolicy": "policy",
    "run_episode": "rollout",
    "run_many": "rollout",
    "Limits": "rollout",
    "Turn": "trajectory",
    "Tokens": "trajectory",
    "Trajectory": "trajectory",
    "Group": "trajectory",
}
__all__ = [
    "ChatPolicy",
    "Env",
    "EnvSpec",
    "Group",
    "Limits",
    "Message",
    "Policy",
    "Reply",
    "ScriptedPolicy",
    "Task",
    "TaskSet",
    "Tokens",
    "ToolSet",
    "Trajectory",
    "Turn",
    "Wrapper",
    "__version__",
    "make",
    "register",
    "registry",
    "run_episode",
    "run_many",
    "spec",
    "tool",
]

if TYPE_CHECKING:
    from agentgym.chat import ChatPolicy
    from agentgym.core import Env, Wrapper
    from agentgym.messages import Message
    from agentgym.policy import Policy, Reply, ScriptedPolicy
    from agentgym.registration import EnvSpec, make, register, registry, spec
    from agentgym.rollout import Limits, run_episode, run_many
    from agentgym.tasks import Task, TaskSet
    from agentgym.tools import ToolSet, tool
    from agentgym.trajectory import Group, Tokens, Trajectory, Turn


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'agentgym' has no attribute {name!r}")
    return getattr(importlib.import_module(f"agentgym.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
