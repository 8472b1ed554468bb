"""A training run of which processes are killed again and again, and the questions that its folder must answer afterwards.

A driver that was killed is started again by the same command; every other loss the run has to mend itself.
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
from training_process import ENDED_SECONDS, POLL_SECONDS, Training, start
from transformers import AutoModelForCausalLM

from agent_train.config.compose import config_from_yaml
from agent_train.config.schema import Config
from agent_train.config.validation import env_spec
from agent_train.rollout.draws import pick_tasks
from agentgym.core.trajectory import Trajectory, read_jsonl

NAME = "soak"
TITLES = {
    "engine": ("vllm.entrypoints.openai.api_server", "ray::_Server"),
    "rank": ("ray::_Actor",),
    "env worker": ("ray::EnvWorker",),
}
LONG = 1_000_000  # steps of a run that ends when its time is over
BACK_SECONDS = 600.0  # on a busy machine
LOGPROB_TOLERANCE = (
    1e-3  # nats; the engine's rounding is 1e-5, and one training step moves some token further than this
)


@dataclass
class Soak:
    """A run of `settings` in the folder `runs`."""

    runs: Path
    settings: tuple[str, ...]
    run: Training
    kills: list[tuple[str, float]] = field(
        default_factory=list
    )  # the victim, and seconds until the next step was trained
    _before: list[Training] = field(default_factory=list)

    @classmethod
    def begin(cls, runs: Path, *settings: str) -> Soak:
        return cls(runs, settings, start(runs, *settings, name=NAME))

    @property
    def config(self) -> Config:
        return config_from_yaml((self.run.folder / "config.yaml").read_text())

    def kill(self, victim: str, moment: Callable[[Training], object], rng: random.Random) -> bool:
        """SIGKILL a victim at the moment, and wait until the run has trained another step; False if it ended before."""
        run = self.run
        while not (found := moment(run) and self._processes(victim)):
            if run.process.poll() is not None:
                return False
            time.sleep(POLL_SECONDS)
        lines, losses = _train_lines(run), _losses(run)
        rng.choice(found).kill()
        killed = time.monotonic()
        if victim == "rank":  # a step that was all but done may still end
            run.wait_for("going back", lambda: _losses(run) > losses, BACK_SECONDS)
            lines |= _train_lines(run)
        if victim == "driver":
            assert run.wait() == -signal.SIGKILL
            left = run.left_behind(ENDED_SECONDS)
            assert not left, left
            self.again()
        self.run.wait_for(f"a step after the {victim}'s end", lambda: _train_lines(self.run) - lines, BACK_SECONDS)
        self.kills.append((victim, time.monotonic() - killed))
        return True

    def finish(self, steps: int) -> None:
        """Stop the run, and have the same command take so many further steps, to its regular end."""
        self.run.send(signal.SIGTERM)
        assert self.run.wait() == 128 + signal.SIGTERM, self.run.told()
        last = int(self.run.checkpoint.name.removeprefix("step-")) + steps
        self.settings = (*self.settings, f"trainer.steps={last}")
        self.again()
        assert self.run.wait(BACK_SECONDS) == 0, self.run.told()

    def __enter__(self) -> Soak:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave nothing of it."""
        for run in (*self._before, self.run):
            run.destroy()

    def told(self) -> str:
        """Kills by victim, with the seconds until the run had trained another step."""
        lines = []
        for victim, count in Counter(victim for victim, _ in self.kills).items():
            seconds = sorted(took for each, took in self.kills if each == victim)
            lines.append(
                f"{victim}: {count} kills, back in {seconds[len(seconds) // 2]:.0f} s, at most {seconds[-1]:.0f} s"
            )
        return "\n".join(lines)

    def again(self) -> None:
        self._before.append(self.run)
        self.run = start(self.runs, *self.settings, name=NAME)

    def _processes(self, victim: str) -> list[psutil.Process]:
        family = self.run.family()
        if victim == "driver":
            return [each for each in family if each.pid == self.run.process.pid]
        return [each for each in family if any(title in _title(each) for title in TITLES[victim])]


def soak_for(seconds: float, every: float, victims: Collection[str], soak: Soak, rng: random.Random) -> None:
    """Kill a victim `every` so many seconds more or less, in rounds of all in random order, for so long; then let the run end."""
    end, order = time.monotonic() + seconds, list[str]()
    while (now := time.monotonic()) < end:
        order = order or rng.sample(sorted(victims), len(victims))
        due = now + rng.uniform(0.5, 1.5) * every
        assert soak.kill(order.pop(), lambda run, due=due: time.monotonic() > due, rng), soak.run.told()
    soak.finish(2)


def assert_nothing_was_lost(soak: Soak) -> None:
    """Every step is there once, on its own tasks, and every token was sampled by the weights of its version."""
    run, config = soak.run, soak.config
    assert run.left_behind(1) == []
    steps = [record["step"] for record in run.of_kind("train")]
    assert steps == list(range(1, config.trainer.steps + 1))
    elapsed = [record["elapsed"] for record in run.metrics]
    assert elapsed == sorted(elapsed)
    tasks = env_spec(config).tasks(config.env.train_split)
    groups, size = config.trainer.groups_per_step, config.algorithm.group_size
    played = {step: list(read_jsonl(run.folder / f"trajectories/train-{step:06d}.jsonl")) for step in steps}
    for step, episodes in played.items():
        picked = pick_tasks(len(tasks), (step - 1) * groups, groups, config.trainer.seed)
        assert [t.task_id for t in episodes] == [tasks[place].id for place in picked for _ in range(size)], step
        bound = range(max(step - 1 - config.trainer.staleness, 0), step)
        versions = {version for t in episodes for turn in t.turns for version in turn.tokens.versions}
        assert versions <= set(bound), (step, versions)
    assert all(record["failed"] == 0 for record in run.of_kind("train"))
    resumed = json.loads((run.folder / "versions.json").read_text()).get("resumed", [])
    assert sum(each["lost"] is None for each in resumed) == len(soak._before)
    assert_versions_are_true(run, [t for episodes in list(played.values())[-4:] for t in episodes[:8]])


def assert_versions_are_true(run: Training, episodes: list[Trajectory]) -> None:
    """The log-probabilities of all sampled tokens are those of the checkpoint of their version, as far as it is kept."""
    turns = [turn.tokens for t in episodes for turn in t.turns]
    for version in {version for tokens in turns for version in tokens.versions}:
        folder = run.folder / "checkpoints" / f"step-{version:06d}"
        if not folder.exists():
            continue
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for tokens in (each for each in turns if set(each.versions) == {version}):
            ids, first = [*tokens.prompt_ids, *tokens.completion_ids], len(tokens.prompt_ids)
            with torch.no_grad():
                rows = model(torch.tensor([ids])).logits[0, first - 1 : -1].log_softmax(-1)
            found = rows.gather(1, torch.tensor(tokens.completion_ids)[:, None])[:, 0]
            assert (found - torch.tensor(tokens.logprobs)).abs().max() < LOGPROB_TOLERANCE, version


def _train_lines(run: Training) -> set[tuple[int, float]]:
    """The training steps so far, by when they ended: one that is taken again counts again."""
    return {(record["step"], record["elapsed"]) for record in run.of_kind("train")}


def _losses(run: Training) -> int:
    """Times that the run went back by itself."""
    return run.out.count("; going on with ")


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
