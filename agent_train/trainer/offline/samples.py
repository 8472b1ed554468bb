"""From the records of a data file to rows: written by the chat template, token for token as sampling would have left them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_train.data.samples import TrainingSample
from agent_train.rollout.renderer import Renderer, RendererError
from agent_train.trainer.offline.records import Conversation, DataError, Example
from agent_train.trainer.warm_start import sft_rows
from agentgym.core.registration import make
from agentgym.core.trajectory import Trajectory, Turn


@dataclass(frozen=True)
class Sample:
    """An example as rows. A conversation is one row, or several where the template writes its past anew.

    Attributes:
        answers: the rows of the answer; of a pair those of the better one, then of the other.
        label, score: as in `Example`.
        other: of kto, the rows of another example's answer under this one's prompt.
    """

    answers: tuple[list[TrainingSample], ...]
    label: bool | None = None
    score: float | None = None
    other: list[TrainingSample] = field(default_factory=list)

    @property
    def rows(self) -> list[TrainingSample]:
        """All of them."""
        return [row for rows in (*self.answers, self.other) for row in rows]


def samples_of(
    examples: Sequence[Example], renderer: Renderer, longest: int | None = None, *, mismatched: bool = False
) -> list[Sample]:
    """The samples of the examples, in their order, without those that are too long.

    Args:
        examples: what `read_examples` found.
        renderer: of the policy's tokenizer.
        longest: most tokens of a row; None: any number.
        mismatched: whether each gets `other`, the answer of the example after it, as KTO needs.

    Raises:
        DataError: the template cannot write a conversation, or an environment whose tools it needs cannot be made.
    """
    samples = []
    for number, example in enumerate(examples):
        answers = tuple(_rows(renderer, answer) for answer in example.answers)
        other: list[TrainingSample] = []
        if mismatched:
            own, next_one = example.answers[0], examples[(number + 1) % len(examples)].answers[0]
            other = _rows(renderer, Conversation(own.id, own.prompt, next_one.said, own.tools, own.env))
        sample = Sample(answers, example.label, example.score, other)
        if longest is None or max(len(row.ids) for row in sample.rows) <= longest:
            samples.append(sample)
    return samples


def texts_of(examples: Sequence[Example]) -> list[str]:
    """What is said in them, for the tokenizer of a model that is built by code."""
    messages = [message for e in examples for a in e.answers for message in (*a.prompt, *a.said)]
    return [message["content"] for message in messages if isinstance(message.get("content"), str)]


def _rows(renderer: Renderer, conversation: Conversation) -> list[TrainingSample]:
    turns: list[Turn] = []
    observation = list(conversation.prompt)
    for message in conversation.said:
        if message["role"] == "assistant":
            turns.append(Turn(observation, message))
            observation = []
        else:
            observation.append(message)
    tools = conversation.tools or _tools_of(conversation)
    try:
        return sft_rows([Trajectory(conversation.id, "", conversation.id, turns=turns)], renderer, tools)
    except (RendererError, ValueError) as error:
        raise DataError(f"{conversation.id}: {error}") from error


def _tools_of(conversation: Conversation) -> list[dict[str, Any]]:
    try:
        return _tools_of_env(conversation.env) if conversation.env else []
    except Exception as error:  # an environment may raise anything
        lines = str(error).splitlines() or [type(error).__name__]
        raise DataError(
            f"{conversation.id}: env: {conversation.env!r} cannot be made here, and its tools are part of the prompt: {lines[0]}"
        ) from error


@functools.cache
def _tools_of_env(env_id: str) -> list[dict[str, Any]]:
    env = make(env_id)
    try:
        return list(env.get_wrapper_attr("tools"))
    finally:
        env.close()
