"""What the modes do to a model: likelihoods rise, preferred answers gain, reward models tell right from wrong."""

import asyncio
import dataclasses
import time
from itertools import chain

import pytest
from learner_cases import make_config, one_rank
from mode_cases import InProcess, assistant, pairs, spoken, user, write_lines
from transformers import AutoTokenizer

from agent_train.config.schema import Config, DataConfig, LearnerConfig, TinyConfig
from agent_train.learner.tiny import build_tiny
from agent_train.rollout.renderer import Renderer
from agent_train.trainer.offline.objectives import learn, loss_of, objective_of, with_reference
from agent_train.trainer.offline.records import form_of, read_examples
from agent_train.trainer.offline.samples import tokenize_examples
from agent_train.trainer.schedule import batch_of_step, rate_of_step, step_count

TRAIN, TEST = range(100, 160), range(160, 180)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    texts = [text for number in (*TRAIN, *TEST) for text in spoken(number)]
    build_tiny(folder, texts, TinyConfig(hidden=64, layers=2, heads=2, intermediate=96), 128, 0)
    return folder


def records(form, numbers):
    if form == "sft":
        return [{"messages": [user(q), assistant(a)]} for q, a in map(spoken, numbers)]
    if form == "kto":
        return [
            {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
            for number, pair in zip(numbers, pairs(numbers), strict=True)
            for side in [("chosen", "rejected")[number // 2 % 2]]
        ]
    return pairs(numbers)


def config_of(mode, loss="dpo", **data):
    return dataclasses.replace(make_config(), mode=mode, data=DataConfig(loss=loss, **data))


def train(model_dir, tmp_path, config, steps, lr, size=20):
    """What is judged of the held-out examples before and after some steps."""
    form = form_of(config)
    renderer = Renderer(AutoTokenizer.from_pretrained(str(model_dir)))
    read = [read_examples(write_lines(tmp_path / "data.jsonl", records(form, part)), form) for part in (TRAIN, TEST)]
    train_on, test_on = (
        tokenize_examples(examples, renderer, mismatched=form == "kto", split=split)
        for split, examples in zip(("train", "test"), read, strict=True)
    )

    async def run(learner):
        objective = objective_of(config, train_on)
        samples, held_out = train_on, test_on
        if objective.needs_reference:
            both = await with_reference(learner, [*train_on, *test_on], size)
            samples, held_out = both[: len(train_on)], both[len(train_on) :]
        before = await loss_of(learner, objective, held_out, size)
        for step in range(1, steps + 1):
            await learn(learner, objective, batch_of_step(samples, size, 0, step), lr)
        return before, await loss_of(learner, objective, held_out, size)

    with one_rank(model_dir, config, "reward_model" if config.mode == "rm" else "policy") as worker:
        return asyncio.run(run(InProcess(worker)))


def test_sft_lowers_the_loss_of_examples_that_it_never_saw(model_dir, tmp_path):
    before, after = train(model_dir, tmp_path, config_of("sft"), steps=30, lr=3e-3)
    assert before.loss > 3
    assert after.loss < before.loss / 4


def test_dpo_lifts_the_margin_and_is_right_of_examples_that_it_never_saw(model_dir, tmp_path):
    before, after = train(model_dir, tmp_path, config_of("dpo"), steps=20, lr=1e-3)
    assert before.measures["margin"] == pytest.approx(0.0, abs=1e-5)
    assert after.measures["margin"] > 0.3
    assert after.measures["accuracy"] > 0.95
    assert after.loss < before.loss - 0.2


def test_ipo_moves_the_margin_towards_its_target(model_dir, tmp_path):
    before, after = train(model_dir, tmp_path, config_of("dpo", "ipo"), steps=20, lr=3e-3)
    assert before.loss == pytest.approx(25.0, abs=1e-3)
    assert after.loss < 20.0


def test_kto_moves_liked_answers_up_and_others_down(model_dir, tmp_path):
    before, after = train(model_dir, tmp_path, config_of("dpo", "kto"), steps=20, lr=3e-3)
    assert after.measures["chosen"] > before.measures["chosen"] + 0.2
    assert after.measures["rejected"] < before.measures["rejected"] - 0.2
    assert after.loss < before.loss


def test_a_reward_model_tells_right_from_wrong_in_examples_that_it_never_saw(model_dir, tmp_path):
    before, after = train(model_dir, tmp_path, config_of("rm"), steps=40, lr=3e-3)
    assert before.measures["accuracy"] < 0.9
    assert after.measures["accuracy"] > 0.95


def test_a_resumed_run_asks_the_reference_again_and_takes_the_same_steps(model_dir, tmp_path):
    """As `open_offline` does: the model as the run began scores the samples, then the checkpoint's state comes."""
    config = config_of("dpo")
    examples = read_examples(write_lines(tmp_path / "data.jsonl", records("dpo", TRAIN)), "dpo")
    samples = tokenize_examples(examples, Renderer(AutoTokenizer.from_pretrained(str(model_dir))))
    objective = objective_of(config, samples)

    async def steps(worker, numbers):
        learner = InProcess(worker)
        return [await learn(learner, objective, batch_of_step(samples, 20, 0, step), 1e-3) for step in numbers]

    def begin(worker):
        samples[:] = asyncio.run(with_reference(InProcess(worker), samples, 20))

    with one_rank(model_dir, config) as worker:
        begin(worker)
        whole = asyncio.run(steps(worker, (1, 2)))
        worker.save_state(str(tmp_path / "state"))
        while worker.state_saved() is None:
            time.sleep(0.01)
        whole += asyncio.run(steps(worker, (3, 4)))
    with one_rank(model_dir, config) as worker:
        begin(worker)
        worker.load_state(str(tmp_path / "state"))
        assert asyncio.run(steps(worker, (3, 4))) == whole[2:]


def test_each_epoch_has_every_example_once_in_an_order_of_its_own():
    steps = step_count(10, 4, epochs=2)
    assert steps == 6
    batches = [batch_of_step(range(10), 4, 0, step) for step in range(1, steps + 1)]
    assert [len(batch) for batch in batches] == [4, 4, 2] * 2
    first, second = list(chain(*batches[:3])), list(chain(*batches[3:]))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert batch_of_step(range(10), 4, 1, 1) != batches[0]


def test_the_rate_warms_up_and_falls():
    config = Config(learner=LearnerConfig(lr=1.0, warmup_steps=2, schedule="linear"))
    assert [rate_of_step(config, step, 4) for step in (1, 2, 3, 4)] == pytest.approx([0.5, 0.75, 0.5, 0.25])
    constant = Config(learner=LearnerConfig(lr=1.0, warmup_steps=0))
    assert [rate_of_step(constant, step, 2) for step in (1, 2)] == [1.0, 1.0]
