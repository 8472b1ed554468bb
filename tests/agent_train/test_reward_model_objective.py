"""Reward models: the published number through a real worker, and the gradient of a step in two passes."""

import asyncio
import dataclasses
import math

import pytest
import torch
from learner_cases import assert_same, make_config, make_rows, one_rank, recorded, write_model
from mode_cases import InProcess, write_reward_model
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification

from agent_train.algorithms.preferences import of_scored_pairs, of_scores
from agent_train.trainer.offline.objectives import Objective, learn, loss_of
from agent_train.trainer.offline.samples import TokenizedExample

SIZES = (9, 17, 5, 12, 9, 21, 7, 11)
CONFIG = dataclasses.replace(make_config(), mode="rm")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def rm_dir(model_dir, tmp_path_factory):
    return write_reward_model(model_dir, tmp_path_factory.mktemp("rm"))


def test_a_reward_model_gives_the_published_number(model_dir):
    rows = make_rows((9, 14))
    sample = TokenizedExample(([rows[0]], [rows[1]]))
    with one_rank(model_dir, CONFIG, role="reward_model") as worker:
        better, worse = asyncio.run(InProcess(worker).scores(rows))
        with torch.no_grad():
            worker.module.model.score.weight.mul_(1.0 / (better - worse))
        found = asyncio.run(loss_of(InProcess(worker), Objective("rm", "dpo", 0.1), [sample]))
    assert found.loss == pytest.approx(0.313262, abs=1e-5)
    assert found.measures["margin"] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("scored", [False, True], ids=["pairs", "scores"])
def test_a_reward_model_has_the_gradient_of_its_loss(rm_dir, scored):
    rows = make_rows(SIZES)
    samples = (
        [TokenizedExample(([row],), score=float(number)) for number, row in enumerate(rows)]
        if scored
        else [TokenizedExample(([one], [other])) for one, other in zip(rows[:4], rows[4:], strict=True)]
    )
    model = AutoModelForSequenceClassification.from_pretrained(str(rm_dir), dtype=torch.float32).eval()

    def score(row):
        last = max(t for t, on in enumerate(row.mask) if on)
        return model.score(model.model(input_ids=torch.tensor([row.ids])).last_hidden_state)[0, last, 0]

    if scored:
        loss = torch.stack([(score(s.answers[0][0]) - s.score).square() / 2 for s in samples]).mean()
    else:
        loss = torch.stack([-logsigmoid(score(s.answers[0][0]) - score(s.answers[1][0])) for s in samples]).mean()
    loss.backward()
    expected = {key: p.grad for key, p in model.named_parameters()}
    with one_rank(rm_dir, CONFIG, role="reward_model") as worker:
        for budget in (10_000, 21):
            learner, objective = InProcess(worker, budget), Objective("rm", "dpo", 0.1)
            (judged, *_), grads = recorded(worker, lambda: asyncio.run(learn(learner, objective, samples, 0.0)))  # noqa: B023
            assert judged == pytest.approx(loss.item(), rel=1e-5)
            assert_same(grads, expected, atol=2e-5)


def test_scores_that_are_equal_have_the_loss_of_a_coin_and_no_accuracy():
    found = of_scored_pairs([1.0, 1.0])
    assert found.loss == pytest.approx(math.log(2))
    assert found.measures["accuracy"] == 0.0
    assert found.derivatives == [[-0.5], [0.5]]
    assert of_scores([1.0, 3.0], [1.0, 1.0]).loss == pytest.approx(1.0)
