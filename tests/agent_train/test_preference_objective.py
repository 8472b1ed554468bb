"""Preference losses: their published numbers through a real worker, and the gradient of a step in two passes."""

import asyncio
import dataclasses
import math
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from learner_cases import assert_same, make_config, make_rows, one_rank, recorded, write_model
from mode_cases import InProcess, along, nan_outside, write_reward_model
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from agent_train.data.packing import rank_batches
from agent_train.learner.worker import LearnerWorker
from agent_train.trainer.offline.objectives import Objective, learn, loss_of
from agent_train.trainer.offline.samples import TokenizedExample

SIZES = (9, 17, 5, 12, 9, 21, 7, 11)
OBJECTIVES = {
    "dpo": Objective("dpo", "dpo", 0.1),
    "ipo": Objective("dpo", "ipo", 0.1),
    "kto": Objective("kto", "kto", 0.1, (1.0, 1.5)),
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def policy(model_dir):
    with one_rank(model_dir) as worker:
        yield worker


@pytest.fixture(scope="module")
def rows(policy):
    """Rows whose reference differs from the policy; outside of the answers it is NaN."""
    made = make_rows(SIZES)
    scored = asyncio.run(InProcess(policy).logprobs(made))
    referenced = []
    for number, (row, exact) in enumerate(zip(made, scored, strict=True)):
        shifted = [p + math.sin(number + 7 * t) for t, p in enumerate(exact)]
        referenced.append(dataclasses.replace(row, reference=nan_outside(row, shifted)))
    return referenced


def tokenize_examples(name, rows):
    """Four pairs, or four answers with labels and answers under other prompts."""
    halves = list(zip(rows[:4], rows[4:], strict=True))
    if name == "kto":
        return [
            TokenizedExample(([one],), label=number % 3 == 0, other=[other])
            for number, (one, other) in enumerate(halves)
        ]
    return [TokenizedExample(([one], [other])) for one, other in halves]


def judged(worker, name, samples, budget=10_000):
    return asyncio.run(loss_of(InProcess(worker, budget), OBJECTIVES[name], samples))


def gradients(worker, name, samples, budget=10_000):
    """The loss and the whole gradient of one step."""
    return recorded(worker, lambda: asyncio.run(learn(InProcess(worker, budget), OBJECTIVES[name], samples, 0.0)))


def with_margin(worker, row, margin):
    """The row, with a reference under which its answer has this margin, spread unevenly over its tokens."""
    (exact,) = asyncio.run(InProcess(worker).logprobs([row]))
    places = [t for t, on in enumerate(row.mask) if on]
    parts = {t: margin * 2 * (i + 1) / (len(places) * (len(places) + 1)) for i, t in enumerate(places)}
    reference = nan_outside(row, [p - parts.get(t, 0.0) for t, p in enumerate(exact)])
    return dataclasses.replace(row, reference=reference)


def test_dpo_gives_the_published_number(policy):
    chosen, rejected = (with_margin(policy, row, m) for row, m in zip(make_rows((9, 14)), (2.0, -1.0), strict=True))
    found = judged(policy, "dpo", [TokenizedExample(([chosen], [rejected]))])
    assert found.loss == pytest.approx(0.554355, abs=1e-6)
    assert found.measures == pytest.approx({"accuracy": 1.0, "margin": 0.3, "chosen": 0.2, "rejected": -0.1}, abs=1e-6)


def test_ipo_gives_the_published_number_by_means_over_tokens(policy):
    """Margins of 2 and -1 a token, x = 3: answers of different length have the same target."""
    chosen, rejected = (
        with_margin(policy, row, per_token * row.sampled)
        for row, per_token in zip(make_rows((9, 21)), (2.0, -1.0), strict=True)
    )
    assert judged(policy, "ipo", [TokenizedExample(([chosen], [rejected]))]).loss == pytest.approx(4.0, abs=1e-4)


def test_kto_counts_gains_over_the_reference_point(policy):
    """Margins 2 (liked) and -1 (not), point max(0, (1 + 2) / 2): beta * (margin - point) is 0.05 and -0.25."""
    rows = make_rows((9, 14, 7, 11))
    liked, not_liked, *others = (with_margin(policy, r, m) for r, m in zip(rows, (2.0, -1.0, 1.0, 2.0), strict=True))
    samples = [
        TokenizedExample(([liked],), label=True, other=[others[0]]),
        TokenizedExample(([not_liked],), label=False, other=[others[1]]),
    ]
    found = judged(policy, "kto", samples)
    expected = (1.0 / (1 + math.exp(0.05)) + 1.5 / (1 + math.exp(0.25))) / 2
    assert found.loss == pytest.approx(expected, abs=1e-6)
    assert found.measures["accuracy"] == 1.0
    assert found.measures["reference_point"] == pytest.approx(0.15, abs=1e-6)


def dense_logprobs(model, row):
    """transformers' own log-probabilities of the sampled tokens: one sequence, no packing."""
    logits = model(input_ids=torch.tensor([row.ids])).logits[0].log_softmax(-1)
    places = [t for t, on in enumerate(row.mask) if on]
    return torch.stack([logits[t - 1, row.ids[t]] for t in places])


def dense_loss(name, model, samples):
    """The loss as its paper writes it, by autograd through whole sequences."""

    def margin(rows):
        change = [
            dense_logprobs(model, row) - torch.tensor([r for r, on in zip(row.reference, row.mask, strict=True) if on])
            for row in rows
        ]
        return torch.cat(change).mean() if name == "ipo" else torch.cat(change).sum()

    if name == "kto":
        with torch.no_grad():
            point = torch.stack([margin(s.other) for s in samples]).mean().clamp(min=0)
        gains = [(s.label, 0.1 * (margin(s.answers[0]) - point)) for s in samples]
        return torch.stack([torch.sigmoid(-g) if liked else 1.5 * torch.sigmoid(g) for liked, g in gains]).mean()
    gaps = torch.stack([margin(s.answers[0]) - margin(s.answers[1]) for s in samples])
    return (-logsigmoid(0.1 * gaps) if name == "dpo" else (gaps - 5.0).square()).mean()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_two_passes_have_the_gradient_of_the_loss_itself(policy, model_dir, rows, name):
    samples = tokenize_examples(name, rows)
    model = AutoModelForCausalLM.from_pretrained(str(model_dir), dtype=torch.float32).eval()
    loss = dense_loss(name, model, samples)
    loss.backward()
    (judged_loss, *_), grads = gradients(policy, name, samples)
    assert judged_loss == pytest.approx(loss.item(), rel=1e-5)
    expected = {key: p.grad for key, p in model.named_parameters()}
    assert max(g.abs().max() for g in expected.values()) > 1e-3
    assert_same(grads, expected, atol=1e-5)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_neither_the_split_nor_the_order_changes_loss_or_gradient(policy, rows, name):
    samples = tokenize_examples(name, rows)
    (loss, measures, _), expected_grads = gradients(policy, name, samples)
    for given, budget in ((samples, 21), (samples, 45), (samples[::-1], 10_000), (samples[::-1], 21)):
        (found_loss, found_measures, _), grads = gradients(policy, name, given, budget)
        assert found_loss == pytest.approx(loss, abs=1e-6)
        assert found_measures == pytest.approx(measures, abs=1e-6)
        assert_same(grads, expected_grads, atol=1e-5)  # of gradients up to 1: the sums of float32 differ by processor


def test_an_answer_of_two_rows_is_one_answer(policy, rows):
    """Where the template writes the past anew, a conversation becomes several rows: its margin is over all of them."""
    chosen, rejected = [rows[0], rows[1]], [rows[2], rows[3]]
    (loss_of_sums,) = (judged(policy, "dpo", [TokenizedExample((chosen, rejected))]),)
    logprobs = asyncio.run(InProcess(policy).logprobs(rows[:4]))
    gains = [
        sum(p - r for p, r, on in zip(own, row.reference, row.mask, strict=True) if on)
        for own, row in zip(logprobs, rows[:4], strict=True)
    ]
    gap = 0.1 * (gains[0] + gains[1] - gains[2] - gains[3])
    assert loss_of_sums.loss == pytest.approx(math.log1p(math.exp(-gap)), abs=1e-6)


def test_a_sample_without_a_reference_is_refused_by_name(policy, rows):
    bare = dataclasses.replace(rows[0], reference=[])
    with pytest.raises(ValueError, match="sample of 't0' has no log-probabilities under the reference"):
        judged(policy, "dpo", [TokenizedExample(([bare], [rows[1]]))])


@pytest.fixture(scope="module")
def rm_dir(model_dir, tmp_path_factory):
    return write_reward_model(model_dir, tmp_path_factory.mktemp("rm"))


def descend_in_worlds(rank, ports, model_dirs, cases, folder):
    """One process of the largest of some worlds, which it joins one after another: the gradient of each one's step.

    Args:
        ports: of the store that the parent serves for each role and number of ranks.
        model_dirs: of each role.
        cases: rows of each role.
        folder: where rank 0 writes what it found.
    """
    for (role, world), port in ports.items():
        if rank >= world:
            continue
        mode = "rm" if role == "reward_model" else "dpo"
        config = dataclasses.replace(make_config(workers=world, timeout=300.0), mode=mode)
        worker = LearnerWorker(rank, world, config, "cpu", role)
        worker.start("127.0.0.1", port, str(model_dirs[role]))
        _, grads = recorded(
            worker, partial(worker.apply_loss_gradients, rank_batches(cases[role], world, 21)[rank], 0.0)
        )
        if rank == 0:
            torch.save(grads, folder / f"{role}-{world}.pt")
        dist.barrier()
        dist.destroy_process_group()


def fork_worlds(_, *arguments):
    """Run in a new process, where nothing runs that may not be forked."""
    ranks = max(world for _, world in arguments[0])
    torch.multiprocessing.start_processes(descend_in_worlds, arguments, nprocs=ranks, start_method="fork")


def dense_score_gradients(rm_dir, rows):
    """Of the sum of the rows' scores times what their `advantages` hold, by autograd through whole sequences."""
    model = AutoModelForSequenceClassification.from_pretrained(str(rm_dir), dtype=torch.float32).eval()
    total = torch.zeros(())
    for row in rows:
        last = max(t for t, on in enumerate(row.mask) if on)
        scores = model.score(model.model(input_ids=torch.tensor([row.ids])).last_hidden_state)
        total = total + row.advantages[last] * scores[0, last, 0]
    total.backward()
    return {key: p.grad for key, p in model.named_parameters()}


def test_ranks_give_the_gradient_of_one(policy, model_dir, rm_dir, rows, tmp_path):
    samples = tokenize_examples("dpo", rows)
    flat = [row for column in zip(*(s.answers for s in samples), strict=True) for (row,) in column]
    ends = [[0.0] * len(row.ids) for row in flat]
    for number, (row, own) in enumerate(zip(flat, ends, strict=True)):
        own[max(t for t, on in enumerate(row.mask) if on)] = 0.3 - 0.1 * number
    cases = {"policy": along(flat, judged(policy, "dpo", samples).derivatives), "reward_model": along(flat, ends)}
    stores = {
        case: dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=300), wait_for_workers=False)
        for case in (("policy", 4), ("policy", 2), ("reward_model", 2))
    }
    ports = {case: store.port for case, store in stores.items()}
    dirs = {"policy": model_dir, "reward_model": rm_dir}
    torch.multiprocessing.spawn(fork_worlds, (ports, dirs, cases, tmp_path))
    expected = {
        "policy": gradients(policy, "dpo", samples)[1],
        "reward_model": dense_score_gradients(rm_dir, cases["reward_model"]),
    }
    for role, world in ports:
        found = torch.load(tmp_path / f"{role}-{world}.pt", weights_only=False)
        assert_same(found, expected[role], atol=2e-5 if role == "reward_model" else 2e-6)
