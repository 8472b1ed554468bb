"""The chunked head equals the dense one, and each token is predicted from where its row says."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma4Config, PretrainedConfig

from agent_train.data.packing import batch_of
from agent_train.data.samples import TrainingSample
from agent_train.learner.head import PackedPolicy, chunked_head

TOKENS, HIDDEN, VOCAB = 23, 3, 31


def head_inputs(dtype=torch.float32, scale=1.0):
    torch.manual_seed(0)
    hidden = (scale * torch.randn(TOKENS, HIDDEN)).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(VOCAB, (TOKENS,)), torch.rand(TOKENS) + 0.5


def dense_head(hidden, weight, targets, temperature):
    logits = hidden @ weight.T
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_p = (logits / temperature[:, None]).log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@given(
    chunk=st.integers(1, 30),
    vocab_chunk=st.integers(0, 40),
    scale=st.sampled_from([0.1, 1.0, 30.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
@settings(deadline=None, max_examples=30)
def test_chunked_head_equals_the_dense_head_with_gradients(chunk, vocab_chunk, scale, dtype):
    hidden, weight, targets, temperature = head_inputs(dtype, scale)
    up_logprobs, up_entropy = torch.randn(TOKENS), torch.randn(TOKENS)
    found = {}
    for name, head in {"dense": dense_head, "chunked": lambda *a: chunked_head(*a, chunk, vocab_chunk)}.items():
        logprobs, entropy = head(hidden, weight, targets, temperature)
        assert logprobs.dtype == entropy.dtype == dtype
        loss = (logprobs * up_logprobs).sum() + (entropy * up_entropy).sum()
        found[name] = (logprobs, entropy, *torch.autograd.grad(loss, (hidden, weight)))
    for dense, chunked in zip(found["dense"], found["chunked"], strict=True):
        atol = 1e-5 * max(1.0, scale) if dtype == torch.float32 else 1e-11
        torch.testing.assert_close(chunked, dense, atol=atol, rtol=atol)


@pytest.mark.parametrize("vocab_chunk", [0, 4])
def test_gradients_are_those_of_small_differences(vocab_chunk):
    hidden, weight, targets, temperature = (x[:6] for x in head_inputs(torch.float64))
    inputs = [x.detach().requires_grad_() for x in (hidden, weight)]
    assert torch.autograd.gradcheck(
        lambda hidden, weight: chunked_head(hidden, weight, targets % 6, temperature, 4, vocab_chunk), inputs
    )


@pytest.mark.parametrize("vocab_chunk", [0, 7])
@pytest.mark.parametrize("trained", [0, 1])
def test_what_is_frozen_costs_no_gradient_and_changes_none(trained, vocab_chunk):
    hidden, weight, targets, temperature = head_inputs()
    whole = torch.autograd.grad(chunked_head(hidden, weight, targets, temperature, 4)[0].sum(), (hidden, weight))
    frozen = [x if place == trained else x.detach() for place, x in enumerate((hidden, weight))]
    logprobs, _ = chunked_head(*frozen, targets, temperature, 4, vocab_chunk)
    (grad,) = torch.autograd.grad(logprobs.sum(), frozen[trained])
    torch.testing.assert_close(grad, whole[trained], atol=1e-5, rtol=1e-5)


def test_a_second_backward_pass_gives_the_same():
    hidden, weight, targets, temperature = head_inputs()
    logprobs, entropy = chunked_head(hidden, weight, targets, temperature, 4)
    loss = logprobs.sum() + entropy.sum()
    first, second = (torch.autograd.grad(loss, (hidden, weight), retain_graph=True) for _ in range(2))
    torch.testing.assert_close(second, first, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("which", [0, 1])
def test_either_output_alone_has_its_gradient(which):
    hidden, weight, targets, temperature = head_inputs()
    grads = [
        torch.autograd.grad(outputs[which].sum(), (hidden, weight))
        for outputs in (
            dense_head(hidden, weight, targets, temperature),
            chunked_head(hidden, weight, targets, temperature, 4),
        )
    ]
    torch.testing.assert_close(grads[1], grads[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("vocab_chunk", [0, 7])
def test_bf16_logits_are_normalised_in_fp32(vocab_chunk):
    hidden, weight, targets, temperature = head_inputs(torch.bfloat16)
    logprobs, _ = chunked_head(hidden, weight, targets, temperature, 4, vocab_chunk)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, dense_head(hidden, weight, targets, temperature)[0], atol=1e-5, rtol=1e-5)


def test_no_target_gives_zero_gradients():
    hidden, weight, targets, temperature = head_inputs()
    logprobs, entropy = chunked_head(hidden[:0], weight, targets[:0], temperature[:0], 4)
    (logprobs.sum() + entropy.sum()).backward()
    assert not weight.grad.any()
    assert not hidden.grad.any()


@pytest.mark.parametrize("vocab_chunk", [0, 7])
def test_logits_of_all_tokens_never_exist_at_once_forwards_or_backwards(vocab_chunk):
    inputs = head_inputs()
    width = vocab_chunk or VOCAB
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            seen.extend(
                x.shape for x in [out] if isinstance(x, torch.Tensor) and x.ndim == 2 and x.shape[1] not in (1, HIDDEN)
            )
            return out

    with Watch():
        logprobs, entropy = chunked_head(*inputs, 4, vocab_chunk)
        (logprobs.sum() + entropy.sum()).backward()
    # Blocks of logits, the transposes of a block and of a part of the weight, and the two buffers.
    allowed = {(c, w) for c in (4, TOKENS % 4) for w in (width, VOCAB % width)}
    weights = {(HIDDEN, w) for w in (width, VOCAB % width)} | {(2, 4 * width)}
    assert len(seen) > 12
    assert set(seen) <= allowed | {(w, c) for c, w in allowed} | weights


class OneHotModel(nn.Module):
    """Answers token i with token i + 1, nearly surely, whatever came before."""

    def __init__(self, size):
        super().__init__()
        self.config = PretrainedConfig()
        self.head = nn.Linear(size, size, bias=False)
        self.head.weight = nn.Parameter(50.0 * torch.eye(size).roll(1, dims=0))

    def base_model(self, input_ids, **_):
        return SimpleNamespace(last_hidden_state=nn.functional.one_hot(input_ids, self.head.in_features).float())

    def get_output_embeddings(self):
        return self.head


def test_each_token_is_scored_by_the_position_before_it_in_its_own_row():
    policy = PackedPolicy(OneHotModel(10), head_chunk=2)
    rows = [
        TrainingSample([1, 2, 3, 4], [False, True, False, True], [0.0] * 4),
        TrainingSample([7, 8, 5], [False, True, True], [0.0] * 3),
    ]
    logprobs_T, entropy_T = policy(batch_of(rows))
    # The last token, 5 after 8, is the only one that the model does not foresee; unmasked tokens are 0.
    assert logprobs_T.tolist() == pytest.approx([0, 0, 0, 0, 0, 0, -50], abs=1e-4)
    assert entropy_T.tolist() == pytest.approx([0] * 7, abs=1e-4)


def test_temperature_divides_the_logits_of_its_own_row():
    policy = PackedPolicy(OneHotModel(4), head_chunk=2)
    policy.model.head.weight = nn.Parameter(torch.arange(16.0).reshape(4, 4) / 7)
    rows = [
        TrainingSample([0, 2], [False, True], [0.0] * 2, temperature=0.5),
        TrainingSample([0, 2], [False, True], [0.0] * 2),
    ]
    logprobs_T, _ = policy(batch_of(rows))
    logits = [0 / 7, 4 / 7, 8 / 7, 12 / 7]

    def by_hand(temperature):
        return logits[2] / temperature - math.log(sum(math.exp(x / temperature) for x in logits))

    assert logprobs_T.tolist() == pytest.approx([0, by_hand(0.5), 0, by_hand(1.0)], abs=1e-5)


def test_a_model_that_changes_its_logits_afterwards_is_refused():
    model = OneHotModel(4)
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(ValueError, match="final_logit_softcapping"):
        PackedPolicy(model, 4)


@pytest.mark.parametrize(("cap", "refused"), [(30.0, True), (None, False)])
def test_so_is_a_multimodal_model_whose_language_model_does(cap, refused):
    model = OneHotModel(4)
    model.config = Gemma4Config(text_config={"final_logit_softcapping": cap})
    assert not hasattr(model.config, "final_logit_softcapping")
    with pytest.raises(ValueError, match="final_logit_softcapping") if refused else nullcontext():
        PackedPolicy(model, 4)
