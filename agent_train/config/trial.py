"""Try a step's formulas on a few made-up episodes, and the model without its weights, before anything starts.

This imports torch and transformers, so it comes last.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from agent_train.algorithms.advantage_inputs import AdvantageInputs
from agent_train.algorithms.selection import choose, participants, turn_rewards
from agent_train.algorithms.step_advantages import with_advantages
from agent_train.config.schema import AlgorithmConfig, Config, first_line
from agent_train.data.packing import batch_of, weighted
from agent_train.data.samples import TrainingSample, samples_of
from agent_train.learner.policy_objective import PolicyObjective, policy_objective
from agent_train.learner.roles import VALUED, roles_of
from agentgym.core.messages import assistant, user
from agentgym.core.trajectory import Group, Tokens, Trajectory, Turn

TURNS = 2
SAMPLED = 4  # tokens of a turn
# How far the trained policy is from the one before: nothing, and both ways, from little to what every clip holds.
DRIFTS = (0.0, 0.01, -0.01, 0.3, -0.3, 3.0, -3.0)


def wrong_formulas(config: Config) -> Iterator[str]:
    """The problem of the algorithm's settings, tried on advantages of both signs; at most one line."""
    algorithm = config.algorithm
    try:
        objective = policy_objective(algorithm)
    except ValueError as error:
        yield f"algorithm.loss={algorithm.loss}: {first_line(error)}"
        return
    groups = _groups(algorithm)
    failed = [replace(trajectory, end="error") for trajectory in groups[0].trajectories]
    try:
        choose([*groups, Group("task 2", failed)], algorithm, len(groups))
    except Exception as error:  # the code of a filter of one's own, say
        yield f"algorithm.filter.name={algorithm.filter.name}: {_told(error)}"
        return
    try:
        samples = _samples(config, groups)
    except KeyError:  # of the user's own function, which reads an info or a metric: made-up episodes have none
        return
    except Exception as error:
        yield f"algorithm.advantage.name={algorithm.advantage.name}: {_told(error)}"
        return
    try:
        kl_coef = algorithm.kl.coef if algorithm.kl.place == "loss" else 0.0
        _try(objective, samples, kl_coef)
        # Advantages of both signs, in turn; each sample has one, as losses of whole samples need.
        for sign in (-1.0, 1.0):
            signed = [replace(s, advantages=s.spread(sign * (-1) ** n)) for n, s in enumerate(samples)]
            _try(objective, signed, kl_coef)
    except ValueError as error:
        yield f"algorithm.loss={algorithm.loss} with its settings and algorithm.correction, kl and proximal: {first_line(error)}"


def wrong_model(config: Config) -> Iterator[str]:
    """Why the learner cannot train the architecture of `model.path` with these settings; at most one line. Reads no weights."""
    if config.model.path is None:
        return
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    from agent_train.learner import fsdp, parallel
    from agent_train.learner.attention import PACKED
    from agent_train.learner.head import PackedPolicy, PackedValue
    from agent_train.learner.loading import meta_parameters
    from agent_train.learner.lora import add_adapters

    learner, valued = config.learner, roles_of(config)[0] in VALUED
    try:
        settings = AutoConfig.from_pretrained(Path(config.model.path).expanduser(), trust_remote_code=False)
        if valued:
            settings.num_labels = 1
        auto_class = AutoModelForSequenceClassification if valued else AutoModelForCausalLM
        with meta_parameters():
            model = auto_class.from_config(settings, attn_implementation=PACKED)
        fsdp.check_layers(model)
        PackedValue(model) if valued else PackedPolicy(model, learner.head_chunk)
        if config.lora.rank and not valued:
            add_adapters(model, config.lora)
        if learner.tensor_parallel > 1 or learner.sequence_parallel > 1:
            parallel.check_model(model, learner)
        if learner.tensor_parallel > 1:
            for block in fsdp.blocks_of(model):
                parallel.plan_of(type(model).__name__, block, learner.tensor_parallel)
    except (ValueError, KeyError, ImportError, OSError) as error:
        yield f"model.path={config.model.path}: {first_line(error)}"


def _told(error: Exception) -> str:
    return first_line(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {first_line(error)}"


def _groups(algorithm: AlgorithmConfig) -> list[Group]:
    """Two groups, with episodes of reward 0 and 1."""
    size = max(2, min(algorithm.group_size, 4)) if algorithm.group_size > 1 else 1
    return [Group(task, [_episode(task, sample) for sample in range(size)]) for task in ("task 0", "task 1")]


def _samples(config: Config, groups: list[Group]) -> list[TrainingSample]:
    """Samples of groups with the advantages of these settings."""
    algorithm = config.algorithm
    scored = []
    for group in groups:
        for trajectory, in_loss in participants(group, algorithm.overlong):
            for sample in samples_of(trajectory, 1.0, turn_rewards(trajectory, algorithm), in_loss):
                said = [p - 0.2 if on else 0.0 for p, on in zip(sample.logprobs, sample.mask, strict=True)]
                scored.append(replace(sample, reference=said, prm=said, teacher=said, values=sample.spread(0.3)))
    greedy = {group.task_id: 0.5 for group in groups}
    inputs = AdvantageInputs(algorithm, groups, scored, greedy, config.teacher.coef, algorithm.kl.coef)
    samples = with_advantages(inputs, scored)
    for name in ("advantages", "targets"):
        if not all(math.isfinite(number) for sample in samples for number in getattr(sample, name)):
            raise ValueError(f"with these settings of algorithm.advantage the {name} are not all finite")
    return weighted(samples, algorithm.reduction, algorithm.reduction_length)


def _episode(task: str, sample: int) -> Trajectory:
    ids, turns = [1, 2], []
    for number in range(TURNS):
        sampled = [3 + (sample + place) % 5 for place in range(SAMPLED)]
        logprobs = [-0.1 - 0.5 * place for place in range(SAMPLED)]
        tokens = Tokens(list(ids), sampled, logprobs, [0] * SAMPLED)
        reward = float(sample % 2) if number == TURNS - 1 else 0.0
        turns.append(Turn([user("?")], assistant("!"), reward, tokens=tokens))
        ids += [*sampled, 2]
    return Trajectory(f"{task}/{sample}", "trial", task, sample, turns=turns)


def _try(objective: PolicyObjective, samples: list[TrainingSample], kl_coef: float) -> None:
    """The loss and its gradient in the first optimizer step of a training step and in a later one."""
    objective.check(samples, kl_coef, 1)
    batch = batch_of(samples)
    start_T = batch.behaviour_logprobs_T + 0.1
    batch = replace(batch, start_T=start_T)
    drift_T = torch.tensor(DRIFTS).repeat(len(start_T) // len(DRIFTS) + 1)[: len(start_T)]
    for number in range(2):
        logprobs_T = (start_T + drift_T).requires_grad_()
        entropy_T = torch.ones_like(start_T, requires_grad=True)
        limit = torch.tensor(0.2) if objective.needs_drift_limit else None
        output = (logprobs_T, entropy_T)
        try:
            loss, *_ = objective.contribute(
                batch, output, number=number, steps=2, kl_coef=kl_coef, version=1, drift_limit=limit
            )
            (grad_T,) = torch.autograd.grad(loss, logprobs_T)
        except ValueError:
            raise
        except Exception as error:  # the code of a loss of one's own, say
            raise ValueError(f"{type(error).__name__}: {error}") from error
        if not (loss.isfinite() and grad_T.isfinite().all()):
            raise ValueError(f"loss {loss.item()} and its gradient are not all finite where the policy has moved")
