"""What DAPO (arXiv 2503.14476) does around the loss: long answers cost, cut ones are left out, groups that teach nothing are
sampled again. Pure Python; lengths count sampled tokens, never what a tool or an environment wrote in between.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from agent_train.algorithms.advantages import has_spread


def overlong_penalty(length: int, limit: int, buffer: int, factor: float = 1.0) -> float:
    """The length penalty of a trajectory: 0 up to `limit - buffer`, then linear down to `-factor` at `limit`.

    Args:
        length: sampled tokens.
        limit: the longest allowed; beyond it the penalty stays `-factor`.
        buffer: over how many tokens it falls, from 1 to `limit`.
        factor: the penalty at the limit, not negative.

    Raises:
        ValueError: `buffer` is not in 1..limit, or `factor` is negative.
    """
    if not 1 <= buffer <= limit or not factor >= 0:
        raise ValueError(
            f"need 1 <= buffer <= limit and factor >= 0, not buffer {buffer}, limit {limit}, factor {factor}"
        )
    over = length - (limit - buffer)
    return -factor * min(over / buffer, 1.0) if over > 0 else 0.0


@dataclass(frozen=True)
class Masked:
    """A group whose cut trajectories are left out of the loss.

    Attributes:
        rewards: what the baseline is made of; None takes no part.
        in_loss: which trajectories are trained on.
    """

    rewards: list[float | None]
    in_loss: list[bool]


def mask_truncated(rewards: Sequence[float | None], truncated: Sequence[bool], in_baseline: bool = True) -> Masked:
    """Leave out of the loss what was cut off at a limit: whether it was good is not known. DAPO's overlong filtering.

    Args:
        rewards: one per trajectory of a group; None marks one that failed.
        truncated: which were cut.
        in_baseline: whether a cut one still counts in its group's mean and spread.

    Raises:
        ValueError: not as many flags as rewards.
    """
    pairs = list(zip(rewards, truncated, strict=True))
    return Masked(
        rewards=[None if cut and not in_baseline else reward for reward, cut in pairs],
        in_loss=[reward is not None and not cut for reward, cut in pairs],
    )


def informative(rewards: Sequence[float | None]) -> bool:
    """True if a group's rewards differ, so that a group-relative advantage is not 0. None marks a failed trajectory."""
    return has_spread([reward for reward in rewards if reward is not None])


@dataclass(frozen=True)
class Decision:
    """The next action of dynamic sampling.

    Attributes:
        action: "train" with what there is, or "sample" again.
        groups: how many groups to sample; 0 where it trains.
        short: how many groups a step that trains lacks, because the sampling has reached its bound.
    """

    action: str
    groups: int = 0
    short: int = 0


def sample_again(kept: int, sampled: int, wanted: int, most: int) -> Decision:
    """Dynamic sampling: sample until `wanted` groups are informative, but never more than `most` groups for one step.

    The number asked for is what the share kept so far makes likely to suffice, at least what is missing, and at most as many
    as `wanted`.

    Args:
        kept: informative groups so far.
        sampled: all groups so far.
        wanted: informative groups of a step.
        most: groups that one step may sample.

    Raises:
        ValueError: counts that contradict one another, or `most` below `wanted`.
    """
    if not 0 <= kept <= sampled or not 1 <= wanted <= most:
        raise ValueError(f"cannot have kept {kept} of {sampled} groups, wanting {wanted} of at most {most}")
    missing = max(wanted - kept, 0)
    if not missing or sampled >= most:
        return Decision("train", short=missing)
    likely = math.ceil(missing * sampled / kept) if kept else wanted
    return Decision("sample", groups=min(max(missing, min(likely, wanted)), most - sampled))
