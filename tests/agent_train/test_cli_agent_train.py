"""The command `agent-train`: what it refuses, and what it shows before it starts anything."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agent_train.cli import main
from agent_train.config.compose import config_from_yaml, environment_names

HEAVY = ("torch", "ray", "transformers", "vllm")
QUICK = ["+env=frozen_lake", "engine=embedded", "learner.workers=1"]


def in_new_process(*commands: list[str], cwd) -> dict:
    """Run each command line in one new interpreter: its exit codes, and the heavy modules that it has imported."""
    code = (
        "import json, sys\nfrom agent_train.cli import main\n"
        f"codes = [main(argv) for argv in {list(commands)!r}]\n"
        f"print(json.dumps({{'codes': codes, 'heavy': [m for m in {HEAVY!r} if m in sys.modules]}}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=cwd, check=True
    )
    return json.loads(done.stdout.splitlines()[-1]) | {"stderr": done.stderr}


BAD = {
    "unknown env": (["+env=frozn_lake"], "frozen_lake"),
    "unknown key": ([*QUICK, "trainer.stps=3"], "trainer.steps"),
    "unknown choice": (["+env=frozen_lake", "engine=vlm"], "engine=vllm"),
    "swapped letters": (["+env=frozen_lake", "algorithm=gpro"], "did you mean algorithm=grpo?"),
    "wrong type": ([*QUICK, "trainer.steps=x"], "trainer.steps"),
    "no environment": ([], "+env="),
    "no model folder": ([*QUICK, "model.path=/nowhere"], "model.path"),
    "size": ([*QUICK, "trainer.groups_per_step=0"], "trainer.groups_per_step"),
    "setting of a loss": ([*QUICK, "algorithm.loss_settings.dual_clip=0.5"], "dual_clip must be above 1"),
    "group of one": ([*QUICK, "algorithm.group_size=1"], "algorithm.group_size"),
    "run folder": ([*QUICK, "trainer.runs_dir=/proc/runs"], "trainer.runs_dir"),
    "unknown mode": (["mode=sfft"], "did you mean mode=sft?"),
    "mode without a file": (["mode=dpo"], "data.train: is missing"),
    "mode with a file that is not there": (["mode=sft", "data.train=nope.jsonl"], "nope.jsonl: no such file"),
    "mode with an environment": (["mode=sft", "+env=frozen_lake", "data.train=x"], "env=frozen_lake: mode=sft"),
    "mode with a setting of one": (["mode=rm", "env.kwargs.size=3", "data.train=x"], "env.kwargs.size: mode=rm"),
    "file without a mode": ([*QUICK, "data.train=x"], "data.train=x: has no effect without mode=sft or dpo or rm"),
    "replay of nothing": (["replay"], "replay: names no run"),
    "replay of no run": (["replay", "runs/no", "step=2"], "runs/no: no run that trained"),
    "dump of no step": ([*QUICK, "trainer.dump=[0]"], "trainer.dump=[0]: steps are numbered from 1"),
    "unknown preference loss": (["mode=dpo", "data.train=x", "data.loss=kt"], "data.loss=kt: unknown"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_exit_code_2_and_one_line_that_names_it(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv, words = BAD[name]
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith("agent-train: error: ")
    assert words in err
    assert list(tmp_path.iterdir()) == []


def test_what_is_slow_to_import_is_not_imported_to_refuse_or_to_plan(tmp_path):
    quick = [argv for name, (argv, _) in BAD.items() if name != "setting of a loss"]
    seen = in_new_process(*quick, ["--list"], cwd=tmp_path)
    assert seen["codes"] == [2] * len(quick) + [0]
    assert seen["heavy"] == []
    # The formulas are tried once all else is right, and they are torch's.
    planned = in_new_process([*QUICK, "--dry-run"], cwd=tmp_path)
    assert (planned["codes"], planned["heavy"]) == ([0], ["torch"])
    assert "Traceback" not in seen["stderr"]
    assert list(tmp_path.iterdir()) == []


def test_the_command_is_installed(tmp_path):
    command = os.path.join(os.path.dirname(sys.executable), "agent-train")
    done = subprocess.run(
        [command, "+env=frozn_lake"], capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("agent-train: error: unknown environment 'frozn_lake': did you mean frozen_lake?")


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_dry_run_prints_the_plan_and_all_settings_wherever_the_flag_stands(place, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = [*QUICK, "trainer.steps=3", "algorithm.group_size=4", "trainer.groups_per_step=5"]
    argv.insert(place, "--dry-run")
    assert main(argv) == 0
    out = capsys.readouterr().out
    plan, yaml = out.split("Settings:\n")
    for words in (
        "frozen_lake",
        "20 episodes (5 tasks x 4)",
        "3 steps, 60 episodes",
        "embedded, in this process",
        "1 FSDP2 worker ",
        "metrics.jsonl",
    ):
        assert words in plan
    assert config_from_yaml(yaml).trainer.steps == 3
    (steps,) = [line for line in yaml.splitlines() if line.startswith("  steps: 3")]
    assert steps.endswith("# training steps")
    assert list(tmp_path.iterdir()) == []


def test_list_names_every_environment_and_choice(capsys):
    assert main(["--list"]) == 0
    out = capsys.readouterr().out
    for name in (*environment_names(), "embedded", "vllm", "grpo", "tiny"):
        assert name in out


def test_help_has_examples(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "agent-train +env=gsm8k model.path=DIR trainer.steps=3" in capsys.readouterr().out


def test_an_unknown_flag_is_exit_code_2_without_a_traceback(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--dry-rnu", "+env=frozen_lake"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[0] == "agent-train: error: unrecognized arguments: --dry-rnu"


def test_functions_and_environments_of_the_current_folder_are_found(tmp_path):
    (tmp_path / "mine_of_this_folder.py").write_text(
        "def above_zero(inputs):\n    return inputs.on_tokens(inputs.rewards)\n"
    )
    command = [Path(sys.executable).parent / "agent-train", "+env=frozen_lake", "--dry-run"]
    setting = "algorithm.advantage.name=mine_of_this_folder:above_zero"
    done = subprocess.run([*command, setting], cwd=tmp_path, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "advantages mine_of_this_folder:above_zero" in done.stdout
