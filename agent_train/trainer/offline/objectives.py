"""The objectives of the modes: a loss with its metrics, and one optimizer step."""

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from agent_train.algorithms.preferences import Judged, of_liked, of_pairs, of_scored_pairs, of_scores
from agent_train.config.schema import Config
from agent_train.data.samples import TrainingSample
from agent_train.learner.actor_group import Learner
from agent_train.learner.measures import OptimizerStep
from agent_train.trainer.offline.records import form_of
from agent_train.trainer.offline.samples import TokenizedExample

T = TypeVar("T")


@dataclass(frozen=True)
class Objective:
    """The objective of a run. `weights` are those of KTO's liked and disliked answers, the same in every batch."""

    form: str
    loss: str
    beta: float
    weights: tuple[float, float] = (1.0, 1.0)

    @property
    def needs_reference(self) -> bool:
        """True if samples need log-probabilities under the policy as the run starts."""
        return self.form in ("dpo", "kto")


def objective_of(config: Config, examples: Sequence[TokenizedExample]) -> Objective:
    """The objective of a run, given what it is trained on: the rarer of liked and disliked answers counts for as much."""
    liked, form = sum(bool(example.label) for example in examples), form_of(config)
    disliked = len(examples) - liked
    most = max(liked, disliked)
    balanced = (most / liked, most / disliked) if form == "kto" and liked and disliked else (1.0, 1.0)
    return Objective(form, config.data.loss, config.data.beta, balanced)


async def with_reference(
    learner: Learner,
    examples: Sequence[TokenizedExample],
    batch_rows: int,
    said: Callable[[int], None] = lambda _: None,
) -> list[TokenizedExample]:
    """The examples with log-probabilities under the learner's present policy, which is the reference before the first step."""
    samples = [sample for example in examples for sample in example.training_samples]
    logprobs = iter(await _in_parts(learner.logprobs, samples, batch_rows, said))

    def scored(own: Sequence[TrainingSample]) -> list[TrainingSample]:
        return [replace(sample, reference=next(logprobs)) for sample in own]

    return [replace(each, answers=tuple(map(scored, each.answers)), other=scored(each.other)) for each in examples]


async def loss_of(
    learner: Learner, objective: Objective, examples: Sequence[TokenizedExample], batch_rows: int | None = None
) -> Judged:
    """The loss of the examples with the present weights, its derivatives, and what is measured."""
    if objective.form == "rm":
        samples = _whole(_answers(examples))
        scores = await _in_parts(learner.scores, samples, batch_rows)
        wanted = [example.score for example in examples if example.score is not None]
        judged = of_scores(scores, wanted) if wanted else of_scored_pairs(scores)
        spread = [sample.spread(0.0) for sample in samples]
        for sample, derivatives, (derivative,) in zip(samples, spread, judged.derivatives, strict=True):
            derivatives[len(sample.mask) - 1 - sample.mask[::-1].index(True)] = derivative  # at the last sampled token
        return replace(judged, derivatives=spread)
    answers = _answers(examples)
    others = [example.other for example in examples if objective.form == "kto"]
    samples = [sample for own in [*answers, *others] for sample in own]
    logprobs = await _in_parts(learner.logprobs, samples, batch_rows)
    if objective.form == "sft":  # the mean negative log-likelihood of the sampled tokens
        tokens = sum(sample.sampled for sample in samples)
        loss = -math.fsum(value for own in logprobs for value in own) / tokens
        return Judged(loss, [sample.spread(-1.0 / tokens) for sample in samples], {})
    if objective.form == "dpo":
        chosen, rejected = answers[: len(examples)], answers[len(examples) :]
        return of_pairs(objective.loss, objective.beta, chosen, rejected, logprobs)
    count = sum(len(own) for own in answers)
    liked = [bool(example.label) for example in examples]
    return of_liked(objective.beta, answers, liked, logprobs[:count], others, logprobs[count:], objective.weights)


async def learn(
    learner: Learner, objective: Objective, examples: Sequence[TokenizedExample], lr: float
) -> tuple[float, dict[str, float], OptimizerStep]:
    """One optimizer step: the loss and the measures before it, and what the learner says of it."""
    if objective.form == "sft":
        step = await learner.sft([sample for each in examples for sample in each.training_samples], lr)
        return step.loss, {}, step
    judged = await loss_of(learner, objective, examples)
    answers = _answers(examples)
    samples = _whole(answers) if objective.form == "rm" else [sample for own in answers for sample in own]
    return judged.loss, judged.measures, await learner.apply_loss_gradients(samples, judged.derivatives, lr)


def _answers(examples: Sequence[TokenizedExample]) -> list[list[TrainingSample]]:
    """The samples of each answer: all single or preferred ones, then the others in the same order."""
    return [own for column in zip(*(example.answers for example in examples), strict=True) for own in column]


def _whole(answers: Sequence[list[TrainingSample]]) -> list[TrainingSample]:
    """The sample of each answer that holds the whole conversation as the template writes it at its end."""
    return [own[-1] for own in answers]


async def _in_parts(
    call: Callable[[Sequence[TrainingSample]], Awaitable[list[T]]],
    samples: Sequence[TrainingSample],
    size: int | None,
    said: Callable[[int], None] = lambda _: None,
) -> list[T]:
    """`call` on `size` samples at a time, so that no call takes too long; `said` gets the number of those done."""
    found: list[T] = []
    for start in range(0, len(samples), size or len(samples)):
        found += await call(samples[start : start + (size or len(samples))])
        said(len(found))
    return found
