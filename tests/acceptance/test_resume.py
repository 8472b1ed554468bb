"""A run that is killed, however often and wherever, and resumed is the run that nobody disturbed, to the last bit."""

import random
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import torch
from equal_runs import assert_equal_runs
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from training_process import SMALL, Training, training

from agentgym.core.trajectory import read_jsonl

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(3600)]
SETTINGS = (
    *("+env=frozen_lake", *SMALL, "sft.episodes=32"),
    *("trainer.groups_per_step=2", "trainer.eval_episodes=4", "trainer.eval_every=2", "trainer.save_every=1"),
)
EXACT = (*SETTINGS, "engine=embedded", "trainer.deterministic=true")
# What a run measures before its first checkpoint, without which it begins anew: four steps of the warm start, an evaluation.
BEFORE_CHECKPOINT = 5
# Every process of a killed run ends within seconds of it; a machine that does ten other things takes longer.
ENDED_SECONDS = 60.0
NAME = "killed"


def lines(run: Training) -> int:
    """How many records the run has measured."""
    return (
        (run.folder / "metrics.jsonl").read_bytes().count(b"\n") if run.folder.joinpath("metrics.jsonl").exists() else 0
    )


def ranks(run: Training) -> list[psutil.Process]:
    """The living ranks of the learner."""
    return [process for process in run.family() if any("ray::_Actor" in word for word in process.cmdline())]


def kill(run: Training, victim: str, further: int) -> bool:
    """SIGKILL a part once the run has measured `further` more records and the part is there; whether the run lived until then."""
    run.wait_for("its beginning", lambda: "reading tasks" in run.out)
    target = lines(run) + further
    found: Sequence[psutil.Process | subprocess.Popen[bytes]] = []
    while not found:
        if run.process.poll() is not None:
            return False
        time.sleep(0.01)
        if lines(run) >= target:
            found = [run.process] if victim == "driver" else ranks(run)
    found[0].send_signal(signal.SIGKILL)
    return True


def assert_ended_as_killed(run: Training, victim: str) -> None:
    """A driver that was killed says nothing; one whose rank was killed says so, and how to go on."""
    code = run.wait()
    assert run.left_behind(ENDED_SECONDS) == []
    if victim == "driver":
        assert code == -signal.SIGKILL
        return
    assert code == 1, run.told()
    assert "Traceback" not in run.err
    assert f"to go on: agent-train trainer.resume={run.folder}" in run.out


def state_of(run: Training, role: str, scratch: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a role's last checkpoint: weights and the optimizer's averages."""
    dcp_to_torch_save(run.checkpoint / "state" / role, scratch)
    return torch.load(scratch)


def assert_equal_states(one: Training, other: Training, roles: tuple[str, ...], scratch: Path) -> None:
    """The last checkpoints hold the same of each role that learns."""
    for role in roles:
        ours, theirs = (state_of(run, role, scratch / f"{role}-{n}.pt") for n, run in enumerate((one, other)))
        assert ours.keys() == theirs.keys()
        assert any(name.endswith("exp_avg_sq") for name in ours)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_run_that_was_killed_again_and_again_is_the_run_that_was_not(tmp_path: Path, uncut: bool) -> None:
    """The engine is in the driver's process, so the driver's death is its own. Moments are counted in records, not in seconds."""
    kills, steps = (20, 24) if uncut else (2, 4)
    rng = random.Random(6)
    settings = (*EXACT, f"trainer.steps={steps}")
    with training(tmp_path, *settings) as undisturbed:
        # Every second one is the driver; a rank is killed before, in or after an update, a save or a send.
        for number, victim in enumerate(["rank", "driver"] * (kills // 2)):
            with training(tmp_path, *settings, name=NAME) as run:
                begun = (run.folder / "checkpoints" / "latest").exists()
                assert kill(run, victim, rng.randint(0, 4) + (0 if begun or number == 0 else BEFORE_CHECKPOINT))
                assert_ended_as_killed(run, victim)
        assert undisturbed.wait() == 0, undisturbed.told()
        with training(tmp_path, *settings, name=NAME) as run:
            assert run.wait() == 0, run.told()
            assert "going on with killed" in run.out
            assert_equal_runs(run, undisturbed)
            assert_equal_states(run, undisturbed, ("policy",), tmp_path)
            assert [record["step"] for record in run.of_kind("train")] == list(range(1, steps + 1))
            elapsed = [record["elapsed"] for record in run.metrics]
            assert elapsed == sorted(elapsed)
            assert (run.folder / "result.json").exists()


@pytest.mark.parametrize(
    ("recipe", "roles"),
    [(("algorithm=ppo",), ("policy", "critic")), (("algorithm=prime", "lora.rank=4"), ("policy", "prm"))],
    ids=["critic", "reward model and adapter"],
)
def test_a_run_with_other_roles_that_was_killed_is_the_run_that_was_not(
    tmp_path: Path, recipe: tuple[str, ...], roles: tuple[str, ...]
) -> None:
    """PRIME drops groups without spread: four of four episodes leave some."""
    settings = (*EXACT, "trainer.steps=3", "trainer.groups_per_step=4", *recipe)
    with training(tmp_path, *settings) as undisturbed:
        assert undisturbed.wait() == 0, undisturbed.told()
    with training(tmp_path, *settings, name=NAME) as run:
        run.wait_for("its first step", lambda: run.of_kind("train"))
        run.process.kill()
        assert_ended_as_killed(run, "driver")
    with training(tmp_path, *settings, name=NAME) as run:
        assert run.wait() == 0, run.told()
        assert "going on with killed" in run.out
    assert_equal_runs(run, undisturbed)
    assert_equal_states(run, undisturbed, roles, tmp_path)
    assert all(record[roles[1]]["grad_norm"] > 0 for record in run.of_kind("train"))


def tasks_of(run: Training) -> dict[str, list[str]]:
    """The tasks that each step was trained on."""
    return {
        file.name: [t.task_id for t in read_jsonl(file)]
        for file in sorted(run.folder.glob("trajectories/train-*.jsonl"))
    }


@pytest.mark.vllm
def test_a_run_whose_vllm_server_was_killed_goes_on_without_a_prompt_skipped_or_taken_twice(
    tmp_path: Path, uncut: bool
) -> None:
    if not uncut:
        pytest.skip("takes minutes; set AGENTGYM_TEST_ALL to run it")
    settings = (*SETTINGS, "engine=vllm", "trainer.steps=4")
    with training(tmp_path, *settings) as undisturbed:
        assert undisturbed.wait() == 0, undisturbed.told()
        for records in (1, 2):
            with training(tmp_path, *settings, name=NAME) as run:
                run.wait_for("its beginning", lambda: "reading tasks" in run.out)
                enough = lines(run) + records
                run.wait_for("records", lambda enough=enough: lines(run) >= enough)
                run.find("vllm.entrypoints.openai.api_server").kill()
                assert_ended_as_killed(run, "engine")
        with training(tmp_path, *settings, name=NAME) as run:
            assert run.wait() == 0, run.told()
            assert tasks_of(run) == tasks_of(undisturbed)
            assert [record["step"] for record in run.of_kind("train")] == [1, 2, 3, 4]
