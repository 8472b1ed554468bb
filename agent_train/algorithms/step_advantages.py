"""The advantages of one training step, and the targets of its critic.

A formula is a function of `AdvantageInputs` that returns one number for each token; `config.extensions.advantages`
names them.

Legend: T tokens of all samples of the step, S trajectories, K turns with sampled tokens.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from agent_train.algorithms import returns
from agent_train.algorithms.advantage_inputs import AdvantageInputs
from agent_train.algorithms.advantages import (
    RELATIVE_SPREAD,
    best_of_advantages,
    level_advantages,
    maxrl_advantages,
    opo_advantages,
    rloo_advantages,
)
from agent_train.algorithms.kl import distillation_advantages
from agent_train.algorithms.prime import prime_advantages, process_rewards
from agent_train.algorithms.turn_rewards import gigpo_advantages, state_key, turn_advantages
from agent_train.config import extensions
from agent_train.data.samples import TrainingSample
from agentgym.core.trajectory import Summary, Trajectory


def with_advantages(inputs: AdvantageInputs, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
    """The samples of a step with their `advantages`, and with `targets` where there is a critic. `inputs` are of the same samples."""
    settings = inputs.settings
    formula = extensions.advantages.load(settings.name)
    if not samples:
        return []
    advantages_T = formula(inputs)
    if not isinstance(advantages_T, Tensor) or advantages_T.shape != inputs.mask_T.shape:
        shape = tuple(advantages_T.shape) if isinstance(advantages_T, Tensor) else type(advantages_T).__name__
        raise ValueError(
            f"advantage {settings.name!r} returns {shape}, not one number for each of {len(inputs.mask_T)} tokens"
        )
    advantages_T = torch.where(inputs.mask_T, advantages_T, 0.0)
    if settings.whiten:
        totals = returns.moments(advantages_T, inputs.trained_T)
        advantages_T = returns.whiten(advantages_T, inputs.mask_T, totals, settings.std, settings.eps)
    advantages = inputs.by_sample(advantages_T)
    targets = {}
    if critic := CRITIC_FORMULAS.get(settings.name):
        targets_T = critic(inputs, settings.value_lam) + inputs.tokens("values")
        targets = inputs.by_sample(torch.where(inputs.mask_T, targets_T, 0.0))
    elif targets_of := getattr(formula, "targets", None):
        targets = inputs.by_sample(targets_of(inputs))
    return [replace(each, advantages=advantages[each.id], targets=targets.get(each.id, [])) for each in samples]


def mean_and_spread(samples: Sequence[TrainingSample]) -> tuple[float, float]:
    on_M = [a for sample in samples for a, on in zip(sample.advantages, sample.mask, strict=True) if on]
    if not on_M:
        return 0.0, 0.0
    advantages_M = torch.tensor(on_M, dtype=torch.float64)
    return float(advantages_M.mean()), float(advantages_M.std(correction=0))


def group_advantage(inputs: AdvantageInputs) -> Tensor:
    s = inputs.settings
    return inputs.on_tokens(level_advantages(inputs.rewards, s.mean_level, s.std_level, s.std, s.eps))


def _of_each_group(formula: Callable[[Sequence[float]], list[float]]) -> Callable[[AdvantageInputs], Tensor]:
    def of_step(inputs: AdvantageInputs) -> Tensor:
        return inputs.on_tokens([formula(rewards) for rewards in inputs.rewards])

    return of_step


rloo_advantage = _of_each_group(rloo_advantages)
maxrl_advantage = _of_each_group(maxrl_advantages)
best_of_advantage = _of_each_group(best_of_advantages)


def opo_advantage(inputs: AdvantageInputs) -> Tensor:
    pairs = zip(inputs.rewards, inputs.lengths, strict=True)
    return inputs.on_tokens([opo_advantages(rewards, sizes) for rewards, sizes in pairs])


def reinforce_pp_baseline_advantage(inputs: AdvantageInputs) -> Tensor:
    s = inputs.settings
    return inputs.on_tokens(returns.reinforce_pp_baseline(inputs.rewards, inputs.lengths, s.std, s.eps, inputs.in_loss))


def remax_advantage(inputs: AdvantageInputs) -> Tensor:
    """The return from each token less the reward of the greedy episode; 0 where that one failed."""
    greedy = {name: math.nan if reward is None else reward for name, reward in inputs.greedy.items()}
    if missing := sorted({trajectory.task_id for trajectory in inputs.trajectories} - greedy.keys()):
        raise ValueError(f"remax needs a greedy episode of every task; task {missing[0]!r} has none")
    returns_T = returns.return_to_go(inputs.rewards_T, inputs.mask_T, inputs.segment_T, inputs.settings.gamma)
    baseline_T = inputs.on_tokens([[greedy[trajectory.task_id] for trajectory in group] for group in inputs.groups])
    # A difference by rounding counts as none; nothing differs by more than NaN.
    differs_T = (returns_T - baseline_T).abs() > RELATIVE_SPREAD * torch.maximum(returns_T.abs(), baseline_T.abs())
    return torch.where(inputs.mask_T & differs_T, returns_T - baseline_T, 0.0)


def turn_advantage(inputs: AdvantageInputs) -> Tensor:
    return inputs.on_turns([turn_advantages(turns, inputs.std, inputs.settings.eps) for turns in inputs.turn_rewards])


def gigpo_advantage(inputs: AdvantageInputs) -> Tensor:
    s = inputs.settings
    states = [[_states(trajectory) for trajectory in group] for group in inputs.groups]
    advantages = [
        gigpo_advantages(turns, seen, s.turn_gamma, s.step_weight, inputs.std, s.eps)
        for turns, seen in zip(inputs.turn_rewards, states, strict=True)
    ]
    return inputs.on_turns(advantages)


def _states(trajectory: Trajectory) -> list[str]:
    """The key of the state before each turn that sampled: `info["state"]` of the `reset` or `step` before, else what the agent was shown."""
    own = iter([trajectory.metadata.get("state"), *(turn.info.get("state") for turn in trajectory.turns)])
    found = []
    for number, call in enumerate(trajectory.calls()):
        if isinstance(call, Summary):
            key = f"{trajectory.id}, summary {number}"  # a state like no other
        else:
            state = next(own)
            key = state_key(call.observation if state is None else [{"state": state}])
        if call.tokens and call.tokens.completion_ids:
            found.append(key)
    return found


def reinforce_pp_advantage(inputs: AdvantageInputs) -> Tensor:
    """REINFORCE++ (arXiv 2501.03262): returns, whitened over the step."""
    s = inputs.settings
    returns_T = returns.return_to_go(inputs.rewards_T, inputs.mask_T, inputs.segment_T, s.gamma)
    return returns.whiten(returns_T, inputs.mask_T, returns.moments(returns_T, inputs.trained_T), s.std, s.eps)


def gae_advantage(inputs: AdvantageInputs, lam: float | Tensor | None = None) -> Tensor:
    given = (inputs.rewards_T, inputs.tokens("values"), inputs.mask_T, inputs.segment_T)
    return returns.gae(*given, inputs.settings.gamma, _lambda(inputs) if lam is None else lam)


def bilevel_gae_advantage(inputs: AdvantageInputs, lam: float | Tensor | None = None) -> Tensor:
    s = inputs.settings
    given = (inputs.rewards_T, inputs.tokens("values"), inputs.mask_T, inputs.segment_T, inputs.turn_T)
    if lam is not None:  # of the critic's targets, between turns too: `turn_lam` would let a wrong critic bias them
        return returns.bilevel_gae(*given, s.gamma, lam, s.turn_gamma)
    return returns.bilevel_gae(*given, s.gamma, _lambda(inputs), s.turn_gamma, s.turn_lam)


def _lambda(inputs: AdvantageInputs) -> float | Tensor:
    alpha = inputs.settings.lam_alpha
    return inputs.settings.lam if alpha is None else returns.adaptive_lambda(inputs.mask_T, inputs.segment_T, alpha)


def prime_advantage(inputs: AdvantageInputs) -> Tensor:
    process_T = process_rewards(
        inputs.tokens("prm"), inputs.tokens("reference"), inputs.mask_T, inputs.settings.prime_beta
    )
    outcomes_S = torch.tensor(list(chain.from_iterable(inputs.rewards)), dtype=torch.float64)
    group_S = torch.tensor([number for number, group in enumerate(inputs.groups) for _ in group])
    return prime_advantages(process_T, inputs.mask_T, inputs.segment_T, outcomes_S, group_S, inputs.settings.gamma)


def distill_advantage(inputs: AdvantageInputs) -> Tensor:
    return distillation_advantages(
        inputs.tokens("logprobs"), inputs.tokens("teacher"), inputs.mask_T, inputs.teacher_coef
    )


def constant_advantage(inputs: AdvantageInputs) -> Tensor:
    return inputs.mask_T.double()


# These take a lambda. Advantage plus value are the critic's targets, with a separate lambda where `value_lam` is set. VAPO (arXiv
# 2504.05118) sets it to 1: the target is then the plain return, which a wrong critic cannot bias.
CRITIC_FORMULAS = {"gae": gae_advantage, "bilevel_gae": bilevel_gae_advantage}
