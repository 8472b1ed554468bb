"""A part that dies in the middle ends the run with exit code 1 and a line that says which and where its log is."""

import re

import pytest
from checkpoints import generates
from training_process import LONG_STEPS, Training, rollout, training, update

pytestmark = [pytest.mark.ray, pytest.mark.slow]
# Far more than the failure takes to be seen, and less than any timeout of a request or a collective.
SECONDS = 60.0


def failed(run: Training) -> str:
    """Wait for the end of a run that must fail; the line that it says."""
    assert run.wait(SECONDS) == 1, run.told()
    assert run.left_behind(1) == []
    assert "Traceback" not in run.err
    assert f"{run.folder.name}: failed" in run.out
    assert (run.folder / "report.html").exists()
    assert not (run.folder / "result.json").exists()
    assert generates(run.checkpoint)
    error, *_, where = run.err.strip().splitlines()
    assert where == f"agent-train: logs and all that was measured: {run.folder}"
    return error


@pytest.mark.vllm
def test_a_server_that_dies_in_a_rollout_is_named_with_its_log(tmp_path) -> None:
    with training(tmp_path, "+env=frozen_lake", "engine=vllm", "trainer.steps=5", *LONG_STEPS) as run:
        run.wait_for("a rollout", lambda: rollout(run))
        run.find("vllm.entrypoints.openai.api_server").kill()
        error = failed(run)
        assert re.fullmatch(
            rf"agent-train: error: the vLLM server at http://127\.0\.0\.1:{run.port} has exited with code -9; log: "
            rf"{re.escape(str(run.folder))}/logs/vllm-0\.log",
            error,
        )


def test_a_learner_rank_that_dies_in_an_update_is_named(tmp_path) -> None:
    with training(
        tmp_path, "+env=frozen_lake", "engine=embedded", "trainer.steps=5", *LONG_STEPS, "learner.workers=2"
    ) as run:
        run.wait_for("an update", lambda: update(run))
        run.find("ray::_Actor.on_batches").kill()
        assert re.match(r"agent-train: error: learner: update: rank [01] died: ", failed(run))
