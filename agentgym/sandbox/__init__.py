"""Sandboxes run programs that a model wrote. `api` has the contract; `acquire` returns a sandbox."""

from agentgym.sandbox.api import (
    PRIVATE,
    WORKSPACE,
    BackendDown,
    Command,
    ExecResult,
    Sandbox,
    SandboxError,
    SandboxSpec,
    SandboxSpoiled,
    Session,
)
from agentgym.sandbox.backends.select import acquire, choose, describe

__all__ = [
    "PRIVATE",
    "WORKSPACE",
    "BackendDown",
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
