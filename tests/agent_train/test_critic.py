"""The critic and PRIME's reward model: what they say, of which token, and what they learn, however the rows are split."""

import dataclasses
import math

import pytest
import torch
from learner_cases import assert_same, make_config, make_rows, one_rank, recorded, write_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from agent_train.algorithms.prime import outcome_loss, process_rewards
from agent_train.data.packing import batch_of, rank_batches
from agent_train.data.samples import TrainingSample
from agent_train.learner.critic_objective import (
    PRM_REDUCTION,
    check_targets,
    critic_contribute,
    prm_targets,
    summarise_critic,
)
from agent_train.learner.fsdp import load_value
from agent_train.learner.head import PackedValue
from agent_train.learner.measures import OptimizerStep

BIG = 10_000


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def critic_dir(model_dir, tmp_path_factory):
    """A critic with a wide head, so that a mistake shows, as transformers itself writes it."""
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_pretrained(str(model_dir), num_labels=1, dtype=torch.float32)
    model.score.weight.data.normal_()
    folder = tmp_path_factory.mktemp("critic")
    model.save_pretrained(str(folder))
    return folder


def critic_config(lr=3e-3, clip=None, **learner):
    config = make_config(**learner)
    return dataclasses.replace(config, critic=dataclasses.replace(config.critic, lr=lr, clip=clip))


def with_targets(rows, of=lambda row, t: row.ids[t - 1] % 4 / 2):
    """The rows with what each sampled token's value is to be: by default a number that the token before it decides."""
    return [
        dataclasses.replace(row, targets=[of(row, t) if on else 0.0 for t, on in enumerate(row.mask)]) for row in rows
    ]


def dense_values(folder, ids):
    """transformers' own number at every position of one sequence: no packing, no mask of ours."""
    model = AutoModelForSequenceClassification.from_pretrained(str(folder), dtype=torch.float32).eval()
    with torch.no_grad():
        return model.score(model.model(input_ids=torch.tensor([ids])).last_hidden_state)[0, :, 0].tolist()


def test_the_value_of_a_token_is_that_of_the_position_before_it(critic_dir):
    rows = make_rows()
    with one_rank(critic_dir, role="critic") as critic:
        (found,) = critic.values(rank_batches(rows, 1, BIG)[0])
    for row, values in zip(sorted(rows, key=lambda row: -len(row.ids)), found, strict=True):
        dense = dense_values(critic_dir, row.ids)
        for t, sampled in enumerate(row.mask):
            assert values[t] == pytest.approx(dense[t - 1] if sampled else 0.0, abs=1e-5)


def test_a_reward_model_scores_a_row_at_its_last_sampled_token(critic_dir):
    rows = make_rows()
    last = [max(t for t, on in enumerate(row.mask) if on) for row in rows]
    assert any(t < len(row.ids) - 1 for row, t in zip(rows, last, strict=True))
    with one_rank(critic_dir, role="reward_model") as model:
        (share,) = rank_batches(rows, 1, 30)
        found = {
            row.id: s
            for own, got in zip(share.micro_batches, model.scores(share), strict=True)
            for row, s in zip(own, got, strict=True)
        }
    for row, t in zip(rows, last, strict=True):
        assert found[row.id] == pytest.approx(dense_values(critic_dir, row.ids)[t], abs=1e-5)


def test_a_row_without_a_sampled_token_is_scored_at_its_end(critic_dir):
    silent = TrainingSample([1, 2, 3, 4], [False] * 4, [0.0] * 4)
    with one_rank(critic_dir, role="reward_model") as worker, torch.no_grad():
        (score,) = worker.module(batch_of([silent])).tolist()
    assert score == pytest.approx(dense_values(critic_dir, silent.ids)[-1], abs=1e-5)


def test_a_new_head_is_small_the_same_for_a_seed_and_beside_the_models_own_weights(model_dir):
    first, again, other = (load_value(model_dir, seed=seed).model.score.weight for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert 0 < first.abs().max() < 0.2
    names = dict(AutoModelForCausalLM.from_pretrained(str(model_dir), dtype=torch.float32).named_parameters())
    with one_rank(model_dir, critic_config(), "critic") as critic:
        for name, own in critic.module.model.named_parameters():
            if name != "score.weight":
                assert torch.equal(own.full_tensor(), names[name])


@pytest.mark.parametrize("labels", [2, 3])
def test_a_classifier_of_several_labels_is_refused(model_dir, tmp_path, labels):
    AutoModelForSequenceClassification.from_pretrained(str(model_dir), num_labels=labels).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"gives {labels} numbers"):
        load_value(tmp_path)


def test_a_model_without_a_linear_score_is_refused():
    with pytest.raises(ValueError, match="no linear `score`"):
        PackedValue(torch.nn.Linear(2, 1))


def test_the_critic_learns_a_known_value_function_and_knows_it_of_rows_it_has_not_seen(model_dir):
    fresh = with_targets(make_rows((25,) * 12, seed=9))
    with one_rank(model_dir, critic_config(lr=1e-2), "critic") as critic:
        before = critic.update_critic(rank_batches(fresh, 1, BIG), lr_scale=0.0)
        for step in range(40):
            critic.update_critic(rank_batches(with_targets(make_rows((25,) * 12, seed=100 + step)), 1, BIG))
        after = critic.update_critic(rank_batches(fresh, 1, BIG), lr_scale=0.0)
    assert before.explained_variance < 0.1
    assert after.explained_variance > 0.8
    assert after.loss < before.loss / 5
    assert after.value_mean == pytest.approx(after.return_mean, abs=0.1)
    assert after.lr == 0.0


def test_what_is_measured_of_a_step_is_what_a_hand_finds():
    row = TrainingSample(
        [1, 2, 3, 4], [False, True, True, True], [0.0] * 4, values=[0.0, 0.0, 0.0, 2.0], targets=[9.0, 1.0, 0.5, 2.0]
    )
    row = dataclasses.replace(row, weight=0.25)
    batch = batch_of([row])
    values_T = torch.tensor([math.nan, 1.0, 1.0, 2.0], requires_grad=True)
    loss, sums, maxima = critic_contribute(batch, values_T, 0.5)
    # Token 1: V 1 is cut to 0.5, error 0.5^2 in place of 0. Token 2: cut to 0.5, error 0, but V itself is 0.5 off. Token 3: right.
    assert loss.item() == pytest.approx(0.25 * 0.5 * (0.25 + 0.25))
    loss.backward()
    assert values_T.grad.tolist() == pytest.approx([0.0, 0.0, 0.25 * 0.5, 0.0])
    said = [{name: x.item() for name, x in numbers.items()} for numbers in (sums, maxima)]
    metrics = summarise_critic([OptimizerStep(*said, 2.0, 1e-3, skipped=False, tokens=4)], 1.5)
    assert (metrics.clip_fraction, metrics.error_max) == pytest.approx((1 / 3, 0.5))
    assert (metrics.value_mean, metrics.return_mean) == pytest.approx((4 / 3, 3.5 / 3))
    errors, targets = torch.tensor([0.0, -0.5, 0.0]), torch.tensor([1.0, 0.5, 2.0])
    assert metrics.explained_variance == pytest.approx(float(1 - errors.var(correction=0) / targets.var(correction=0)))
    assert (metrics.grad_norm, metrics.lr, metrics.skipped, metrics.seconds) == (2.0, 1e-3, 0, 1.5)


def test_targets_that_do_not_vary_have_no_variance_to_explain(model_dir):
    same = with_targets(make_rows(), of=lambda row, t: 0.1)
    with one_rank(model_dir, critic_config(), "critic") as critic:
        metrics = critic.update_critic(rank_batches(same, 1, BIG))
    assert metrics.explained_variance == 0.0
    assert metrics.return_mean == pytest.approx(0.1)


def test_rows_without_what_the_critic_learns_are_refused():
    with pytest.raises(ValueError, match=r"trajectory .* has no targets"):
        check_targets(make_rows(), clip=0.2)
    with pytest.raises(ValueError, match=r"no values, which critic\.clip needs"):
        check_targets(with_targets(make_rows()), clip=0.2)
    check_targets(with_targets(make_rows()), clip=None)


@pytest.mark.parametrize("reduction", ["token-mean", "seq-mean-token-mean"])
def test_loss_and_gradient_are_the_same_however_the_rows_are_split(model_dir, reduction):
    rows = with_targets(make_rows())
    with one_rank(model_dir, critic_config(), "critic") as critic:
        whole, expected = recorded(critic, lambda: critic.update_critic(rank_batches(rows, 1, BIG, reduction)))
        for budget, order in ((40, 1), (21, -1), (1, 1)):
            metrics, grads = recorded(
                critic, lambda b=budget, o=order: critic.update_critic(rank_batches(rows[::o], 1, b, reduction))
            )
            assert metrics.loss == pytest.approx(whole.loss, abs=1e-6)
            assert metrics.explained_variance == pytest.approx(whole.explained_variance, abs=1e-6)
            assert_same(grads, expected, atol=1e-6)
    assert expected["score.weight"].abs().max() > 0.01
    assert expected["model.embed_tokens.weight"].abs().max() > 0


def test_values_and_scores_are_the_same_where_rows_share_their_prompt(critic_dir):
    prompt = make_rows((9,))[0].ids
    rows = []
    for number, row in enumerate(make_rows((5, 8, 3, 5), seed=4)):
        mask = [False] * len(prompt) + [True] * len(row.ids)
        ids, logprobs = prompt + row.ids, [0.0] * len(prompt) + [-1.0] * len(row.ids)
        rows.append(TrainingSample(ids, mask, logprobs, id=f"t{number}", trajectory=f"t{number}", group="g"))
    apart, together = (rank_batches(rows, 1, BIG, shared_prefix=shared)[0] for shared in (False, True))
    assert any(together.prefixes)
    with one_rank(critic_dir, role="critic") as critic:
        (found,), (expected,) = critic.values(together), critic.values(apart)
    by_length = zip(together.micro_batches[0], found, strict=True)
    wanted = {row.id: values for row, values in zip(apart.micro_batches[0], expected, strict=True)}
    for row, values in by_length:
        assert values == pytest.approx(wanted[row.id], abs=1e-5)
    with one_rank(critic_dir, role="reward_model") as model:
        (found,), (expected,) = model.scores(together), model.scores(apart)
    wanted = {row.id: score for row, score in zip(apart.micro_batches[0], expected, strict=True)}
    for row, score in zip(together.micro_batches[0], found, strict=True):
        assert score == pytest.approx(wanted[row.id], abs=1e-5)


def test_a_saved_critic_is_one_that_transformers_loads_and_goes_on_as_a_reward_model(model_dir, tmp_path):
    rows = with_targets(make_rows((9, 9)))
    with one_rank(model_dir, critic_config(), "critic") as critic:
        for _ in range(3):
            critic.update_critic(rank_batches(rows, 1, BIG))
        critic.save(str(tmp_path / "saved"))
        trained = {name: p.full_tensor().clone() for name, p in critic.module.model.named_parameters()}
    loaded = AutoModelForSequenceClassification.from_pretrained(str(tmp_path / "saved"), dtype=torch.float32)
    assert loaded.config.num_labels == 1
    assert {name: torch.equal(p, trained[name]) for name, p in loaded.named_parameters()} == dict.fromkeys(
        trained, True
    )
    whole = [dataclasses.replace(row, mask=[*row.mask[:-1], True]) for row in rows]
    with one_rank(tmp_path / "saved", role="reward_model") as model:
        (scores,) = model.scores(rank_batches(whole, 1, BIG)[0])
    for row, score in zip(whole, scores, strict=True):
        assert score == pytest.approx(loaded(input_ids=torch.tensor([row.ids])).logits.item(), abs=1e-5)


# PRIME's reward model. t0 leaves two rows, and t2 samples nothing.


def outcome_rows():
    rows = make_rows((9, 17, 5, 12, 9))
    names = ["t0", "t1", "t0", "t3", "t2"]
    rows = [dataclasses.replace(row, trajectory=name) for row, name in zip(rows, names, strict=True)]
    rows[4] = dataclasses.replace(rows[4], mask=[False] * 9)
    return rows, {"t0": 1.0, "t1": 0.0, "t2": 1.0, "t3": 0.25}


def whole_gradient(worker, rows, reference, outcomes, beta):
    """Autograd through PRIME's loss of whole trajectories, all rows in one micro-batch."""
    batch = batch_of(rows)
    names = list(dict.fromkeys(row.trajectory for row in rows if row.sampled))
    place = torch.tensor([names.index(row.trajectory) if row.sampled else 0 for row in rows])[batch.segment_T]
    logprobs_T = worker.module(batch)[0]
    reference_T = torch.tensor([x for own in reference for x in own])
    process_T = process_rewards(logprobs_T, reference_T, batch.mask_T, beta)
    loss = outcome_loss(process_T, batch.mask_T, place, torch.tensor([outcomes[name] for name in names])).mean()
    loss.backward()
    grads = {name: p.grad.full_tensor().clone() for name, p in worker.module.model.named_parameters()}
    for parameter in worker.module.parameters():
        parameter.grad = None
    return loss.item(), grads


def scored(worker, rows):
    """The log-probabilities of each row, in the rows' order."""
    found = {}
    for row in rows:
        ((found[row.id],),) = (
            worker.logprobs(rank_batches([dataclasses.replace(row)], 1, BIG)[0])
            if row.sampled
            else (([0.0] * len(row.ids),),)
        )
    return [found[row.id] for row in rows]


def with_scores(rows, logprobs, reference):
    """The rows with the log-probabilities of PRIME's reward model and of what it started from."""
    return [
        dataclasses.replace(row, prm=own, reference=base)
        for row, own, base in zip(rows, logprobs, reference, strict=True)
    ]


@pytest.mark.parametrize("budget", [BIG, 20, 1])
def test_the_gradient_of_outcomes_is_that_of_whole_trajectories_however_their_rows_are_split(model_dir, budget):
    rows, outcomes = outcome_rows()
    with one_rank(model_dir, critic_config(), "prm") as prm:
        logprobs = scored(prm, rows)
        # The reference is not where the model is: a trajectory's sum is then not 0.
        reference = [
            [x - 0.3 if on else 0.0 for x, on in zip(own, row.mask, strict=True)]
            for own, row in zip(logprobs, rows, strict=True)
        ]
        loss, expected = whole_gradient(prm, rows, reference, outcomes, beta=0.5)
        taught, said = prm_targets(with_scores(rows, logprobs, reference), outcomes, beta=0.5)
        assert said["loss"] == pytest.approx(loss, abs=1e-6)
        result, grads = recorded(prm, lambda: prm.update_prm(rank_batches(taught, 1, budget, PRM_REDUCTION)[0]))
    assert_same(grads, expected, atol=1e-6)
    assert result.grad_norm > 1e-3


def test_the_reward_model_learns_which_trajectories_are_right(model_dir):
    rows = make_rows((13,) * 8)
    outcomes = {row.trajectory: float(i % 2) for i, row in enumerate(rows)}
    with one_rank(model_dir, critic_config(lr=1e-3), "prm") as prm:
        reference = scored(prm, rows)
        _, start = prm_targets(with_scores(rows, reference, reference), outcomes, beta=0.5)
        assert start["loss"] == pytest.approx(math.log(2), abs=1e-5)
        assert start["reward_mean"] == 0.0
        for _ in range(25):
            taught, _ = prm_targets(with_scores(rows, scored(prm, rows), reference), outcomes, beta=0.5)
            prm.update_prm(rank_batches(taught, 1, BIG, PRM_REDUCTION)[0])
        _, end = prm_targets(with_scores(rows, scored(prm, rows), reference), outcomes, beta=0.5)
    assert end["accuracy"] == 1.0
    assert end["loss"] < 0.2


def test_what_the_reward_model_cannot_learn_from_is_refused():
    rows, outcomes = outcome_rows()
    zeros = [[0.0] * len(row.ids) for row in rows]
    for wrong in ({**outcomes, "t1": 1.5}, {name: x for name, x in outcomes.items() if name != "t1"}):
        with pytest.raises(ValueError, match="'t1': PRIME needs an outcome from 0 to 1, not"):
            prm_targets(with_scores(rows, zeros, zeros), wrong, beta=0.1)
