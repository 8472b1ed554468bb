"""A run of which any process is killed goes on by itself, and nothing is lost.

Ranks and drivers are killed in `test_same_numbers.py`. AGENTGYM_SOAK_SECONDS makes it long: a victim every AGENTGYM_SOAK_EVERY seconds (60), with each engine.
"""

import os
import random

import pytest
from soak import LONG, Soak, assert_nothing_was_lost, soak_for
from training_process import LONG_STEPS, SMALL, rollout

pytestmark = [pytest.mark.ray, pytest.mark.slow]
SECONDS = float(os.environ.get("AGENTGYM_SOAK_SECONDS", "0"))
EVERY = float(os.environ.get("AGENTGYM_SOAK_EVERY", "60"))
GAME = ("+env=frozen_lake", *SMALL, "sft.episodes=32", "trainer.save_every=1", "trainer.eval_every=50")
ENGINES = ["embedded", pytest.param("vllm", marks=pytest.mark.vllm)]


@pytest.mark.vllm
def test_a_run_whose_server_is_killed_in_a_rollout_goes_on(tmp_path) -> None:
    """Weights travel as changes, of which a new server has no base."""
    engine = ("engine=vllm", "engine.weights=delta")
    settings = ("+env=frozen_lake", *LONG_STEPS, *engine, "trainer.staleness=1", "trainer.steps=2")
    with Soak.begin(tmp_path, *settings) as soak:
        assert soak.kill("engine", rollout, random.Random(0))
        assert soak.run.wait() == 0, soak.run.told()
        assert "it is started again" in soak.run.err + soak.run.out
        assert_nothing_was_lost(soak)


@pytest.mark.timeout(4 * SECONDS + 600)
@pytest.mark.skipif(not SECONDS, reason="takes as long as AGENTGYM_SOAK_SECONDS says")
@pytest.mark.parametrize("engine", ENGINES)
def test_random_processes_are_killed_for_long_and_nothing_is_lost(engine: str, tmp_path) -> None:
    victims = ["rank", "driver", "env worker", *(["engine"] if engine == "vllm" else [])]
    parts = (f"engine={engine}", "learner.workers=2", "env.placement=ray", "env.workers=2", "env.cpus=0.5")
    settings = (*GAME, *parts, "trainer.staleness=2", "trainer.keep_checkpoints=8", f"trainer.steps={LONG}")
    with Soak.begin(tmp_path, *settings) as soak:
        soak_for(SECONDS, EVERY, victims, soak, random.Random(0))
        steps, success = len(soak.run.of_kind("train")), soak.run.of_kind("eval")[-1]["success"]
        print(f"\n{engine}: {steps} steps, held-out success {success:.2f}\n{soak.told()}")
        assert_nothing_was_lost(soak)
