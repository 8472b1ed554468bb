"""Training samples of the records of a data file: the chat template writes them, token for token as sampling would leave them."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from agent_train.algorithms.turn_rewards import state_key
from agent_train.config.schema import first_line
from agent_train.data.samples import TrainingSample
from agent_train.rollout.renderer import Renderer
from agent_train.trainer.offline.records import Conversation, DataError, Example
from agent_train.trainer.warm_start import sft_samples
from agentgym.core.env import close_unused
from agentgym.core.registration import make
from agentgym.core.trajectory import Trajectory, Turn


@dataclass(frozen=True)
class TokenizedExample:
    """An `Example` as training samples. A conversation is one sample, or several where the template rewrites its past."""

    answers: tuple[list[TrainingSample], ...]  # of the answer; of a pair those of the preferred one, then of the other
    label: bool | None = None
    score: float | None = None
    # For kto, the answer to another prompt under this one's prompt.
    other: list[TrainingSample] = field(default_factory=list)

    @property
    def training_samples(self) -> list[TrainingSample]:
        return [sample for own in (*self.answers, self.other) for sample in own]


def tokenize_examples(
    examples: Sequence[Example],
    renderer: Renderer,
    longest: int | None = None,
    *,
    mismatched: bool = False,
    split: str = "train",
) -> list[TokenizedExample]:
    """The examples as samples, in their order, without those of more than `longest` tokens.

    With `mismatched` each gets `other`, the answer of an example with another prompt, as KTO needs. `split` begins the ids of the
    samples, which are unique in a run.
    """
    samples = []
    others = _mismatched(examples) if mismatched else []
    for number, example in enumerate(examples):
        name = f"{split}:{number}"
        answers = tuple(_samples(renderer, answer, f"{name}/{k}") for k, answer in enumerate(example.answers))
        other: list[TrainingSample] = []
        if mismatched:
            said = examples[others[number]].answers[0].said
            other = _samples(renderer, replace(example.answers[0], said=said), f"{name}/other")
        sample = TokenizedExample(answers, example.label, example.score, other)
        if longest is None or max(len(each.ids) for each in sample.training_samples) <= longest:
            samples.append(sample)
    return samples


def _mismatched(examples: Sequence[Example]) -> list[int]:
    """For each example the number of one with another prompt; where all prompts are equal, that of the next one.

    It is of the prompts after its own: examples with one prompt get different answers, as far as there are any.
    """
    size = len(examples)
    by_prompt: dict[str, list[int]] = {}
    for number, example in enumerate(examples):
        own = example.answers[0]
        by_prompt.setdefault(state_key([*own.prompt, {"tools": own.tools, "env": own.env}]), []).append(number)
    if len(by_prompt) == 1:
        return [(number + 1) % size for number in range(size)]
    order = list(chain.from_iterable(by_prompt.values()))
    found, end = [0] * size, 0
    for numbers in by_prompt.values():
        end += len(numbers)
        for place, number in enumerate(numbers):
            found[number] = order[(end + place % (size - len(numbers))) % size]
    return found


def texts_of(examples: Sequence[Example]) -> list[str]:
    """The texts of the records, for the tokenizer of a model that is built by code."""
    messages = [message for e in examples for a in e.answers for message in (*a.prompt, *a.said)]
    return [message["content"] for message in messages if isinstance(message.get("content"), str)]


def _samples(renderer: Renderer, conversation: Conversation, name: str) -> list[TrainingSample]:
    turns: list[Turn] = []
    observation = list(conversation.prompt)
    for message in conversation.said:
        if message["role"] == "assistant":
            turns.append(Turn(observation, message))
            observation = []
        else:
            observation.append(message)
    try:
        tools = conversation.tools or (_tools_of_env(conversation.env) if conversation.env else [])
    except Exception as error:  # an environment may raise anything
        problem = f"env: {conversation.env!r} cannot be made here, and its tools are part of the prompt"
        raise DataError(f"{conversation.id}: {problem}: {first_line(error)}") from error
    try:
        samples = sft_samples([Trajectory(conversation.id, "", conversation.id, turns=turns)], renderer, tools)
    except ValueError as error:
        raise DataError(f"{conversation.id}: {error}") from error
    return [replace(sample, id=f"{name}#{k}") for k, sample in enumerate(samples)]


@functools.cache
def _tools_of_env(env_id: str) -> list[dict[str, Any]]:
    env = make(env_id)
    try:
        return list(env.get_wrapper_attr("tools"))
    finally:
        close_unused(env)
