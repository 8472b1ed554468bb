"""A training run of TRL's GRPOTrainer on a game of ours, in this process. The last line of the output is JSON.

Its `rollout_func` plays all episodes of a step at a time: each turn is one `model.generate` over those that go on. TRL's other
way, `environment_factory`, wants each move as the JSON of a tool call, ten times the tokens of a word. What is cheaper for
TRL was taken: only new messages are encoded, environments are kept, log-probabilities that no loss reads are left out, and
a checkpoint is the weights alone.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

from datasets import Dataset
from transformers import GenerationConfig, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

from agent_train.config.compose import compose
from agent_train.config.schema import Config
from agent_train.config.validation import env_spec
from agent_train.learner.roles import tokenizer_of
from agent_train.rollout.draws import pick_tasks
from agentgym.core.env import Env


@dataclass
class Played:
    """One episode: the tokens behind its prompt, which of them the model sampled, and what it earned."""

    env: Env
    prompt: list[int]
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    reward: float = 0.0
    over: bool = False


class Rollout:
    """TRL's `rollout_func`: a prompt is the place of a task."""

    def __init__(self, config: Config, tokenizer: Any):
        spec = env_spec(config)
        self.tasks = spec.tasks(config.env.train_split)
        self.tokens: list[int] = []  # sampled in each step
        self._make, self._tokenizer, self._end = spec.make, tokenizer, tokenizer.eos_token_id
        self._envs: list[Env] = []
        self._longest = config.engine.max_model_len - config.sampling.max_tokens
        self._generation = GenerationConfig(
            do_sample=True,
            temperature=config.sampling.temperature,
            top_k=0,
            top_p=1.0,
            max_new_tokens=config.sampling.max_tokens,
            eos_token_id=self._end,
            pad_token_id=tokenizer.pad_token_id,
        )

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        self._envs += [self._make() for _ in prompts[len(self._envs) :]]
        episodes = [self._begin(env, int(place)) for env, place in zip(self._envs, prompts, strict=True)]
        while going := [episode for episode in episodes if not episode.over]:
            for episode, said in zip(going, self._answers(trainer.model, going), strict=True):
                self._take(episode, said)
        self.tokens.append(sum(sum(episode.mask) for episode in episodes))
        return {
            "prompt_ids": [episode.prompt for episode in episodes],
            "completion_ids": [episode.ids for episode in episodes],
            "env_mask": [episode.mask for episode in episodes],
            "logprobs": [[0.0] * len(episode.ids) for episode in episodes],  # read with vLLM alone
            "earned": [episode.reward for episode in episodes],
        }

    def _begin(self, env: Env, place: int) -> Played:
        env.init(self.tasks[place])
        observation, _ = env.reset(seed=place)
        return Played(env, self._encode(observation))

    def _encode(self, messages: Any, before: str = "") -> list[int]:
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(self._tokenizer.encode(before + text, add_special_tokens=False))

    def _answers(self, model: Any, episodes: list[Played]) -> list[list[int]]:
        """What the model samples in one turn, the end of turn with it."""
        contexts = [episode.prompt + episode.ids for episode in episodes]
        longest = max(map(len, contexts))
        padding = [longest - len(context) for context in contexts]
        ids = torch.tensor([[self._end] * pad + context for pad, context in zip(padding, contexts, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding])
        found = model.generate(input_ids=ids, attention_mask=mask, generation_config=self._generation)
        rows: list[list[int]] = found[:, longest:].tolist()
        return [row[: row.index(self._end) + 1] if self._end in row else row for row in rows]

    def _take(self, episode: Played, said: list[int]) -> None:
        ended = said[-1] == self._end
        text = self._tokenizer.decode(said[:-1] if ended else said)
        observation, reward, terminated, truncated, _ = episode.env.step(text)
        episode.ids += said
        episode.mask += [1] * len(said)
        episode.reward += float(reward)
        episode.over = terminated or truncated
        if not episode.over:
            new = self._encode(observation, "" if ended else self._tokenizer.eos_token)
            episode.ids += new
            episode.mask += [0] * len(new)
            episode.over = len(episode.prompt) + len(episode.ids) > self._longest


class Spans(TrainerCallback):
    """When each step began and ended."""

    def __init__(self) -> None:
        self.found: list[list[float]] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.found.append([time.time()])

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.found[-1].append(time.time())


def earned_reward(earned: list[float], **kwargs: Any) -> list[float]:
    return earned


def grpo(config: Config, rows: int, out: Path) -> GRPOConfig:
    """The objective, optimizer and steps of our settings; everything else is TRL's default."""
    trainer, learner, algorithm = config.trainer, config.learner, config.algorithm
    return GRPOConfig(
        output_dir=str(out),
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="steps",
        save_steps=trainer.save_every,
        save_only_model=True,
        disable_tqdm=True,
        shuffle_dataset=False,
        seed=trainer.seed,
        max_steps=trainer.steps,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=trainer.groups_per_step * algorithm.group_size // rows,
        gradient_checkpointing=False,
        num_generations=algorithm.group_size,
        max_completion_length=config.engine.max_model_len,
        temperature=config.sampling.temperature,
        beta=0.0,
        epsilon=algorithm.loss_settings["clip_low"],
        epsilon_high=algorithm.loss_settings["clip_high"],
        loss_type="dapo",
        learning_rate=learner.lr,
        lr_scheduler_type=learner.schedule,
        warmup_steps=0,
        adam_beta1=learner.beta1,
        adam_beta2=learner.beta2,
        weight_decay=learner.weight_decay,
        max_grad_norm=learner.max_grad_norm,
        logging_steps=1000,
        model_init_kwargs={"dtype": "float32"},
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, required=True, help="of one forward pass")
    parser.add_argument("settings", nargs="+", help="those of agent-train")
    args = parser.parse_intermixed_args()
    torch.set_num_threads(1)
    config, spans = compose(args.settings), Spans()
    trainer, model = config.trainer, str(config.model.path)
    set_seed(trainer.seed)
    rollout = Rollout(config, tokenizer_of(model))
    places = pick_tasks(len(rollout.tasks), 0, trainer.steps * trainer.groups_per_step, trainer.seed)
    GRPOTrainer(
        model=model,
        reward_funcs=earned_reward,
        args=grpo(config, args.rows, args.out),
        train_dataset=Dataset.from_list([{"prompt": str(place)} for place in places]),
        rollout_func=rollout,
        callbacks=[spans],
    ).train()
    print(json.dumps({"spans": spans.found, "tokens": rollout.tokens}))


if __name__ == "__main__":
    main()
