"""A run that goes on from a checkpoint is the run that nobody disturbed, to the last bit.

Runs that are killed at any moment are in `test_same_numbers.py`, beside the runs that they must equal.
"""

from pathlib import Path

import pytest
from equal_runs import assert_equal_runs, assert_equal_states, leave_as_killed_after
from training_process import SMALL, Training, training

from agentgym.core.trajectory import read_jsonl

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(3600)]
SETTINGS = (
    *("+env=frozen_lake", *SMALL, "sft.episodes=32"),
    *("trainer.groups_per_step=2", "trainer.eval_episodes=4", "trainer.eval_every=2", "trainer.save_every=1"),
)
NAME = "killed"


def test_a_reward_model_and_an_adapter_that_learn_and_pools_go_on_where_they_were(
    in_shared_ray, forks, tmp_path: Path
) -> None:
    """PRIME drops groups without spread: four of four episodes leave some. Of 100,000 tasks those that were played come again."""
    settings = (
        *(*SETTINGS, "engine=embedded", "trainer.deterministic=true", "trainer.steps=2"),
        *("trainer.groups_per_step=4", "algorithm=prime", "lora.rank=4"),
        *("pools.groups=2", "pools.revisit=1", "pools.weights.unseen=0.1"),
    )
    with training(tmp_path, *settings, env=in_shared_ray, forks=forks) as undisturbed:
        assert undisturbed.wait() == 0, undisturbed.told()
    leave_as_killed_after(1, undisturbed, tmp_path / NAME)
    with training(tmp_path, *settings, env=in_shared_ray, name=NAME, forks=forks) as run:
        assert run.wait() == 0, run.told()
        assert "going on with killed from step 1" in run.out
    assert_equal_runs(run, undisturbed)
    assert_equal_states(run, undisturbed, ("policy", "prm"), tmp_path)
    assert all(record["prm"]["grad_norm"] > 0 for record in run.of_kind("train"))
    assert (run.checkpoint / "tasks.json").read_text() == (undisturbed.checkpoint / "tasks.json").read_text()
    last = run.of_kind("train")[-1]["pools"]
    assert sum(last["tasks"].values()) == 100_000
    assert last["played"]["unseen"] < 1, "a task was played again"


def tasks_of(run: Training) -> dict[str, list[str]]:
    """The tasks that each step was trained on."""
    return {
        file.name: [t.task_id for t in read_jsonl(file)]
        for file in sorted(run.folder.glob("trajectories/train-*.jsonl"))
    }


@pytest.mark.vllm
@pytest.mark.parametrize("placement", ["own", "colocated"])
def test_a_run_whose_vllm_server_was_killed_goes_on_without_a_prompt_skipped_or_taken_twice(
    tmp_path: Path, uncut: bool, placement: str
) -> None:
    if not uncut:
        pytest.skip("takes minutes; set AGENTGYM_TEST_ALL to run it")
    settings = (*SETTINGS, "engine=vllm", f"engine.placement={placement}", "trainer.steps=4")
    with training(tmp_path, *settings) as undisturbed:
        assert undisturbed.wait() == 0, undisturbed.told()
        with training(tmp_path, *settings, name=NAME) as run:
            for records in (1, 2):
                run.wait_for("records", lambda enough=records: run.measured >= enough)
                run.find("vllm.entrypoints.openai.api_server").kill()
            assert run.wait() == 0, run.told()
            assert tasks_of(run) == tasks_of(undisturbed)
            assert [record["step"] for record in run.of_kind("train")] == [1, 2, 3, 4]
