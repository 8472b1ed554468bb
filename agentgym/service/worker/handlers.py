"""The languages that a session may speak, by name. Each is a `Wire` of `worker.py`; a client's address chooses one."""

from __future__ import annotations

import importlib
from typing import Any

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
    module, _, attribute = WIRES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
