"""What each mode makes of a batch of samples: a loss with its measures, and one optimizer step."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from agent_train.config.schema import Config
from agent_train.data.samples import TrainingSample
from agent_train.learner.measures import SftUpdate, StepResult
from agent_train.learner.preference_objective import (
    Judged,
    of_liked,
    of_pairs,
    of_scored_pairs,
    of_scores,
)
from agent_train.trainer.offline.records import form_of
from agent_train.trainer.offline.samples import Sample

T = TypeVar("T")


class FileLearner(Protocol):
    """What the modes need of a learner."""

    async def sft(self, rows: Sequence[TrainingSample], lr: float) -> SftUpdate:
        """One supervised step."""
        ...

    async def logprobs(self, rows: Sequence[TrainingSample]) -> list[list[float]]:
        """Log-probabilities of each row's sampled tokens."""
        ...

    async def scores(self, rows: Sequence[TrainingSample]) -> list[float]:
        """The reward model's score of each row."""
        ...

    async def apply_loss_gradients(
        self, rows: Sequence[TrainingSample], derivatives: Sequence[Sequence[float]], lr: float
    ) -> StepResult:
        """One optimizer step along derivatives."""
        ...


@dataclass(frozen=True)
class Learned:
    """One optimizer step: the loss and the measures before it, and what the learner says of it."""

    loss: float
    measures: dict[str, float]
    grad_norm: float
    tokens: int
    lr: float
    skipped: bool


@dataclass(frozen=True)
class Objective:
    """What a run optimises. `weights` are what liked and disliked answers of KTO count, the same in every batch."""

    form: str
    loss: str
    beta: float
    weights: tuple[float, float] = (1.0, 1.0)

    @property
    def needs_reference(self) -> bool:
        """Whether rows need log-probabilities under the policy as the run starts."""
        return self.form in ("dpo", "kto")


def objective_of(config: Config, samples: Sequence[Sample]) -> Objective:
    """The objective of a run, given what it is trained on: the rarer of liked and disliked answers counts for as much."""
    liked = sum(bool(sample.label) for sample in samples)
    disliked = len(samples) - liked
    most = max(liked, disliked)
    form = form_of(config)
    balanced = (most / liked, most / disliked) if form == "kto" and liked and disliked else (1.0, 1.0)
    return Objective(form, config.data.loss, config.data.beta, balanced)


async def refer(
    learner: FileLearner, samples: Sequence[Sample], batch_rows: int, said: Callable[[int], None] = lambda _: None
) -> None:
    """Give all rows the log-probabilities of the policy as it is now, which is the reference if it has not learned yet."""
    rows = [row for sample in samples for row in sample.rows]
    for row, logprobs in zip(rows, await _in_parts(learner.logprobs, rows, batch_rows, said), strict=True):
        row.reference = logprobs


async def judge(
    learner: FileLearner, objective: Objective, samples: Sequence[Sample], batch_rows: int | None = None
) -> Judged:
    """The loss of the samples with the present weights, its derivatives, and what there is to see.

    Args:
        learner: whose weights.
        objective: of the run.
        samples: the mean is over all of them.
        batch_rows: most rows that one call of the learner scores; None: all.
    """
    if objective.form == "rm":
        return await _judge_scores(learner, samples, batch_rows)
    columns = list(zip(*(sample.answers for sample in samples), strict=True))
    answers = [rows for column in columns for rows in column]
    others = [sample.other for sample in samples if objective.form == "kto"]
    rows = [row for of_answer in [*answers, *others] for row in of_answer]
    logprobs = await _in_parts(learner.logprobs, rows, batch_rows)
    if objective.form == "sft":
        return _likelihood(rows, logprobs)
    if objective.form == "dpo":
        return of_pairs(objective.loss, objective.beta, columns[0], columns[1], logprobs)
    own = sum(len(rows) for rows in answers)
    liked = [bool(sample.label) for sample in samples]
    return of_liked(objective.beta, answers, liked, logprobs[:own], others, logprobs[own:], objective.weights)


async def learn(learner: FileLearner, objective: Objective, samples: Sequence[Sample], lr: float) -> Learned:
    """One optimizer step on these samples."""
    if objective.form == "sft":
        said = await learner.sft([row for sample in samples for row in sample.rows], lr)
        return Learned(said.loss, {}, said.grad_norm, said.tokens, said.lr, said.skipped)
    judged = await judge(learner, objective, samples)
    answers = [rows for column in zip(*(s.answers for s in samples), strict=True) for rows in column]
    rows = _scored_rows(answers) if objective.form == "rm" else [row for of_answer in answers for row in of_answer]
    done = await learner.apply_loss_gradients(rows, judged.derivatives, lr)
    tokens = sum(row.sampled for row in rows)
    return Learned(judged.loss, judged.measures, done.grad_norm, tokens, done.lr, not done.applied)


async def _judge_scores(learner: FileLearner, samples: Sequence[Sample], batch_rows: int | None) -> Judged:
    answers = [rows for column in zip(*(s.answers for s in samples), strict=True) for rows in column]
    rows = _scored_rows(answers)
    scores = await _in_parts(learner.scores, rows, batch_rows)
    wanted = [sample.score for sample in samples if sample.score is not None]
    judged = of_scores(scores, wanted) if wanted else of_scored_pairs(scores)
    spread = [row.spread(0.0) for row in rows]
    for row, derivatives, (derivative,) in zip(rows, spread, judged.derivatives, strict=True):
        derivatives[_last_sampled(row)] = derivative
    return replace(judged, derivatives=spread)


def _scored_rows(answers: Sequence[list[TrainingSample]]) -> list[TrainingSample]:
    """The row that holds the whole conversation as the template writes it at its end."""
    return [rows[-1] for rows in answers]


def _last_sampled(row: TrainingSample) -> int:
    return len(row.mask) - 1 - row.mask[::-1].index(True)


def _likelihood(rows: Sequence[TrainingSample], logprobs: Sequence[Sequence[float]]) -> Judged:
    """The mean negative log-likelihood of the sampled tokens."""
    tokens = sum(row.sampled for row in rows)
    loss = -math.fsum(value for own in logprobs for value in own) / tokens
    return Judged(loss, [row.spread(-1.0 / tokens) for row in rows], {})


async def _in_parts(
    call: Callable[[Sequence[TrainingSample]], Awaitable[list[T]]],
    rows: Sequence[TrainingSample],
    size: int | None,
    said: Callable[[int], None] = lambda _: None,
) -> list[T]:
    """`call` on the rows, `size` at a time, so that no call takes longer than it may; `said` gets how many are done."""
    found: list[T] = []
    for start in range(0, len(rows), size or len(rows)):
        found += await call(rows[start : start + (size or len(rows))])
        said(len(found))
    return found
