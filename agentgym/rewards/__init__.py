"""Rewards: named, weighted functions of an episode (`rubric`), and a language model as one of them (`judge`)."""

from agentgym.rewards.rubric import (
    Reward,
    Rewarded,
    RewardError,
    Rubric,
    Score,
    boxed,
    env_reward,
    has_tags,
    length_penalty,
    matches,
)

__all__ = [
    "Reward",
    "RewardError",
    "Rewarded",
    "Rubric",
    "Score",
    "boxed",
    "env_reward",
    "has_tags",
    "length_penalty",
    "matches",
]
