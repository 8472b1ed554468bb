"""Advantages: from the rewards of a group to one number per trajectory. Pure Python; a group has a handful of trajectories.

A reward of None marks a trajectory that takes no part: it is in no baseline and gets 0.0. A group of one and a group
whose rewards do not differ get exactly 0.0. A reward that is not finite raises ValueError.
"""

import math
from collections.abc import Sequence

Rewards = Sequence[float | None]

# fp32 keeps 7 digits; a spread below this share of the rewards' size is rounding, not a difference.
RELATIVE_SPREAD = 1e-6


def group_advantages(rewards: Rewards, std: str = "sample", eps: float = 1e-6) -> list[float]:
    """`(r - mean) / (std + eps)` of one group: GRPO (arXiv 2402.03300); with `std` "none" Dr. GRPO (arXiv 2503.20783)."""
    return level_advantages([rewards], "group", "none" if std == "none" else "group", std, eps)[0]


def level_advantages(
    groups: Sequence[Rewards],
    mean_level: str = "group",
    std_level: str = "batch",
    std: str = "sample",
    eps: float = 1e-6,
) -> list[list[float]]:
    """`(r - mean) / (std + eps)` with mean and standard deviation each of the "group", of the whole "batch", or left out ("none").

    Group and batch is LitePPO (arXiv 2508.08221), group and group is GRPO (arXiv 2402.03300), group and none is Dr.
    GRPO (arXiv 2503.20783). The standard deviation of the batch is taken around the batch's mean as in ROLL (AReaL
    takes it around the groups' means), each trajectory counting once; `std` is "sample" (n - 1) or "population" (n).
    Where a level in use has rewards that do not differ, the advantage is 0.0.
    """
    levels = {mean_level, std_level}
    batch = known_rewards([reward for group in groups for reward in group])
    flat_batch = "batch" in levels and not has_spread(batch)
    advantages = []
    for group in groups:
        known = known_rewards(group)
        if flat_batch or not known or ("group" in levels and not has_spread(known)):
            advantages.append([0.0] * len(group))
            continue
        of_level = {"group": known, "batch": batch}
        mean = mean_of(of_level[mean_level]) if mean_level != "none" else 0.0
        scale = _deviation(of_level[std_level], std) + eps if std_level != "none" else 1.0
        advantages.append([0.0 if r is None else (r - mean) / scale for r in group])
    return advantages


def rloo_advantages(rewards: Rewards) -> list[float]:
    """RLOO (arXiv 2402.14740): the reward less the mean of the other rewards of the group, `n / (n - 1) * (r - mean)`."""
    known = known_rewards(rewards)
    if not has_spread(known):
        return [0.0] * len(rewards)
    mean, factor = mean_of(known), len(known) / (len(known) - 1)
    return [0.0 if r is None else factor * (r - mean) for r in rewards]


def opo_advantages(rewards: Rewards, lengths: Sequence[int]) -> list[float]:
    """OPO (arXiv 2505.23585): the reward less the group's mean weighted by sampled tokens, `r - sum(len * r) / sum(len)`."""
    known = known_rewards(rewards)
    weights = [n for r, n in zip(rewards, lengths, strict=True) if r is not None]
    if not has_spread(known) or not sum(weights):
        return [0.0] * len(rewards)
    baseline = math.fsum(r * n for r, n in zip(known, weights, strict=True)) / sum(weights)
    return [0.0 if r is None else r - baseline for r in rewards]


def maxrl_advantages(rewards: Rewards) -> list[float]:
    """MaxRL (arXiv 2602.02710): `(r - mean) / mean`, so that a task which is solved rarely weighs more."""
    known = known_rewards(rewards)
    if any(r < 0 for r in known):
        raise ValueError(f"MaxRL divides by the mean reward and needs rewards of at least 0, not {list(rewards)}")
    if not has_spread(known):
        return [0.0] * len(rewards)
    mean = mean_of(known)
    return [0.0 if r is None else (r - mean) / mean for r in rewards]


def best_of_advantages(rewards: Rewards) -> list[float]:
    """For the best of the samples (arXiv 2503.19595): the best gets its lead over the second, the others 0.

    It is `max(all) - max(all but this one)`; with rewards of 0 and 1 the baseline is that of pass@n.
    """
    known = sorted(known_rewards(rewards))
    if not has_spread(known[-2:]):
        return [0.0] * len(rewards)
    return [known[-1] - known[-2] if r == known[-1] else 0.0 for r in rewards]


def known_rewards(rewards: Rewards) -> list[float]:
    known = [float(r) for r in rewards if r is not None]
    if not all(map(math.isfinite, known)):
        raise ValueError(f"rewards must be finite numbers, or None for a failed trajectory: {list(rewards)}")
    return known


def has_spread(rewards: Rewards) -> bool:
    """True if rewards differ by more than rounding, relative to the largest. Dividing noise by itself would make it signal."""
    known = [r for r in rewards if r is not None]
    return len(known) > 1 and max(known) - min(known) > RELATIVE_SPREAD * max(map(abs, known))


def reward_spread(rewards: Rewards) -> float:
    """The population standard deviation of a group's rewards; 0.0 where they do not differ."""
    known = [float(reward) for reward in rewards if reward is not None]
    return _deviation(known, "population") if has_spread(known) else 0.0


def mean_of(values: Sequence[float]) -> float:
    """0.0 where there are none."""
    return math.fsum(values) / len(values) if values else 0.0


def _deviation(known: Sequence[float], std: str) -> float:
    mean = mean_of(known)
    squares = math.fsum((r - mean) ** 2 for r in known)
    return math.sqrt(squares / (len(known) - (std == "sample")))
