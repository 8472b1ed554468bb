"""Evaluation: agents on environments, with no training. Names are imported on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "AgentSpec": "plan",
    "Cell": "plan",
    "Report": "statistics",
    "evaluate": "run",
    "pass_at_k": "statistics",
    "success_interval": "statistics",
    "summarise": "statistics",
    "table_of": "tables",
}
__all__ = ["AgentSpec", "Cell", "Report", "evaluate", "pass_at_k", "success_interval", "summarise", "table_of"]

if TYPE_CHECKING:
    from agentgym.evaluate.plan import AgentSpec, Cell
    from agentgym.evaluate.run import evaluate
    from agentgym.evaluate.statistics import Report, pass_at_k, success_interval, summarise
    from agentgym.evaluate.tables import table_of


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'agentgym.evaluate' has no attribute {name!r}")
    return getattr(importlib.import_module(f"agentgym.evaluate.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
