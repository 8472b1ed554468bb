"""The chunked head equals the dense one, and packed attention equals attention row by row."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from agent_train.learner.attention import packed_attention, segments_of
from agent_train.learner.head import PackedPolicy, chunked_head
from agent_train.packing import batch_of
from agent_train.rows import Row

TOKENS, HIDDEN, VOCAB = 23, 3, 31


def head_inputs(dtype=torch.float32):
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(VOCAB, (TOKENS,)), torch.rand(TOKENS) + 0.5


def dense_head(hidden, weight, targets, temperature):
    log_p = ((hidden @ weight.T).float() / temperature[:, None]).log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("chunk", [1, 5, 23, 100])
def test_chunked_head_equals_the_dense_head_with_gradients(chunk):
    hidden, weight, targets, temperature = head_inputs()
    up_logprobs, up_entropy = torch.randn(TOKENS), torch.randn(TOKENS)
    found = {}
    for name, head in {"dense": dense_head, "chunked": lambda *a: chunked_head(*a, chunk)}.items():
        logprobs, entropy = head(hidden, weight, targets, temperature)
        loss = (logprobs * up_logprobs).sum() + (entropy * up_entropy).sum()
        found[name] = (logprobs, entropy, *torch.autograd.grad(loss, (hidden, weight)))
    for dense, chunked in zip(found["dense"], found["chunked"], strict=True):
        torch.testing.assert_close(chunked, dense, atol=1e-5, rtol=1e-5)


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


def test_bf16_logits_are_normalised_in_fp32():
    hidden, weight, targets, temperature = head_inputs(torch.bfloat16)
    logprobs, _ = chunked_head(hidden, weight, targets, temperature, 4)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, dense_head(hidden, weight, targets, temperature)[0], atol=1e-5, rtol=1e-5)


def test_no_target_gives_zero_gradients():
    hidden, weight, targets, temperature = head_inputs()
    logprobs, entropy = chunked_head(hidden[:0], weight, targets[:0], temperature[:0], 4)
    (logprobs.sum() + entropy.sum()).backward()
    assert not weight.grad.any()
    assert not hidden.grad.any()


def test_logits_of_all_tokens_never_exist_at_once_forwards_or_backwards():
    inputs = head_inputs()
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            seen.extend(
                x.shape[0] for x in [out] if isinstance(x, torch.Tensor) and x.ndim == 2 and x.shape[1] == VOCAB
            )
            return out

    with Watch():
        logprobs, entropy = chunked_head(*inputs, 4)
        (logprobs.sum() + entropy.sum()).backward()
    assert len(seen) > 12
    assert max(seen) == 4


class OneHotModel(nn.Module):
    """Answers token i with token i + 1, nearly surely, whatever came before."""

    def __init__(self, size):
        super().__init__()
        self.config = SimpleNamespace()
        self.head = nn.Linear(size, size, bias=False)
        self.head.weight = nn.Parameter(50.0 * torch.eye(size).roll(1, dims=0))

    def base_model(self, input_ids, **_):
        return SimpleNamespace(last_hidden_state=nn.functional.one_hot(input_ids, self.head.in_features).float())

    def get_output_embeddings(self):
        return self.head


def test_each_token_is_scored_by_the_position_before_it_in_its_own_row():
    policy = PackedPolicy(OneHotModel(10), head_chunk=2)
    rows = [Row([1, 2, 3, 4], [False, True, False, True], [0.0] * 4), Row([7, 8, 5], [False, True, True], [0.0] * 3)]
    logprobs_T, entropy_T = policy(batch_of(rows))
    # The last token, 5 after 8, is the only one that the model does not foresee; unmasked tokens are 0.
    assert logprobs_T.tolist() == pytest.approx([0, 0, 0, 0, 0, 0, -50], abs=1e-4)
    assert entropy_T.tolist() == pytest.approx([0] * 7, abs=1e-4)


def test_temperature_divides_the_logits_of_its_own_row():
    policy = PackedPolicy(OneHotModel(4), head_chunk=2)
    policy.model.head.weight = nn.Parameter(torch.arange(16.0).reshape(4, 4) / 7)
    rows = [Row([0, 2], [False, True], [0.0] * 2, temperature=0.5), Row([0, 2], [False, True], [0.0] * 2)]
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


def attention_inputs(lengths, heads=4, kv_heads=2, size=8):
    torch.manual_seed(0)
    total = sum(lengths)
    query, key, value = (torch.randn(1, n, total, size, requires_grad=True) for n in (heads, kv_heads, kv_heads))
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return query, key, value, segments_of(tuple(lengths), cu_seqlens)


@pytest.mark.parametrize("lengths", [[5], [1, 1], [7, 7, 7], [9, 4, 4, 2], [3, 8, 3]])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_packed_attention_equals_causal_attention_row_by_row(lengths, kv_heads):
    query, key, value, segments = attention_inputs(lengths, kv_heads=kv_heads)
    packed, _ = packed_attention(nn.Identity(), query, key, value, None, scaling=0.3, segments=segments)
    parts = []
    for q, k, v in zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True):
        keys, values = (x.repeat_interleave(query.shape[1] // kv_heads, dim=1) for x in (k, v))
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
        parts.append(scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=0.3).transpose(1, 2))
    expected = torch.cat(parts, dim=1)
    torch.testing.assert_close(packed, expected, atol=1e-6, rtol=1e-6)
    up = torch.randn_like(expected)
    found, wanted = (torch.autograd.grad((out * up).sum(), (query, key, value)) for out in (packed, expected))
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("wrong", [{"segments": None}, {"dropout": 0.1}, {"softcap": 30.0}, {"sliding_window": 3}])
def test_what_packed_attention_cannot_compute_it_refuses(wrong):
    query, key, value, segments = attention_inputs([5, 4])
    with pytest.raises(ValueError, match=r"attention|sliding window"):
        packed_attention(nn.Identity(), query, key, value, None, **{"segments": segments, **wrong})
