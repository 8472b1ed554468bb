"""Filters of a step's groups by the spread of their rewards. Pure Python; a step has some hundred groups.

A filter is a function `(rewards, share)`: the rewards of each group's episodes, with None for an episode that takes no
part, and `algorithm.filter.share`. It returns the indices of the groups to keep, ascending. `algorithm.filter.name`
names it.
"""

import math
from collections.abc import Sequence

from agent_train.algorithms.advantages import has_spread

Rewards = Sequence[Sequence[float | None]]  # of each group's episodes


def all_groups(rewards: Rewards, share: float) -> list[int]:
    return list(range(len(rewards)))


def with_spread(rewards: Rewards, share: float) -> list[int]:
    """Keep the groups whose rewards differ: the others teach nothing (DAPO, arXiv 2503.14476)."""
    return [index for index, group in enumerate(rewards) if has_spread(group)]


def uncertain(rewards: Rewards, share: float) -> list[int]:
    """StarPO-S (RAGEN, arXiv 2504.20073): keep the share of the groups, rounded up, whose rewards differ most; of equal ones the earlier.

    Groups without spread are kept too where the share asks for them: a critic learns from them, a group baseline does
    not.
    """
    # 0.07 of 100 groups is 7.000000000000001 in floating point; it means 7.
    return sorted(_widest_first(_spreads(rewards), share)[: math.ceil(share * len(rewards) - 1e-9)])


def nucleus(rewards: Rewards, share: float) -> list[int]:
    """RAGEN's nucleus filter: the fewest groups, widest first, that hold `share` of the step's whole reward spread.

    Groups without spread are never kept.
    """
    spreads = _spreads(rewards)
    goal = share * math.fsum(spreads) * (1 - 1e-9)
    kept: list[int] = []
    for index in _widest_first(spreads, share):
        if not spreads[index] or (kept and math.fsum(spreads[i] for i in kept) >= goal):
            break
        kept.append(index)
    return sorted(kept)


def reward_spread(rewards: Sequence[float | None]) -> float:
    """The population standard deviation of a group's rewards, without the failed ones (None); 0.0 where they do not differ."""
    known = [float(reward) for reward in rewards if reward is not None]
    if not has_spread(known):
        return 0.0
    mean = math.fsum(known) / len(known)
    return math.sqrt(math.fsum((reward - mean) ** 2 for reward in known) / len(known))


def _spreads(rewards: Rewards) -> list[float]:
    return [reward_spread(group) for group in rewards]


def _widest_first(spreads: Sequence[float], share: float) -> list[int]:
    if not 0 < share <= 1:
        raise ValueError(f"the share to keep must be over 0 and at most 1, not {share}")
    return sorted(range(len(spreads)), key=lambda index: -spreads[index])
