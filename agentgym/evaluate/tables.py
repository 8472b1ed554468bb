"""Results as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from agentgym.evaluate.statistics import Report


def table_of(reports: Sequence[Report]) -> Table:
    """The reports as a table for a terminal."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("env", no_wrap=True)
    for column in ("n", "err", "reward", "success", "95%", "pass@k", "turns", "s"):
        table.add_column(column, justify="right", no_wrap=True)
    for r in reports:
        numbers = ["-"] * 5
        if r.success is not None and r.success_low is not None and r.success_high is not None:
            interval = f"{100 * r.success_low:.1f}-{100 * r.success_high:.1f}"
            passes = "\n".join(f"@{k} {100 * value:.1f}" for k, value in r.pass_at.items() if k > 1)
            numbers = [f"{r.reward:.3f}", f"{r.success:.1%}", interval, passes or "-", f"{r.turns:.1f}"]
        table.add_row(f"{r.env}/{r.split}", str(r.episodes), str(r.errors), *numbers, f"{r.seconds:.1f}")
    return table
