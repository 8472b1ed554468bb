"""Divides the samples of a training step among its optimizer steps."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from agent_train.data.balance import TOKENS, Cost, balance
from agent_train.data.prefixes import in_order
from agent_train.data.samples import TrainingSample


def split_steps(
    rows: Sequence[TrainingSample], parts: int, cost: Cost = TOKENS, groups_whole: bool = False
) -> list[list[TrainingSample]]:
    """Deal rows to optimizer steps of nearly equal cost, whole trajectories, whatever the order they come in.

    A reduction counts a trajectory once in each optimizer step that holds a row of it. Torn apart, one of several rows would
    weigh more than the others.

    Args:
        rows: of the training step. Rows whose trajectory has no name are each by themselves.
        parts: optimizer steps.
        cost: of a row.
        groups_whole: whether groups stay whole, where there are at least `parts` of them: reductions by prompt count them once
            in each optimizer step, and rows that share a prefix are computed together.

    Returns:
        `parts` lists or, where too few trajectories sampled a token, fewer; each with a sampled token. One list of all rows where
        none sampled any.

    Raises:
        ValueError: `parts` is below 1.
    """
    if parts < 1:
        raise ValueError(f"rows are split into at least 1 optimizer step, not {parts}")
    ordered = in_order(rows)
    units = _units([(row.trajectory or number, row) for number, row in enumerate(ordered)])
    if groups_whole and len(groups := _units([(row.group, row) for row in ordered])) >= parts:
        units = groups
    costs = [sum(cost.of(len(row.ids), row.sampled) for row in unit) for unit in units]
    dealt = [[row for place in own for row in units[place]] for own in balance(costs, parts)]
    return [part for part in dealt if any(row.sampled for row in part)] or [list(rows)]


def _units(named: Sequence[tuple[Hashable, TrainingSample]]) -> list[list[TrainingSample]]:
    units: dict[Hashable, list[TrainingSample]] = {}
    for name, row in named:
        units.setdefault(name, []).append(row)
    return list(units.values())
