"""What a run leaves on disk, and where."""

import json
import re
from pathlib import Path

import pytest
from run_cases import new_run

from agent_train.config.compose import config_from_yaml
from agent_train.config.schema import Config, EnvConfig, TrainerConfig
from agent_train.trainer.run_folder import RunFolder, run_name, versions
from agentgym.storage.files import write_json, write_text


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return new_run(Config(trainer=TrainerConfig(name="one", runs_dir=str(tmp_path))), ["agent-train", "+env=x"])


def test_a_new_run_has_its_settings_and_versions(run, tmp_path):
    assert run.path == tmp_path / "one"
    assert config_from_yaml(run.config.read_text()).trainer.name == "one"
    found = json.loads(run.versions.read_text())
    assert found["command"] == ["agent-train", "+env=x"]
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", found["python"])
    assert found["packages"]["ray"]
    assert {p.name for p in run.path.iterdir()} == {
        "config.yaml",
        "versions.json",
        "trajectories",
        "checkpoints",
        "logs",
        "turns",
    }


def test_the_path_is_absolute_so_that_other_processes_can_use_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert new_run(Config(trainer=TrainerConfig(name="x"))).path == tmp_path / "runs" / "x"


@pytest.mark.parametrize(
    ("env", "start"),
    [("gsm8k", "gsm8k-grpo-"), ("my_pkg.envs:MyEnv", "my_pkg.envs-MyEnv-grpo-"), ("acme/x-v2", "acme-x-v2-grpo-")],
)
def test_the_name_of_a_run_is_env_algorithm_time(env, start):
    name = run_name(Config(env=EnvConfig(id=env)))
    assert name.startswith(start)
    assert re.fullmatch(r"\d{8}-\d{6}", name.removeprefix(start))


def test_the_git_revision_is_that_of_the_checkout():
    git = versions()["git"]
    if (Path(__file__).parents[2] / ".git").exists() and git is not None:
        assert re.fullmatch(r"[0-9a-f]{40}", git["commit"])
        assert git["changed"] in (True, False)
    else:
        assert git is None


def test_files_are_written_in_one_step_and_leave_nothing_else(tmp_path):
    write_text(tmp_path / "a", "old")
    write_text(tmp_path / "a", "né\n")
    write_json(tmp_path / "b.json", {"x": [1, "é"]})
    assert (tmp_path / "a").read_text(encoding="utf-8") == "né\n"
    assert json.loads((tmp_path / "b.json").read_text(encoding="utf-8")) == {"x": [1, "é"]}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b.json"]


def test_checkpoints_are_in_the_order_of_their_steps_and_nothing_else_is_one(run):
    assert run.latest_checkpoint() is None
    for name in ("step-1000000", "step-000005", "step-000010.before-resume-1", ".unfinished-step-000020.1"):
        (run.checkpoints / name).mkdir()
    (run.checkpoints / "step-000030").touch()
    (run.checkpoints / "latest").write_text("step-000005\n")
    assert [path.name for path in run.saved_checkpoints()] == ["step-000005", "step-1000000"]
    assert run.latest_checkpoint() == run.checkpoints / "step-000005"
