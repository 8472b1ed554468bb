"""Every example runs as it stands, in a process of its own. Those that play by a chat endpoint do so in test_serving.py too.

Those that train go one after another through one process, but for one, and their runs join one Ray: imports take most of a short
run's time.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from docs_endpoint import chat_endpoint

from agent_train.report.metrics import read_metrics
from agentgym.core.trajectory import read_jsonl

EXAMPLES = Path(__file__).parent.parent / "examples"


# The arguments of those that train in one process, for runs of seconds.
LAKE = ("sft.episodes=0", "trainer.eval_episodes=4", "env.kwargs.max_turns=4", "trainer.steps=1")
SHORT = {
    "ppo_critic": (*LAKE, "trainer.steps=2", "critic.alone_steps=1"),
    "asynchronous": (*LAKE, "trainer.steps=3"),
    "lora": LAKE,
    "sft_then_rl": ("--episodes", "32", *LAKE),
    "own_advantage": LAKE,
    # On the environment of another example, named by its module: a file of a user's.
    "judge_reward": ("--model", "my-model", *LAKE, "env.kwargs.max_turns=2", "+env=register_and_train:Larger"),
}
IN_TURN = """
import importlib, json, sys
for name, arguments in json.loads(sys.argv[1]).items():
    print("example:", name, flush=True)
    importlib.import_module(name).main([*arguments, f"trainer.name={name}"])
"""


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
        "openenv_env",
        "register_and_train",
        *SHORT,
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


def test_openenv_env(tmp_path):
    lines = run("openenv_env", "-n", "3", cwd=tmp_path).splitlines()
    assert lines[0].startswith("reset: P you, G goal")
    assert lines[1] == "step:  {'reward': 0.0, 'done': False}"
    row = next(line.split() for line in lines if line.startswith("openenv:http://"))
    assert row[1] == "3"
    assert row[2].endswith("%")


def test_mcp_tools(tmp_path):
    assert run("mcp_tools", cwd=tmp_path).splitlines()[-1] == "terminated, reward 1"


@pytest.mark.ray
@pytest.mark.slow
def test_register_and_train(in_shared_ray, forks, tmp_path):
    """By `train`, as all others that train. That it learns is the acceptance tests' matter."""
    shorter = ("trainer.name=example", "trainer.steps=2", "sft.episodes=32", "trainer.eval_episodes=4")
    words = [str(EXAMPLES / "register_and_train.py"), *shorter]
    lines = forks.run(words, {**os.environ, **in_shared_ray}, 240, tmp_path).splitlines()
    assert [line.partition(" reward")[0] for line in lines[-2:]] == ["step 1:", "step 2:"]
    folder = tmp_path / "runs" / "example"
    records = [record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == "train"]
    assert [(record["episodes"], record["failed"]) for record in records] == [(64, 0)] * 2
    assert all(record["update"]["tokens"] == record["sampled_tokens"] > 0 for record in records)
    assert json.loads((folder / "result.json").read_text())["env"] == "example/larger"
    assert (folder / "checkpoints" / (folder / "checkpoints" / "latest").read_text().strip() / "config.json").is_file()
    assert (folder / "report.html").is_file()


@pytest.fixture(scope="module")
def trained(in_shared_ray, forks, tmp_path_factory):
    """What each example that trains printed, by its name, and the folder in which all of them ran."""
    cwd = tmp_path_factory.mktemp("trained")
    for file in EXAMPLES.glob("*.py"):  # a run's processes import from its current folder
        shutil.copy(file, cwd)
    with chat_endpoint() as judge:
        given = {**SHORT, "judge_reward": ("--base-url", judge, *SHORT["judge_reward"])}
        (cwd / "in_turn.py").write_text(IN_TURN)
        said = forks.run(["in_turn.py", json.dumps(given)], {**os.environ, **in_shared_ray}, 900, cwd)
    printed = re.split(r"^example: (\w+)\n", said, flags=re.MULTILINE)[1:]
    return dict(zip(printed[::2], map(str.splitlines, printed[1::2]), strict=True)), cwd


def of(name, trained):
    """What an example printed, the folder of its run, and the records of its training steps."""
    printed, cwd = trained
    folder = cwd / "runs" / name
    return printed[name], folder, [r for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "train"]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1000)
class TestThoseThatTrain:
    """That they learn is not asked of runs so short, but that each does what it is about."""

    def test_a_critic_learns_alone_at_first_and_then_the_policy_too(self, trained):
        printed, _, records = of("ppo_critic", trained)
        assert [printed[-2].split()[0], printed[-2].split()[-1]] == ["1", "waits"]
        assert [printed[-1].split()[0], printed[-1].split()[-1]] == ["2", "clipped"]
        assert all(record["critic"]["grad_norm"] > 0 for record in records)
        assert records[1]["update"]["grad_norm"] > 0

    def test_a_step_is_trained_on_what_older_versions_have_sampled(self, trained):
        printed, _, records = of("asynchronous", trained)
        versions = re.fullmatch(r"step 3 trained version 2 on tokens of versions \{(.*)\}", printed[-1])[1]
        assert min(int(version.split(":")[0]) for version in versions.split(", ")) < 2
        lags = [lag for record in records for lag in record["update"]["gap_by_lag"]]
        table = printed[printed.index("step  lag  tokens   ess  mean weight, capped") + 1 : -1]
        assert [line.split()[1] for line in table] == lags

    def test_an_adapter_is_small_names_its_base_and_is_merged_into_a_model_that_answers(self, trained):
        printed, folder, [record] = of("lora", trained)
        adapter, base, merged, says = printed[-4:]
        assert int(adapter.split()[1]) < int(merged.split()[1]) / 5
        assert (Path(base.removeprefix("base ")) / "config.json").is_file()
        assert (folder / "merged" / "tokenizer.json").is_file()
        assert says.startswith("it says ")
        assert record["update"]["grad_norm"] > 0

    def test_imitation_lowers_the_loss_and_the_second_run_starts_from_its_checkpoint(self, trained):
        printed, folder, _ = of("sft_then_rl", trained)
        assert re.match(r"\d+ of 32 episodes of the expert are kept", printed[0])
        before, after = re.search(r"imitation: ([\d.]+) .* ([\d.]+) at last", "\n".join(printed)).groups()
        assert float(after) < float(before)
        assert printed[-1].startswith("step 1: success")
        [imitation] = folder.parent.glob("sft-*")
        assert f"path: {imitation}/checkpoints/step-" in (folder / "config.yaml").read_text()

    def test_advantages_are_those_of_the_example_s_function(self, trained):
        _, folder, [record] = of("own_advantage", trained)
        assert "name: own_advantage:by_rank" in (folder / "config.yaml").read_text()
        assert 0 < record["advantage_std"] <= 1  # of numbers from -1 to 1
        assert record["update"]["grad_norm"] > 0

    def test_a_judge_s_ranking_is_in_the_rewards_of_an_environment_in_a_user_s_own_file(self, trained):
        printed, folder, [record] = of("judge_reward", trained)
        episodes = list(read_jsonl(folder / "trajectories" / "train-000001.jsonl"))
        assert {t.env for t in episodes} == {"register_and_train:Larger"}
        assert (len(episodes), record["failed"]) == (16, 0)
        assert record["env"]["reward/judge"] == pytest.approx(0.5)
        assert record["update"]["grad_norm"] > 0
        assert [line.split()[:2] for line in printed[-2:]] == [["best:", "1.00,"], ["worst:", "0.00,"]]


@pytest.mark.slow
def test_grpo(tmp_path):
    """That it learns is in its first lines: a run of minutes."""
    shorter = ("--steps", "2", "--groups", "2", "--expert-episodes", "16", "--eval-episodes", "4")
    lines = run("grpo", *shorter, cwd=tmp_path, timeout=280).splitlines()
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
