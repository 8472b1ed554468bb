"""Training runs give the same numbers as before: all metrics, sampled tokens and weights in `records/same_numbers.json`.

    python tests/acceptance/test_same_numbers.py            compare with the records and print old, new and differences
    python tests/acceptance/test_same_numbers.py --record   make the records anew, at a commit that is known to be right

By default GRPO and PPO run with one seed, with AGENTGYM_TEST_ALL=1 all with both. On a machine like the recorded one, all values are
equal to the bit. Other processors and versions of torch round sums differently: there, values agree within a tolerance as long as
the same tokens are sampled.

Learning rates, lengths and precision come from the configuration files. If one of them changes on purpose, make the records
anew. If a metric is renamed on purpose, rename it in the records.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import hashlib
import json
import math
import os
import platform
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from equal_runs import assert_equal_runs, assert_equal_states, sampled, without_times
from preloaded import Forked, Preloaded
from safetensors.torch import load_file
from training_process import COMMAND, ENDED_SECONDS, Training, training

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]
RECORDS = Path(__file__).parent / "records" / "same_numbers.json"
STEPS = 5
# A run takes about 20 s on an idle machine, and minutes on one where everything else runs too.
SECONDS = 500.0
GAME = (
    *("+env=frozen_lake", "env.kwargs.shaping=1.0", "engine=embedded", "trainer.deterministic=true"),
    *("model.tiny.hidden=64", "model.tiny.heads=2", "model.tiny.intermediate=128", "model.tiny.layers=1"),
    *("sft.episodes=64", "sft.batch_rows=8", "sft.lr=5e-3", "trainer.groups_per_step=4", "algorithm.group_size=4"),
    *(
        f"trainer.steps={STEPS}",
        f"trainer.eval_every={STEPS}",
        f"trainer.save_every={STEPS}",
        "trainer.eval_episodes=8",
    ),
)
ALGORITHMS = {
    "grpo": ("algorithm=grpo",),
    "ppo": ("algorithm=ppo",),
    "gigpo": ("algorithm=gigpo",),
    "dynamic-sampling": (
        *("algorithm=dapo", "algorithm.updates_per_step=2", "algorithm.filter.rounds=3", "algorithm.group_size=2"),
        *("algorithm.overlong.length=50", "algorithm.overlong.buffer=10"),
    ),
}
# A rank takes longer to start than to train here, so with the first seed only GRPO has two.
RUNS = {
    f"{name}-seed-{seed}": (
        *GAME,
        *algorithm,
        f"trainer.seed={seed}",
        f"learner.workers={1 if seed == 0 and name != 'grpo' else 2}",
    )
    for seed in (0, 1)
    for name, algorithm in ALGORITHMS.items()
}
CHOSEN = list(RUNS) if os.environ.get("AGENTGYM_TEST_ALL") else ["grpo-seed-0", "ppo-seed-0"]
# Tolerances for a machine that rounds differently; absolute because terms of losses and of log-ratios cancel.
RELATIVE, ABSOLUTE = 1e-5, 2e-6
# On such a machine, at most this share of the episodes samples other tokens in the first step where any does.
# Other weights change more of them.
DIVERGING = 0.25
# What a run measures before its first checkpoint: the warm start, an evaluation.
WARM_RECORDS = 64 // 8 + 1
Tables = dict[str, dict[str, Any]]


def machine() -> dict[str, Any]:
    """Everything outside the program that may change the last bits of a number."""
    cpu = dict(re.findall(r"^([\w ]+?)\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE))
    vector = re.compile(r"sse|ssse|avx|fma|f16c|amx|asimd|sve")
    return {
        "cpu": {key: cpu.get(key) for key in ("vendor_id", "cpu family", "model", "model name")},
        "flags": sorted(flag for flag in cpu.get("flags", cpu.get("Features", "")).split() if vector.search(flag)),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "packages": {name: version(name) for name in ("torch", "transformers", "tokenizers", "numpy")},
        "python": ".".join(platform.python_version_tuple()[:2]),
        "libc": " ".join(platform.libc_ver()),
        "environment": {n: v for n, v in sorted(os.environ.items()) if n.startswith(("MKL_", "ONEDNN_", "ATEN_"))},
    }


def flat(record: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names and values of a record of metrics; names of nested values are joined by dots."""
    for key, value in record.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def digest(value: Any) -> str:
    """A short hash of a JSON value."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]


def weights_of(folder: Path) -> dict[str, Any]:
    """A hash of names and bits of a saved model, and the norm of its weights."""
    tensors = sorted(load_file(folder / "model.safetensors").items())
    bits = hashlib.sha256()
    for name, tensor in tensors:
        bits.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode() + tensor.numpy().tobytes())
    norm = math.sqrt(math.fsum(float(tensor.double().square().sum()) for _, tensor in tensors))
    return {"sha256": bits.hexdigest(), "norm": norm}


def make(name: str, runs: Path, env: dict[str, str] | None = None, forks: Preloaded | None = None) -> Training:
    """Train with the installed command."""
    with training(runs, *RUNS[name], env=env, name=name, forks=forks) as run:
        assert run.wait(SECONDS) == 0, run.told()
        return run


def tables_of(run: Training) -> Tables:
    """A table for each record of metrics, each file of episodes, each saved model."""
    files, tables = sampled(run), {}
    for record in run.metrics:
        kind, step = record["kind"], record["step"]
        if kind != "sft":
            episodes = files.pop(f"{kind}-{step:06d}.jsonl")
            tables[f"{kind} {step} episodes"] = {
                "tokens": [digest([id, [tokens for tokens, _ in turns]]) for id, turns in episodes],
                "logprobs": digest([[logprobs for _, logprobs in turns] for _, turns in episodes]),
            }
        tables[f"{kind} {step}"] = dict(flat(without_times(record)))
    assert not files, f"episodes without a record of metrics: {sorted(files)}"
    folders = {"policy": run.checkpoint, "critic": run.checkpoint / "critic"}
    return tables | {f"{model} weights": weights_of(path) for model, path in folders.items() if path.exists()}


def read_records() -> dict[str, Any]:
    """The commit, the machine and the runs that `--record` wrote."""
    return dict(json.loads(RECORDS.read_text(encoding="utf-8")))


def write_records(runs: dict[str, Tables]) -> None:
    """Write one line for each table, so that a diff of the file shows what changed."""
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], text=True, cwd=RECORDS.parent).strip()
    parts = [f'"commit": {json.dumps(commit)}', f'"machine": {json.dumps(machine())}']
    for name, tables in runs.items():
        lines = [f'"settings": {json.dumps(RUNS[name])}', *(f'"{t}": {json.dumps(tables[t])}' for t in tables)]
        parts.append(f'"{name}": {{\n ' + ",\n ".join(lines) + "\n}")
    RECORDS.parent.mkdir(exist_ok=True)
    RECORDS.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def recorded(records: dict[str, Any], name: str) -> Tables:
    """The recorded tables of a run."""
    assert records[name]["settings"] == list(RUNS[name]), "the records were made with other settings: make them anew"
    return {table: values for table, values in records[name].items() if table != "settings"}


@dataclass(frozen=True)
class Difference:
    """One value, as recorded and as it is now; None if it is missing."""

    table: str
    name: str
    old: Any
    new: Any

    def __str__(self) -> str:
        numbers = isinstance(self.old, int | float) and isinstance(self.new, int | float)
        by = f"{self.new - self.old:+.3g}" if numbers else ""
        return f"  {self.table:<18} {self.name:<26} {self.old!s:>24.24} {self.new!s:>24.24} {by:>10}"


def equal(name: str, old: Any, new: Any) -> bool:
    """Equal to the bit."""
    return bool(old == new)


def close(name: str, old: Any, new: Any) -> bool:
    """Equal within the tolerance. Whole numbers and learning rates must not round; hashes of bits are only required to be there."""
    if name in ("weights_checksum", "sha256", "logprobs"):
        return type(old) is type(new)
    if not (isinstance(old, float) and isinstance(new, float)):
        return bool(old == new)
    return math.isclose(old, new, rel_tol=RELATIVE, abs_tol=0.0 if name.endswith(".lr") else ABSOLUTE)


def differences(old: Tables, new: Tables, same: Callable[[str, Any, Any], bool]) -> list[Difference]:
    """Recorded values that differ now. New metrics are not compared."""
    pairs = [
        Difference(table, name, value, new.get(table, {}).get(name))
        for table in old
        for name, value in old[table].items()
    ]
    return [pair for pair in pairs if not same(pair.name, pair.old, pair.new)]


def until_divergence(old: Tables, new: Tables) -> tuple[Tables, str]:
    """The recorded tables before the first step that samples other tokens now, and that step; "" if there is none."""
    kept: Tables = {}
    for table, values in old.items():
        if table.endswith("episodes"):
            theirs, ours = values["tokens"], new.get(table, {}).get("tokens", [])
            assert len(ours) == len(theirs), f"{table}: {len(ours)} in place of {len(theirs)}"
            others = sum(one != other for one, other in zip(ours, theirs, strict=True))
            assert others <= DIVERGING * len(ours), f"{table}: {others} of {len(ours)} sampled other tokens"
            if others:
                return kept, table.removesuffix(" episodes")
        kept[table] = values
    return kept, ""


def compare(old: Tables, new: Tables, exact: bool) -> tuple[list[Difference], str]:
    """The differences, and a summary of what was compared.

    With `exact` false, values may round differently, and the comparison ends where sampled tokens differ. The warm start, the
    first evaluation and the first step must be compared, otherwise they count as differences.
    """
    kept, diverged = (old, "") if exact else until_divergence(old, new)
    found = differences(kept, new, equal if exact else close)
    unknown = [Difference(table, "", None, "a new table") for table in new.keys() - old.keys()]
    needed = [t for t in old if t.startswith("sft ")] + ["eval 0", "train 1"]
    uncompared = [Difference(table, "", "recorded", "not compared") for table in needed if table not in kept]
    summary = f"{sum(map(len, kept.values()))} values compared {'to the bit' if exact else 'within the tolerance'}"
    return found + unknown + uncompared, summary + (f", other tokens from {diverged} on" if diverged else "")


def other_machine(records: dict[str, Any]) -> str:
    """How this machine differs from the recorded one; "" if last bits must be equal."""
    here = json.loads(json.dumps(machine()))
    return "; ".join(
        f"{key} is {here[key]}, recorded with {there}"
        for key, there in records["machine"].items()
        if here[key] != there
    )


@pytest.fixture(scope="module")
def records() -> dict[str, Any]:
    return read_records()


@pytest.fixture(scope="module")
def made(in_shared_ray, forks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Training]:
    """Trains when a run is first asked for."""
    return cache(lambda name: make(name, tmp_path_factory.mktemp("runs"), in_shared_ray, forks))


@pytest.mark.parametrize("name", RUNS)
def test_the_records_are_of_runs_that_learn_in_every_step(records, name: str) -> None:
    tables = recorded(records, name)
    steps = [tables[f"train {step}"] for step in range(1, STEPS + 1)]
    assert all(step["update.grad_norm"] > 0 and step["update.skipped"] == 0 for step in steps)
    assert len({step["weights_checksum"] for step in steps}) == STEPS
    assert all(step["mixed_groups"] > 0 for step in steps)
    assert {"sft 1", "eval 0", f"eval {STEPS}", "policy weights"} <= set(tables)
    assert all(
        table.split()[0] in ("sft", "policy", "critic") or f"{table} episodes" in tables
        for table in tables
        if not table.endswith("episodes")
    )
    assert ("critic weights" in tables) == name.startswith("ppo")
    assert any(step.get("critic.grad_norm") for step in steps) == name.startswith("ppo")
    assert any(step["update.kl_reference"] for step in steps) == name.startswith("gigpo")
    assert any(step["selection.rounds"] > 1 for step in steps) == name.startswith("dynamic")


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    ("table", "name"), [("sft 1", "loss"), ("train 1", "update.lr"), ("train 5", "reward"), ("policy weights", "norm")]
)
def test_a_number_that_changes_by_one_in_a_thousand_is_found(records, exact: bool, table: str, name: str) -> None:
    old = recorded(records, "ppo-seed-0")
    new = copy.deepcopy(old)
    assert compare(old, new, exact)[0] == []
    new[table][name] *= 1.001
    assert [(d.table, d.name) for d in compare(old, new, exact)[0]] == [(table, name)]
    del new[table][name]
    assert [(d.table, d.new) for d in compare(old, new, exact)[0]] == [(table, None)]


def test_runs_that_cannot_be_compared_count_as_different(records) -> None:
    old = recorded(records, "ppo-seed-0")
    new = copy.deepcopy(old)
    new["train 1 episodes"]["tokens"][0] = "another"
    found, summary = compare(old, new, exact=False)
    assert [(d.table, d.new) for d in found] == [("train 1", "not compared")]
    assert summary.endswith("other tokens from train 1 on")
    new["train 1 episodes"]["tokens"] = ["another"] * 16
    with pytest.raises(AssertionError, match="16 of 16 sampled other tokens"):
        compare(old, new, exact=False)


@pytest.mark.parametrize("name", CHOSEN)
def test_a_run_has_the_recorded_numbers_within_the_tolerance(made, records, name: str) -> None:
    found, summary = compare(recorded(records, name), tables_of(made(name)), exact=False)
    assert not found, "\n".join([summary, *map(str, found)])


@pytest.mark.parametrize("name", CHOSEN)
def test_on_a_machine_like_the_recorded_one_all_is_equal_to_the_bit(made, records, name: str) -> None:
    found, summary = compare(recorded(records, name), tables_of(made(name)), exact=True)
    if found and (why := other_machine(records)):
        pytest.skip(f"{len(found)} values are not equal to the bit, but this is another machine: {why}")
    assert not found, "\n".join([summary, *map(str, found)])


def test_all_steps_of_a_run_are_trained_again_to_the_bit_without_its_engine(made, in_shared_ray, forks) -> None:
    """Of one with a critic; with dynamic sampling, on older versions and with summaries they are in tests/agent_train."""
    run = made("ppo-seed-0")
    words = [COMMAND, "replay", str(run.folder), "step=1", f"through={STEPS}"]
    env = {**os.environ, **in_shared_ray}
    said = forks.run(words, env, SECONDS)
    told = [line for line in said.splitlines() if line.startswith("step ")]
    assert told == [f"step {step}: the same weights, bit for bit" for step in range(1, STEPS + 1)], said
    assert "critic.loss" in said


def kill(run: Training, victim: str, further: int) -> bool:
    """SIGKILL a part once the run has measured `further` more records and the part is there; False if the run ended before.

    The driver is killed in the middle of a rollout, when some of its turns are on disk.
    """
    run.wait_for("its beginning", lambda: "reading tasks" in run.out)
    target = run.measured + further
    found: psutil.Process | subprocess.Popen[bytes] | Forked | None = None
    while found is None:
        if run.process.poll() is not None:
            return False
        time.sleep(0.01)
        if run.measured >= target:
            if victim == "rank":
                found = run.find("ray::_Actor")
            elif (turns := run.folder / "turns" / f"{len(run.of_kind('train')) + 1:06d}.jsonl").exists():
                found = run.process if turns.stat().st_size else None
    found.send_signal(signal.SIGKILL)
    return True


def test_a_run_that_was_killed_again_and_again_is_the_run_that_was_not(
    made, forks, tmp_path: Path, uncut: bool
) -> None:
    """The engine is in the driver's process, so the driver's death is its own. Moments are counted in records, not in seconds."""
    name, steps = "ppo-seed-0", 24 if uncut else STEPS
    settings = (*RUNS[name], f"trainer.steps={steps}", "trainer.eval_every=5", "trainer.save_every=1")
    rng = random.Random(6)
    for _ in range(10 if uncut else 1):
        with training(tmp_path, *settings, name="killed", forks=forks) as run:
            assert kill(run, "rank", rng.randint(0, 4)), run.told()  # at first in the warm start, which begins anew
            run.wait_for("going back", lambda run=run: "; going on with killed" in run.out)
            before = 0 if (run.folder / "checkpoints" / "latest").exists() else WARM_RECORDS
            assert kill(run, "driver", before + rng.randint(0, 4)), run.told()
            assert run.wait() == -signal.SIGKILL
            assert run.left_behind(ENDED_SECONDS) == []
    with training(tmp_path, *settings, name="killed", forks=forks) as run:
        assert run.wait(SECONDS) == 0, run.told()
        assert "going on with killed" in run.out
        assert sum(record["journal_turns"] for record in run.of_kind("train")) > 0
        assert all(record["diverged"] == record["replaced_tokens"] == 0 for record in run.of_kind("train"))
        assert not list((run.folder / "turns").iterdir()), "the last checkpoint holds all that they were for"
    with training(tmp_path, *settings, forks=forks) if uncut else contextlib.nullcontext(made(name)) as undisturbed:
        assert undisturbed.wait(SECONDS) == 0, undisturbed.told()
    assert_equal_runs(run, undisturbed)
    assert_equal_states(run, undisturbed, ("policy", "critic"), tmp_path)
    assert [record["step"] for record in run.of_kind("train")] == list(range(1, steps + 1))
    elapsed = [record["elapsed"] for record in run.metrics]
    assert elapsed == sorted(elapsed)
    assert (run.folder / "result.json").exists()


def main() -> int:
    """Print a table for each run, or write the records; the exit code is 1 if something differs."""
    parser = argparse.ArgumentParser(description="Compare training runs with their records.")
    parser.add_argument("--record", action="store_true", help="write the records of all runs anew instead")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("names", nargs="*", metavar="RUN", help=f"default: {' '.join(CHOSEN)}")
    asked = parser.parse_args()
    names = list(RUNS) if asked.record else asked.names or CHOSEN
    if unknown := set(names) - set(RUNS):
        parser.error(f"no such run: {', '.join(sorted(unknown))}; there are {', '.join(RUNS)}")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(asked.jobs) as pool:
        made = {name: pool.submit(make, name, Path(folder)) for name in names}
        if asked.record:
            write_records({name: tables_of(run.result()) for name, run in made.items()})
            return 0
        return max([report(name, run) for name, run in made.items()])


def report(name: str, run: Future[Training]) -> int:
    """Print old and new results of a run and all differences; 1 if there are any, or if the run failed."""
    try:
        new = tables_of(run.result())
    except AssertionError as error:
        print(f"{name}: FAILED\n{error}", flush=True)
        return 1
    records = read_records()
    old, why = recorded(records, name), other_machine(records)
    try:
        found, summary = compare(old, new, exact=not why)
    except AssertionError as error:
        found, summary = differences(old, new, equal), str(error)
    results = {f"train {STEPS}": ("reward", "update.loss", "update.grad_norm", "weights_checksum")}
    results |= {table: ("sha256",) for table in old if table.endswith("weights")}
    lines = [Difference(t, n, old[t][n], new.get(t, {}).get(n)) for t, names in results.items() for n in names]
    print(f"{name}: {f'{len(found)} DIFFER' if found else 'equal'} ({summary})")
    print(f"  {'table':<18} {'name':<26} {'old':>24} {'new':>24} {'difference':>10}")
    print("\n".join(map(str, [*lines, *(each for each in found if each not in lines)])), flush=True)
    if why:
        print(
            f"  {len(differences(old, new, equal))} values are not equal to the bit, but this is another machine: {why}"
        )
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
