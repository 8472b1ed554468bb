"""Options that say what is asked: which tasks, and with which words."""

import json
import time

import parity
import pytest
from endpoint_double import said, serving

from agentgym.cli import main
from agentgym.core.trajectory import read_jsonl
from agentgym.evaluate.statistics import passes, success_interval

PARITY = f"{parity.__name__}:Parity"


class Opened(parity.Parity):
    """Opens with a system message of its own."""

    def reset(self, *, seed=None, options=None):
        observation, info = super().reset(seed=seed, options=options)
        return [{"role": "system", "content": "You are a number."}, *observation], info


class Sleepy(parity.Parity):
    def step(self, action):
        time.sleep(0.5)
        return super().step(action)


def asked(env, out, *options):
    """The requests that an endpoint got."""
    bodies = []

    def answer(body):
        bodies.append(body)
        return said("even")

    with serving(answer) as url:
        words = ["eval", env, "--model", "double", "--base-url", url, "-n", "1", "--quiet", "--out", str(out)]
        assert main([*words, *options]) == 0
    return bodies


def test_a_system_message_stands_first_and_stop_texts_are_sent(tmp_path):
    options = ["--system", "Be brief.", "--stop", "\n\n", "--stop", "END"]
    [body] = asked(PARITY, tmp_path / "a", *options)
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    assert body["stop"] == ["\n\n", "END"]
    [body] = asked(f"{__name__}:Opened", tmp_path / "b", *options)
    assert body["messages"][0] == {"role": "system", "content": "Be brief.\n\nYou are a number."}
    assert [message["role"] for message in body["messages"]] == ["system", "user"]


def played(out, *options):
    """The tasks in the order in which they were played, one at a time."""
    words = ["eval", PARITY, "--policy", "expert", "--concurrency", "1", "--quiet", "--out", str(out)]
    assert main([*words, *options]) == 0
    [file] = (out / "episodes").iterdir()
    return [trajectory.task_id for trajectory in read_jsonl(file)]


def test_tasks_are_chosen_by_id(tmp_path, capsys):
    assert played(tmp_path / "r", "--task", "7", "--task", "3") == ["7", "3"]
    assert main(["eval", "--resume", str(tmp_path / "r"), "--quiet"]) == 0
    assert main(["eval", PARITY, "--policy", "expert", "--task", "70", "--no-store"]) == 2
    assert "has no task '70'" in capsys.readouterr().err
    assert main(["eval", PARITY, "--policy", "expert", "--task", "7", "-n", "3", "--no-store"]) == 2
    assert "--task names the tasks" in capsys.readouterr().err


def test_a_split_is_shuffled_by_the_seed_alone(tmp_path):
    first = played(tmp_path / "a", "--shuffle", "--seed", "5", "-n", "8")
    assert first != sorted(first, key=int)
    assert played(tmp_path / "b", "--shuffle", "--seed", "5", "-n", "8") == first
    assert played(tmp_path / "c", "--shuffle", "--seed", "6", "-n", "8") != first


def test_a_shuffled_run_is_not_gone_on_with_unshuffled(tmp_path, capsys):
    played(tmp_path / "a", "--shuffle", "-n", "8")
    assert main(["eval", PARITY, "--policy", "expert", "-n", "8", "--quiet", "--out", str(tmp_path / "a")]) == 2
    assert "shuffle was true, is now null" in capsys.readouterr().err


def test_a_step_has_a_limit_of_its_own(tmp_path, capsys):
    words = ["eval", f"{__name__}:Sleepy", "--policy", "expert", "-n", "1", "--retries", "0", "--no-store"]
    assert main([*words, "--step-timeout", "0.1", "--quiet"]) == 1
    assert "step took longer than its limit" in capsys.readouterr().out


def test_pass_at_k_has_an_interval_over_tasks_in_the_table_and_in_json(tmp_path, capsys):
    words = ["eval", PARITY, "--policy", "random", "-n", "20", "-k", "4", "--no-store", "--quiet"]
    assert main([*words, "--json"]) == 0
    [cell] = json.loads(capsys.readouterr().out)["cells"]
    for name in ("pass_at", "pass_hat"):
        assert cell[name].keys() == cell[f"{name}_interval"].keys() == {"1", "2", "4"}
        for k, (low, high) in cell[f"{name}_interval"].items():
            assert low <= cell[name][k] <= high
    low, high = cell["pass_at_interval"]["1"]
    assert (low, high) == pytest.approx((cell["success_low"], cell["success_high"]))
    assert main(words) == 0
    low, high = cell["pass_at_interval"]["4"]
    assert f"{100 * low:.1f}-{100 * high:.1f}" in capsys.readouterr().out


def test_an_interval_of_pass_at_k_is_clustered_by_task():
    outcomes = [(4, 4)] * 10 + [(4, 0)] * 10
    _, _, at, hat = passes(outcomes, 4)
    of_tasks = success_interval([[1.0]] * 10 + [[0.0]] * 10)
    assert at[1] == at[4] == hat[4] == pytest.approx(of_tasks, abs=0.01), "80 episodes that are worth 20"
