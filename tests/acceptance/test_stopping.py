"""Ctrl-C, SIGTERM and worse, at any moment: the run ends in seconds and nothing of it stays behind."""

import signal
import time

import pytest
from checkpoints import generates
from training_process import (
    LONG_STEPS,
    SMALL,
    Training,
    importing,
    rollout,
    server_started,
    training,
    update,
    warm_start,
)

pytestmark = [pytest.mark.ray, pytest.mark.slow]
STOP_SECONDS = 10.0
VLLM = ("+env=frozen_lake", "engine=vllm", "trainer.steps=5")
COLOCATED = (*VLLM, "engine.placement=colocated")
EMBEDDED = ("+env=frozen_lake", "engine=embedded", "trainer.steps=5")


STOPS = {
    "Ctrl-C while packages are imported": (signal.SIGINT, importing, (*EMBEDDED, *SMALL)),
    "SIGTERM while vLLM starts": (signal.SIGTERM, server_started, (*VLLM, *SMALL)),
    "SIGTERM in the warm start": (signal.SIGTERM, warm_start, (*EMBEDDED, *SMALL, "sft.episodes=1024")),
    "Ctrl-C in a rollout of a colocated engine": (signal.SIGINT, rollout, (*COLOCATED, *LONG_STEPS)),
    "SIGTERM in an update": (signal.SIGTERM, update, (*EMBEDDED, *LONG_STEPS, "learner.workers=2")),
}
SELDOM = ("SIGTERM in the warm start", "Ctrl-C in a rollout of a colocated engine")  # where all is tested


@pytest.mark.parametrize(
    "stop", [pytest.param(k, marks=pytest.mark.vllm) if VLLM[1] in v[2] else k for k, v in STOPS.items()]
)
def test_a_signal_ends_the_run_within_seconds_and_nothing_stays(stop: str, uncut: bool, tmp_path) -> None:
    if stop in SELDOM and not uncut:
        pytest.skip("takes a minute; set AGENTGYM_TEST_ALL to run it")
    number, moment, settings = STOPS[stop]
    with training(tmp_path, *settings) as run:
        run.wait_for(stop, lambda: moment(run))
        sent = run.send(number)
        assert run.wait() == 128 + number, run.told()
        seconds = time.monotonic() - sent
        assert run.left_behind(STOP_SECONDS - seconds) == []
        assert time.monotonic() - sent < STOP_SECONDS, f"it took {seconds:.1f} s"
        assert run.err == ""
        assert_in_order(run, run.folder.exists(), moment in (rollout, update))


def assert_in_order(run: Training, began: bool, saved: bool) -> None:
    """What was measured can be read, the report is there, and so is a checkpoint that loads if one was saved."""
    assert all(record["kind"] in ("sft", "eval") for record in run.metrics)
    assert (run.folder / "report.html").exists() == began
    assert not (run.folder / "result.json").exists()
    assert ("interrupted" in run.out) == began
    assert (run.folder / "checkpoints" / "latest").exists() == saved
    if saved:
        assert run.checkpoint.name == "step-000000"
        assert generates(run.checkpoint)


@pytest.mark.vllm
def test_a_driver_that_is_killed_takes_everything_with_it(tmp_path) -> None:
    """SIGKILL lets it close nothing: the kernel ends what it started, and the reaper what Ray started."""
    with training(tmp_path, *VLLM, *LONG_STEPS) as run:
        run.wait_for("a rollout", lambda: rollout(run))
        for title in ("vllm.entrypoints", "ray::_Actor", "raylet", "gcs_server"):
            assert run.find(title), title
        # The server's engine is a process of its own, whose title vLLM changes where it can.
        assert run.find("VLLM::EngineCore") or run.find("multiprocessing.spawn")
        run.send(signal.SIGKILL)
        assert run.wait() == -signal.SIGKILL
        assert run.left_behind(STOP_SECONDS) == []
        assert generates(run.checkpoint)
