"""The optimizers by name, and blocks that are compiled."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from learner_cases import assert_same, gradients_of, make_config, make_rows, one_rank, write_model
from torch import nn

from agent_train.learner.fsdp import UNCOMPILED, blocks_of, compile_blocks, load_policy
from agent_train.learner.parallel import deal_to_ranks
from agent_train.learner.sequence_parallel import ULYSSES, SequenceParallelGroup, spread_over
from agent_train.learner.state import make_optimizer, set_lr


def settings_of(**learner):
    return make_config(lr=0.5, **learner).learner


def test_frozen_weights_have_no_place_in_the_optimizer():
    layer = nn.Linear(2, 3)
    layer.bias.requires_grad_(False)
    optimizer = make_optimizer(layer.named_parameters(), settings_of())
    assert [len(group["params"]) for group in optimizer.param_groups] == [1]


def test_weight_decay_leaves_norms_and_biases_alone():
    """Biases of experts too, which lie in one matrix. Without a gradient, decay is all that a step does."""
    model = nn.ModuleDict({"layer": nn.Linear(2, 3), "norm": nn.LayerNorm(3)})
    model.register_parameter("experts_bias", nn.Parameter(torch.ones(2, 3)))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = make_optimizer(model.named_parameters(), settings_of(weight_decay=0.1))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert {name for name, p in model.named_parameters() if not torch.equal(p, before[name])} == {"layer.weight"}
    torch.testing.assert_close(model["layer"].weight, before["layer.weight"] * (1 - 0.5 * 0.1))


def test_the_learning_rate_is_set_also_where_the_optimizer_keeps_it_as_a_tensor():
    weight = nn.Parameter(torch.ones(2))
    for lr in (0.5, torch.tensor(0.5)):
        optimizer = torch.optim.AdamW([weight], lr=lr)
        kept = optimizer.param_groups[0]["lr"]
        set_lr(optimizer, 0.25)
        assert float(optimizer.param_groups[0]["lr"]) == 0.25
        assert not isinstance(kept, torch.Tensor) or optimizer.param_groups[0]["lr"] is kept


def test_a_package_that_is_missing_is_said(monkeypatch):
    weight = [("weight", nn.Parameter(torch.ones(2)))]
    monkeypatch.setattr("agent_train.learner.state.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs torchao: pip install torchao"):
        make_optimizer(weight, settings_of(optimizer="adamw8bit"))


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
def test_eight_bits_learn_about_the_same(tmp_path):
    share, said = deal_to_ranks(make_rows(), settings_of())[0], {}
    for name in ("adamw", "adamw8bit"):
        with one_rank(write_model(tmp_path), make_config(optimizer=name)) as worker:
            worker.update([share])
            worker.update([share])
            said[name] = torch.tensor([n for packed in worker.logprobs(share) for row in packed for n in row])
    torch.testing.assert_close(said["adamw8bit"], said["adamw"], atol=0.05, rtol=0)


def test_attention_stays_out_of_compiled_blocks_where_ranks_share_the_tokens(tmp_path):
    two = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    policy = load_policy(write_model(tmp_path), 64)
    compile_blocks(policy.model, blocks_of(policy.model))
    spread_over(policy, SequenceParallelGroup(two, two))
    assert policy.model.config._attn_implementation == UNCOMPILED
    plain = load_policy(write_model(tmp_path), 64)
    spread_over(plain, SequenceParallelGroup(two, two))
    assert plain.model.config._attn_implementation == ULYSSES


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_compiled_blocks_have_the_same_gradients(tmp_path):
    found = []
    for compiled in (False, True):
        config = make_config(compile=compiled, gradient_checkpointing=True)
        with one_rank(write_model(tmp_path), config) as worker:
            found.append(gradients_of(worker, deal_to_ranks(make_rows(), config.learner)[0]))
    (plain, expected), (compiled, gradients) = found
    assert compiled.loss == pytest.approx(plain.loss, abs=1e-6)
    assert_same(gradients, expected, 2e-6)
