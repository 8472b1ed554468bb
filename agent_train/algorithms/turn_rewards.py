"""Rewards of turns and episodes on tokens, and advantages of turns.

A reward lies on the last token that was *sampled* in its turn or trajectory.

Legend: T tokens, S segments: trajectories or turns.
"""

import hashlib
import json
import math
from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from agent_train.algorithms.advantages import group_advantages
from agentgym.storage.jsonl import plain


def place(scores_S: Tensor, mask_T: Tensor, segment_T: Tensor) -> Tensor:
    """rewards_T, fp32: the score of each segment on its last sampled token, 0 elsewhere.

    `segment_T` says which score is a token's, 0 to S-1; the tokens of a segment lie together.
    """
    index_M = mask_T.nonzero()[:, 0]
    segment_M = segment_T[index_M]
    ends_M = torch.ones_like(segment_M, dtype=torch.bool)
    ends_M[:-1] = segment_M[1:] != segment_M[:-1]
    last_T = torch.zeros_like(mask_T).index_copy(0, index_M, ends_M)
    return torch.where(last_T, scores_S.float()[segment_T], 0.0)


def turn_segments(lengths: Sequence[int], turn_ends: Sequence[Sequence[int]]) -> Tensor:
    """turn_T, int64: the number of each token's turn, from 0, over samples of these lengths that lie one after another.

    A turn begins behind the sampled tokens of the one before. A sample without turns takes one number.
    """
    sizes: list[int] = []
    for number, (length, ends) in enumerate(zip(lengths, turn_ends, strict=True)):
        bounds = [0, *ends]
        rises = all(a < b for a, b in pairwise(bounds))
        if not rises or bounds[-1] > length:
            raise ValueError(f"sample {number} of {length} tokens: its turns cannot end at {list(ends)}")
        starts = bounds[:-1] or [0]
        sizes += [end - start for start, end in zip(starts, [*starts[1:], length], strict=True)]
    return torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes, dtype=torch.int64))


def fold_silent_turns(rewards: Sequence[float], sampled: Sequence[int]) -> list[float]:
    """The rewards of the turns that sampled tokens; another turn's reward goes to the last one before it, or to the first."""
    parts: list[list[float]] = []
    early: list[float] = []
    for reward, tokens in zip(rewards, sampled, strict=True):
        if tokens:
            parts.append([reward])
        else:
            (parts[-1] if parts else early).append(reward)
    if parts:
        parts[0] += early
    return [math.fsum(part) for part in parts]


def turn_returns(rewards: Sequence[float], gamma: float = 1.0) -> list[float]:
    returns: list[float] = []
    for reward in reversed(rewards):
        returns.append(reward + gamma * (returns[-1] if returns else 0.0))
    return returns[::-1]


def turn_advantages(rewards: Sequence[Sequence[float]], std: str = "sample", eps: float = 1e-6) -> list[list[float]]:
    """GRPO with process supervision (arXiv 2402.03300, section 4.1.3): one advantage for each turn of one group.

    The rewards of all its turns are normalised together, `(r - mean) / (std + eps)`; the advantage of a turn is the sum
    of its own and all later ones. All 0.0 with fewer than two trajectories or without spread.
    """
    flat = [reward for turns in rewards for reward in turns]
    normal = iter(group_advantages(flat, std, eps) if len(rewards) > 1 else [0.0] * len(flat))
    return [turn_returns([next(normal) for _ in turns]) for turns in rewards]


def gigpo_advantages(
    rewards: Sequence[Sequence[float]],
    states: Sequence[Sequence[Hashable]],
    gamma: float = 0.95,
    step_weight: float = 1.0,
    std: str = "none",
    eps: float = 1e-6,
) -> list[list[float]]:
    """GiGPO (arXiv 2505.10978): `A_episode + step_weight * A_step` for each step of each episode of one group.

    A_episode compares the sums of rewards of the episodes. A_step compares the returns, discounted by `gamma` per step,
    of all steps of the group that began in the same state (see `state_key`); a state that was met once gives 0.
    """
    episodes = group_advantages([math.fsum(steps) for steps in rewards], std, eps)
    returns = [turn_returns(steps, gamma) for steps in rewards]
    met: dict[Hashable, list[tuple[int, int]]] = {}
    for number, (steps, seen) in enumerate(zip(rewards, states, strict=True)):
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
    """A short key of an observation: equal for equal messages, whatever the order of their fields."""
    text = json.dumps(list(observation), sort_keys=True, ensure_ascii=False, default=plain)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
