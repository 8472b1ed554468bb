"""The quick form of every benchmark, one after another: our figures beside what each is measured against, in one table.

Rounds are few and short: what differs by a third here may be chance. A peer that must be installed first is left out, as is
what this machine lacks; the end of the table says which and why. Numbers and output of each benchmark lie in --out.

python benchmarks/quick.py [NAME ...] [--out DIR] [--limit SECONDS]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LESS_IS_BETTER = ("CPU us", "MiB", "ms", "s", "seconds")  # units; of all others more is
HEAD = "| benchmark | measured | ours | beside | theirs | ours is | seconds |\n|---|---|---|---|---|---|---|"


@dataclass(frozen=True)
class Figure:
    """One row: what was measured, and its unit; ours; what stands beside it, and its figure."""

    what: str
    unit: str
    ours: float
    beside: str
    theirs: float

    def cells(self) -> list[str]:
        times = self.theirs / self.ours if self.unit in LESS_IS_BETTER else self.ours / self.theirs
        verdict = f"{times:.2f} times as good" if times >= 0.995 else f"{1 / times:.2f} times WORSE"
        numbers = [f"{number:,.0f}" if number >= 1000 else f"{number:.3g}" for number in (self.ours, self.theirs)]
        return [f"{self.what}, {self.unit}", numbers[0], self.beside, numbers[1], verdict]


@dataclass(frozen=True)
class Quick:
    """The quick form of a benchmark: its command, the figures in its numbers, and what is left out."""

    command: str
    figures: Callable[[Any], Iterator[Figure]]
    left_out: str = ""


def find(rows: list[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    return next(row for row in rows if wanted.items() <= row.items())


def of_rollout(found: Any) -> Iterator[Figure]:
    for part, concurrent, side, other in (
        ("instant", 32, "for loop", 1),
        ("instant", 32, "to_thread", 32),
        ("sleeping", 64, "to_thread", 64),
    ):
        ours, theirs = (find(found[part], side=s, concurrent=n) for s, n in (("run_many", concurrent), (side, other)))
        name = f"{part} steps, {concurrent} at a time"
        yield Figure(name, "turns/s", ours["turns_per_second"], side, theirs["turns_per_second"])


def of_evaluate(found: Any) -> Iterator[Figure]:
    rate = find(found["instant"], side="agentgym", concurrent=512)["episodes_per_second"]
    yield Figure("512 at a time", "episodes/s", rate, "goal", found["goal"])
    sides = [find(found["instant"], side=name, concurrent=32) for name in ("agentgym", "agentgym, in memory")]
    ours, theirs = (row["cpu_microseconds_per_episode"] for row in sides)
    yield Figure("32 at a time, for an episode", "CPU us", ours, "nothing stored", theirs)


def of_service(found: Any) -> Iterator[Figure]:
    for row in found["rows"]:
        if row["server"] != "bare":
            limit = find(found["rows"], server="bare", sessions=row["sessions"])["steps_per_second"]
            what = f"{row['server']}, {row['sessions']} at a time"
            yield Figure(what, "steps/s", row["steps_per_second"], "constant answers", limit)
    idle = found["idle"]["agentgym"]["idle_megabytes"]
    yield Figure("before the first session", "MiB", idle, "goal", found["goal_megabytes"])


def of_service_soak(found: Any) -> Iterator[Figure]:
    readings = [row["own"]["server"] for row in found["readings"]]
    yield Figure("the server at the end", "MiB", readings[-1], "a tenth of the way", readings[1])


def of_gateway(found: Any) -> Iterator[Figure]:
    for connections, unit, name in ((1, "ms", "median_ms"), (32, "calls/s", "calls_per_second")):
        for side in ("inside", "upstream"):
            ours, theirs = (
                find(found["rows"], side=s, connections=connections, stream=False)[name] for s in (side, "engine")
            )
            yield Figure(f"{side}, {connections} at a time", unit, ours, "the engine itself", theirs)


def of_learner(found: Any) -> Iterator[Figure]:
    for row in found["packing"]:
        yield Figure("packed", "seconds", row["packed_cpu_seconds"], "padded", row["padded_cpu_seconds"])
    for row in found["shared_prefix"]:
        yield Figure(
            f"shared {row['what']}", "seconds", row["shared_cpu_seconds"], "repeated", row["naive_cpu_seconds"]
        )
    for row in found["head"]:
        for unit, name in (("seconds", "cpu_seconds"), ("MiB", "mib")):
            yield Figure("chunked head", unit, row[f"chunked_{name}"], "dense", row[f"dense_{name}"])


def of_generator(found: Any) -> Iterator[Figure]:
    for row in found["rows"]:
        what = f"{row['episodes']} episodes"
        yield Figure(what, "seconds", row["wall"], "ideal", row["wall"] / row["over_ideal"])
        yield Figure(what, "seconds", row["wall"], "bare requests", row["bare_wall"])


def of_asynchrony(found: Any) -> Iterator[Figure]:
    turns, ahead = found["rows"]
    what = f"a step, staleness {ahead['staleness']}"
    yield Figure(what, "seconds", ahead["step_seconds"], "in turns", turns["step_seconds"])
    yield Figure(what, "seconds", ahead["step_seconds"], "ceiling", ahead["ceiling_seconds"])


def of_weights(found: Any) -> Iterator[Figure]:
    for row in found["rows"]:
        raw = row["wall"] / row["wall_of_raw"]
        yield Figure(f"{row['model']}, {row['transport']}", "seconds", row["wall"], "raw copy", raw)


def of_sandbox(found: Any) -> Iterator[Figure]:
    bare, *sides = found["sides"]
    for side in sides:
        for name in ("exec_true_ms", "session_step_ms"):
            what = f"{side['side']}, {name.removesuffix('_ms').replace('_', ' ')}"
            yield Figure(what, "ms", side[name], "subprocess", bare[name])


def of_math_graders(found: Any) -> Iterator[Figure]:
    held_out = [row for row in found["rows"] if row["part"] == "held out"]
    shares = {row["grader"]: 1 - (row["false_accepts"] + row["false_refusals"]) / row["cases"] for row in held_out}
    yield Figure("held out, judged rightly", "share", shares["ours"], "math-verify", shares.get("math-verify", 1.0))


BARE = "agentgym+raw,shared+raw,bare+raw"
BENCHMARKS = {
    "rollout": Quick("rollout.py --episodes 256 --rounds 2", of_rollout),
    "evaluate": Quick("evaluate.py --episodes 256 --rounds 1 --only-agentgym", of_evaluate, "inspect_ai, verifiers"),
    "gateway": Quick(
        "gateway.py --seconds 0.5 --rounds 1 --sides engine,inside,upstream", of_gateway, "LiteLLM, and vLLM behind"
    ),
    "service": Quick(
        f"service.py --sessions 1,32 --seconds 0.5 --rounds 1 --sides {BARE}", of_service, "OpenEnv's server and client"
    ),
    "service_soak": Quick("service_soak.py --episodes 2000", of_service_soak),
    "learner": Quick("learner.py --quick --parts packing,shared_prefix,head", of_learner, "TRL, two ranks, and GPUs"),
    "generator": Quick("generator.py --episodes 256 --rounds 1", of_generator),
    "asynchrony": Quick("asynchrony.py --steps 8 --groups 4 --staleness 0,2", of_asynchrony, "the engine of vLLM"),
    "weights": Quick("weights.py --models 0.1B --rounds 1", of_weights),
    "sandbox": Quick("sandbox.py --quick", of_sandbox),
    "math_graders": Quick("math_graders.py", of_math_graders),
}
NOT_QUICK = {
    "curves": "trains for hours",
    "against_trl": "trains for an hour, and installs TRL",
    **dict.fromkeys(("swe", "swe_agreement", "swe_episodes"), "needs a file of SWE-bench's instances and their images"),
}


class Failed(Exception):
    """A benchmark failed; says how."""


def run(name: str, folder: Path, limit: float) -> Any:
    """What a benchmark found: the JSON of its file.

    Raises:
        Failed: it ended with an error, or took too long.
    """
    script, *options = BENCHMARKS[name].command.split()
    numbers = folder / f"{name}.json"
    numbers.unlink(missing_ok=True)
    said, errors = (folder / f"{name}.{kind}.txt" for kind in ("out", "err"))
    with said.open("w") as out, errors.open("w") as err:
        command = [sys.executable, str(HERE / script), *options, "--out", str(numbers)]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
        )  # so that its servers can be ended with it
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            raise Failed(f"took more than {limit:g} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code:
        raise Failed(f"exit code {code}: {' '.join(errors.read_text(errors='replace').split())[-300:]}")
    return json.loads(numbers.read_text())


def notes(names: list[str], folder: Path) -> Iterator[str]:
    """What is not in the table, and why."""
    for name in names:
        if left_out := BENCHMARKS[name].left_out:
            yield f"{name}: without {left_out}: too long for this; see benchmarks/{name}.py --help"
        for line in (folder / f"{name}.err.txt").read_text(errors="replace").splitlines():
            if line.startswith("without "):
                yield f"{name}: {line}"
    yield from (f"{name}: not run, {why}" for name, why in NOT_QUICK.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)} (default: all)")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder (default: runs/bench)")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds of each benchmark (default: 180)")
    args = parser.parse_args()
    names = args.names or list(BENCHMARKS)
    if unknown := set(names) - set(BENCHMARKS):
        parser.error(f"no {min(unknown)}; there are {', '.join(BENCHMARKS)}")
    args.out.mkdir(parents=True, exist_ok=True)
    table, failed = [HEAD], 0
    for place, name in enumerate(names, 1):
        print(f"{place}/{len(names)} {name} ...", end="", flush=True)
        begun = time.perf_counter()
        try:
            rows = [figure.cells() for figure in BENCHMARKS[name].figures(run(name, args.out, args.limit))]
        except (Failed, OSError, ValueError, LookupError, ArithmeticError, RuntimeError) as error:
            why = str(error) if isinstance(error, Failed) else f"its numbers: {error!r}"
            rows, failed = [[f"FAILED, {why.replace('|', '/')}", *[""] * 4]], failed + 1
        seconds = f"{time.perf_counter() - begun:.0f}"
        print(f" {seconds} s{' FAILED' if rows[0][0].startswith('FAILED') else ''}", flush=True)
        table += [
            f"| {name} | {' | '.join(cells)} | {'' if number else seconds} |" for number, cells in enumerate(rows)
        ]
    table += ["", *notes(names, args.out)]
    (args.out / "table.md").write_text("\n".join(table) + "\n")
    print("\n" + "\n".join(table) + f"\n\nnumbers and output of each: {args.out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
