"""The languages that a session may speak, by name. Each is a `Wire` of `worker.py`; a client's address chooses one."""

from __future__ import annotations

from typing import Any

from agentgym.core.extensions import import_path

WIRES = {
    "agentgym/1": "agentgym.service.worker.agentgym_handler:AgentgymWire",
    "openenv": "agentgym.service.openenv.handler:OpenEnvWire",
    "sandbox/1": "agentgym.service.worker.sandbox_handler:SandboxWire",
}


def wire_class(name: str) -> Any:
    """The class of a wire.

    Raises:
        KeyError: there is none of this name.
    """
    return import_path(WIRES[name])
