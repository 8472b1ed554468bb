"""Rewards of turns and episodes, placed on tokens.

A reward lies on the last token that was *sampled* in its turn or trajectory, not on the last token: what the environment wrote
after it is no action. Where nothing was sampled there is no place, and nothing else is touched.

Legend: T tokens, S segments: trajectories or turns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from agent_train.algorithms.advantages import group_advantages


def last_sampled(mask_T: Tensor, segment_T: Tensor) -> Tensor:
    """True on the last sampled token of each segment; segments without one have none."""
    index_M = mask_T.nonzero()[:, 0]
    segment_M = segment_T[index_M]
    ends_M = torch.ones_like(segment_M, dtype=torch.bool)
    ends_M[:-1] = segment_M[1:] != segment_M[:-1]
    return torch.zeros_like(mask_T).index_copy(0, index_M, ends_M)


def place(scores_S: Tensor, mask_T: Tensor, segment_T: Tensor) -> Tensor:
    """The score of each segment on its last sampled token.

    Args:
        scores_S: one score for each segment: rewards of trajectories, or of turns.
        mask_T: True on sampled tokens.
        segment_T: which score is a token's, 0 to S-1; the tokens of a segment lie together.

    Returns:
        rewards_T, fp32, 0 everywhere else. The score of a segment without a sampled token lies nowhere.
    """
    return torch.where(last_sampled(mask_T, segment_T), scores_S.float()[segment_T], 0.0)


def turn_segments(lengths: Sequence[int], turn_ends: Sequence[Sequence[int]]) -> Tensor:
    """Numbers the turns of rows that lie one after another.

    The tokens before a turn's sampled ones, which it answers, are of that turn; those after the last are of the last.

    Args:
        lengths: tokens of each row.
        turn_ends: for each row the positions just past the last sampled token of each turn, as in `TrainingSample.turn_ends`.

    Returns:
        turn_T, int64, from 0. A row without turns takes one number as if it were a turn.

    Raises:
        ValueError: the ends of a row do not rise, or lie outside it.
    """
    sizes: list[int] = []
    for number, (length, ends) in enumerate(zip(lengths, turn_ends, strict=True)):
        bounds = [0, *ends]
        rises = all(a < b for a, b in pairwise(bounds))
        if not rises or bounds[-1] > length:
            raise ValueError(f"row {number} of {length} tokens: its turns cannot end at {list(ends)}")
        starts = bounds[:-1] or [0]
        sizes += [end - start for start, end in zip(starts, [*starts[1:], length], strict=True)]
    return torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes, dtype=torch.int64))


def fold_silent_turns(rewards: Sequence[float], sampled: Sequence[int]) -> list[float]:
    """The rewards of the turns that sampled tokens, with those of the other turns added, so that the sum stays.

    The reward of a turn without sampled tokens goes to the last turn before it that has some, or to the first one.

    Args:
        rewards: one for each turn of a trajectory.
        sampled: sampled tokens of each turn.

    Returns:
        One reward for each turn with sampled tokens; none where no turn has any.
    """
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
    """The discounted sum of the rewards from each turn to the last."""
    returns: list[float] = []
    for reward in reversed(rewards):
        returns.append(reward + gamma * (returns[-1] if returns else 0.0))
    return returns[::-1]


def turn_advantages(
    rewards: Sequence[Sequence[float] | None], std: str = "sample", eps: float = 1e-6
) -> list[list[float]]:
    """GRPO with process supervision (arXiv 2402.03300, section 4.1.3): one advantage for each turn of one group.

    The rewards of all turns of the group are normalised together, `(r - mean) / (std + eps)`; the advantage of a turn is the
    sum of its own and all later ones.

    Args:
        rewards: for each trajectory the rewards of its turns; None takes no part.
        std: "sample" (n-1), "population" (n) or "none".
        eps: added to the standard deviation.

    Returns:
        As many numbers as there are turns, none for None. All 0.0 with fewer than two trajectories or without spread.
    """
    known = [turns for turns in rewards if turns is not None]
    flat = [reward for turns in known for reward in turns]
    normal = iter(group_advantages(flat, std, eps) if len(known) > 1 else [0.0] * len(flat))
    return [turn_returns([next(normal) for _ in turns]) if turns is not None else [] for turns in rewards]
