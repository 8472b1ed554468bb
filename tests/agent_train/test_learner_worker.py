"""The learner's rank: the same loss and gradient however rows are packed, split and dealt, and what an update promises."""

import dataclasses
import math
import threading

import psutil
import pytest
import torch
from learner_cases import advantage_of, assert_same, gradients_of, make_config, make_rows, one_rank, write_model
from transformers import AutoModelForCausalLM

from agent_train.data.packing import rank_batches
from agent_train.learner import head
from agent_train.learner.fsdp import full_tensors
from agent_train.learner.head import chunked_head
from agent_train.weights.collective import checksum, make_group, receive_buckets
from agent_train.weights.sync import WeightAddress, free_port

BIG = 10_000


def sampled(rows):
    return sum(row.sampled for row in rows)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def worker(model_dir):
    with one_rank(model_dir) as worker:
        yield worker


def checksums(worker):
    return {name: checksum(whole) for name, whole in full_tensors(worker.module)}


def share_of(rows, budget=BIG):
    return rank_batches(rows, 1, budget)[0]


def logprobs_by_row(worker, rows, budget=BIG):
    """Log-probabilities of each row, by the name of its trajectory."""
    share = share_of(rows, budget)
    return {
        row.trajectory: scored
        for rows_of_bin, scored_bin in zip(share.micro_batches, worker.logprobs(share), strict=True)
        for row, scored in zip(rows_of_bin, scored_bin, strict=True)
    }


def dense_loss(model_dir, rows, attention="eager", side=None):
    """Loss and gradients by plain transformers: row by row, or in one padded batch."""
    model = AutoModelForCausalLM.from_pretrained(str(model_dir), dtype=torch.float32, attn_implementation=attention)
    total = torch.zeros(())
    longest = max(len(row.ids) for row in rows)
    for row in rows:
        pad = (longest - len(row.ids)) if side else 0
        before, after = (pad, 0) if side == "left" else (0, pad)
        ids = torch.tensor([0] * before + row.ids + [0] * after)
        real = torch.tensor([0] * before + [1] * len(row.ids) + [0] * after)
        mask = torch.tensor([False] * before + row.mask + [False] * after)
        positions = (real.cumsum(0) - 1).clamp(min=0)
        logits = model(ids[None], attention_mask=real[None], position_ids=positions[None]).logits[0]
        log_p = logits.float().log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        total = total - (advantage_of(row) * log_p[mask[1:]]).sum()
    # On policy, the gradient of the clipped surrogate is that of -A * log p; its value is -A.
    (total / sampled(rows)).backward()
    loss = -sum(advantage_of(row) * sum(row.mask) for row in rows) / sampled(rows)
    return loss, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_packed_loss_and_gradients_are_those_of_transformers_with_any_padding(worker, model_dir, side):
    rows = make_rows()
    metrics, grads = gradients_of(worker, share_of(rows))
    loss, expected = dense_loss(model_dir, rows, side=side)
    assert metrics.loss == pytest.approx(loss, abs=1e-6)
    assert_same(grads, expected, atol=4e-6)  # processors differ in the order in which they sum float32


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_micro_batches_and_order_change_neither_loss_nor_gradients(worker, micro_batches):
    rows = make_rows(sizes=(12,) * 8)
    share = share_of(rows[3:] + rows[:3], budget=96 // micro_batches)
    assert len(share.micro_batches) == micro_batches
    metrics, grads = gradients_of(worker, share)
    expected_metrics, expected = gradients_of(worker, share_of(rows))
    assert metrics.loss == pytest.approx(expected_metrics.loss, abs=1e-6)
    assert metrics.grad_norm == pytest.approx(expected_metrics.grad_norm, abs=1e-6)
    assert_same(grads, expected, atol=1e-6)


def test_the_denominator_counts_all_tokens_so_that_long_and_short_micro_batches_are_no_mean_of_means(worker):
    long, short = make_rows(sizes=(21, 5))
    metrics, _ = gradients_of(worker, share_of([long, short], budget=21))
    tokens = [sum(row.mask) for row in (long, short)]
    assert metrics.loss == pytest.approx(
        -(advantage_of(long) * tokens[0] + advantage_of(short) * tokens[1]) / sum(tokens), abs=1e-6
    )


@pytest.mark.parametrize("which", range(6))
def test_rows_do_not_see_each_other(worker, which):
    rows = make_rows()
    before = logprobs_by_row(worker, rows)
    changed = dataclasses.replace(rows[which], ids=[(token + 1) % 40 for token in rows[which].ids])
    after = logprobs_by_row(worker, [*rows[:which], changed, *rows[which + 1 :]])
    assert before.pop(f"t{which}") != after.pop(f"t{which}")
    assert before == after


def test_on_policy_the_ratio_is_one_and_nothing_is_clipped(worker):
    rows = make_rows()
    metrics = worker.update([share_of(rows, budget=30)])
    assert metrics.ratio_mean == metrics.ratio_max == 1.0
    assert metrics.clip_fraction == metrics.kl_k1 == metrics.kl_k3 == 0.0
    assert metrics.loss == pytest.approx(
        -sum(advantage_of(row) * sum(row.mask) for row in rows) / sampled(rows), abs=1e-6
    )
    assert (metrics.tokens, metrics.skipped) == (sampled(rows), 0)
    assert metrics.packed_tokens == sum(len(row.ids) for row in rows)
    assert metrics.entropy > 0


def test_the_gap_between_engine_and_trainer_is_measured_on_sampled_tokens(worker):
    rows = make_rows()
    exact = logprobs_by_row(worker, rows)
    honest = [dataclasses.replace(row, logprobs=exact[row.trajectory]) for row in rows]
    metrics, _ = gradients_of(worker, share_of(honest))
    assert metrics.gap_max == pytest.approx(0.0, abs=1e-6)
    off = [dataclasses.replace(row, logprobs=[x - 0.5 for x in exact[row.trajectory]]) for row in rows]
    metrics, _ = gradients_of(worker, share_of(off))
    assert (metrics.gap_mean, metrics.gap_max) == pytest.approx((0.5, 0.5), abs=1e-5)
    assert metrics.gap_k3 == pytest.approx(math.exp(0.5) - 0.5 - 1, abs=1e-5)


def test_with_several_updates_the_later_ones_are_against_the_policy_at_the_start(model_dir):
    rows = make_rows()
    with one_rank(model_dir, make_config(lr=1e-2)) as worker:
        start = logprobs_by_row(worker, rows)
        share = share_of(rows, budget=30)
        # The same rows twice: the second step's ratios are those of the moved policy.
        worker.update([share])
        moved = logprobs_by_row(worker, rows)
    ratios = [
        math.exp(m - s)
        for row in rows
        for m, s, on in zip(moved[row.trajectory], start[row.trajectory], row.mask, strict=True)
        if on
    ]
    with one_rank(model_dir, make_config(lr=1e-2)) as worker:
        metrics = worker.update([share, share])
    assert metrics.ratio_max == pytest.approx(max(1.0, *ratios), rel=1e-4)
    assert metrics.ratio_mean == pytest.approx((1 + sum(ratios) / len(ratios)) / 2, rel=1e-4)
    assert metrics.clip_fraction > 0
    assert metrics.kl_k3 > 0


def test_learning_rate_zero_leaves_every_bit_of_the_weights(model_dir):
    with one_rank(model_dir, make_config(lr=0.0)) as worker:
        before = checksums(worker)
        for _ in range(3):
            metrics = worker.update([share_of(make_rows())])
        assert metrics.grad_norm > 0
        assert checksums(worker) == before


def test_an_update_raises_the_likelihood_of_what_had_a_positive_advantage(worker):
    rows = make_rows(advantage=1.0)
    before = logprobs_by_row(worker, rows)
    worker.update([share_of(rows)])
    after = logprobs_by_row(worker, rows)
    assert sum(map(sum, after.values())) > sum(map(sum, before.values()))


def test_warm_up_raises_the_learning_rate_in_equal_steps(model_dir):
    with one_rank(model_dir, make_config(lr=1e-3, warmup_steps=4)) as worker:
        rates = [worker.update([share_of(make_rows())], lr_scale=0.5).lr for _ in range(5)]
    assert rates == pytest.approx([1.25e-4, 2.5e-4, 3.75e-4, 5e-4, 5e-4])


def test_the_gradient_is_clipped_by_its_global_norm_and_reported_as_it_was(model_dir):
    rows = make_rows()
    with one_rank(model_dir) as worker:
        metrics, whole = gradients_of(worker, share_of(rows))
    with one_rank(model_dir, make_config(max_grad_norm=metrics.grad_norm / 4)) as worker:
        clipped_metrics, clipped = gradients_of(worker, share_of(rows))
    norm = math.sqrt(sum(grad.double().square().sum().item() for grad in whole.values()))
    assert metrics.grad_norm == clipped_metrics.grad_norm == pytest.approx(norm, rel=1e-5)
    assert_same(clipped, {name: grad / 4 for name, grad in whole.items()}, atol=1e-6)


@pytest.mark.parametrize("rubbish", [math.nan, math.inf])
def test_rubbish_in_masked_cells_of_a_row_changes_nothing(worker, rubbish):
    rows = make_rows()
    dirty = [
        dataclasses.replace(row, logprobs=[x if on else rubbish for x, on in zip(row.logprobs, row.mask, strict=True)])
        for row in rows
    ]
    # A row without a sampled token may even have no advantage.
    idle = dataclasses.replace(rows[0], mask=[False] * len(rows[0].ids), advantages=[rubbish] * len(rows[0].ids))
    metrics, grads = gradients_of(worker, share_of([*dirty, idle]))
    expected_metrics, expected = gradients_of(worker, share_of(rows))
    for name in ("loss", "gap_mean", "gap_max", "gap_k3", "entropy", "ratio_max", "grad_norm"):
        assert getattr(metrics, name) == pytest.approx(getattr(expected_metrics, name), abs=1e-6)
    assert_same(grads, expected, atol=1e-6)


@pytest.mark.parametrize("rubbish", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_skips_the_step_and_says_so(worker, rubbish):
    before = checksums(worker)
    rows = make_rows()
    rows[1] = dataclasses.replace(rows[1], advantages=rows[1].spread(rubbish))
    assert worker.update([share_of(rows)]).skipped == 1
    assert checksums(worker) == before
    assert worker.update([share_of(make_rows())]).skipped == 0
    assert checksums(worker) != before


def test_temperature_divides_the_logits_of_each_row(worker, model_dir):
    rows = make_rows()
    cold = [dataclasses.replace(row, temperature=0.5) for row in rows[:3]] + rows[3:]
    found = logprobs_by_row(worker, cold)
    model = AutoModelForCausalLM.from_pretrained(str(model_dir), dtype=torch.float32)
    for row in cold:
        ids = torch.tensor(row.ids)
        scaled = model(ids[None]).logits[0] / row.temperature
        by_hand = scaled[:-1].exp().gather(1, ids[1:, None])[:, 0] / scaled[:-1].exp().sum(-1)
        expected = [math.log(p) if on else 0.0 for p, on in zip([1.0, *by_hand.tolist()], row.mask, strict=True)]
        assert found[row.trajectory] == pytest.approx(expected, abs=1e-5)


def test_gradient_checkpointing_changes_nothing(model_dir):
    found = []
    for checkpointing in (False, True):
        with one_rank(model_dir, make_config(gradient_checkpointing=checkpointing)) as worker:
            found.append(gradients_of(worker, share_of(make_rows()))[1])
    assert_same(found[1], found[0], atol=1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_folder_loads_with_transformers_and_says_the_same(tmp_path, tied):
    rows = make_rows()
    source = write_model(tmp_path / "source", tied=tied)
    folder = tmp_path / "out" / "step-1"
    with one_rank(source) as worker:
        worker.save(str(folder))
        worker.update([share_of(rows)])
        worker.save(str(folder))
        expected = logprobs_by_row(worker, rows)
    assert [path.name for path in folder.parent.iterdir()] == ["step-1"]
    assert (folder / "tokenizer_config.json").read_text() == "{}"
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    assert (model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()) == tied
    for row in rows:
        ids = torch.tensor(row.ids)
        log_p = model(ids[None]).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        found = [x if on else 0.0 for x, on in zip([0.0, *log_p.tolist()], row.mask, strict=True)]
        assert found == pytest.approx(expected[row.trajectory], abs=1e-5)


def test_bf16_computes_sends_and_saves_in_bf16_and_keeps_fp32_weights(model_dir, tmp_path):
    rows = make_rows()
    config = make_config()
    half = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype="bfloat16"))
    with one_rank(model_dir) as worker:
        expected = worker.update([share_of(rows)])
    with one_rank(model_dir, half) as worker:
        metrics = worker.update([share_of(rows)])
        worker.save(str(tmp_path / "half"))
        assert {info.dtype for info in worker.manifest()} == {"bfloat16"}
        assert {whole.dtype for _, whole in full_tensors(worker.module)} == {torch.float32}
    assert metrics.ratio_max == 1.0
    assert metrics.entropy == pytest.approx(expected.entropy, abs=0.02)
    assert metrics.entropy != expected.entropy
    assert metrics.grad_norm == pytest.approx(expected.grad_norm, rel=0.05)
    assert AutoModelForCausalLM.from_pretrained(str(tmp_path / "half")).dtype == torch.bfloat16


def test_sharding_in_bf16_leaves_a_micro_batch_as_it_is(model_dir, monkeypatch):
    """FSDP's cast of inputs would round 0.7 to 0.69921875, and give each block segments of its own."""
    config = make_config()
    half = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype="bfloat16"))
    rows = [dataclasses.replace(row, temperature=0.7) for row in make_rows()]
    temperatures, segments = set(), []

    def spied(*arguments):
        temperatures.update(arguments[3].tolist())
        return chunked_head(*arguments)

    monkeypatch.setattr(head, "chunked_head", spied)
    with one_rank(model_dir, half) as worker:
        for block in worker.module.model.model.layers:
            block.register_forward_pre_hook(lambda _, __, given: segments.append(given["segments"]), with_kwargs=True)
        worker.score(worker._batches(share_of(rows)))
    assert torch.tensor(0.7).item() in temperatures
    assert temperatures <= {torch.tensor(0.7).item(), 1.0}, "that of tokens that fill a micro-batch up"
    assert len(segments) == 2
    assert segments[0] is segments[1]


@pytest.mark.parametrize("role", ["policy", "critic"])
def test_tokens_that_fill_a_micro_batch_up_change_nothing(model_dir, role):
    rows = make_rows()
    with one_rank(model_dir, role=role) as worker:
        (batch,) = share_of(rows).batches()
        expected = worker.module(batch)
        worker.module.multiple = 64
        filled = worker.module(batch)
    assert len(batch.ids_T) % 64
    for own, other in zip(expected, filled, strict=True):
        torch.testing.assert_close(own, other, atol=1e-6, rtol=1e-6)


def resident_after_new_lengths(model_dir, out):
    """The megabytes that a rank of bfloat16 takes after some updates, and after more of other lengths."""
    config = make_config(microbatch_tokens=BIG, head_chunk=1024)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype="bfloat16"))
    taken = []
    with one_rank(model_dir, config) as worker:
        for number in range(24):
            worker.update([share_of(make_rows((200 + number, 299 - 2 * number, 90 + number)))])
            if number in (7, 23):
                taken.append(psutil.Process().memory_info().rss / 2**20)
    out.put(taken)


def test_a_rank_in_half_precision_takes_no_more_memory_for_each_new_length(tmp_path):
    out = torch.multiprocessing.get_context("spawn").Queue()
    folder = write_model(tmp_path / "model", head_dim=64, vocab=8192)
    process = torch.multiprocessing.get_context("spawn").Process(target=resident_after_new_lengths, args=(folder, out))
    process.start()
    before, after = out.get(timeout=300)
    process.join(60)
    assert after - before < 40


def test_sent_weights_arrive_with_the_checksums_that_were_sent_and_tied_ones_once(worker):
    address = WeightAddress("127.0.0.1", free_port(), world_size=2)
    manifest = worker.manifest()
    assert "lm_head.weight" not in [info.name for info in manifest]
    arrived = {}

    def receive():
        group = make_group(address, 1, "cpu", connect_seconds=30, transfer_seconds=30)
        arrived.update({name: checksum(tensor) for name, tensor in receive_buckets(group, manifest)})

    receiver = threading.Thread(target=receive)
    receiver.start()
    worker.connect_weights(address)
    sent = worker.send_weights()
    receiver.join(30)
    assert sent == arrived == checksums(worker) == worker.checksums(), "the last without a receiver"


def test_sending_before_connecting_is_refused(worker):
    with pytest.raises(RuntimeError, match="connect_weights"):
        worker.send_weights()


def test_supervised_steps_lower_the_mean_negative_log_likelihood(worker):
    rows = make_rows()
    scored = logprobs_by_row(worker, rows)
    first = worker.sft(share_of(rows, budget=30), lr=1e-2)
    assert first.loss == pytest.approx(-sum(map(sum, scored.values())) / sampled(rows), abs=1e-5)
    losses = [worker.sft(share_of(rows), lr=1e-2).loss for _ in range(5)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < first.loss - 0.5


def test_the_optimizer_forgets_the_warm_start(model_dir):
    rows = make_rows()
    with one_rank(model_dir) as worker:
        worker.update([share_of(rows)])
        expected = checksums(worker)
    with one_rank(model_dir) as worker:
        # Averages of another loss, though the weights stay.
        worker.sft(share_of(rows), lr=0.0)
        worker.update([share_of(rows)])
        assert checksums(worker) == expected


def test_packing_puts_rows_of_equal_length_side_by_side():
    sizes = [len(row.ids) for row in share_of(make_rows()).micro_batches[0]]
    assert sizes == sorted(sizes, reverse=True)


def test_a_folder_that_is_no_model_is_refused_by_name(tmp_path):
    with pytest.raises(FileNotFoundError, match=str(tmp_path)), one_rank(tmp_path):
        pass
