"""Benchmarks run as they stand, in a process of their own. What they measure is asserted nowhere."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.mark.sandbox
@pytest.mark.slow
def test_sandbox(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "sandbox.py"), "--quick", "--out", "numbers.json"]
    done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    sides = json.loads((tmp_path / "numbers.json").read_text())["sides"]
    assert sides[0]["side"] == "subprocess"
    assert len(sides) > 1
    for side in sides:
        assert all(value > 0 for name, value in side.items() if name != "side")
        assert {"session_step_ms", "exec_true_ms", "execs_per_second_at_32"} <= side.keys()


@pytest.mark.slow
def test_evaluate(tmp_path):
    """Without the peers, which are not installed for tests."""
    options = ["--quick", "--only-agentgym", "--out", "numbers.json"]
    command = [sys.executable, str(BENCHMARKS / "evaluate.py"), *options]
    done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert [row["concurrent"] for row in numbers["instant"]] == [1, 1, 32, 32, 512, 512]
    assert [row["concurrent"] for row in numbers["http"]] == [32, 512]
    assert all(row["episodes_per_second"] > 0 for row in numbers["instant"] + numbers["http"])
