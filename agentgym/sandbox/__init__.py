"""Sandboxes run programs that a model wrote. `api` has the contract; `acquire` returns a sandbox.

Names are imported on first use. If the package imported its modules itself, Python's import locks would let threads fail that
import it and one of its modules at once.
"""

# ruff: noqa: F401 - type checkers alone read the imports below

import importlib
from typing import TYPE_CHECKING, Any

_MODULES = {
    "api": (
        *("PRIVATE", "WORKSPACE", "BackendDown", "Command", "ExecResult", "Sandbox", "SandboxError", "SandboxSpec"),
        *("SandboxSpoiled", "Session"),
    ),
    "backends.select": ("acquire", "choose", "describe", "prepare"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}
__all__ = list(_HOME)

if TYPE_CHECKING:
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
    from agentgym.sandbox.backends.select import acquire, choose, describe, prepare


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'agentgym.sandbox' has no attribute {name!r}")
    return getattr(importlib.import_module(f"agentgym.sandbox.{_HOME[name]}"), name)
