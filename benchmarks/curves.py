"""Whether the algorithms learn: training runs of several recipes on a game, seed by seed, their curves in one picture and a table.

Nine games. `frozen_lake` is the default job of `agent-train +env=frozen_lake`, with a reward at the goal alone, for GRPO and for PPO
with a critic. `turn_rewards` is the same lake with `shaping`, so that every move has a reward, for several algorithms.
`staleness` is that lake for GRPO with rollouts ahead of training, by the bound. `self_play` is tic-tac-toe: training against the
perfect player, against itself and against its past, all held out against the perfect player. `algorithms` is tic-tac-toe
against the perfect player, for each of several algorithms, `guess` and `sokoban` are `guess_number` and Sokoban for each of them.
`countdown` is for a real instruct model, which `model.path=DIR` gives: GRPO after imitating 256 episodes of the expert;
`countdown-sft` is imitation of as many more as GRPO plays, held out at its step 0. `mbpp` is for a real coder model as it is:
GRPO of an adapter on MBPP's problems, with two replies; `mbpp-sft` imitates the reference solution of each.
All runs of another game and a seed start from the same warm start, which is made once, and learn from as many episodes.

It may be stopped and started again: a run that has its record is not run again, one that was cut off goes on from its newest
checkpoint. Records, pictures and table go to --out, the run folders to --runs. Only what is there is drawn.

python benchmarks/curves.py [--seeds 3] [--out docs/results/curves] [--only NAME,...] [--draw] [key=value ...]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_train.report.curves import Series, curves_svg, read_result

GOAL = 0.9
# The default job with as many episodes, but without a group for each task: a critic takes the place of the group.
NO_GROUPS = ("algorithm.group_size=1", "trainer.groups_per_step=192")
TURN_REWARDS = ("env.kwargs.shaping=1.0",)
# Near one: a move is two tokens, an episode up to 28, and its only reward comes at the end.
LAMBDA = ("algorithm.advantage.lam=0.99",)
# A smaller step than the default job's, since these are compared with each other and not with a goal.
SMALLER = ("trainer.groups_per_step=12",)
SMALLER_NO_GROUPS = ("algorithm.group_size=1", "trainer.groups_per_step=96")
# The model and its warm start in games of short replies.
PLAYER = (
    *("model.tiny.hidden=192", "model.tiny.heads=6", "model.tiny.intermediate=576", "model.tiny.layers=2"),
    *("sft.batch_rows=16", "sft.lr=1.5e-3", "sampling.max_tokens=4"),
)
# In tic-tac-toe it knows the rules and plays badly, on either side.
TIC_TAC_TOE_START = ("+env=tic_tac_toe_self", *PLAYER, "sft.episodes=8192", "sft.mistakes=0.5")
GAMES = (
    *("algorithm.updates_per_step=4", "algorithm.proximal=behaviour", "trainer.groups_per_step=16"),
    *("sampling.max_tokens=4", "trainer.eval_episodes=400"),
)
# A number of eight, which halving finds in four guesses. So many ranges that no number is learned by heart.
RANGES = ("env.kwargs.width=8", "env.kwargs.highest=999")
GUESS_START = ("+env=guess_number", *PLAYER, *RANGES, "sft.episodes=16384", "sft.mistakes=0.2")
GUESS = (*RANGES, "learner.lr=3.0e-4", "learner.schedule=linear", "trainer.steps=20", "trainer.eval_every=5")
# Rooms that a policy of this size can plan in. With a larger learning rate success falls in the first steps.
ROOMS = ("env.kwargs.size=5", "env.kwargs.max_turns=10")
SOKOBAN_START = ("+env=sokoban", *PLAYER, *ROOMS, "sft.episodes=8192", "sft.mistakes=0.1")
SOKOBAN = (
    *(*ROOMS, "learner.lr=1.5e-4", "learner.schedule=linear", "trainer.steps=20"),
    *("trainer.eval_episodes=200", "trainer.eval_every=10"),
)
PERFECT = ("env.kwargs.opponent=minimax", "learner.lr=1.0e-3", "learner.schedule=linear", "trainer.steps=20")
# Both sides play badly at first, so an episode says less of a move: a smaller learning rate and more steps. A rejected reply
# loses the game at once; else a player that is bad at the rules is not told so.
SELF = ("env.kwargs.mistakes=0", "learner.lr=2.0e-4", "trainer.steps=150", "trainer.eval_every=30")
PAST = ("env.players.O=past", "env.past_every=10")
# Each from the same warm start and with as many episodes of a game: groups of eight, or none.
ALGORITHMS = {
    "grpo": (),
    "ppo": ("algorithm=ppo", *LAMBDA),
    "starpo-s": ("algorithm=starpo_s",),
    "bilevel-gae": ("algorithm=bilevel_ppo",),
    "gigpo": ("algorithm=gigpo", "algorithm.kl.coef=0"),
    "gspo": ("algorithm=gspo",),
    "staleness-2": ("trainer.staleness=2",),
}
# A real model of about 0.1 B parameters on a CPU: two numbers and three attempts, so that feedback can be used; a step takes 70 s.
COUNTDOWN = (
    *("env.kwargs.min_count=2", "env.kwargs.max_count=2", "env.kwargs.max_number=15", "env.kwargs.max_turns=3"),
    *("sampling.max_tokens=24", "engine.max_model_len=512", "engine.kv_cache_bytes=1073741824"),
    *("engine=vllm", "algorithm=grpo", "algorithm.group_size=8", "trainer.groups_per_step=16", "trainer.steps=16"),
    *("learner.workers=2", "learner.lr=5e-6", "learner.shared_prefix=true", "learner.microbatch_tokens=2048"),
    *("learner.gradient_checkpointing=false", "trainer.eval_episodes=200", "trainer.eval_every=8"),
)
# In place of 16 steps: imitating as many episodes of the expert as they play.
IMITATION = ("sft.episodes=2048", "sft.mistakes=0", "sft.batch_rows=16", "sft.lr=3e-5", "trainer.steps=1")
# A coder model of about 0.5 B parameters on two cores with AVX512-BF16. The first reply's code is run, so that feedback can be
# used. Groups of equal rewards teach nothing and are not trained on. A step takes 5 minutes and 16 GB.
MBPP = (
    *("env.kwargs.max_turns=2", "sampling.max_tokens=160", "model.dtype=bfloat16", "lora.rank=16", "learner.lr=2e-4"),
    *("engine=vllm", "engine.max_model_len=1024", "engine.kv_cache_bytes=536870912"),
    *("algorithm=grpo", "algorithm.group_size=8", "algorithm.filter.name=spread"),
    *("trainer.groups_per_step=16", "trainer.steps=12", "trainer.save_every=2"),
    *("learner.workers=2", "learner.shared_prefix=true", "learner.microbatch_tokens=1024", "learner.head_chunk=256"),
    *("learner.gradient_checkpointing=false", "trainer.eval_episodes=200", "trainer.eval_every=8"),
)
MBPP_IMITATION = (
    *("sft.episodes=374", "sft.mistakes=0", "sft.batch_rows=16", "sft.lr=2e-4"),
    *("algorithm.filter.name=none", "trainer.steps=1", "trainer.groups_per_step=1"),
)
# The warm start of countdown, on other rounds than it trains on: with two or three numbers, which are smaller, and one attempt.
COUNTDOWN_START = (
    *("env.kwargs.min_count=2", "env.kwargs.max_count=3", "env.kwargs.max_number=10", "env.kwargs.max_turns=1"),
    *("sampling.max_tokens=24", "engine.max_model_len=256"),
    *("sft.episodes=256", "sft.mistakes=0", "sft.batch_rows=16", "sft.lr=3e-5"),
)


def episodes(algorithm: str, count: int) -> tuple[str, ...]:
    """Settings for so many episodes a step: groups of eight, or none where a critic takes the place of the group."""
    if algorithm in ("ppo", "bilevel-gae"):
        return "algorithm.group_size=1", f"trainer.groups_per_step={count}"
    return "algorithm.group_size=8", f"trainer.groups_per_step={count // 8}"


@dataclass(frozen=True)
class Curve:
    """One recipe on one game."""

    name: str
    game: str
    settings: tuple[str, ...]
    env: str = "frozen_lake"


CURVES = (
    Curve("grpo", "frozen_lake", ("algorithm=grpo",)),
    Curve("ppo", "frozen_lake", ("algorithm=ppo", *LAMBDA, *NO_GROUPS)),
    Curve("turns-grpo", "turn_rewards", ("algorithm=grpo", *TURN_REWARDS, *SMALLER)),
    Curve("turns-gigpo", "turn_rewards", ("algorithm=gigpo", "algorithm.kl.coef=0", *TURN_REWARDS, *SMALLER)),
    Curve("turns-gae", "turn_rewards", ("algorithm=ppo", *LAMBDA, *TURN_REWARDS, *SMALLER_NO_GROUPS)),
    Curve(
        "turns-bilevel-gae",
        "turn_rewards",
        ("algorithm=bilevel_ppo", "algorithm.updates_per_step=4", *TURN_REWARDS, *SMALLER_NO_GROUPS),
    ),
    Curve("turns-starpo-s", "turn_rewards", ("algorithm=starpo_s", *TURN_REWARDS, *SMALLER)),
    Curve("turns-gspo", "turn_rewards", ("algorithm=gspo", *TURN_REWARDS, *SMALLER)),
    *(
        Curve(
            f"staleness-{bound}",
            "staleness",
            ("algorithm.proximal=behaviour", *TURN_REWARDS, *SMALLER, f"trainer.staleness={bound}"),
        )
        for bound in (0, 1, 2, 4, 8)
    ),
    Curve("game-perfect", "self_play", (*PERFECT, *GAMES), "tic_tac_toe"),
    Curve("game-self", "self_play", (*SELF, *GAMES), "tic_tac_toe_self"),
    Curve("game-past", "self_play", (*PAST, *SELF, *GAMES), "tic_tac_toe_self"),
    *(
        Curve(f"game-{name}", "algorithms", (*PERFECT, *GAMES, *own, *episodes(name, 128)), "tic_tac_toe")
        for name, own in ALGORITHMS.items()
    ),
    *(
        Curve(f"guess-{name}", "guess", (*GUESS, *GAMES, *own, *episodes(name, 256)), "guess_number")
        for name, own in ALGORITHMS.items()
    ),
    *(
        Curve(f"sokoban-{name}", "sokoban", (*GAMES, *SOKOBAN, *own, *episodes(name, 128)), "sokoban")
        for name, own in ALGORITHMS.items()
    ),
    Curve("countdown", "countdown", COUNTDOWN, "countdown"),
    Curve("countdown-sft", "countdown", (*COUNTDOWN, *IMITATION, "trainer.groups_per_step=1"), "countdown"),
    Curve("mbpp", "mbpp", MBPP, "code_mbpp"),
    Curve("mbpp-sft", "mbpp", (*MBPP, *MBPP_IMITATION), "code_mbpp"),
)
REAL = ("countdown", "mbpp")  # games for a real model, of model.path=DIR
ALWAYS = ("engine=embedded", "learner.workers=1")
# By game; of the others, the default job's.
WARM_STARTS = {
    "self_play": TIC_TAC_TOE_START,
    "algorithms": TIC_TAC_TOE_START,
    "guess": GUESS_START,
    "sokoban": SOKOBAN_START,
    "countdown": ("+env=countdown", *COUNTDOWN_START),
}


def train(settings: list[str], log: Path) -> None:
    """One run of agent-train in a process of its own.

    Raises:
        SystemExit: it failed; with the last lines it said.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as out:
        command = [sys.executable, "-m", "agent_train.cli", *settings]
        done = subprocess.run(command, check=False, stdout=out, stderr=subprocess.STDOUT)
    if done.returncode:
        last = "\n".join(log.read_text(errors="replace").splitlines()[-8:])
        raise SystemExit(f"agent-train {' '.join(settings)} failed, see {log}:\n{last}")


def warm_start(game: str, seed: int, runs: Path, more: list[str]) -> Path:
    """The model that all runs of a game and a seed start from: the job's tiny one after its imitation of the expert."""
    own = WARM_STARTS.get(game, ("+env=frozen_lake",))
    name = f"warm-{game}-seed{seed}" if game in WARM_STARTS else f"warm-seed{seed}"
    folder = runs / name / "checkpoints" / "step-000000"
    if not (folder / "manifest.json").exists():
        print(name, flush=True)
        short = ["trainer.steps=1", "trainer.groups_per_step=1", "trainer.eval_episodes=1"]
        named = [f"trainer.seed={seed}", f"trainer.name={name}", f"trainer.runs_dir={runs}", "trainer.resume=auto"]
        train([*own, *ALWAYS, *short, *more, *named], runs / f"{name}.log")
    return folder


def run(curve: Curve, seed: int, out: Path, runs: Path, more: list[str]) -> None:
    """Train a recipe on a seed, unless its record is there."""
    name = f"{curve.name}-seed{seed}"
    record = out / f"{name}.json"
    if record.exists():
        return
    begun = ["trainer.resume=auto"]
    if curve.game != "mbpp":  # whose model is trained as it is
        start = warm_start(curve.game, seed, runs, [setting for setting in more if not setting.startswith("trainer.")])
        begun = [f"model.path={start}", *begun]
    print(f"{name}: {' '.join(curve.settings)}", flush=True)
    named = [f"trainer.seed={seed}", f"trainer.name={name}", f"trainer.runs_dir={runs}", f"trainer.record={record}"]
    own = [f"+env={curve.env}", *ALWAYS, "sft.episodes=0", *curve.settings]
    train([*own, *more, *begun, *named], runs / f"{name}.log")


def records_of(curve: Curve, out: Path) -> list[dict[str, Any]]:
    """What the runs of a recipe wrote, by seed."""
    found = [read_result(path) for path in sorted(out.glob(f"{curve.name}-seed*.json"))]
    return sorted(found, key=lambda record: record["seed"])


def mean_curve(records: list[dict[str, Any]]) -> tuple[list[tuple[float, float]], list[tuple[float, float, float]]]:
    """The mean over the seeds at each step that all of them measured, and the least and the most."""
    curves = [dict(map(tuple, record["curve"])) for record in records]
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    values = [(step, [curve[step] for curve in curves]) for step in steps]
    return [(s, statistics.fmean(v)) for s, v in values], [(s, min(v), max(v)) for s, v in values]


def draw(game: str, out: Path) -> None:
    """One picture of the recipes of a game, of those that have records: the mean of the seeds, its band from least to most."""
    series = []
    for curve in CURVES:
        records = records_of(curve, out)
        if curve.game == game and records:
            points, band = mean_curve(records)
            count = "1 seed" if len(records) == 1 else f"{len(records)} seeds"
            series.append(Series(f"{curve.name}, {count}", points, band))
    if series:
        picture = curves_svg(series, f"{game}: mean, least and most of the seeds")
        (out / f"{game}.svg").write_text(picture, encoding="utf-8")


def table(out: Path) -> str:
    """A line for each run: held-out success at the start, at the end and at its best, and when it first reached the goal."""
    lines = [
        f"| game | recipe | seed | start | end | best | first at {GOAL:.0%} | minutes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for curve in CURVES:
        for record in records_of(curve, out):
            best = max(success for _, success in record["curve"])
            reached = next((str(step) for step, success in record["curve"] if success >= GOAL), "never")
            lines.append(
                f"| {curve.game} | {curve.name} | {record['seed']} | {record['start']:.1%} | {record['end']:.1%} | {best:.1%}"
                f" | {reached} | {record['minutes']:.0f} |"
            )
    return "\n".join(lines)


def summary(out: Path) -> str:
    """A line for each recipe: the means over its seeds at the start and the end, its least and most at the end, and the minutes."""
    lines = [
        "| game | recipe | seeds | start, mean | end, mean | least | most | minutes, mean |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for curve in CURVES:
        if records := records_of(curve, out):
            start, end, minutes = (statistics.fmean(one[key] for one in records) for key in ("start", "end", "minutes"))
            ends = [record["end"] for record in records]
            lines.append(
                f"| {curve.game} | {curve.name} | {len(ends)} | {start:.1%} | {end:.1%} | {min(ends):.1%} | {max(ends):.1%}"
                f" | {minutes:.0f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [curve.name for curve in CURVES]
    real = [curve.name for curve in CURVES if curve.game in REAL]
    without_model = [name for name in names if name not in real]
    parser.add_argument("--seeds", type=int, default=3, help="0, 1, ... of each recipe (default: 3)")
    parser.add_argument("--out", type=Path, default=Path("docs/results/curves"), help="for records, pictures, table.md")
    parser.add_argument("--runs", type=Path, default=Path("runs/curves"), help="for the run folders")
    parser.add_argument(
        "--only", default=",".join(without_model), help=f"of {', '.join(names)} (default: all but {', '.join(real)})"
    )
    parser.add_argument("--draw", action="store_true", help="run nothing, draw what is there")
    parser.add_argument("more", nargs="*", metavar="key=value", help="settings of every run, after the recipe's own")
    args = parser.parse_intermixed_args()
    only = args.only.split(",")
    if unknown := set(only) - set(names):
        parser.error(f"--only: no {min(unknown)}; there are {', '.join(names)}")
    with_model = any(each.startswith("model.path=") for each in args.more)
    if not args.draw and not with_model and (named := [name for name in only if name in real]):
        parser.error(f"{named[0]} takes a real model: add model.path=DIR, the folder of an instruct model")
    args.out.mkdir(parents=True, exist_ok=True)
    for seed in [] if args.draw else range(args.seeds):
        for curve in CURVES:
            if curve.name in only:
                run(curve, seed, args.out, args.runs, args.more)
    for game in dict.fromkeys(curve.game for curve in CURVES):
        draw(game, args.out)
    text = f"{summary(args.out)}\n\n{table(args.out)}\n"
    (args.out / "table.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
