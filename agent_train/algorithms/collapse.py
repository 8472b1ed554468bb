"""Signs that a policy collapses: its answers become all the same, too long, or no longer worth a difference in reward.

RAGEN (arXiv 2504.20073) calls it the echo trap: reward spread and entropy fall before the reward does. Pure Python.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from agent_train.algorithms.advantages import mean_of, reward_spread
from agentgym.core.trajectory import NO_LIMIT, Group, Trajectory


@dataclass(frozen=True)
class CollapseMetrics:
    """Collapse metrics of a step's trajectories; failed ones are left out."""

    reward_spread: float  # mean over groups of the standard deviation of the rewards inside a group of at least two
    flat_groups: float  # share of these groups whose rewards do not differ
    entropy: float  # of the policy, mean over sampled tokens, nats
    # share of the n-grams of sampled tokens that stood before in the same trajectory, mean over trajectories
    repetition: float
    same: float  # share of trajectories whose sampled tokens are, id for id, those of an earlier one of their group
    length: float  # sampled tokens of a trajectory, mean
    length_max: int  # the longest
    truncated: float  # share of trajectories cut at a limit


def health(groups: Sequence[Group], entropy: float, n: int = 4) -> CollapseMetrics | None:
    """The diagnostics of a step with n-grams of `n` tokens; None where every trajectory failed."""

    def sampled_ids(trajectory: Trajectory) -> tuple[int, ...]:
        return tuple(token for call in trajectory.calls() if call.tokens for token in call.tokens.completion_ids)

    played = [[t for t in group.trajectories if not t.failed] for group in groups]
    ids = [[sampled_ids(t) for t in group] for group in played]
    flat = [own for group in ids for own in group]
    if not flat:
        return None
    spreads = [reward_spread([t.reward for t in group]) for group in played if len(group) > 1]
    return CollapseMetrics(
        reward_spread=mean_of(spreads),
        flat_groups=mean_of([spread == 0 for spread in spreads]),
        entropy=entropy,
        repetition=mean_of([repetition(own, n) for own in flat]),
        same=sum(len(group) - len(set(group)) for group in ids) / len(flat),
        length=mean_of([len(own) for own in flat]),
        length_max=max(map(len, flat)),
        truncated=mean_of([t.end not in NO_LIMIT for group in played for t in group]),
    )


def repetition(ids: Sequence[int], n: int = 4) -> float:
    """Share of the n-grams that stood before in the same sequence; 0.0 where there are none."""
    grams = Counter(zip(*(ids[start:] for start in range(n)), strict=False))
    return (grams.total() - len(grams)) / grams.total() if grams else 0.0
