"""Evaluation of agents on environments. Names are imported on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "Budget": "budget",
    "CellResult": "results",
    "Results": "results",
    "compare_runs": "compare",
    "evaluate": "run",
    "results_of": "results",
    "table_of": "tables",
}
__all__ = ["Budget", "CellResult", "Results", "compare_runs", "evaluate", "results_of", "table_of"]

if TYPE_CHECKING:
    from agentgym.evaluate.budget import Budget
    from agentgym.evaluate.compare import compare_runs
    from agentgym.evaluate.results import CellResult, Results, results_of
    from agentgym.evaluate.run import evaluate
    from agentgym.evaluate.tables import table_of


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'agentgym.evaluate' has no attribute {name!r}")
    return getattr(importlib.import_module(f"agentgym.evaluate.{_HOME[name]}"), name)
