"""A reference that takes the policy's weights every few steps: when it does, and a run that goes on or is replayed with it."""

from __future__ import annotations

import os

import pytest
from in_turn import in_turn

from agent_train.config.compose import compose
from agent_train.config.schema import Config, ConfigError
from agent_train.config.validation import validate
from agent_train.learner.roles import reference_is_base
from agent_train.report.metrics import read_metrics
from agent_train.trainer.following import reset_before

RUN = [
    *(
        "+env=tic_tac_toe_self",
        "engine=embedded",
        "learner.workers=1",
        "algorithm.kl.coef=0.05",
        "reference.reset_every=2",
    ),
    *("model.tiny.hidden=64", "model.tiny.heads=2", "model.tiny.intermediate=128", "model.tiny.layers=2"),
    *("trainer.groups_per_step=4", "algorithm.group_size=4", "sampling.max_tokens=4", "engine.max_model_len=1024"),
    *("sft.episodes=0", "learner.lr=2e-3", "trainer.eval_every=100", "trainer.eval_episodes=4"),
    *("trainer.keep_checkpoints=1", "trainer.deterministic=true"),
]


def test_the_reference_is_the_policy_of_the_last_multiple():
    config = Config()
    assert [reset_before(config, step) for step in (0, 3, 10)] == [0, 0, 0], "never, by default"
    config.reference.reset_every = 4
    assert [reset_before(config, step) for step in (0, 3, 4, 7, 8)] == [0, 0, 4, 4, 8]


def test_with_adapters_such_a_reference_is_a_model_of_its_own():
    config = compose(["+env=gsm8k", "lora.rank=4", "algorithm.kl.coef=0.1", "sft.episodes=0"])
    assert reference_is_base(config)
    config.reference.reset_every = 10
    assert not reference_is_base(config)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["reference.reset_every=5"], "reference.reset_every=5: has no effect without algorithm.kl.coef"),
        (["algorithm.kl.coef=0.1", "reference.reset_every=0"], "reference.reset_every=0: must be positive"),
        (["algorithm=prime", "algorithm.kl.coef=0.1", "reference.reset_every=5"], "reference.reset_every=5: advantage"),
        (
            ["+env=tic_tac_toe_self", "env.players.O=own", "algorithm.kl.coef=0.1", "reference.reset_every=5"],
            "reference.reset_every=5: players with policies of their own share one reference",
        ),
    ],
)
def test_a_reset_that_cannot_be_is_refused(words, told):
    env = [] if words[0].startswith("+env") else ["+env=frozen_lake"]
    with pytest.raises(ConfigError) as refused:
        validate(compose(["engine=embedded", *env, *words]))
    assert any(problem.startswith(told) for problem in refused.value.problems), refused.value.problems


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_that_goes_on_and_one_that_is_replayed_have_the_reference_that_the_run_had(
    in_shared_ray, forks, tmp_path
):
    words = [*RUN, f"trainer.runs_dir={tmp_path}"]
    whole = [*words, "trainer.name=whole", "trainer.save_every=3", "trainer.dump=[4]"]
    parted = [*words, "trainer.name=parted", "trainer.save_every=1"]
    replay = ["replay", str(tmp_path / "whole"), "step=4", "through=5"]
    env = {**os.environ, **in_shared_ray}
    in_turn(forks, [[*whole, "trainer.steps=6"], [*parted, "trainer.steps=3"]], env, 250)
    *_, replayed = in_turn(forks, [[*parted, "trainer.steps=6"], replay], env, 250)

    one, other = (
        [record for record in read_metrics(tmp_path / name / "metrics.jsonl") if record["kind"] == "train"]
        for name in ("whole", "parted")
    )
    kl = [record["update"]["kl_reference"] for record in one]
    assert kl[::2] == pytest.approx([0, 0, 0], abs=1e-6), "the policy before steps 1, 3 and 5 is its own reference"
    assert min(kl[1::2]) > 1e-4
    assert [record["weights_checksum"] for record in other] == [record["weights_checksum"] for record in one]
    assert [line for line in replayed.splitlines() if line.startswith("step ")] == [
        f"step {step}: the same weights, bit for bit" for step in (4, 5)
    ]
    kept = [sorted(path.name for path in (tmp_path / name / "reference").iterdir()) for name in ("whole", "parted")]
    assert kept == [["000002", "000004", "000006"], ["000004", "000006"]], "those that a checkpoint needs"
