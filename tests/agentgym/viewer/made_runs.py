"""Runs for tests of the viewer, of episodes that are really played: `python made_runs.py FOLDER` writes one of each kind.

The token policy is a model of its own: it draws an action byte by byte from the uniform distribution over an environment's
actions, so that its log-probabilities are true ones.
"""

import asyncio
import json
import math
import random
import sys
import time
from dataclasses import replace
from pathlib import Path

from agentgym.core.registration import spec
from agentgym.core.trajectory import Tokens, write_jsonl
from agentgym.evaluate.plan import AgentSpec, Cell
from agentgym.evaluate.statistics import success_interval
from agentgym.policies.base import ExpertPolicy, RandomPolicy, Reply
from agentgym.rollout.episode import Episode, run_many
from agentgym.storage.files import write_json, write_text

MOVES = ("up", "down", "left", "right")
HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"> <!-- \u2028"


def play(env, make_policy, n, k, seed=0):
    """Trajectories of k episodes of each of the first n tasks of the test split."""
    found = spec(env)
    episodes = [Episode(task, sample, seed + sample) for task in found.tasks("test").take(n) for sample in range(k)]
    return asyncio.run(run_many(found.make, make_policy, episodes, concurrency=8, env_id=env))


def policy_maker(kind):
    if kind == "expert":
        return lambda episode: ExpertPolicy()
    return lambda episode: RandomPolicy(rng=random.Random(f"{episode.task.id} {episode.sample}"))


def write_evaluation(run, cells=(("frozen_lake", "expert"), ("frozen_lake", "random")), n=3, k=2, created=None):
    """A run folder of an evaluation, without its lock and results."""
    planned = [Cell(spec(env), AgentSpec(kind, kind), n=n, k=k) for env, kind in cells]
    (run / "episodes").mkdir(parents=True)
    write_json(
        run / "run.json",
        {
            "kind": "evaluation",
            "format": 1,
            "name": run.name,
            "created": time.time() if created is None else created,
            "command": ["agentgym", "eval", *[env for env, _ in cells]],
            "versions": {"python": sys.version.split()[0]},
            "cells": [{**c.to_json(), "tasks": n, "file": f"episodes/{c.name}.jsonl"} for c in planned],
            "settings": {"limits": {}, "budget": {}, "retries": 1, "concurrency": 8},
            "prices": None,
        },
    )
    for cell in planned:
        for trajectory in play(cell.env.id, policy_maker(cell.agent.kind), n, k):
            trajectory.metadata |= {"tags": ["game"], "difficulty": len(trajectory.turns) % 3, "ended": time.time()}
            write_jsonl(run / "episodes" / f"{cell.name}.jsonl", [trajectory])
    return run


def failed(trajectory, error="env, task 't', turn 1: act failed after 0.1 s: EndpointError: answered 500"):
    """The same episode as it would be had the endpoint died after its first turn."""
    return replace(trajectory, end="error", error=error, turns=trajectory.turns[:1], metrics={})


def hostile(trajectory, text=HOSTILE):
    """The same episode with a text in every place where a model or an environment can put one."""
    turns = [
        replace(
            turn,
            observation=[{"role": "user", "content": text}],
            reply={
                "role": "assistant",
                "content": text,
                "reasoning_content": text,
                "tool_calls": [
                    {"id": text, "type": "function", "function": {"name": text, "arguments": json.dumps({text: text})}}
                ],
            },
            info={text: text, "model_patch": text, "tests": {text: {text: text}}},
        )
        for turn in trajectory.turns
    ]
    return replace(trajectory, id=text, task_id=text, turns=turns, end="error", error=text, metadata={"tags": [text]})


def byte_tokenizer():
    """A real tokenizer of the `tokenizers` package: 256 bytes and four markers."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True) for name in ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>")]
    )
    return tokenizer


class TokenPolicy:
    """Draws one of the actions byte by byte, with the exact log-probability of each byte."""

    def __init__(self, tokenizer, actions, rng, version=0):
        self.tokenizer, self.rng, self.version = tokenizer, rng, version
        self.actions = [self.encode(action + "<|end|>") for action in actions]

    def encode(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    async def act(self, messages, tools):
        prompt = "".join(f"<|{m['role']}|>{m['content']}<|end|>" for m in messages) + "<|assistant|>"
        ids, logprobs, left = [], [], self.actions
        while len(ids) < len(left[0]):
            choices = [action[len(ids)] for action in left]
            chosen = self.rng.choice(choices)
            logprobs.append(math.log(choices.count(chosen) / len(choices)))
            left = [action for action in left if action[len(ids)] == chosen]
            ids.append(chosen)
        text = self.tokenizer.decode(ids[:-1])
        tokens = Tokens(self.encode(prompt), ids, logprobs, [self.version] * len(ids))
        return Reply({"role": "assistant", "content": text}, tokens)


def write_training(run, steps=2, n=2, k=2):
    """A run folder of a training run: metrics, trajectories with tokens, a checkpoint with its tokenizer."""
    tokenizer = byte_tokenizer()
    (run / "trajectories").mkdir(parents=True)
    checkpoint = run / "checkpoints" / f"step-{steps:06d}"
    checkpoint.mkdir(parents=True)
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    write_text(run / "checkpoints" / "latest", checkpoint.name + "\n")
    write_text(run / "config.yaml", "env:\n  id: frozen_lake\nalgorithm:\n  name: grpo\n")
    write_json(
        run / "versions.json", {"python": sys.version.split()[0], "command": ["agent-train", "+env=frozen_lake"]}
    )
    for step in range(steps + 1):
        for kind in ("eval",) if step == 0 else ("train", "eval"):
            played = play(
                "frozen_lake",
                lambda e, s=step: TokenPolicy(tokenizer, MOVES, random.Random(f"{e.task.id} {e.sample} {s}"), s),
                n,
                k,
                seed=step,
            )
            write_jsonl(run / "trajectories" / f"{kind}-{step:06d}.jsonl", played)
            _measure(run, kind, step, played)
    return run


def _measure(run, kind, step, played):
    successes = [t.success for t in played]
    low, high = success_interval([[s] for s in successes])
    record = {
        "kind": kind,
        "step": step,
        "elapsed": 10.0 * step,
        "success": sum(successes) / len(played),
        "reward": sum(t.reward for t in played) / len(played),
        "turns": sum(len(t.turns) for t in played) / len(played),
        "episodes": len(played),
        "failed": 0,
    }
    gaps = {str(lag): {"tokens": 8, "mean": 1e-3 * lag, "k1": 0.0, "k3": 1e-4 * lag, "ess": 1.0} for lag in range(step)}
    more = {"low": low, "high": high} if kind == "eval" else {"update": {"gap_by_lag": gaps}}
    with (run / "metrics.jsonl").open("a") as out:
        out.write(json.dumps(record | more) + "\n")


def write_all(folder):
    """One run of each kind, and an evaluation with failed, superseded and hostile episodes."""
    write_training(folder / "train-lake")
    write_evaluation(
        folder / "games",
        [(env, kind) for env in ("frozen_lake", "tic_tac_toe", "wordle") for kind in ("expert", "random")],
    )
    run = write_evaluation(folder / "broken-endpoint", [("wordle", "random")], n=4)
    file = next((run / "episodes").glob("*.jsonl"))
    first, second, third = play("wordle", policy_maker("random"), 3, 1)
    write_jsonl(file, [failed(first), replace(first, metadata={"tags": ["again"]})])
    write_jsonl(file, [replace(failed(second), sample=7), replace(hostile(third), sample=8)])
    with file.open("a") as out:
        out.write('{"id": "cut off by a cra')


if __name__ == "__main__":
    write_all(Path(sys.argv[1]))
