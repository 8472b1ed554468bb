"""Every example runs as it stands, in a process of its own. Those that play by a chat endpoint do so in test_serving.py too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name, *arguments, cwd, timeout=120):
    """The example's output; the test fails with its stderr if it does not end with 0."""
    env = {k: v for k, v in os.environ.items() if k != "OPENAI_API_KEY"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=cwd,
        env=env,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_has_a_test_here():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {
        "register_env",
        "evaluate",
        "train",
        "gymnasium_vector",
        "chat_agent",
        "mcp_tools",
        "rewards",
        "other_packages",
        "remote_env",
        "grpo",
    }


def test_register_env(tmp_path):
    out = run("register_env", cwd=tmp_path)
    assert "problems: none" in out
    assert "higher" in out
    assert out.splitlines()[-1] == "terminated, reward 1, success 1"


def test_evaluate(tmp_path):
    out = run("evaluate", "-n", "5", cwd=tmp_path)
    expert, _, chance = out.partition("random\n")
    for env in ("frozen_lake", "tic_tac_toe"):
        line = next(line for line in expert.splitlines() if env in line)
        assert "100.0%" in line
        assert env in chance


def test_gymnasium_vector(tmp_path):
    numbers = [int(word) for word in run("gymnasium_vector", cwd=tmp_path).split() if word.isdigit()]
    ended, won = numbers[-2:]
    assert ended == won > 0


def test_rewards(tmp_path):
    lines = run("rewards", cwd=tmp_path).splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["tidy:", "+1.20"],
        ["bare:", "+1.00"],
        ["wrong:", "+0.20"],
        ["long:", "+0.70"],
    ]


def test_other_packages(tmp_path):
    lines = run("other_packages", "-n", "3", cwd=tmp_path).splitlines()
    assert sum("Blackjack-v1-" in line for line in lines) == 3
    assert lines[-1].endswith("over 3 episodes")


def test_remote_env(tmp_path):
    lines = run("remote_env", "-n", "6", cwd=tmp_path).splitlines()
    *_, frozen_lake, sokoban = (line.split() for line in lines)
    assert (frozen_lake[:2], frozen_lake[-2:]) == (["frozen_lake", "6"], ["the", "same"])
    assert (sokoban[:2], sokoban[-2:]) == (["sokoban", "6"], ["the", "same"])
    assert any("+1" in line for line in lines)  # of the episode that is played by plain calls


def test_mcp_tools(tmp_path):
    assert run("mcp_tools", cwd=tmp_path).splitlines()[-1] == "terminated, reward 1"


@pytest.mark.ray
@pytest.mark.slow
def test_train(tmp_path):
    """The run leaves metrics, a report and a checkpoint; that it learns is the acceptance tests' matter."""
    shorter = ("trainer.steps=2", "sft.episodes=64", "trainer.eval_episodes=8")
    out = run("train", "trainer.name=example", *shorter, cwd=tmp_path, timeout=240)
    assert "step 2/2" in out
    folder = tmp_path / "runs" / "example"
    assert (folder / "checkpoints" / (folder / "checkpoints" / "latest").read_text().strip() / "config.json").is_file()
    assert (folder / "report.html").is_file()


@pytest.mark.slow
def test_grpo(tmp_path):
    """That it learns is in its first lines: a run of minutes."""
    lines = run("grpo", "--steps", "2", "--expert-episodes", "16", "--eval-episodes", "4", cwd=tmp_path).splitlines()
    assert [line.partition(":")[0] for line in lines[1:]] == [
        *("held-out success after step 0", "step 1", "step 2"),
        "held-out success after step 2",
    ]
    # Before the first update the ratios are 1, and the loss is minus the mean advantage of a token.
    assert abs(float(lines[2].split()[-1])) < 1


def test_train_refuses_a_wrong_setting(tmp_path):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "train.py"), "trainer.stps=3"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 2
    assert "trainer.steps" in done.stderr


def test_chat_agent_says_what_it_takes(tmp_path):
    assert "--base-url" in run("chat_agent", "--help", cwd=tmp_path)
