"""The protocols of sessions by name, and their handlers. The path of a request chooses one."""

from __future__ import annotations

from typing import Any

from agentgym.core.extensions import import_path

HANDLERS = {
    "agentgym/1": "agentgym.service.worker.agentgym_handler:AgentgymHandler",
    "openenv": "agentgym.service.openenv.handler:OpenEnvHandler",
    "sandbox/1": "agentgym.service.worker.sandbox_handler:SandboxHandler",
}


def handler_class(name: str) -> Any:
    return import_path(HANDLERS[name])
