"""Evaluation of agents on environments. Names are imported on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "AgentSpec": "plan",
    "Budget": "budget",
    "Cell": "plan",
    "CellResult": "results",
    "Results": "results",
    "compare_runs": "compare",
    "evaluate": "run",
    "mean_interval": "statistics",
    "pass_at_k": "statistics",
    "pass_hat_k": "statistics",
    "results_of": "results",
    "run_plan": "run",
    "success_interval": "statistics",
    "table_of": "tables",
}
__all__ = [
    "AgentSpec",
    "Budget",
    "Cell",
    "CellResult",
    "Results",
    "compare_runs",
    "evaluate",
    "mean_interval",
    "pass_at_k",
    "pass_hat_k",
    "results_of",
    "run_plan",
    "success_interval",
    "table_of",
]

if TYPE_CHECKING:
    from agentgym.evaluate.budget import Budget
    from agentgym.evaluate.compare import compare_runs
    from agentgym.evaluate.plan import AgentSpec, Cell
    from agentgym.evaluate.results import CellResult, Results, results_of
    from agentgym.evaluate.run import evaluate, run_plan
    from agentgym.evaluate.statistics import mean_interval, pass_at_k, pass_hat_k, success_interval
    from agentgym.evaluate.tables import table_of


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'agentgym.evaluate' has no attribute {name!r}")
    return getattr(importlib.import_module(f"agentgym.evaluate.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
