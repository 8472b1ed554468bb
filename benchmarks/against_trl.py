"""Whether training with us learns as fast as with TRL: the same model, game, seeds and episodes, reward by token and by CPU second.

Both sides start from the warm start of `frozen_lake`'s default job, play the same tasks in the same order through the same
environment, and take as many optimizer steps with the same objective, learning rates and AdamW. Ours is agent-train with the
embedded engine and one rank; TRL's GRPOTrainer plays by a `rollout_func` (`learning/train_trl.py`). All is float32 with one
thread for numerics. The CPU seconds are those of a side's tree of processes during its steps, without start, evaluation and
checkpoints; `whole` has all but evaluation. The weights of both are evaluated afterwards, by the same code on the same held-out tasks.
TRL is installed as for `learner.py`. A run that has its record is not run again.

python benchmarks/against_trl.py [--seeds 0 1 2] [--steps 12] [--out docs/results/trl] [--draw]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import psutil
from curves import ALWAYS, warm_start
from peers import ONE_THREAD, TRL, trl_python

from agent_train.report.curves import Series, curves_svg

HERE = Path(__file__).parent
SIDES = ("agentgym", "TRL")
JOB = ("+env=frozen_lake", *ALWAYS)
HELD_OUT = 200
ROWS = 16  # of TRL's forward passes: of 8, 16 and 32 what took the least CPU
EVERY = 4  # steps between the weights that are evaluated
SETTINGS = ("sft.episodes=0", "learner.warmup_steps=0", "trainer.groups_per_step=12", f"trainer.save_every={EVERY}")
LOOK = 0.5  # seconds between looks at the processes
Readings = list[tuple[float, float]]  # Unix seconds, CPU seconds up to then
Spans = list[tuple[float, float]]  # when each step began and ended, in Unix seconds
Trained = tuple[Readings, Spans, list[int]]  # the last are the tokens that each step sampled


@dataclass(frozen=True)
class Record:
    """One run: the curve has step, sampled tokens, CPU seconds of the steps, and held-out success."""

    side: str
    seed: int
    curve: list[tuple[int, int, float, float]]
    whole: float
    peer: str = TRL


def metered(command: list[str], log: Path) -> Readings:
    """Run a command to its end, and read the CPU seconds of its tree of processes, ended ones too.

    Raises:
        SystemExit: it failed; with the last lines it said.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    paths = {"PYTHONPATH": str(HERE.parent), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    used: dict[tuple[int, float], float] = {}
    readings: Readings = []
    with log.open("w") as out:
        process = psutil.Popen(command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **ONE_THREAD, **paths})
        while process.poll() is None:
            with contextlib.suppress(psutil.Error):  # it ended meanwhile
                for each in [process, *process.children(recursive=True)]:
                    with contextlib.suppress(psutil.Error):
                        times = each.cpu_times()
                        used[each.pid, each.create_time()] = times.user + times.system
            readings.append((time.time(), sum(used.values())))
            time.sleep(LOOK)
    if process.returncode:
        last = "\n".join(log.read_text(errors="replace").splitlines()[-8:])
        raise SystemExit(f"{' '.join(command)} failed, see {log}:\n{last}")
    return readings


def seconds_by_step(readings: Readings, spans: Spans) -> list[float]:
    """The CPU seconds within the spans of the steps, up to the end of each."""
    at, used = zip(*readings, strict=True)
    each = [float(np.interp(end, at, used) - np.interp(begin, at, used)) for begin, end in spans]
    return list(itertools.accumulate(each))


def spans_of(timeline: Path) -> Spans:
    """Those of a run of ours, each from its rollout to the end of its sync."""
    events = json.loads(timeline.read_text() + "]")
    (loop,) = {each["tid"] for each in events if each["ph"] == "M" and each["args"]["name"] == "loop 0"}
    own = [each for each in events if each["ph"] == "X" and each["tid"] == loop]
    begins = [each["ts"] / 1e6 for each in own if each["name"] == "rollout"]
    ends = [(each["ts"] + each["dur"]) / 1e6 for each in own if each["name"] == "sync"]
    return list(zip(begins, ends, strict=True))


def train_ours(settings: list[str], runs: Path, name: str) -> Trained:
    folder = runs / name
    named = [f"trainer.name={name}", f"trainer.runs_dir={runs}", "trainer.resume=never", "trainer.eval_episodes=1"]
    kept = ["trainer.keep_checkpoints=1000", "trainer.eval_every=1000"]
    readings = metered([sys.executable, "-m", "agent_train.cli", *settings, *named, *kept], runs / f"{name}.log")
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    tokens = [line["sampled_tokens"] for line in lines if line["kind"] == "train"]
    return readings, spans_of(folder / "timeline.json"), tokens


def train_trl(settings: list[str], runs: Path, name: str) -> Trained:
    log = runs / f"{name}.log"
    script = [str(HERE / "learning" / "train_trl.py"), "--out", str(runs / name), "--rows", str(ROWS)]
    readings = metered([str(trl_python()), *script, *settings], log)
    found = json.loads(log.read_text().splitlines()[-1])
    return readings, found["spans"], found["tokens"]


@functools.cache
def success(weights: Path, start: Path, seed: int) -> float:
    """The share of the held-out tasks that a policy solves, in this process."""
    from agent_train.config.compose import compose
    from agent_train.config.validation import env_spec
    from agent_train.engine.embedded import EmbeddedEngine
    from agent_train.rollout.renderer import Renderer
    from agent_train.trainer.rl import sampler_of

    config = compose([*JOB, f"model.path={start}", f"trainer.seed={seed}"])
    spec = env_spec(config)

    async def evaluate() -> float:
        engine = EmbeddedEngine(weights, config.engine.max_model_len, max_concurrent=config.engine.max_concurrent)
        sampler = sampler_of(config, spec.make, engine, Renderer.of_folder(start))
        played = await sampler.evaluate(spec.tasks(config.env.test_split).take(HELD_OUT))
        await engine.close()
        return statistics.fmean(bool(each.success) for each in played)

    return asyncio.run(evaluate())


def run(side: str, seed: int, steps: int, out: Path, runs: Path) -> None:
    """Train on one side and evaluate its weights, unless its record is there."""
    name = f"{side.lower()}-seed{seed}"
    path = out / f"{name}.json"
    if path.exists():
        return
    start = warm_start("frozen_lake", seed, runs, [])
    print(f"{name}: trains", flush=True)
    settings = [*JOB, *SETTINGS, f"model.path={start}", f"trainer.seed={seed}", f"trainer.steps={steps}"]
    shutil.rmtree(runs / name, ignore_errors=True)
    ours = side == "agentgym"
    readings, spans, tokens = (train_ours if ours else train_trl)(settings, runs, name)
    used, sampled = seconds_by_step(readings, spans), list(itertools.accumulate(tokens))
    curve = [(0, 0, 0.0, success(start, start, seed))]
    for step in range(EVERY, steps + 1, EVERY):
        weights = runs / name / (f"checkpoints/step-{step:06d}" if ours else f"checkpoint-{step}")
        curve.append((step, sampled[step - 1], round(used[step - 1], 1), success(weights, start, seed)))
    path.write_text(json.dumps(asdict(Record(side, seed, curve, round(readings[-1][1], 1)))) + "\n")


def records_of(side: str, out: Path) -> list[Record]:
    return [Record(**json.loads(path.read_text())) for path in sorted(out.glob(f"{side.lower()}-seed*.json"))]


def draw(out: Path) -> None:
    """One picture of two parts, by token and by CPU second: the mean of the seeds, its band from least to most."""
    parts = []
    for column, across in ((1, "sampled tokens"), (2, "CPU seconds of training")):
        series = []
        for side in SIDES:
            points, band = [], []
            for rows in zip(*(record.curve for record in records_of(side, out)), strict=True):
                at, values = statistics.fmean(row[column] for row in rows), [row[3] for row in rows]
                points.append((at, statistics.fmean(values)))
                band.append((at, min(values), max(values)))
            series.append(Series(side, points, band))
        parts.append(curves_svg(series, f"frozen_lake by {across}", across))
    low = parts[1].replace("<svg ", '<svg y="420" ', 1)
    whole = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 840" width="760" height="840">'
    (out / "trl.svg").write_text(f"{whole}\n{parts[0]}{low}</svg>\n", encoding="utf-8")


def table(out: Path) -> str:
    """A line for each run: held-out success at each step, and what the training took."""
    records = [record for side in SIDES for record in records_of(side, out)]
    steps = [str(row[0]) for row in records[0].curve]
    head = ["side", "seed", *(f"step {step}" for step in steps), "tokens", "CPU s", "CPU ms/token", "CPU s, whole"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for record in records:
        _, tokens, seconds, _ = record.curve[-1]
        cells = [f"{row[3]:.1%}" for row in record.curve]
        cost = [f"{tokens:,}", f"{seconds:,.0f}", f"{seconds / tokens * 1e3:.1f}", f"{record.whole:,.0f}"]
        lines.append(f"| {' | '.join([record.side, str(record.seed), *cells, *cost])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(default: 0 1 2)")
    parser.add_argument("--steps", type=int, default=12, help=f"a multiple of {EVERY} (default: 12)")
    parser.add_argument("--out", type=Path, default=Path("docs/results/trl"), help="for records and picture")
    parser.add_argument("--runs", type=Path, default=Path("runs/trl"), help="for the run folders")
    parser.add_argument("--draw", action="store_true", help="run nothing, draw what is there")
    args = parser.parse_args()
    if args.steps % EVERY:
        parser.error(f"--steps: {args.steps} is no multiple of {EVERY}")
    args.out.mkdir(parents=True, exist_ok=True)
    for seed in [] if args.draw else args.seeds:
        for side in SIDES if seed % 2 == 0 else reversed(SIDES):
            run(side, seed, args.steps, args.out.absolute(), args.runs.absolute())
    draw(args.out)
    print(table(args.out))


if __name__ == "__main__":
    main()
