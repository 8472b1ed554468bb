"""Sandboxes: where programs that a model wrote are run. See `core` for the contract, `backends.acquire` to get one."""

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
