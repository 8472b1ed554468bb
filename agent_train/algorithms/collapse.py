"""Signs that a policy collapses: what it says becomes always the same, too long, or no longer worth a difference in reward.

RAGEN (arXiv 2504.20073) calls it the echo trap: reward spread and entropy fall before the reward does. Pure Python.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from agent_train.algorithms.filters import reward_spread


@dataclass(frozen=True)
class Health:
    """Collapse metrics of a step's trajectories; failed ones are left out.

    Attributes:
        reward_spread: mean over groups of the standard deviation of the rewards inside a group.
        flat_groups: share of the groups whose rewards do not differ.
        entropy: of the policy, mean over sampled tokens, nats.
        repetition: share of the n-grams of sampled tokens that stood before in the same trajectory, mean over trajectories.
        same: share of trajectories whose sampled tokens are, id for id, those of an earlier one of their group.
        length: sampled tokens of a trajectory, mean.
        length_max: the longest.
        truncated: share of trajectories cut at a limit.
    """

    reward_spread: float
    flat_groups: float
    entropy: float
    repetition: float
    same: float
    length: float
    length_max: int
    truncated: float


@dataclass(frozen=True)
class Sample:
    """One trajectory as the diagnostics see it: its reward, its sampled ids in order, and whether it was cut at a limit."""

    reward: float
    ids: Sequence[int]
    truncated: bool = False


def health(groups: Sequence[Sequence[Sample]], entropy: float, n: int = 4) -> Health:
    """The diagnostics of a step.

    Args:
        groups: the trajectories that did not fail, by group. An empty group, or one of a single trajectory, has no spread to
            speak of and is not counted in `reward_spread` and `flat_groups`.
        entropy: mean over the step's sampled tokens, nats.
        n: length of the n-grams of `repetition`.

    Raises:
        ValueError: no trajectory at all.
    """
    samples = [sample for group in groups for sample in group]
    if not samples:
        raise ValueError("no trajectories to diagnose")
    spreads = [reward_spread([sample.reward for sample in group]) for group in groups if len(group) > 1]
    copies = sum(len(group) - len({tuple(sample.ids) for sample in group}) for group in groups)
    return Health(
        reward_spread=_mean(spreads),
        flat_groups=_mean([float(spread == 0) for spread in spreads]),
        entropy=entropy,
        repetition=_mean([repetition(sample.ids, n) for sample in samples]),
        same=copies / len(samples),
        length=_mean([float(len(sample.ids)) for sample in samples]),
        length_max=max(len(sample.ids) for sample in samples),
        truncated=_mean([float(sample.truncated) for sample in samples]),
    )


def repetition(ids: Sequence[int], n: int = 4) -> float:
    """Share of the n-grams that stood before in the same sequence; 0.0 where there are none.

    Raises:
        ValueError: `n` is below 1.
    """
    if n < 1:
        raise ValueError(f"n-grams have at least 1 token, not {n}")
    grams = Counter(zip(*(ids[start:] for start in range(n)), strict=False))
    return (grams.total() - len(grams)) / grams.total() if grams else 0.0


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
