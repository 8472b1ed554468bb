"""A run whose episodes go on with summaries: killed, resumed and replayed, its numbers stay the same."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from in_turn import in_turn

from agent_train.report.metrics import read_metrics
from agentgym.core.trajectory import read_jsonl

CONTEXT = 2048
WORDS = [
    *(
        "+env=frozen_lake",
        "engine=embedded",
        "learner.workers=1",
        "algorithm.group_size=4",
        "trainer.groups_per_step=4",
    ),
    *("model.tiny.hidden=64", "model.tiny.heads=2", "model.tiny.intermediate=128", "model.tiny.layers=1"),
    *("sft.episodes=512", "sft.epochs=2", "sft.batch_rows=8", "sft.lr=8e-3", "trainer.eval_every=9"),
    *("trainer.eval_episodes=2", "trainer.deterministic=true", "trainer.dump=[1]", "trainer.steps=2"),
    *(f"engine.max_model_len={CONTEXT}", "memory.name=summary", "memory.tokens=8", f"memory.room={CONTEXT - 200}"),
]


def began_anew(turns: Path) -> bool:
    """True if the journal of a step has what was said after a summary."""
    lines = turns.read_text().split("\n")[:-1] if turns.is_file() else []
    return any(turn["turn"] and not turn["shared"] for line in lines for turn in json.loads(line))


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_with_summaries_that_is_killed_goes_on_as_if_it_had_not_been_and_is_replayed_to_the_bit(
    in_shared_ray, forks, tmp_path
):
    """The reference begins the step anew from the same checkpoint; runs that nothing disturbed are in tests/acceptance."""
    env = {**os.environ, **in_shared_ray}

    words = [*WORDS, f"trainer.runs_dir={tmp_path}"]
    killed = [*words, "trainer.name=killed"]
    driver = forks.start(["-m", "agent_train.cli", *killed], env)
    try:
        deadline = time.monotonic() + 200
        while not began_anew(tmp_path / "killed" / "turns" / "000002.jsonl"):
            assert driver.poll() is None, "it ended before its second step"
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        driver.kill()
        driver.wait()
    shutil.copytree(tmp_path / "killed", tmp_path / "anew")
    shutil.rmtree(tmp_path / "anew" / "turns")
    replay = ["replay", str(tmp_path / "killed"), "step=1", "through=2"]
    *_, replayed = in_turn(forks, [killed, [*words, "trainer.name=anew"], replay], env, 500)

    anew, resumed = (
        [record for record in read_metrics(tmp_path / name / "metrics.jsonl") if record["kind"] == "train"]
        for name in ("anew", "killed")
    )
    assert resumed[1]["journal_turns"] > 0
    assert anew[1]["journal_turns"] == 0
    assert [record["weights_checksum"] for record in resumed] == [record["weights_checksum"] for record in anew]
    for record in anew:
        assert record["summaries"] > 0.5
        assert 0 < record["update"]["gap_max"] < 1e-4, (
            "the trainer finds the engine's log-probabilities, of summaries too"
        )
        path = Path("trajectories") / f"train-{record['step']:06d}.jsonl"
        one, other = (list(read_jsonl(tmp_path / name / path)) for name in ("anew", "killed"))
        assert [[vars(call.tokens) for call in t.calls()] for t in one] == [
            [vars(call.tokens) for call in t.calls()] for t in other
        ]
        assert record["update"]["tokens"] == sum(t.sampled_tokens for t in one)
    assert [line for line in replayed.splitlines() if line.startswith("step ")] == [
        f"step {step}: the same weights, bit for bit" for step in (1, 2)
    ]
