"""Sandboxes: where programs that a model wrote are run. See `core` for the contract, `backends.acquire` to get one."""

from agentgym.sandbox.backends import acquire, choose, describe
from agentgym.sandbox.core import (
    PRIVATE,
    WORKSPACE,
    Command,
    ExecResult,
    Sandbox,
    SandboxError,
    SandboxSpec,
    SandboxSpoiled,
    Session,
)

__all__ = [
    "PRIVATE",
    "WORKSPACE",
    "Command",
    "ExecResult",
    "Sandbox",
    "SandboxError",
    "SandboxSpec",
    "SandboxSpoiled",
    "Session",
    "acquire",
    "choose",
    "describe",
]
