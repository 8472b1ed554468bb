"""The training half: our learner against TRL's GRPOTrainer, and our own ways of computing a step against the plain ones.

Parts, of which --parts takes some: `trl` (the same rows, the same model, one thread each; the two must have the same
gradients before anything is timed), `packing`, `shared_prefix`, `head`, `ranks` (two FSDP2 ranks against one), and `gpu`
(tokens/s and MFU in bf16, where torch finds CUDA). Every side runs in a process of its own, in turn; times are CPU
seconds of that process. TRL is installed from the package index into a virtual environment of its own in the user's
cache on the first run; it shares this Python's torch and transformers.

python benchmarks/learner.py [--out FILE.json] [--parts trl,ranks] [--rounds N] [--quick] [--only-agentgym]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from found import write
from learning.cases import CASES, QUICK, Case, write_case
from peers import ONE_THREAD, TRL, trl_python

HERE = Path(__file__).parent / "learning"

SIDES = {
    "agentgym": ("step_agentgym.py",),
    "agentgym, shared prefix": ("step_agentgym.py", "--shared-prefix"),
    "TRL": ("step_trl.py",),
    "TRL, its default checkpointing": ("step_trl.py", "--checkpointing"),
}
OURS = ("packing", "shared_prefix", "head")  # modules of benchmarks/learning
PARTS = ("trl", *OURS, "ranks", "gpu")
GOAL = 2.0  # times TRL's tokens for each CPU second
SAME = 1e-4  # of the largest gradient of a weight
SAMPLED = 64  # most tokens of a completion in whole steps


def run_side(side: str, folder: Path, *options: str) -> dict[str, Any]:
    """One process of a side; what its last line says."""
    script, *own = SIDES[side]
    return run_script(script, "--folder", str(folder), *own, *options, peer=script == "step_trl.py")


def run_script(script: str, *options: str, peer: bool = False) -> dict[str, Any]:
    python = trl_python() if peer else Path(sys.executable)
    paths = {} if peer else {"PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent.parent)])}
    env = {**os.environ, **ONE_THREAD, **paths, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [str(python), str(HERE / script), *options], check=False, env=env, capture_output=True, text=True, timeout=1800
    )
    if done.returncode:
        raise SystemExit(f"{script} {' '.join(options)} failed: {done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def check_same(gradients: dict[str, Path]) -> float:
    """The largest difference between a side's gradients and the first side's, as a share of the weight's largest one.

    Raises:
        SystemExit: it is above SAME: then the sides do not compute the same step.
    """
    first, *others = gradients
    expected, worst = torch.load(gradients[first]), 0.0
    for side in others:
        found = torch.load(gradients[side])
        if found.keys() != expected.keys():
            raise SystemExit(f"{side} has other weights than {first}")
        for name, gradient in found.items():
            gap = float((gradient - expected[name]).abs().max() / expected[name].abs().max())
            if not gap <= SAME:
                raise SystemExit(
                    f"{side}: the gradient of {name} differs from that of {first} by {gap:.1e} of its size"
                )
            worst = max(worst, gap)
    return worst


def per_token(found: list[dict[str, Any]]) -> dict[str, float]:
    """The least and the middle CPU microseconds a token, over all steps but the first of each process; the memory."""
    each = [s / t * 1e6 for one in found for s, t in list(zip(one["seconds"], one["tokens"], strict=True))[1:]]
    return {
        "cpu_us_per_token": round(min(each), 2),
        "median_us_per_token": round(statistics.median(each), 2),
        "peak_mib": round(max(one["peak_mib"] for one in found)),
    }


def against_trl(case: Case, sides: list[str], whole: list[str], rounds: int, steps: int) -> list[dict[str, Any]]:
    """The training half of all sides in turn, with their gradients compared, then the whole step of those in `whole`."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="agentgym-learner-") as name:
        folder = write_case(case, Path(name))
        gradients = {side: folder / f"gradients-{number}.pt" for number, side in enumerate(sides)}
        for what in ("training half", "whole step"):
            taken: dict[str, list[dict[str, Any]]] = {side: [] for side in (whole if what == "whole step" else sides)}
            for _ in range(rounds):
                for side, found in taken.items():
                    options = ["--generate", str(min(SAMPLED, case.completion))]
                    if what == "training half":
                        options = ["--gradients", str(gradients[side])]
                    found.append(run_side(side, folder, "--steps", str(steps), *options))
                if what == "training half":
                    gap = check_same(gradients)
            for side, found in taken.items():
                rows.append({"case": case.name, "what": what, "side": side, **per_token(found), "gradient_gap": gap})
                show_side(rows[-1])
    return rows


def show_side(row: dict[str, Any]) -> None:
    print(
        f"| {row['case']} | {row['what']} | {row['side']} | {row['cpu_us_per_token']:,.1f} | {row['median_us_per_token']:,.1f}"
        f" | {row['peak_mib']:,} |",
        flush=True,
    )


def judge(rows: list[dict[str, Any]]) -> None:
    """How many times TRL's speed, by case."""
    least = {(row["case"], row["what"], row["side"]): row["cpu_us_per_token"] for row in rows}
    print()
    for (case, what, side), ours in least.items():
        theirs = least.get((case, what, "TRL"))
        if theirs and not side.startswith("TRL"):
            verdict = "met" if theirs / ours >= GOAL else "MISSED"
            print(f"{case}, {what}, {side}: {theirs / ours:.2f} times TRL, goal {GOAL:g}: {verdict}")


def ranks(case: Case, rounds: int, steps: int) -> list[dict[str, Any]]:
    """The same step on one rank and on two: seconds of the slowest rank, CPU seconds of all, memory of the largest."""
    with tempfile.TemporaryDirectory(prefix="agentgym-ranks-") as name:
        folder = write_case(case, Path(name))
        taken: dict[int, list[dict[str, Any]]] = {1: [], 2: []}
        for _ in range(rounds):
            for world, found in taken.items():
                given = ("--folder", str(folder), "--world", str(world), "--steps", str(steps))
                found.append(run_script("step_ranks.py", *given))
    return [
        {
            "case": case.name,
            "ranks": world,
            "wall_seconds": round(min(s for one in found for s in one["wall"][1:]), 3),
            "cpu_seconds": round(min(s for one in found for s in one["cpu"][1:]), 3),
            "peak_mib": round(max(one["peak_mib"] for one in found)),
        }
        for world, found in taken.items()
    ]


def on_gpu(profile: Path | None) -> list[dict[str, Any]]:
    """Tokens/s and MFU; nothing where torch finds no CUDA."""
    options = ["--profile", str(profile.absolute())] if profile else []
    return run_script("gpu.py", *options)["rows"] if torch.cuda.is_available() else []


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """A table with the rows' own names as its head."""
    print(f"\n{title}\n")
    if not rows:
        return
    print(f"| {' | '.join(rows[0])} |\n|{'---|' * len(rows[0])}")
    for row in rows:
        print(f"| {' | '.join(f'{v:,.4g}' if isinstance(v, float) else str(v) for v in row.values())} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="of which the least counts (default: 3)")
    parser.add_argument("--steps", type=int, default=4, help="of each process; the first does not count (default: 4)")
    parser.add_argument("--profile", type=Path, help="folder for the GPU profiles")
    parser.add_argument("--only-agentgym", action="store_true", help="without TRL")
    parser.add_argument("--quick", action="store_true", help="one short round, to see that it runs")
    args = parser.parse_args()
    parts = args.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts: no {min(unknown)}; there are {', '.join(PARTS)}")
    torch.set_num_threads(1)
    cases, rounds, steps = ([QUICK], 1, 2) if args.quick else (list(CASES), args.rounds, args.steps)
    found: dict[str, Any] = {}
    if "trl" in parts:
        print("| case | what | side | CPU us/token, least | median | peak MiB |\n|---|---|---|---|---|---|")
        sides = [side for side in SIDES if not (args.only_agentgym and side.startswith("TRL"))]
        whole = [side for side in sides if side in ("agentgym", "agentgym, shared prefix", "TRL")]
        found["trl"] = [row for case in cases for row in against_trl(case, sides, whole, rounds, steps)]
        judge(found["trl"])
    for part in OURS:
        if part in parts:
            found[part] = import_module(f"learning.{part}").measure(quick=args.quick, rounds=rounds)
            show(part.replace("_", " "), found[part])
    if "ranks" in parts:
        found["ranks"] = ranks(cases[0], rounds, steps)
        show("FSDP2 ranks", found["ranks"])
    if "gpu" in parts:
        found["gpu"] = on_gpu(args.profile)
        show("GPU, bf16" if found["gpu"] else "GPU: not measured, torch finds no CUDA here", found["gpu"])
    versions = {name: version(name) for name in ("torch", "transformers")}
    write(args.out, rounds=rounds, steps=steps, goal=GOAL, peer=TRL, **versions, **found)


if __name__ == "__main__":
    main()
