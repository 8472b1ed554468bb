"""Divides the samples of a training step among its optimizer steps."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from agent_train.data.balance import TOKENS, Cost, balance
from agent_train.data.prefixes import in_order
from agent_train.data.samples import TrainingSample


def split_steps(
    samples: Sequence[TrainingSample], parts: int, cost: Cost = TOKENS, groups_whole: bool = False
) -> list[list[TrainingSample]]:
    """Deal samples to `parts` optimizer steps of nearly equal cost, whole trajectories, whatever the order they come in.

    A reduction counts a trajectory once in each optimizer step that holds a sample of it. Torn apart, one of several samples would weigh
    more than the others. Samples whose trajectory has no name are each by themselves. With `groups_whole` groups stay whole, where there
    are at least `parts` of them: reductions by prompt count them once in each step, and samples that share a prefix are computed together.

    Returns:
        `parts` lists or, where too few trajectories sampled a token, fewer; each with a sampled token. One list of all samples where
        none sampled any.
    """
    ordered = in_order(samples)
    units = _units((sample.trajectory or number, sample) for number, sample in enumerate(ordered))
    if groups_whole and len(groups := _units((sample.group, sample) for sample in ordered)) >= parts:
        units = groups
    costs = [sum(cost.of(len(sample.ids), sample.sampled) for sample in unit) for unit in units]
    dealt = [[sample for place in own for sample in units[place]] for own in balance(costs, parts)]
    return [part for part in dealt if any(sample.sampled for sample in part)] or [list(samples)]


def _units(named: Iterable[tuple[Hashable, TrainingSample]]) -> list[list[TrainingSample]]:
    units: dict[Hashable, list[TrainingSample]] = {}
    for name, sample in named:
        units.setdefault(name, []).append(sample)
    return list(units.values())
