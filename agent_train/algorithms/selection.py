"""Which episodes of a step are trained on, and what their lengths cost. Pure functions on groups.

Filters and dynamic sampling look at rewards as the environment gave them; overlong shaping changes only what advantages are made
of. Nothing is chosen by when it ended: groups stay whole and keep their order, and what was left out is counted with its length.

Legend: an episode is *cut* where a limit ended it, of turns, tokens or time, or where its last answer is not whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from agent_train.algorithms.shaping import informative, mask_truncated, overlong_penalty, sample_again
from agent_train.algorithms.turn_rewards import fold_silent_turns
from agent_train.config.extensions import filters, reward_shaping
from agent_train.config.schema import AlgorithmConfig, FilterConfig, OverlongConfig
from agentgym.core.trajectory import Group, Trajectory


@dataclass(frozen=True)
class Outcome:
    """What one trajectory counts for.

    Attributes:
        rewards: of its turns with sampled tokens, in order, what overlong shaping takes included; None where it takes no part in
            advantages: it failed, sampled nothing, or was cut and is left out of the baseline too.
        trained: whether it is in the loss.
    """

    rewards: tuple[float, ...] | None
    trained: bool

    @property
    def score(self) -> float | None:
        """The sum of the rewards; None where it takes no part."""
        return None if self.rewards is None else math.fsum(self.rewards)

    def plus(self, score: float) -> Outcome:
        """With a reward model's score beside the reward of the last turn. What takes no part stays as it is."""
        return self if self.rewards is None else Outcome((*self.rewards[:-1], self.rewards[-1] + score), self.trained)


@dataclass(frozen=True)
class Selection:
    """What a step trains on, in numbers. Lengths are sampled tokens of an episode; failed episodes are in none of them.

    Attributes:
        rounds: rollouts of the step.
        groups: that were played; `dropped_groups` of them are not trained on.
        episodes: that are trained on; `length` is their mean length.
        dropped: episodes that were played to an end and are not trained on; `dropped_length` is their mean length.
        masked: those of them that were cut, in groups that are trained on.
        short: groups that dynamic sampling wanted and did not find.
        penalty: mean of what overlong shaping took from the rewards of the groups that are trained on.
    """

    rounds: int
    groups: int
    dropped_groups: int
    episodes: int
    length: float
    dropped: int
    dropped_length: float
    masked: int
    short: int
    penalty: float


@dataclass(frozen=True)
class Chosen:
    """The groups that a step trains on, the outcome of each of their trajectories by id, and what was left out."""

    groups: list[Group]
    outcomes: Mapping[str, Outcome]
    selection: Selection


def more_groups(played: Sequence[Group], algorithm: AlgorithmConfig, wanted: int, rounds: int) -> int:
    """How many further groups dynamic sampling (DAPO, arXiv 2503.14476) plays before the step trains; 0: none.

    Args:
        played: of this step so far.
        algorithm: its `filter.rounds` rollouts, each of `wanted` groups, are the most there are.
        wanted: groups with spread that a step trains on.
        rounds: rollouts so far.
    """
    most = algorithm.filter.rounds
    if rounds >= most:
        return 0
    kept = sum(_informative(group, algorithm.overlong) for group in played)
    return sample_again(kept, len(played), wanted, most * wanted).groups


def choose(played: Sequence[Group], algorithm: AlgorithmConfig, wanted: int, rounds: int = 1) -> Chosen:
    """What a step trains on, of all that it played.

    Args:
        played: whole groups, in the order of their tasks.
        algorithm: its `filter` chooses groups; its `overlong` shapes rewards and masks cut episodes.
        wanted: of dynamic sampling: the most groups that a step trains on. Those that it found too many are dropped.
        rounds: rollouts that it took.
    """
    kept = kept_groups(played, algorithm.filter, algorithm.overlong)
    short = 0
    if algorithm.filter.rounds > 1:
        kept, short = kept[:wanted], max(wanted - len(kept), 0)
    groups = [played[index] for index in kept]
    outcomes = {
        t.id: outcome
        for group in groups
        for t, outcome in zip(
            group.trajectories, outcomes_of(group, algorithm.overlong, algorithm.reward_shaping), strict=True
        )
    }
    return Chosen(groups, outcomes, _counted(played, groups, outcomes, algorithm.overlong, rounds, short))


def kept_groups(groups: Sequence[Group], settings: FilterConfig, overlong: OverlongConfig) -> list[int]:
    """Indices of the groups that the filter keeps, ascending; none if no group has what it asks for.

    Raises:
        ValueError: an unknown filter, or it returns something else than ascending indices.
    """
    kept = list(filters.load(settings.name)([_rewards(group, overlong) for group in groups], settings.share))
    if kept != sorted(set(kept)) or not all(0 <= index < len(groups) for index in kept):
        raise ValueError(f"filter {settings.name!r} returns {kept}, not ascending indices of {len(groups)} groups")
    return kept


def outcomes_of(group: Group, overlong: OverlongConfig, shaping: str | None = None) -> list[Outcome]:
    """What each trajectory of a group counts for. `shaping` names a function of `algorithm.reward_shaping`."""
    shape = rewards_of_turns if shaping is None else reward_shaping.load(shaping)
    masked = mask_truncated(
        [float(t.reward) if _took_part(t) else None for t in group.trajectories],
        [overlong.mask and cut(t) for t in group.trajectories],
        overlong.baseline,
    )
    return [
        Outcome(None if reward is None else _turn_rewards(trajectory, overlong, shape), trained and reward is not None)
        for trajectory, reward, trained in zip(group.trajectories, masked.rewards, masked.in_loss, strict=True)
    ]


def cut(trajectory: Trajectory) -> bool:
    """Whether a limit ended the episode, so that nobody knows how it would have gone on."""
    if trajectory.end != "terminated":
        return not trajectory.failed
    last = trajectory.turns[-1].tokens if trajectory.turns else None
    return last is not None and last.finish_reason == "length"


def penalty(trajectory: Trajectory, overlong: OverlongConfig) -> float:
    """What overlong shaping adds to the reward of an episode, 0 or less, by all the tokens that were sampled in it."""
    if overlong.length is None:
        return 0.0
    if overlong.buffer == 0:
        return -overlong.factor if trajectory.sampled_tokens > overlong.length else 0.0
    return overlong_penalty(trajectory.sampled_tokens, overlong.length, overlong.buffer, overlong.factor)


def rewards_of_turns(trajectory: Trajectory) -> list[float]:
    """The rewards of an episode's turns as the environment gave them: no shaping."""
    return [turn.reward for turn in trajectory.turns]


def _turn_rewards(
    trajectory: Trajectory, overlong: OverlongConfig, shape: Callable[[Trajectory], Sequence[float]]
) -> tuple[float, ...]:
    """Of the turns with sampled tokens; the penalty comes with the last.

    Raises:
        ValueError: the shaping returns something else than a finite number for each turn.
    """
    sampled = [len(turn.tokens.completion_ids) if turn.tokens else 0 for turn in trajectory.turns]
    shaped = [float(reward) for reward in shape(trajectory)]
    if len(shaped) != len(sampled) or not all(math.isfinite(reward) for reward in shaped):
        raise ValueError(f"reward shaping returns {shaped}, not a finite number for each of {len(sampled)} turns")
    rewards = fold_silent_turns(shaped, sampled)
    rewards[-1] += penalty(trajectory, overlong)
    return tuple(rewards)


def _took_part(trajectory: Trajectory) -> bool:
    return not trajectory.failed and trajectory.sampled_tokens > 0


def _rewards(group: Group, overlong: OverlongConfig) -> list[float | None]:
    """As the environment gave them; None for those that are in no baseline."""
    out = overlong.mask and not overlong.baseline
    return [float(t.reward) if _took_part(t) and not (out and cut(t)) else None for t in group.trajectories]


def _informative(group: Group, overlong: OverlongConfig) -> bool:
    return informative(_rewards(group, overlong))


def _counted(
    played: Sequence[Group],
    kept: Sequence[Group],
    outcomes: Mapping[str, Outcome],
    overlong: OverlongConfig,
    rounds: int,
    short: int,
) -> Selection:
    in_kept = [t for group in kept for t in group.trajectories if _took_part(t)]
    trained = {t.id for t in in_kept if outcomes[t.id].trained}
    everyone = [t for group in played for t in group.trajectories if _took_part(t)]
    left = [t.sampled_tokens for t in everyone if t.id not in trained]
    return Selection(
        rounds=rounds,
        groups=len(played),
        dropped_groups=len(played) - len(kept),
        episodes=len(trained),
        length=_mean([t.sampled_tokens for t in in_kept if t.id in trained]),
        dropped=len(left),
        dropped_length=_mean(left),
        masked=len(in_kept) - len(trained),
        short=short,
        penalty=_mean([penalty(t, overlong) for t in in_kept]),
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
