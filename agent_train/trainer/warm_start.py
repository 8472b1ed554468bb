"""Supervised warm start: the environment's scripted expert plays, and the policy learns from samples like those it will sample.

Nothing here imports torch: a worker of Ray that only plays should not wait for it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_train.config.schema import Config, SftConfig
from agent_train.data.players import parts
from agent_train.data.samples import TrainingSample, samples_of
from agent_train.rollout.memory import RecentMemory
from agent_train.rollout.renderer import Rendered, Renderer
from agent_train.trainer.schedule import batch_of_step, derive_seed, step_count
from agentgym.core.env import close_unused
from agentgym.core.messages import Message, text_of, tool_result
from agentgym.core.registration import EnvSpec
from agentgym.core.trajectory import Tokens, Trajectory, Turn
from agentgym.policies.base import ExpertPolicy
from agentgym.rollout.episode import close_env, run_episode

if TYPE_CHECKING:
    from agent_train.learner.actor_group import Learner
    from agent_train.learner.measures import OptimizerStep

_TRIES = 2  # of an expert's episode


class ExpertError(RuntimeError):
    """The environment has no scripted expert, or failed while its expert played."""


async def expert_trajectories(
    env_spec: EnvSpec, split: str = "train", episodes: int = 1000, mistakes: float = 0.3, seed: int = 0
) -> list[Trajectory]:
    """Episodes of the environment's expert, without tokens, with a share of random actions. The same arguments give the same ones.

    The order of the tasks depends on the seed; it begins again when they run out. An episode that fails is played again in
    a new environment; ExpertError if that fails too.
    """
    tasks = env_spec.tasks(split).shuffled(seed)
    env = env_spec.make()
    needed = ["expert_action", *["random_action"] * bool(mistakes)]
    if missing := [name for name in needed if not env.has_wrapper_attr(name)]:
        instead = "set sft.episodes=0 to start without a warm start"
        raise ExpertError(f"environment {env_spec.id!r} has no {missing[0]}(): {instead}")
    trajectories = []
    try:
        for number in range(episodes):
            own = derive_seed(seed, "expert", number)
            task, sample = tasks[number % len(tasks)], number // len(tasks)
            for tries in range(1, _TRIES + 1):
                policy = ExpertPolicy(mistakes=mistakes, rng=random.Random(own))
                trajectory = await run_episode(env, policy, task, seed=own % 2**31, env_id=env_spec.id, sample=sample)
                if not trajectory.failed:
                    break
                if tries == _TRIES:
                    raise ExpertError(f"the expert's episode {number} failed {tries} times: {trajectory.error}")
                await close_env(env)
                env = env_spec.make()
            trajectories.append(trajectory)
    finally:
        await close_env(env)
    return trajectories


def demonstrations(config: Config, env_spec: EnvSpec, model_dir: str | Path) -> list[TrainingSample]:
    """The samples of the warm start that `config.sft` asks for, in a process without an event loop that can read the model folder."""
    sft, seed = config.sft, derive_seed(config.trainer.seed, "sft")
    played = asyncio.run(expert_trajectories(env_spec, config.env.train_split, sft.episodes, sft.mistakes, seed))
    env = env_spec.make()
    tools = env.get_wrapper_attr("tools")
    close_unused(env)
    memory = RecentMemory(config.memory.turns) if config.memory.name == "recent" else None
    return sft_samples(played, Renderer.of_folder(model_dir), tools, memory)


def sft_samples(
    trajectories: Sequence[Trajectory],
    renderer: Renderer,
    tools: Sequence[dict[str, Any]] = (),
    memory: RecentMemory | None = None,
) -> list[TrainingSample]:
    """Samples to imitate, token for token in the form that sampling with this memory will have.

    The expert's tokens are in the mask, with log-probability 0 and version -1, since nothing sampled them.
    """
    samples: list[TrainingSample] = []
    for trajectory in (part for whole in trajectories for part in parts(whole)):
        turns: list[Turn] = []
        conversation: list[Message] = []
        previous: Rendered | None = None
        for turn in trajectory.turns:
            conversation += turn.observation
            seen = conversation if memory is None else memory.view(conversation)
            prompt = renderer.prompt(seen, tools, previous)
            said = _completion(renderer, prompt, seen, turn.reply, tools)
            tokens = Tokens(prompt.ids, said, [0.0] * len(said), [-1] * len(said))
            turns.append(Turn(turn.observation, turn.reply, turn.reward, tokens=tokens, player=turn.player))
            conversation.append(turn.reply)
            previous = prompt.answered(said)
        own = Trajectory(trajectory.id, trajectory.env, trajectory.task_id, trajectory.sample, turns=turns)
        samples += samples_of(own)
    return samples


def _completion(
    renderer: Renderer,
    prompt: Rendered,
    conversation: Sequence[Message],
    reply: Message,
    tools: Sequence[dict[str, Any]],
) -> list[int]:
    """The tokens that the policy would have sampled to say this, with the token that ends its turn."""
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
    problem = "the chat template does not write it behind the prompt as the policy would say it"
    field = "reasoning_content" if thought else "tool_calls"
    raise ValueError(f"{field}: {problem}: leave it out, or take a model whose template has it")


async def warm_start(
    learner: Learner,
    samples: Sequence[TrainingSample],
    config: SftConfig,
    on_step: Callable[[int, int, float, int], None] = lambda *_: None,
    seed: int = 0,
) -> OptimizerStep:
    """Train on the samples, the learning rate falling linearly to 1/steps of it; the metrics of the last step.

    `on_step` is called after each step with its number, the number of all, the loss and the tokens.
    """
    steps = step_count(len(samples), config.batch_rows, config.epochs)
    for step in range(1, steps + 1):
        batch = batch_of_step(samples, config.batch_rows, seed, step, "sft")
        metrics = await learner.sft(batch, config.lr * (1 - (step - 1) / steps))
        on_step(step, steps, metrics.loss, metrics.tokens)
    return metrics
