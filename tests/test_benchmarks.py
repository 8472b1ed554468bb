"""Benchmarks run as they stand, in a process of their own. What they measure is asserted nowhere."""

import importlib.util
import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def numbers_of(folder, script, *options, timeout=280):
    """What a benchmark with these options wrote as JSON."""
    command = [sys.executable, str(BENCHMARKS / script), *options, "--out", "numbers.json"]
    done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "numbers.json").read_text())


@pytest.mark.sandbox
@pytest.mark.slow
def test_sandbox(tmp_path):
    sides = numbers_of(tmp_path, "sandbox.py", "--quick")["sides"]
    assert sides[0]["side"] == "subprocess"
    assert len(sides) > 1
    for side in sides:
        assert all(value > 0 for name, value in side.items() if name != "side")
        assert {"session_step_ms", "exec_true_ms", "execs_per_second_at_32"} <= side.keys()


@pytest.mark.slow
def test_evaluate(tmp_path):
    """Without the peers, which are not installed for tests."""
    numbers = numbers_of(tmp_path, "evaluate.py", "--quick", "--only-agentgym")
    assert [row["concurrent"] for row in numbers["instant"]] == [1, 1, 32, 32, 512, 512]
    assert [row["concurrent"] for row in numbers["http"]] == [32, 512]
    assert all(row["episodes_per_second"] > 0 for row in numbers["instant"] + numbers["http"])


@pytest.mark.slow
def test_learner(tmp_path):
    """Without TRL, which is not installed for tests. It fails where ways of computing a step differ in gradients or losses."""
    options = ["--quick", "--only-agentgym", "--parts", "trl,packing,shared_prefix"]
    rows = numbers_of(tmp_path, "learner.py", *options)["trl"]
    assert [(row["what"], row["side"]) for row in rows] == [
        ("training half", "agentgym"),
        ("training half", "agentgym, shared prefix"),
        ("whole step", "agentgym"),
        ("whole step", "agentgym, shared prefix"),
    ]
    assert all(row["cpu_us_per_token"] > 0 and row["gradient_gap"] <= 1e-4 for row in rows)


@pytest.mark.slow
def test_asynchrony(tmp_path):
    """It fails where a token is staler than the bound."""
    options = ["--steps", "3", "--groups", "1", "--staleness", "0,2"]
    rows = numbers_of(tmp_path, "asynchrony.py", *options, timeout=120)["rows"]
    assert [row["staleness"] for row in rows] == [0, 2]
    assert rows[0]["mean_lag"] == 0 < rows[1]["mean_lag"]
    assert all(row["limit_seconds"] < row["ceiling_seconds"] <= row["step_seconds"] for row in rows)


@pytest.fixture(scope="module")
def asynchrony():
    sys.path.insert(0, str(BENCHMARKS))
    import asynchrony

    yield asynchrony
    sys.path.remove(str(BENCHMARKS))


def test_the_ceiling_of_two_steps_is_that_worked_out_by_hand(asynchrony):
    """One episode each, of 3 and 5 tokens, and updates of 2 s. In the last case two requests take twice as long per token."""
    steps = [[3], [5]]
    assert asynchrony.best(steps, 0, 2.0, [(1, 1.0)]) == (3 + 2) + (5 + 2)
    assert asynchrony.best(steps, 1, 2.0, [(1, 1.0)]) == 5 + 2
    assert asynchrony.best(steps, 1, 2.0, [(1, 1.0), (2, 2.0)]) == (3 * 2 + 2 * 1) + 2


def test_two_samples_differ_if_what_takes_long_is_left_out_of_one(asynchrony):
    chance = random.Random(1)
    drawn = [asynchrony.length(chance.getrandbits(48), chance.randrange(1, 201)) for _ in range(2000)]
    one, other = drawn[:1000], drawn[1000:]
    assert asynchrony.kolmogorov_smirnov(one, other) > 0.05
    assert asynchrony.kolmogorov_smirnov(sorted(one)[:900], other) < 0.01
    assert asynchrony.kolmogorov_smirnov([1, 1, 2], [2, 1, 1]) == 1.0, "equal values count together"


@pytest.mark.slow
def test_generator(tmp_path):
    (row,) = numbers_of(tmp_path, "generator.py", "--episodes", "64", "--rounds", "1", timeout=120)["rows"]
    assert row["episodes"] == 64
    assert row["wall"] > 0.4


@pytest.mark.slow
def test_weights(tmp_path):
    """It fails where what arrives is not what was sent."""
    rows = numbers_of(tmp_path, "weights.py", "--models", "tiny", "--rounds", "2", timeout=120)["rows"]
    assert [row["transport"] for row in rows] == ["collective", "disk", "delta"]
    assert rows[2]["share"] < 0.2


@pytest.mark.slow
def test_gateway(tmp_path):
    """Without LiteLLM and vLLM. It fails where a call is not answered."""
    options = ["--seconds", "0.3", "--rounds", "1", "--connections", "2", "--sides", "engine,inside,upstream"]
    rows = numbers_of(tmp_path, "gateway.py", *options)["rows"]
    kinds = itertools.product((8, 1), (False, True), ("engine", "inside", "upstream"))
    assert [(row["turns"], row["stream"], row["side"]) for row in rows] == list(kinds)
    assert all(row["calls_per_second"] > 0 and row["cpu_us"] > 0 for row in rows)


def quick(folder, *words, **more):
    """The quick form of some benchmarks: how it ended, and the rows of its table by benchmark."""
    command = [sys.executable, str(BENCHMARKS / "quick.py"), *words, "--out", "found"]
    environment = {**os.environ, **more}
    done = subprocess.run(
        command, cwd=folder, check=False, capture_output=True, text=True, timeout=280, env=environment
    )
    rows = {}
    for line in (folder / "found" / "table.md").read_text().splitlines():
        if line.startswith("|"):
            name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            rows.setdefault(name, []).append(cells)
    return done, rows


def test_the_quick_form_goes_on_after_a_benchmark_that_fails(tmp_path):
    """The double stands for an installation that is broken: agent_train, which one of the two benchmarks imports."""
    (tmp_path / "agent_train.py").write_text("raise ImportError('this installation is broken')\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done, rows = quick(tmp_path, "generator", "rollout", PYTHONPATH=path)
    assert done.returncode == 1
    ((failed, *_, seconds),) = rows["generator"]
    assert failed.startswith("FAILED, exit code 1: ")
    assert failed.endswith("ImportError: this installation is broken")
    assert seconds.isdigit()
    assert [row[2] for row in rows["rollout"]] == ["for loop", "to_thread", "to_thread"]
    assert all(row[4].endswith(("times as good", "times WORSE")) for row in rows["rollout"])
    assert (tmp_path / "found" / "rollout.json").is_file()
    assert "1/2 generator ..." in done.stdout
    assert "curves: not run, trains for hours" in done.stdout


def test_a_benchmark_that_takes_too_long_is_ended_and_named(tmp_path):
    done, rows = quick(tmp_path, "rollout", "--limit", "0.2")
    assert done.returncode == 1
    assert rows["rollout"][0][0] == "FAILED, took more than 0.2 s"


def test_curves_of_runs_that_are_there(tmp_path):
    """What two seeds of one recipe and one of another wrote, drawn and tabled; nothing is trained."""
    curves = {
        "grpo-seed0": [[0, 0.5], [10, 0.92], [20, 0.9]],
        "grpo-seed1": [[0, 0.4], [10, 0.6], [20, 0.8]],
        "turns-gae-seed0": [[0, 0.5], [10, 0.7]],
    }
    for name, curve in curves.items():
        record = {
            "env": "frozen_lake",
            "seed": int(name[-1]),
            "start": curve[0][1],
            "end": curve[-1][1],
            "minutes": 2.0,
        }
        (tmp_path / f"{name}.json").write_text(json.dumps({**record, "curve": curve, "command": "agent-train"}))
    command = [sys.executable, str(BENCHMARKS / "curves.py"), "--draw", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    table = (tmp_path / "table.md").read_text()
    assert "| frozen_lake | grpo | 2 | 45.0% | 85.0% | 80.0% | 90.0% | 2 |" in table
    assert "| frozen_lake | grpo | 0 | 50.0% | 90.0% | 92.0% | 10 | 2 |" in table
    assert "| turn_rewards | turns-gae | 0 | 50.0% | 70.0% | 70.0% | never | 2 |" in table
    assert "grpo, 2 seeds" in (tmp_path / "frozen_lake.svg").read_text()
    assert "turns-gae, 1 seed" in (tmp_path / "turn_rewards.svg").read_text()


@pytest.fixture(scope="module")
def against_trl():
    sys.path.insert(0, str(BENCHMARKS))
    import against_trl

    yield against_trl
    sys.path.remove(str(BENCHMARKS))


def test_cpu_seconds_of_training_are_those_within_steps(against_trl):
    """A start that takes 10 CPU seconds, two steps with a checkpoint between them, and an end."""
    readings = [(0.0, 0.0), (10.0, 10.0), (20.0, 14.0), (30.0, 20.0), (40.0, 21.0), (50.0, 30.0)]
    assert against_trl.seconds_by_step(readings, [(10.0, 20.0), (30.0, 35.0)]) == [4.0, 4.5]


def test_cpu_seconds_of_a_child_that_has_ended_count(against_trl, tmp_path):
    busy = "import time; begun = time.process_time()\nwhile time.process_time() - begun < 2: pass"
    parent = f"import subprocess, sys, time; subprocess.run([sys.executable, '-c', {busy!r}]); time.sleep(1)"
    readings = against_trl.metered([sys.executable, "-c", parent], tmp_path / "log")
    assert 2 - 2 * against_trl.LOOK < readings[-1][1] < 4


def test_runs_on_both_sides_make_a_table_and_a_picture(against_trl, tmp_path):
    for side, seed, end, seconds in (("agentgym", 0, 0.75, 20.0), ("agentgym", 1, 0.65, 20.0), ("TRL", 0, 0.7, 40.0)):
        curve = [(0, 0, 0.0, 0.5), (4, 10000, seconds, end)]
        record = {"side": side, "seed": seed, "curve": curve, "whole": seconds + 10, "peer": "trl"}
        (tmp_path / f"{side.lower()}-seed{seed}.json").write_text(json.dumps(record))
    against_trl.draw(tmp_path)
    picture = (tmp_path / "trl.svg").read_text()
    assert "agentgym, sampled tokens 10000: 70.0%" in picture
    assert "TRL, CPU seconds of training 40: 70.0%" in picture
    table = against_trl.table(tmp_path).splitlines()
    assert table[0] == "| side | seed | step 0 | step 4 | tokens | CPU s | CPU ms/token | CPU s, whole |"
    assert table[2] == "| agentgym | 0 | 50.0% | 75.0% | 10,000 | 20 | 2.0 | 30 |"
    assert table[4] == "| TRL | 0 | 50.0% | 70.0% | 10,000 | 40 | 4.0 | 50 |"


@pytest.fixture(scope="module")
def flops():
    """The benchmark's own arithmetic of operations per token."""
    spec = importlib.util.spec_from_file_location("learner_flops", BENCHMARKS / "learning" / "flops.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize(("name", "parameters"), [("Qwen3-0.6B", 596_049_920), ("Qwen3-4B", 4_022_468_096)])
def test_shapes_are_those_of_the_models(flops, name, parameters):
    assert flops.SHAPES[name].parameters == parameters


def test_operations_of_a_token_are_those_counted_by_hand(flops):
    """Hidden 2, one block, one head of size 2 for queries, keys and values, intermediate 3, vocabulary 5."""
    shape = flops.Shape(hidden=2, layers=1, heads=1, kv_heads=1, head_dim=2, intermediate=3, vocab=5)
    weights = 4 * (2 * 2) + 3 * (2 * 3)
    attention = (2 + 2) * 2 * 8 / 2  # scores and their use: 2 operations each for each of 2 numbers, half of 8 tokens
    assert flops.training_flops(shape, 8) == 3 * (2 * weights + 2 * 5 * 2 + attention)
    assert flops.training_flops(shape, 8, sampled=0.5) == 3 * (2 * weights + 5 * 2 + attention)
    assert flops.training_flops(shape, 16) - flops.training_flops(shape, 8) == 3 * attention


def test_utilisation_is_what_was_computed_of_what_could_be(flops):
    assert flops.utilisation(1000.0, 2e9, 4e12) == 0.5
    assert flops.peak_of("NVIDIA H100 80GB HBM3") == 989e12
    assert flops.peak_of("some other device") is None
