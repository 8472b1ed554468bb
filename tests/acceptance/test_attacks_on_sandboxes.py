"""An agent that attacks its sandbox in half of its episodes scores no higher than one that answers wrongly in those."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from evaluation_process import Evaluation, results
from sandbox_attacks import ATTACKS

from agentgym.core.messages import text_of
from agentgym.evaluate.store import cells_of, effective, read_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]
SAMPLES = 3  # so that the five tasks in which it attacks see every attack


def play(out: Path, backend: str, attack: bool) -> dict[str, object]:
    """The results of an evaluation in which a program has 2 s, and no episode is given a second try."""
    env = ("gsm8k_python", "-k", str(SAMPLES), "--kwargs", json.dumps({"sandbox": backend, "timeout": 2.0}))
    agent = (
        "--agent",
        "sandbox_attacks:Player",
        "--agent-kwargs",
        json.dumps({"attack": attack}),
        "--concurrency",
        "4",
        "--retries",
        "0",
    )
    run = Evaluation(out, *env, *agent)
    assert run.ends() == 0, run.told()
    return results(out)["cells"][0]


@pytest.mark.parametrize(
    "backend",
    [pytest.param("bubblewrap", marks=pytest.mark.bubblewrap), pytest.param("docker", marks=pytest.mark.docker)],
)
def test_an_attack_earns_no_more_than_a_wrong_answer(tmp_path, monkeypatch, backend):
    monkeypatch.chdir(Path(__file__).parent)  # where the agent's module is
    wrong = play(tmp_path / "wrong", backend, attack=False)
    attacked = play(tmp_path / "attacked", backend, attack=True)
    assert (wrong["episodes"], wrong["success"], wrong["agent_failures"]) == (10 * SAMPLES, 0.5, {})
    assert (attacked["episodes"], attacked["errors"], attacked["success"]) == (10 * SAMPLES, 0, 0.5)
    assert attacked["reward"] == wrong["reward"]

    ((_, file),) = cells_of(tmp_path / "attacked", read_run(tmp_path / "attacked"))
    said = [text_of(turn.reply) for episode in effective(file) for turn in episode.turns]
    assert [name for name, program in ATTACKS.items() if not any(program in text for text in said)] == []
