"""The protocols of sessions by name, and their handlers. The path of a request chooses one."""

from __future__ import annotations

import importlib
from typing import Any

HANDLERS = {
    "agentgym/1": "agentgym.service.worker.agentgym_handler:AgentgymHandler",
    "openenv": "agentgym.service.openenv.handler:OpenEnvHandler",
    "sandbox/1": "agentgym.service.worker.sandbox_handler:SandboxHandler",
}


def handler_class(name: str) -> Any:
    """The class of a protocol handler.

    Raises:
        KeyError: there is none of this name.
    """
    module, _, attribute = HANDLERS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
