"""GiGPO (arXiv 2505.10978): advantages of steps, from episodes of one task that met the same states. Pure Python."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from agent_train.algorithms.advantages import group_advantages
from agent_train.algorithms.turn_rewards import turn_returns
from agentgym.storage.jsonl import plain


def gigpo_advantages(
    rewards: Sequence[Sequence[float] | None],
    states: Sequence[Sequence[Hashable]],
    gamma: float = 0.95,
    step_weight: float = 1.0,
    std: str = "none",
    eps: float = 1e-6,
) -> list[list[float]]:
    """`A_episode + step_weight * A_step` for each step of each episode of one group.

    A_episode compares the sums of rewards of the episodes, each counting once however long it is. A_step compares the
    discounted returns of all steps of the group that began in the same state; a state that was met once gives 0.

    Args:
        rewards: for each episode the rewards of its steps; None takes no part and gets no numbers.
        states: for each episode what identifies the state before each step; see `state_key`.
        gamma: discount per step, for A_step.
        step_weight: the paper's omega.
        std: what both comparisons divide by: "none", "sample" or "population".
        eps: added to the standard deviation.

    Returns:
        One list for each episode, as long as its rewards.

    Raises:
        ValueError: not one state for each reward, or a reward that is not finite.
    """
    episodes = group_advantages([None if steps is None else math.fsum(steps) for steps in rewards], std, eps)
    met: dict[Hashable, list[tuple[int, int]]] = {}
    returns: list[list[float]] = []
    for number, (steps, seen) in enumerate(zip(rewards, states, strict=True)):
        returns.append([] if steps is None else turn_returns(steps, gamma))
        if steps is None:
            continue
        if len(steps) != len(seen):
            raise ValueError(f"episode {number} of the group: {len(steps)} rewards and {len(seen)} states")
        for step, state in enumerate(seen):
            met.setdefault(state, []).append((number, step))
    advantages = [[episode] * len(steps) for episode, steps in zip(episodes, returns, strict=True)]
    for places in met.values():
        relative = group_advantages([returns[number][step] for number, step in places], std, eps)
        for (number, step), advantage in zip(places, relative, strict=True):
            advantages[number][step] += step_weight * advantage
    return advantages


def state_key(observation: Sequence[Mapping[str, Any]]) -> str:
    """A short key of what an agent was shown: equal for equal messages, whatever the order of their fields."""
    text = json.dumps(list(observation), sort_keys=True, ensure_ascii=False, default=plain)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
