"""What the folder of a run tells of kills: when its parts were back, and that no turn, task or version was lost."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from training_process import Training
from transformers import AutoModelForCausalLM, PreTrainedModel

from agent_train.config.compose import config_from_yaml
from agent_train.config.validation import env_spec
from agent_train.report.timeline import LOOP
from agent_train.rollout.draws import pick_tasks
from agentgym.core.trajectory import Tokens, Trajectory, read_jsonl

BATCH = 64
TOLERANCE = 1e-3  # nats; the engine's rounding is 1e-5, and one training step moves some token further than this
Turns = dict[tuple[int, str], list[list[int]]]  # sampled ids of each turn, by step and episode
Span = tuple[float, float, str]  # begin and end in Unix seconds, and the name


@dataclass(frozen=True)
class Back:
    """Seconds from a kill until the run went on as before it, and without the time in which a vLLM server started."""

    whole: float
    net: float


def spans(folder: Path) -> dict[str, list[Span]]:
    """The spans of a timeline by row, "engine 0", in the order of their ends."""
    names: dict[tuple[int, int], str] = {}
    found: dict[str, list[Span]] = {}
    for event in _events(folder):
        row = (event["pid"], event["tid"])
        if event["name"] == "thread_name":
            names[row] = event["args"]["name"]
        elif event["ph"] == "X":
            begun = event["ts"] / 1e6
            found.setdefault(names[row], []).append((begun, begun + event["dur"] / 1e6, event["name"]))
    return {row: sorted(own, key=lambda span: span[1]) for row, own in found.items()}


def _events(folder: Path) -> Iterator[dict[str, Any]]:
    for name in ("timeline.earlier.json", "timeline.json"):
        for line in (folder / name).read_text().splitlines() if (folder / name).exists() else ():
            try:
                yield json.loads(line[1:])
            except ValueError:  # cut off by a kill
                continue


def back_after(folder: Path, victim: str, at: float) -> Back | None:
    """When an engine serves present weights again, or the loop goes on from a checkpoint; None for what ends neither.

    None too where the run itself was started again before the engine was.
    """
    rows = spans(folder)
    loop = rows[f"{LOOP[0]} {LOOP[1]}"]
    if victim == "engine":
        restarts = [
            (end, row.split()[-1]) for row, own in rows.items() if "restart" in row for _, end, _ in own if end > at
        ]
        again = min((end for begun, end, name in loop if name == "start" and begun > at), default=math.inf)
        if not restarts or min(restarts)[0] > again:
            return None
        restarted, number = min(restarts)
        served = rows[f"engine {number}"]
        ends = [end for begun, end, name in served if name.startswith("loads version") and begun >= restarted]
    elif victim in ("rank", "driver"):
        ends = [end for begun, end, name in loop if name == "start" and begun > at]
    else:
        return None
    if not ends:
        return None
    starting = [
        (max(begun, at), min(end, ends[0]))
        for own in rows.values()
        for begun, end, name in own
        if name == "vLLM starts" and end > at and begun < ends[0]
    ]
    return Back(ends[0] - at, ends[0] - at - _covered(starting))


def _covered(parts: Sequence[tuple[float, float]]) -> float:
    seconds, until = 0.0, 0.0
    for begun, end in sorted(parts):
        seconds += max(0.0, end - max(begun, until))
        until = max(until, end)
    return seconds


def turns_on_disk(folder: Path) -> Turns:
    """The finished turns of rollouts that run, as a run that is killed now would find them."""
    found: Turns = {}
    for path in sorted((folder / "turns").glob("*.jsonl")):
        for line in path.read_bytes().splitlines(keepends=True):
            for turn in json.loads(line) if line.endswith(b"\n") else ():
                turns = found.setdefault((int(path.stem), turn["episode"]), [])
                if turn["turn"] == 0:  # the episode was begun anew
                    turns.clear()
                turns.append(turn["ids"])
    return found


@dataclass(frozen=True)
class Losses:
    steps: int
    episodes: int
    turns: int  # that were on disk at a kill
    lost: int  # of these, those that were not trained on as they were
    tokens: int  # whose version is a checkpoint that is kept
    checked: int  # turns that have them
    mixed: int  # turns of several versions among them
    wrong: int  # of the tokens, those with another log-probability under that checkpoint
    told_apart: float  # share of the tokens with another one under the next checkpoint


def losses_of(run: Training, kills: Sequence[Turns], starts: int) -> Losses:
    """Asserts that every step is there once, on its own tasks and within the bound, in a run with so many more starts."""
    config = config_from_yaml((run.folder / "config.yaml").read_text())
    records = run.of_kind("train")
    steps = [record["step"] for record in records]
    assert steps == list(range(1, config.trainer.steps + 1))
    elapsed = [record["elapsed"] for record in run.metrics]
    assert elapsed == sorted(elapsed)
    assert all(record["failed"] == 0 for record in records)
    resumed = json.loads((run.folder / "versions.json").read_text()).get("resumed", [])
    assert sum(each["lost"] is None for each in resumed) == starts
    tasks = env_spec(config).tasks(config.env.train_split)
    groups, size = config.trainer.groups_per_step, config.algorithm.group_size
    played = {step: list(read_jsonl(run.folder / f"trajectories/train-{step:06d}.jsonl")) for step in steps}
    for step, episodes in played.items():
        picked = pick_tasks(len(tasks), (step - 1) * groups, groups, config.trainer.seed)
        assert [t.task_id for t in episodes] == [tasks[place].id for place in picked for _ in range(size)], step
        bound = range(max(step - 1 - config.trainer.staleness, 0), step)
        versions = {version for t in episodes for call in t.calls() for version in call.tokens.versions}
        assert versions <= set(bound), (step, versions)
    turns, lost = _lost(played, kills)
    counts = _versions(run.folder, [call.tokens for own in played.values() for t in own for call in t.calls()])
    return Losses(len(steps), sum(map(len, played.values())), turns, lost, *counts)


def _lost(played: dict[int, list[Trajectory]], kills: Sequence[Turns]) -> tuple[int, int]:
    """Turns of trained steps that were on disk at a kill, and those of them that were not trained on."""
    trained = {
        (step, f"{t.seed:x}"): [call.tokens.completion_ids for call in t.calls()]
        for step, own in played.items()
        for t in own
    }
    pairs = [
        (ids, trained[episode][number : number + 1])
        for turns in kills
        for episode, own in turns.items()
        if episode in trained
        for number, ids in enumerate(own)
    ]
    return len(pairs), sum([ids] != now for ids, now in pairs)


def _versions(folder: Path, turns: Sequence[Tokens]) -> tuple[int, int, int, int, float]:
    """Of the tokens whose version is kept: how many, in how many turns, mixed ones, wrong ones, and the share that is told apart."""
    checked: set[int] = set()
    tokens = wrong = others = apart = 0
    for checkpoint in sorted((folder / "checkpoints").glob("step-??????")):
        version = int(checkpoint.name.removeprefix("step-"))
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        numbers = [n for n, turn in enumerate(turns) if {version, version - 1} & {*turn.versions}]
        numbers.sort(key=lambda n: len(turns[n].prompt_ids) + len(turns[n].completion_ids))
        for batch in (numbers[first : first + BATCH] for first in range(0, len(numbers), BATCH)):
            for number, found in zip(batch, _logprobs(model, [turns[n] for n in batch]), strict=True):
                turn = turns[number]
                own = torch.tensor([each == version for each in turn.versions])
                before = torch.tensor([each == version - 1 for each in turn.versions])
                differs = (found - torch.tensor(turn.logprobs)).abs() > TOLERANCE
                tokens, wrong = tokens + int(own.sum()), wrong + int((differs & own).sum())
                others, apart = others + int(before.sum()), apart + int((differs & before).sum())
                checked |= {number} if own.any() else set()
    mixed = sum(len(set(turns[number].versions)) > 1 for number in checked)
    return tokens, len(checked), mixed, wrong, apart / max(others, 1)


@torch.no_grad()
def _logprobs(model: PreTrainedModel, turns: Sequence[Tokens]) -> list[torch.Tensor]:
    """The log-probabilities of the sampled ids of each turn."""
    rows = [torch.tensor([*turn.prompt_ids, *turn.completion_ids]) for turn in turns]
    ids = torch.nn.utils.rnn.pad_sequence(
        rows, batch_first=True
    )  # behind the ids, where causal attention does not look
    scores = model(ids).logits.log_softmax(-1)
    return [
        scores[row, len(turn.prompt_ids) - 1 : len(ids_of) - 1].gather(1, ids_of[len(turn.prompt_ids) :, None])[:, 0]
        for row, (turn, ids_of) in enumerate(zip(turns, rows, strict=True))
    ]
