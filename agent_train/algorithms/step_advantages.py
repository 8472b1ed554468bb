"""The advantages of one training step, and what a critic learns: from the outcomes of trajectories to numbers on their rows.

Groups may come in any order, and so may the rows of different trajectories. A formula gives one number for each trajectory, for
each turn, or for each sampled token; `ADVANTAGES` says which formula a name stands for.

Legend: T tokens of all rows of the step, S trajectories, K turns with sampled tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from agent_train.algorithms.advantages import (
    RELATIVE_SPREAD,
    best_of_advantages,
    level_advantages,
    maxrl_advantages,
    opo_advantages,
    rloo_advantages,
)
from agent_train.algorithms.distillation import distillation_advantages
from agent_train.algorithms.gae import adaptive_lambda, bilevel_gae, gae
from agent_train.algorithms.gigpo import gigpo_advantages, state_key
from agent_train.algorithms.kl import kl_rewards, kl_scores
from agent_train.algorithms.prime import prime_advantages, process_rewards
from agent_train.algorithms.returns import moments, reinforce_pp_baseline, return_to_go, whiten
from agent_train.algorithms.selection import Outcome
from agent_train.algorithms.turn_rewards import place, turn_advantages
from agent_train.config.schema import AdvantageConfig, AlgorithmConfig
from agent_train.data.chains import Chains, joined
from agent_train.data.samples import TrainingSample
from agentgym.core.trajectory import Group, Trajectory


@dataclass(frozen=True)
class Scores:
    """What is known of a step beside its rows. Lists are one for each row, in the order of the rows.

    Attributes:
        greedy: the reward of the greedy episode of each task by the task's id, None where it failed: of remax.
        prm: log-probabilities under PRIME's reward model; its reference is that of the rows.
        teacher: log-probabilities under the teacher: of distill.
        teacher_coef: what a nat of difference weighs.
    """

    greedy: Mapping[str, float | None] = field(default_factory=dict)
    prm: Sequence[Sequence[float]] | None = None
    teacher: Sequence[Sequence[float]] | None = None
    teacher_coef: float = 1.0


@dataclass(frozen=True)
class Asked:
    """What a formula reads.

    Attributes:
        settings: of the advantage.
        chains: the trajectories that take part.
        turns: for each chain the rewards of its turns, less the KL of their tokens where the reward pays for it.
        rewards_T: the same on tokens: the KL on each, the reward of a turn on its last sampled one.
        scores: what is known beside the rows.
        listed: the lists of `scores` by the identity of their row.
    """

    settings: AdvantageConfig
    chains: Chains
    turns: list[list[float]]
    rewards_T: Tensor
    scores: Scores
    listed: Mapping[str, Mapping[int, Sequence[float]]]

    @property
    def rewards(self) -> list[list[float]]:
        """The reward of each trajectory, by group."""
        return self.chains.grouped([math.fsum(turns) for turns in self.turns])

    @property
    def std(self) -> str:
        """What formulas with one deviation divide by."""
        return "none" if self.settings.std_level == "none" else self.settings.std

    def known_T(self, name: str) -> Tensor:
        """The lists of `scores` with this name, on all tokens.

        Raises:
            ValueError: nobody gave them.
        """
        lists = self.listed.get(name)
        if lists is None:
            raise ValueError(f"advantage {self.settings.name!r} needs what the {name} says of each row")
        return torch.tensor(list(chain.from_iterable(lists[id(row)] for row in self.chains.rows)), dtype=torch.float64)


def set_advantages(
    algorithm: AlgorithmConfig,
    groups: Sequence[Group],
    rows: Sequence[TrainingSample],
    outcomes: Mapping[str, Outcome],
    scores: Scores = Scores(),
    kl_coef: float = 0.0,
) -> None:
    """Set `advantages` of every row of a step, and `targets` where there is a critic.

    Args:
        algorithm: its `advantage` says which, its `kl` whether the reward pays for the KL.
        groups: all that the step trains on.
        rows: of their trajectories that take part; with `reference` where the reward pays for the KL, with `values` for a critic.
        outcomes: of each trajectory, by its id.
        scores: what the chosen advantage needs beside these.
        kl_coef: the present coefficient; read where `kl.place` is reward.

    Raises:
        ValueError: an unknown advantage, something that it needs is missing, rows that do not fit the trajectories, or rewards
            that the advantage cannot take.
    """
    settings = algorithm.advantage
    if settings.name not in ADVANTAGES:
        raise ValueError(f"advantage must be one of {', '.join(ADVANTAGES)}, not {settings.name!r}")
    chains = Chains.of(groups, rows, outcomes)
    if not chains.chains:
        return
    asked = Asked(settings, chains, *_rewards(chains, algorithm, kl_coef), scores, _listed(rows, scores))
    advantages_T = ADVANTAGES[settings.name](asked)
    if settings.whiten:
        totals = moments(advantages_T, chains.trained_T)
        advantages_T = whiten(advantages_T, chains.mask_T, totals, settings.std, settings.eps)
    chains.put_back("advantages", advantages_T)
    if settings.name in TARGETS:
        chains.put_back("targets", TARGETS[settings.name](asked))


def mean_and_spread(rows: Sequence[TrainingSample]) -> tuple[float, float]:
    """Mean and population standard deviation of the advantages over the sampled tokens; 0.0 without tokens."""
    advantages_M = joined(rows, "advantages")[joined(rows, "mask").bool()]
    if not len(advantages_M):
        return 0.0, 0.0
    return float(advantages_M.mean()), float(advantages_M.std(correction=0))


def _rewards(chains: Chains, algorithm: AlgorithmConfig, kl_coef: float) -> tuple[list[list[float]], Tensor]:
    """The rewards of turns and of tokens; see `Asked`."""
    turns = [list(one.rewards) for one in chains.chains]
    turns_K = torch.tensor(list(chain.from_iterable(turns)), dtype=torch.float64)
    if algorithm.kl.place != "reward" or not kl_coef:
        return turns, place(turns_K, chains.mask_T, chains.turn_T)
    given = (joined(chains.rows, "logprobs"), joined(chains.rows, "reference"), chains.mask_T, chains.turn_T)
    paid_K = kl_scores(turns_K, *given, kl_coef, algorithm.kl.value)
    return chains.split_turns(paid_K.tolist()), kl_rewards(turns_K, *given, kl_coef, algorithm.kl.value)


def _listed(rows: Sequence[TrainingSample], scores: Scores) -> dict[str, dict[int, Sequence[float]]]:
    given = {"prm": scores.prm, "teacher": scores.teacher}
    return {
        name: {id(row): numbers for row, numbers in zip(rows, lists, strict=True)}
        for name, lists in given.items()
        if lists is not None
    }


def _group(asked: Asked) -> Tensor:
    s = asked.settings
    levels = level_advantages(asked.rewards, s.mean_level, s.std_level, s.std, s.eps)
    return asked.chains.on_tokens(asked.chains.flat(levels))


def _of_each_group(formula: Callable[[Sequence[float]], list[float]]) -> Callable[[Asked], Tensor]:
    """The advantage whose formula reads the rewards of one group."""

    def of_step(asked: Asked) -> Tensor:
        return asked.chains.on_tokens(asked.chains.flat([formula(rewards) for rewards in asked.rewards]))

    return of_step


def _opo(asked: Asked) -> Tensor:
    lengths = asked.chains.grouped(asked.chains.lengths)
    pairs = zip(asked.rewards, lengths, strict=True)
    return asked.chains.on_tokens(asked.chains.flat([opo_advantages(rewards, sizes) for rewards, sizes in pairs]))


def _reinforce_pp_baseline(asked: Asked) -> Tensor:
    chains, s = asked.chains, asked.settings
    lengths = chains.grouped(chains.lengths)
    trained = chains.grouped([one.trained for one in chains.chains])
    return chains.on_tokens(chains.flat(reinforce_pp_baseline(asked.rewards, lengths, s.std, s.eps, trained)))


def _remax(asked: Asked) -> Tensor:
    """The return from each token less the reward of the greedy episode; 0 where that one failed."""
    chains, greedy = asked.chains, asked.scores.greedy
    names = [one.trajectory.task_id for one in chains.chains]
    if missing := sorted({name for name in names if name not in greedy}):
        raise ValueError(f"remax needs a greedy episode of every task; task {missing[0]!r} has none")
    returns_T = return_to_go(asked.rewards_T, chains.mask_T, chains.segment_T, asked.settings.gamma)
    baseline_T = chains.on_tokens([math.nan if greedy[name] is None else float(greedy[name] or 0.0) for name in names])
    # What differs by rounding does not differ; nothing differs by more than NaN.
    differs_T = (returns_T - baseline_T).abs() > RELATIVE_SPREAD * torch.maximum(returns_T.abs(), baseline_T.abs())
    return torch.where(chains.mask_T & differs_T, returns_T - baseline_T, 0.0)


def _turn(asked: Asked) -> Tensor:
    groups = asked.chains.grouped(asked.turns)
    advantages = [turn_advantages(turns, asked.std, asked.settings.eps) for turns in groups]
    return asked.chains.on_turns(asked.chains.flat(advantages))


def _gigpo(asked: Asked) -> Tensor:
    s, chains = asked.settings, asked.chains
    states = chains.grouped([_states(one.trajectory) for one in chains.chains])
    advantages = [
        gigpo_advantages(turns, seen, s.turn_gamma, s.step_weight, asked.std, s.eps)
        for turns, seen in zip(chains.grouped(asked.turns), states, strict=True)
    ]
    return chains.on_turns(chains.flat(advantages))


def _states(trajectory: Trajectory) -> list[str]:
    """What identifies the state before each turn in which the agent sampled.

    The environment's own key where it gives one, as `info["state"]` of the `reset` or `step` before; else what the agent was shown.
    """
    own = [trajectory.metadata.get("state"), *(turn.info.get("state") for turn in trajectory.turns)]
    return [
        state_key(turn.observation if state is None else [{"state": state}])
        for turn, state in zip(trajectory.turns, own, strict=False)
        if turn.tokens and turn.tokens.completion_ids
    ]


def _reinforce_pp(asked: Asked) -> Tensor:
    chains, s = asked.chains, asked.settings
    returns_T = return_to_go(asked.rewards_T, chains.mask_T, chains.segment_T, s.gamma)
    return whiten(returns_T, chains.mask_T, moments(returns_T, chains.trained_T), s.std, s.eps)


def _gae(asked: Asked, lam: float | Tensor | None = None) -> Tensor:
    chains = asked.chains
    given = (asked.rewards_T, joined(chains.rows, "values"), chains.mask_T, chains.segment_T)
    return gae(*given, asked.settings.gamma, _lambda(asked) if lam is None else lam)


def _bilevel_gae(asked: Asked, lam: float | Tensor | None = None) -> Tensor:
    chains, s = asked.chains, asked.settings
    given = (asked.rewards_T, joined(chains.rows, "values"), chains.mask_T, chains.segment_T, chains.turn_T)
    return bilevel_gae(*given, s.gamma, _lambda(asked) if lam is None else lam, s.turn_gamma, s.turn_lam)


def _lambda(asked: Asked) -> float | Tensor:
    alpha = asked.settings.lam_alpha
    if alpha is None:
        return asked.settings.lam
    return adaptive_lambda(asked.chains.mask_T, asked.chains.segment_T, alpha)


def _targets_of(formula: Callable[[Asked, float | Tensor | None], Tensor]) -> Callable[[Asked], Tensor]:
    """What the critic learns: advantage and value together, with a lambda of its own where one is set.

    VAPO (arXiv 2504.05118) sets it to 1: the target is then the plain return, which a wrong critic cannot bias.
    """

    def of_step(asked: Asked) -> Tensor:
        advantages_T = formula(asked, asked.settings.value_lam)
        return torch.where(asked.chains.mask_T, advantages_T + joined(asked.chains.rows, "values"), 0.0)

    return of_step


def _prime(asked: Asked) -> Tensor:
    chains, s = asked.chains, asked.settings
    reference_T = joined(chains.rows, "reference")
    process_T = process_rewards(asked.known_T("prm"), reference_T, chains.mask_T, s.prime_beta)
    outcomes_S = torch.tensor([math.fsum(turns) for turns in asked.turns], dtype=torch.float64)
    group_S = torch.tensor(chains.flat([[number] * len(own) for number, own in enumerate(chains.groups)]))
    return prime_advantages(process_T, chains.mask_T, chains.segment_T, outcomes_S, group_S, s.gamma)


def _distill(asked: Asked) -> Tensor:
    chains = asked.chains
    sampled_T, teacher_T = joined(chains.rows, "logprobs"), asked.known_T("teacher")
    return distillation_advantages(sampled_T, teacher_T, chains.mask_T, asked.scores.teacher_coef)


def _constant(asked: Asked) -> Tensor:
    return asked.chains.mask_T.double()


ADVANTAGES: Mapping[str, Callable[[Asked], Tensor]] = {
    "group": _group,
    "rloo": _of_each_group(rloo_advantages),
    "opo": _opo,
    "maxrl": _of_each_group(maxrl_advantages),
    "remax": _remax,
    "best_of": _of_each_group(best_of_advantages),
    "reinforce_pp": _reinforce_pp,
    "reinforce_pp_baseline": _reinforce_pp_baseline,
    "gae": _gae,
    "bilevel_gae": _bilevel_gae,
    "turn": _turn,
    "gigpo": _gigpo,
    "prime": _prime,
    "distill": _distill,
    "constant": _constant,
}
TARGETS: Mapping[str, Callable[[Asked], Tensor]] = {
    "gae": _targets_of(_gae),
    "bilevel_gae": _targets_of(_bilevel_gae),
}
