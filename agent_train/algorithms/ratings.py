"""Elo ratings of the policy and of past policies, and the choice of the next opponent. Pure functions."""

import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

FIRST = 1000.0  # the rating of the policy as the run starts
GAIN = 8.0  # most that one game moves a rating (K)
UNIFORM = 0.2  # share of the steps that meet an earlier policy whatever its rating
NOW = "now"  # the present policy; the others go by their steps


@dataclass(frozen=True)
class PlayersMetrics:
    """A step's opponent and score: a part of `StepMetrics`. Ratings are those after the step."""

    rating: float  # of the policy
    opponent: int  # the step of the earlier policy
    opponent_rating: float
    score: float | None  # mean of the games: 1 won, 0.5 drawn, 0 lost; None without any


def expected(own: float, other: float) -> float:
    """Expected score of a player with the rating `own`, from 0 to 1."""
    return 1 / (1 + 10 ** ((other - own) / 400))


def after_games(own: float, other: float, scores: Iterable[float]) -> tuple[float, float]:
    """Both ratings after games, one by one, with the scores of the first; one player gains what the other loses."""
    for score in scores:
        gain = GAIN * (score - expected(own, other))
        own, other = own + gain, other - gain
    return own, other


def score_of(rewards: Mapping[str, float], past: Collection[str], learning: Collection[str]) -> float:
    """The score of the learning players: 1 if their mean reward is higher, 0.5 if equal, else 0."""
    mine, theirs = (sum(rewards.get(name, 0.0) for name in side) / len(side) for side in (learning, past))
    return 0.5 if mine == theirs else float(mine > theirs)


def kept_steps(step: int, every: int, keep: int) -> list[int]:
    """The steps of possible opponents after `step`: the first, and the newest of each `every` steps, `keep` in all."""
    return [0, *range(every, step + 1, every)[-(keep - 1) :]]


def chances(ratings: Mapping[str, float], steps: Sequence[int]) -> list[float]:
    """The probability of each step's policy as the opponent: (1 - p)^2 for expected score p (10.1038/s41586-019-1724-z), mixed with uniform."""
    hard = [(1 - expected(ratings[NOW], ratings[str(step)])) ** 2 for step in steps]
    return [(1 - UNIFORM) * weight / sum(hard) + UNIFORM / len(steps) for weight in hard]


def draw(ratings: Mapping[str, float], steps: Sequence[int], seed: int) -> int:
    return random.Random(seed).choices(steps, chances(ratings, steps))[0]
