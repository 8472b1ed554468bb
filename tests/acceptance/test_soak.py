"""A run of which any process is killed goes on by itself, and nothing is lost.

Ranks and drivers are killed in `test_same_numbers.py`. AGENTGYM_SOAK_SECONDS makes it long: a victim every AGENTGYM_SOAK_EVERY seconds (60), with each engine.
"""

import os
import random
from contextlib import nullcontext

import pytest
from soak import Soak, assert_nothing_was_lost, long_soak, missing, nodes_for
from training_process import LONG_STEPS, rollout

pytestmark = [pytest.mark.ray, pytest.mark.slow]
SECONDS = float(os.environ.get("AGENTGYM_SOAK_SECONDS", "0"))
EVERY = float(os.environ.get("AGENTGYM_SOAK_EVERY", "60"))
ENGINES = ["embedded", pytest.param("vllm", marks=pytest.mark.vllm)]


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_a_run_whose_server_is_killed_in_a_rollout_goes_on(tmp_path) -> None:
    """Weights travel as changes, of which a new server has no base."""
    engine = ("engine=vllm", "engine.weights=delta")
    settings = ("+env=frozen_lake", *LONG_STEPS, *engine, "trainer.staleness=1", "trainer.steps=2")
    with Soak.begin(tmp_path, *settings) as soak:
        assert soak.kill("engine", rollout, random.Random(0))
        assert soak.run.wait() == 0, soak.run.told()
        assert "it is started again" in soak.run.err + soak.run.out
        assert_nothing_was_lost(soak)


@pytest.mark.timeout(12 * SECONDS + 600)
@pytest.mark.skipif(not SECONDS, reason="takes as long as AGENTGYM_SOAK_SECONDS says, and undisturbed runs beside it")
@pytest.mark.parametrize("many", [False, True], ids=["one machine", "three machines"])
@pytest.mark.parametrize("engine", ENGINES)
def test_random_processes_are_killed_for_long_and_nothing_is_lost(engine: str, many: bool, tmp_path) -> None:
    if many and (reason := missing()):
        pytest.skip(reason)
    with nodes_for(tmp_path) if many else nullcontext() as nodes:
        told = long_soak(tmp_path, engine, nodes, SECONDS, EVERY, others=3)
    print(f"\n{told}")
    assert "MISSED" not in "".join(line for line in told.splitlines() if line.startswith("-")), "no times are asserted"
