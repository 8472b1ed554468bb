"""Multi-turn GRPO (arXiv 2402.03300) in one file, to read from top to bottom: a game, a tiny model, and nothing hidden.

python examples/grpo.py [--steps 40]      about 5 minutes on two CPU cores

An expert shows the game to the model, which then plays groups of episodes of the same task; in each group, episodes
that earned more become likelier. `agent-train` is the same loop with an engine that samples fast, shards, checkpoints,
and episodes that run beside the update.

Shapes: E episodes, T tokens, V vocabulary. A row is an episode: its prompt, and by turns what was sampled and what answered it.
"""

import argparse
import math
import random
import tempfile
from dataclasses import dataclass, field

import torch
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

import agentgym
from agent_train.config.schema import TinyConfig
from agent_train.learner.tiny import build_tiny, texts_of_env
from agent_train.rollout.renderer import Rendered, Renderer
from agentgym.core.messages import assistant, text_of
from agentgym.core.tasks import TaskSet

ENV, KWARGS = "frozen_lake", {"view": "near", "holes": 0.12, "max_turns": 14}
MAX_LENGTH, MAX_ACTION = 1024, 6  # tokens of an episode, and of an action
EXPERT_EPISODES, EXPERT_LR, MISTAKES = 2048, 2e-3, 0.8  # its mistakes leave the model something to find out
GROUPS, GROUP_SIZE, LR, CLIP = 16, 8, 8e-4, 0.2
EVAL_EPISODES, EVAL_EVERY = 100, 5


@dataclass
class Episode:
    """One episode and its row: the ids, which of them were sampled, and their log-probabilities when they were."""

    env: agentgym.Env
    messages: list
    prompt: Rendered | None = None
    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reward: float = 0.0
    success: bool = False
    over: bool = False

    def ask(self, renderer: Renderer) -> None:
        """Render the next prompt. It goes on from the exact ids so far: text that is encoded again may have others."""
        self.prompt = renderer.prompt(self.messages, previous=self.prompt)
        assert self.prompt.ids[: len(self.ids)] == self.ids
        new = len(self.prompt.ids) - len(self.ids)
        self._add(self.prompt.ids[len(self.ids) :], False, [0.0] * new)

    def act(self, ids: list[int], logprobs: list[float], renderer: Renderer) -> None:
        """Take a turn with sampled ids."""
        self._add(ids, True, logprobs)
        self.prompt = self.prompt.answered(ids)
        action = renderer.parse(ids)
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.messages += [action, *observation]
        self.reward += reward
        self.over = terminated or truncated
        self.success = bool(info.get("success"))

    def _add(self, ids: list[int], sampled: bool, logprobs: list[float]) -> None:
        self.ids += ids
        self.sampled += [sampled] * len(ids)
        self.logprobs += logprobs


def begin(task: agentgym.Task, seed: int) -> Episode:
    env = agentgym.make(ENV, **KWARGS)
    env.init(task)
    observation, _ = env.reset(seed=seed)
    return Episode(env, list(observation))


# ---- the rollout


@torch.no_grad()
def sample(
    model, prompts: list[list[int]], stops: tuple[int, ...], greedy: bool
) -> list[tuple[list[int], list[float]]]:
    """Ids that go on from each prompt, up to a stop token, and the log-probability of each. Prompts are padded on the left."""
    lengths = torch.tensor([len(ids) for ids in prompts])
    ids_ET = pad_sequence([torch.tensor(ids[::-1]) for ids in prompts], batch_first=True).flip(1)
    mask_ET = (torch.arange(ids_ET.shape[1]) >= ids_ET.shape[1] - lengths[:, None]).long()
    position_ET = (mask_ET.cumsum(1) - 1).clamp(min=0)
    answers: list[tuple[list[int], list[float]]] = [([], []) for _ in prompts]
    running, cache = torch.ones(len(prompts), dtype=torch.bool), None
    for _ in range(MAX_ACTION):
        out = model(ids_ET, attention_mask=mask_ET, position_ids=position_ET, past_key_values=cache, use_cache=True)
        logprobs_EV, cache = out.logits[:, -1].log_softmax(-1), out.past_key_values
        next_E = logprobs_EV.argmax(-1) if greedy else torch.multinomial(logprobs_EV.exp(), 1)[:, 0]
        for place in running.nonzero()[:, 0].tolist():
            answers[place][0].append(int(next_E[place]))
            answers[place][1].append(float(logprobs_EV[place, next_E[place]]))
        running &= ~torch.isin(next_E, torch.tensor(stops))
        if not running.any():
            break
        ids_ET, position_ET = next_E[:, None], position_ET[:, -1:] + 1
        mask_ET = torch.cat([mask_ET, torch.ones(len(prompts), 1, dtype=torch.long)], 1)
    return answers


def play(model, renderer: Renderer, tasks: list[agentgym.Task], greedy: bool = False) -> list[Episode]:
    """An episode of each task; all take their turns together."""
    episodes = [begin(task, seed) for seed, task in enumerate(tasks)]
    while live := [episode for episode in episodes if not episode.over]:
        for episode in live:
            episode.ask(renderer)
        answers = sample(model, [episode.ids for episode in live], renderer.stop_token_ids, greedy)
        for episode, (ids, logprobs) in zip(live, answers, strict=True):
            episode.act(ids, logprobs, renderer)
            episode.over |= len(episode.ids) > MAX_LENGTH - 100
    return episodes


def play_expert(renderer: Renderer, task: agentgym.Task, seed: int) -> Episode:
    """An episode of the environment's own expert, who makes mistakes."""
    rng, episode = random.Random(seed), begin(task, seed)
    env = episode.env.unwrapped
    while not episode.over:
        episode.ask(renderer)
        action = env.random_action(rng) if rng.random() < MISTAKES else env.expert_action()
        ids = [*renderer.encode(text_of(assistant(action))), renderer.end_of_turn]
        episode.act(ids, [0.0] * len(ids), renderer)
    return episode


# ---- the update


def logprobs_of(model, episodes: list[Episode]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of all ids but the first, and which of these were sampled; rows are padded on the right."""
    ids_ET = pad_sequence([torch.tensor(episode.ids) for episode in episodes], batch_first=True)
    sampled_ET = pad_sequence([torch.tensor(episode.sampled) for episode in episodes], batch_first=True)
    logits_ETV = model(ids_ET).logits[:, :-1]
    logprobs_ET = logits_ETV.log_softmax(-1).gather(-1, ids_ET[:, 1:, None])[..., 0]
    return logprobs_ET, sampled_ET[:, 1:]


def imitate(model, optimizer, episodes: list[Episode]) -> float:
    """One update towards what was done in these episodes; the mean negative log-probability of a token."""
    logprobs_ET, sampled_ET = logprobs_of(model, episodes)
    loss = -logprobs_ET[sampled_ET].mean()
    return update(model, optimizer, loss)


def advantages_of(episodes: list[Episode]) -> torch.Tensor:
    """Of each episode, by its group's mean and standard deviation. A group whose rewards are all the same teaches nothing."""
    rewards = torch.tensor([episode.reward for episode in episodes]).view(-1, GROUP_SIZE)
    centred = rewards - rewards.mean(1, keepdim=True)
    return (centred / (rewards.std(1, keepdim=True) + 1e-6)).flatten()


def improve(model, optimizer, episodes: list[Episode], advantages_E: torch.Tensor) -> float:
    """One update by the clipped objective of PPO (arXiv 1707.06347): the mean over sampled tokens."""
    logprobs_ET, sampled_ET = logprobs_of(model, episodes)
    old_ET = pad_sequence([torch.tensor(episode.logprobs) for episode in episodes], batch_first=True)[:, 1:]
    ratio_ET = (logprobs_ET - old_ET).exp()
    gain_ET = torch.minimum(
        ratio_ET * advantages_E[:, None], ratio_ET.clamp(1 - CLIP, 1 + CLIP) * advantages_E[:, None]
    )
    return update(model, optimizer, -gain_ET[sampled_ET].mean())


def update(model, optimizer, loss: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss.backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


# ---- the run


def main() -> None:
    parser = argparse.ArgumentParser(description="Multi-turn GRPO in one file.")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--groups", type=int, default=GROUPS, help="of a step")
    parser.add_argument("--expert-episodes", type=int, default=EXPERT_EPISODES)
    parser.add_argument("--eval-episodes", type=int, default=EVAL_EPISODES)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    disable_progress_bar()
    torch.manual_seed(asked.seed)
    rng = random.Random(asked.seed)
    train, held_out = (TaskSet.load(ENV, split, **KWARGS) for split in ("train", "test"))

    with tempfile.TemporaryDirectory() as folder:
        build_tiny(folder, texts_of_env(ENV, KWARGS), TinyConfig(128, 2, 4, 384), MAX_LENGTH, asked.seed)
        model, renderer = AutoModelForCausalLM.from_pretrained(folder), Renderer.of_folder(folder)

    def measure(step: int) -> None:
        ends = play(model, renderer, held_out.take(asked.eval_episodes), greedy=True)
        share = sum(episode.success for episode in ends) / len(ends)
        error = 1.96 * math.sqrt(share * (1 - share) / len(ends))
        print(f"held-out success after step {step}: {share:.1%} +- {error:.1%}", flush=True)

    optimizer = torch.optim.AdamW(model.parameters(), EXPERT_LR, weight_decay=0.0)
    shown = [play_expert(renderer, task, seed) for seed, task in enumerate(rng.sample(train, asked.expert_episodes))]
    for begins in range(0, len(shown), 16):
        loss = imitate(model, optimizer, shown[begins : begins + 16])
    print(f"the expert showed {len(shown)} episodes, loss {loss:.3f}", flush=True)
    measure(0)

    optimizer = torch.optim.AdamW(model.parameters(), LR, weight_decay=0.0)
    for step in range(1, asked.steps + 1):
        tasks = [task for task in rng.sample(train, asked.groups) for _ in range(GROUP_SIZE)]
        episodes = play(model, renderer, tasks)
        loss = improve(model, optimizer, episodes, advantages_of(episodes))
        success = sum(episode.success for episode in episodes) / len(episodes)
        print(f"step {step}: success {success:.1%}, loss {loss:+.4f}", flush=True)
        if step % EVAL_EVERY == 0 or step == asked.steps:
            measure(step)


if __name__ == "__main__":
    main()
