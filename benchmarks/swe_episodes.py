"""A real model plays swe_bench: how episodes end, what they cost, and whether the samples have exactly the tokens that were sampled.

The settings are those of `+env=swe_bench_small`. Each answer of the engine is written down where the engine gives it, beside the
rollout; afterwards each sample's sampled tokens, log-probabilities and versions are compared with those answers, token for token.

python benchmarks/swe_episodes.py MODEL FILE.jsonl [--only ID ...] [--episodes N] [--engine vllm|embedded] [--out FILE.jsonl]
    [SETTING=VALUE ...]
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent_train.config.compose import compose
from agent_train.config.extensions import engines
from agent_train.config.schema import Config
from agent_train.config.validation import env_spec
from agent_train.data.samples import samples_of
from agent_train.engine.base import Completion, Engine, Sampling
from agent_train.rollout.renderer import Renderer
from agent_train.rollout.sampler import episode_key
from agent_train.trainer.rl import sampler_of
from agentgym.core.trajectory import Trajectory, write_jsonl

Answers = dict[str, list[tuple[list[int], Completion]]]


def overhear(engine: Engine) -> Answers:
    """Every answer of the engine from now on, with its prompt, by episode."""
    answers: Answers = {}
    generate = engine.generate

    async def heard(prompt_ids: Sequence[int], sampling: Sampling, episode: str | None = None) -> Completion:
        completion = await generate(prompt_ids, sampling, episode)
        answers.setdefault(episode or "", []).append((list(prompt_ids), completion))
        return completion

    engine.generate = heard  # type: ignore[method-assign]
    return answers


def compared(trajectory: Trajectory, answers: Sequence[tuple[list[int], Completion]]) -> Counter[str]:
    """Tokens that the engine sampled in an episode, those that its samples train, and those of them that are not the same."""
    samples = samples_of(trajectory)
    trained = [
        one
        for sample in samples
        for one in zip(sample.ids, sample.logprobs, sample.versions, sample.mask, strict=True)
        if one[3]
    ]
    said = [one for _, each in answers for one in zip(each.ids, each.logprobs, each.versions, strict=True)]
    wrong = sum(ours[:3] != theirs for ours, theirs in zip(trained, said, strict=False)) + abs(len(trained) - len(said))
    # What precedes an answer in its sample is the prompt that the engine was given.
    prompts = [sample.ids[:end] for sample in samples for end in sample.turn_ends]
    wrong += sum(prompt + each.ids != read for (prompt, each), read in zip(answers, prompts, strict=False))
    return Counter(sampled=len(said), trained=len(trained), wrong=wrong, samples=len(samples))


async def play(config: Config, model: Path, logs: Path, episodes: int) -> tuple[list[Trajectory], Answers, float]:
    spec = env_spec(config)
    tasks = spec.tasks("all")
    engine = await engines.load(config.engine.name)(
        config.engine, model, logs, dtype=config.model.dtype, seed=config.trainer.seed, deterministic=False
    )
    try:
        answers = overhear(engine)
        sampler = sampler_of(config, spec.make, engine, Renderer.of_folder(model))
        begun, ended = time.monotonic(), 0

        def told(trajectory: Trajectory) -> None:
            nonlocal ended
            ended += 1
            last = trajectory.turns[-1].info if trajectory.turns else {}
            what = f"{last.get('exit', trajectory.end)}, patch {last.get('patch', '')!r}, reward {trajectory.reward:g}"
            print(f"{ended:>3} {trajectory.id}: {what}; {trajectory.error or ''}", flush=True)

        chosen = [tasks[n % len(tasks)] for n in range(-(-episodes // config.algorithm.group_size))]
        groups = await sampler.collect(chosen, 0, told)
    finally:
        await engine.close()
    return [t for group in groups for t in group.trajectories], answers, time.monotonic() - begun


def table(trajectories: Sequence[Trajectory], answers: Answers, seconds: float) -> str:
    sums: Counter[str] = Counter()
    for trajectory in trajectories:
        if not trajectory.failed:
            sums += compared(trajectory, answers[episode_key(trajectory.seed)])
    last = [t.turns[-1].info for t in trajectories if not t.failed and t.turns]
    exits = Counter(info.get("exit", "none") for info in last)
    patches = Counter(str(info.get("patch", "none")).partition(":")[0] for info in last)
    rows: list[tuple[str, Any]] = [
        ("episodes", len(trajectories)),
        ("failed by the machinery", sum(t.failed for t in trajectories)),
        ("turns an episode", f"{sum(len(t.turns) for t in trajectories) / len(trajectories):.1f}"),
        ("ended by", ", ".join(f"{name} {count}" for name, count in exits.most_common())),
        ("patches", ", ".join(f"{name} {count}" for name, count in patches.most_common())),
        ("resolved", sum(bool(t.success) for t in trajectories)),
        ("tokens sampled", sums["sampled"]),
        ("of them in samples", f"{sums['trained']} in {sums['samples']} samples"),
        ("of them not as the engine sampled them", sums["wrong"]),
        ("minutes", f"{seconds / 60:.1f}"),
    ]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("file", type=Path, help="instances whose images are built")
    parser.add_argument("settings", nargs="*", help="of a run, such as sampling.max_tokens=256")
    parser.add_argument("--only", nargs="+", default=[], metavar="ID", help="these instances")
    parser.add_argument("--episodes", type=int, default=50)
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--out", type=Path, help="the episodes, for `agentgym view`")
    args = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as folder:
        lines = args.file.read_text().splitlines()
        chosen = [line for line in lines if not args.only or json.loads(line)["instance_id"] in args.only]
        Path(folder, "chosen.jsonl").write_text("".join(f"{line}\n" for line in chosen))
        words = ["+env=swe_bench_small", f"model.path={args.model}", f"engine={args.engine}"]
        config = compose([*words, f"env.kwargs.data={folder}/chosen.jsonl", *args.settings])
        if args.engine == "vllm":
            import ray

            ray.init(address="local", include_dashboard=False, logging_level="error", log_to_driver=False)
        trajectories, answers, seconds = asyncio.run(play(config, args.model, Path(folder), args.episodes))
    sys.stdout.write(table(trajectories, answers, seconds))
    if args.out:
        write_jsonl(args.out, trajectories)


if __name__ == "__main__":
    main()
