"""Supervised warm start: the environment's scripted expert plays, and the policy learns from rows like those it will sample.

Nothing here imports torch: a worker of Ray that only plays should not wait for it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from agent_train.config.schema import Config, SftConfig
from agent_train.data.samples import TrainingSample, samples_of
from agent_train.rollout.renderer import Rendered, Renderer
from agent_train.trainer.seeds import derive_seed
from agentgym.core.env import close_unused
from agentgym.core.messages import Message, text_of, tool_result
from agentgym.core.registration import EnvSpec
from agentgym.core.trajectory import Tokens, Trajectory, Turn
from agentgym.policies.base import ExpertPolicy
from agentgym.rollout.episode import close_env, run_episode

if TYPE_CHECKING:
    from agent_train.learner.measures import SftUpdate


class NoExpertError(ValueError):
    """The environment has no scripted expert, so there is nothing to warm-start from."""


class ExpertError(RuntimeError):
    """The environment failed while its expert played."""


async def expert_trajectories(
    env_spec: EnvSpec,
    split: str = "train",
    episodes: int = 1000,
    mistakes: float = 0.3,
    seed: int = 0,
) -> list[Trajectory]:
    """Episodes of the environment's expert, without tokens. The same arguments give the same episodes.

    Args:
        env_spec: the environment, with the settings that it is made with.
        split: whose tasks are played, in an order that depends on the seed; from the first again when they run out.
        episodes: how many.
        mistakes: share of random actions, which are recorded and learned like any other: the more, the weaker the start.
        seed: of the order, the mistakes and the episodes.

    Raises:
        NoExpertError: the environment has no `expert_action`, or no `random_action` where mistakes are asked for.
        ExpertError: an episode failed.
    """
    tasks = env_spec.tasks(split).shuffled(seed)
    env = env_spec.make()
    missing = [
        name for name in ("expert_action", *["random_action"] * bool(mistakes)) if not env.has_wrapper_attr(name)
    ]
    if missing:
        raise NoExpertError(
            f"environment {env_spec.id!r} has no {missing[0]}(): set sft.episodes=0 to start without a warm start"
        )
    trajectories = []
    try:
        for number in range(episodes):
            own = derive_seed(seed, "expert", number)
            policy = ExpertPolicy(mistakes=mistakes, rng=random.Random(own))
            task, sample = tasks[number % len(tasks)], number // len(tasks)
            trajectory = await run_episode(env, policy, task, seed=own % 2**31, env_id=env_spec.id, sample=sample)
            if trajectory.failed:
                raise ExpertError(f"the expert's episode {number} failed: {trajectory.error}")
            trajectories.append(trajectory)
    finally:
        await close_env(env)
    return trajectories


async def demonstrations(config: Config, env_spec: EnvSpec, model_dir: str | Path) -> list[TrainingSample]:
    """The rows of the warm start that `config.sft` asks for. Runs in any process that can read the model folder."""
    sft = config.sft
    seed = derive_seed(config.trainer.seed, "sft")
    played = await expert_trajectories(env_spec, config.env.train_split, sft.episodes, sft.mistakes, seed)
    env = env_spec.make()
    tools = env.get_wrapper_attr("tools")
    close_unused(env)
    return sft_samples(played, Renderer.of_folder(model_dir), tools)


def demonstrate(config: Config, env_spec: EnvSpec, model_dir: str) -> list[TrainingSample]:
    """`demonstrations` in a process without an event loop."""
    return asyncio.run(demonstrations(config, env_spec, model_dir))


def sft_samples(
    trajectories: Sequence[Trajectory], renderer: Renderer, tools: Sequence[dict[str, Any]] = ()
) -> list[TrainingSample]:
    """Rows to imitate, token for token in the form that sampling will have.

    Each turn's prompt is the renderer's; its completion is the reply's text, encoded, and the stop token. What the expert
    said is in the mask, with log-probability 0 and version -1, since nothing sampled it.

    Args:
        trajectories: with or without tokens; what tokens they have is not used.
        renderer: of the policy's tokenizer.
        tools: the environment's tool schemas, which are part of the prompt.

    Raises:
        ValueError: a reply with tool calls or reasoning that the template does not write.
    """
    return [row for trajectory in trajectories for row in samples_of(_with_tokens(trajectory, renderer, tools))]


def _with_tokens(trajectory: Trajectory, renderer: Renderer, tools: Sequence[dict[str, Any]]) -> Trajectory:
    """The trajectory as a policy on token ids would have left it, had it said the same."""
    turns: list[Turn] = []
    conversation: list[Message] = []
    previous: Rendered | None = None
    for turn in trajectory.turns:
        conversation += turn.observation
        prompt = renderer.prompt(conversation, tools, previous)
        said = _completion(renderer, prompt, conversation, turn.reply, tools)
        size = len(said)
        turns.append(
            Turn(turn.observation, turn.reply, turn.reward, tokens=Tokens(prompt.ids, said, [0.0] * size, [-1] * size))
        )
        conversation.append(turn.reply)
        previous = prompt.answered(said)
    return Trajectory(trajectory.id, trajectory.env, trajectory.task_id, trajectory.sample, turns=turns)


def _completion(
    renderer: Renderer,
    prompt: Rendered,
    conversation: Sequence[Message],
    reply: Message,
    tools: Sequence[dict[str, Any]],
) -> list[int]:
    """The tokens that the policy would have sampled to say this, with the token that ends its turn.

    A reply that is more than text is what the template writes of it.
    """
    # The template's own end of an assistant turn comes last among the stop tokens.
    end = renderer.end_of_turn
    thought = (reply.get("reasoning_content") or "").strip()
    calls = reply.get("tool_calls") or []
    if not calls and not thought:
        return [*renderer.encode(text_of(reply)), end]
    answers = [tool_result(call.get("id", ""), ".", call["function"]["name"]) for call in calls]
    written = [thought, *(call["function"]["name"] for call in calls)]
    # Templates may write a last message otherwise than an earlier one: empty think blocks, and thoughts at all.
    for after in ([], answers) if thought else (answers, []):
        text = renderer.text([*conversation, reply, *after], tools, answering=False)
        said, ended, _ = text.removeprefix(prompt.text).partition(renderer.decode([end]))
        if text.startswith(prompt.text) and ended and all(part in said for part in written):
            return [*renderer.encode(said), end]
    what = "reasoning_content" if thought else "tool_calls"
    raise ValueError(
        f"{what}: the chat template does not write it behind the prompt as the policy would say it: leave it out, or take "
        "a model whose template has it"
    )


class SftLearner(Protocol):
    """The methods that `warm_start` needs of a learner."""

    async def sft(self, rows: Sequence[TrainingSample], lr: float) -> SftUpdate:
        """One supervised step at this learning rate."""
        ...


@dataclass(frozen=True)
class SftProgress:
    """The progress of a warm start: `step` of `steps` is done, in `epoch` of `epochs`, with these metrics."""

    step: int
    steps: int
    epoch: int
    epochs: int
    metrics: SftUpdate


async def warm_start(
    learner: SftLearner,
    rows: Sequence[TrainingSample],
    config: SftConfig,
    on_progress: Callable[[SftProgress], None] | None = None,
    seed: int = 0,
) -> SftUpdate:
    """Train on the rows: `config.epochs` times over, in batches of `config.batch_rows`, the rate falling linearly to 1/steps of it at the last.

    Args:
        learner: takes the steps.
        rows: what `sft_samples` made.
        config: epochs, rows of a batch, learning rate.
        on_progress: called after each step.
        seed: of the order, which differs from epoch to epoch.

    Returns:
        The metrics of the last step.

    Raises:
        ValueError: no rows, or fewer than 1 epoch or 1 row of a batch.
        LearnerError: a rank failed.
    """
    if not rows or config.epochs < 1 or config.batch_rows < 1:
        raise ValueError(
            f"a warm start needs rows, epochs and batch_rows of at least 1: {len(rows)} rows, "
            f"sft.epochs={config.epochs}, sft.batch_rows={config.batch_rows}"
        )
    per_epoch = -(-len(rows) // config.batch_rows)
    steps = per_epoch * config.epochs
    for step in range(steps):
        epoch, place = divmod(step, per_epoch)
        if place == 0:
            order = list(range(len(rows)))
            random.Random(derive_seed(seed, "sft", epoch)).shuffle(order)
        batch = [rows[i] for i in order[place * config.batch_rows :][: config.batch_rows]]
        metrics = await learner.sft(batch, config.lr * (1 - step / steps))
        if on_progress:
            on_progress(SftProgress(step + 1, steps, epoch + 1, config.epochs, metrics))
    return metrics
