"""Packed attention equals attention row by row: with windows, and where rows share prefixes."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention.flex_attention import create_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from agent_train.data.packing import Prefix
from agent_train.learner.attention import block_mask, flex, packed_attention, segments_of

# (prefix, what each row has beyond it): rows by themselves are trees of one without a prefix.
FORESTS = [
    [(4, [3, 3, 3])],
    [(1, [1, 2])],
    [(0, [5]), (7, [2, 6, 2]), (0, [4]), (3, [1, 1])],
    [(12, [3, 5]), (5, [9, 9, 2, 2])],
]


def draw(size, heads=4, kv_heads=2, width=8, dtype=torch.float64):
    torch.manual_seed(0)
    return [torch.randn(1, n, size, width, dtype=dtype).requires_grad_() for n in (heads, kv_heads, kv_heads)]


def cu_seqlens_of(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def segments_of_forest(forest):
    """Segments as packing makes them, and where the tokens of each row lie."""
    lengths, prefixes, rows, start = [], [], [], 0
    for prefix, branches in forest:
        if prefix:
            prefixes.append(Prefix(len(lengths), len(branches), prefix))
        trunk = list(range(start, start + prefix))
        for number, branch in enumerate(branches):
            begin = start + (prefix if number == 0 else 0)
            rows.append(trunk + list(range(begin, begin + branch)))
            lengths.append(branch + (prefix if number == 0 else 0))
            start += lengths[-1]
    return segments_of(tuple(lengths), cu_seqlens_of(lengths), prefixes), rows


def row_by_row(query, key, value, rows, scaling=0.3, window=None):
    """Each row's tokens taken out whole, attended to with a mask of their own, and put back."""
    out = torch.zeros(query.shape[2], query.shape[1], query.shape[3], dtype=query.dtype)
    repeat = query.shape[1] // key.shape[1]
    for row in rows:
        q, k, v = query[:, :, row], *(x[:, :, row].repeat_interleave(repeat, dim=1) for x in (key, value))
        seen = torch.ones(len(row), len(row), dtype=torch.bool).tril()
        seen = seen if window is None else seen.triu(1 - window)
        out = out.index_copy(
            0, torch.tensor(row), scaled_dot_product_attention(q, k, v, seen, scale=scaling)[0].transpose(0, 1)
        )
    return out[None]


def assert_equal_with_gradients(found, expected, inputs, atol=1e-10):
    torch.testing.assert_close(found, expected, atol=atol, rtol=atol)
    up = torch.randn_like(expected)
    grads, wanted = (torch.autograd.grad((out * up).sum(), inputs) for out in (found, expected))
    torch.testing.assert_close(grads, wanted, atol=atol, rtol=atol)


@pytest.mark.parametrize("window", [None, 1, 3, 8])
@pytest.mark.parametrize("lengths", [[5], [1, 1], [7, 7, 7], [9, 4, 4, 2], [3, 8, 3]])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_packed_attention_equals_causal_attention_row_by_row(lengths, kv_heads, window):
    inputs = draw(sum(lengths), kv_heads=kv_heads)
    segments, rows = segments_of_forest([(0, [n]) for n in lengths])
    packed, _ = packed_attention(nn.Identity(), *inputs, None, scaling=0.3, sliding_window=window, segments=segments)
    assert_equal_with_gradients(packed, row_by_row(*inputs, rows, window=window), inputs)


@pytest.mark.parametrize("window", [None, 1, 3, 8])
@pytest.mark.parametrize("forest", FORESTS)
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_rows_that_share_a_prefix_see_it_as_if_it_were_theirs(forest, kv_heads, window):
    segments, rows = segments_of_forest(forest)
    inputs = draw(int(segments.cu_seqlens[-1]), kv_heads=kv_heads)
    packed, _ = packed_attention(nn.Identity(), *inputs, None, scaling=0.3, sliding_window=window, segments=segments)
    assert_equal_with_gradients(packed, row_by_row(*inputs, rows, window=window), inputs)


FOREST = st.lists(
    st.one_of(
        st.tuples(st.integers(1, 9), st.lists(st.integers(1, 7), min_size=2, max_size=4)),
        st.tuples(st.just(0), st.lists(st.integers(1, 9), min_size=1, max_size=1)),
    ),
    min_size=1,
    max_size=4,
)


@given(forest=FOREST, window=st.sampled_from([None, 2, 5]))
@settings(deadline=None, max_examples=30)
def test_any_forest_of_rows_equals_its_rows(forest, window):
    segments, rows = segments_of_forest(forest)
    inputs = draw(int(segments.cu_seqlens[-1]))
    packed, _ = packed_attention(nn.Identity(), *inputs, None, sliding_window=window, segments=segments)
    assert_equal_with_gradients(packed, row_by_row(*inputs, rows, scaling=8**-0.5, window=window), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shared_prefixes_in_the_types_that_models_compute_in(dtype):
    segments, rows = segments_of_forest(FORESTS[2])
    inputs = draw(int(segments.cu_seqlens[-1]), dtype=dtype)
    packed, _ = packed_attention(nn.Identity(), *inputs, None, scaling=0.3, segments=segments)
    exact = row_by_row(*(x.double() for x in inputs), rows)
    assert packed.dtype == dtype
    torch.testing.assert_close(
        packed.double(),
        exact,
        **({"atol": 1e-6, "rtol": 1e-6} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}),
    )


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("forest", FORESTS)
def test_the_block_mask_for_gpus_lets_each_token_see_its_own_row(forest, window):
    segments, rows = segments_of_forest(forest)
    size = int(segments.cu_seqlens[-1])
    seen = torch.zeros(size, size, dtype=torch.bool)
    for row in rows:
        for place, token in enumerate(row):
            seen[token, row[max(0, place + 1 - (window or size)) : place + 1]] = True
    mask = block_mask(segments, window, torch.device("cpu"))
    assert torch.equal(create_mask(mask.mask_mod, None, None, size, size, "cpu")[0, 0], seen)


@pytest.mark.filterwarnings("ignore")
def test_flex_attention_with_that_mask_gives_the_same_and_keeps_it():
    """Not compiled, and forwards alone: the rest torch has on GPUs only."""
    segments, rows = segments_of_forest(FORESTS[2])
    inputs = [x.detach().float() for x in draw(int(segments.cu_seqlens[-1]))]
    found = flex(*inputs, segments, 0.3, None, flex_attention)
    torch.testing.assert_close(found, row_by_row(*inputs, rows), atol=1e-5, rtol=1e-5)
    assert list(segments.masks) == [None]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("forest", [*FORESTS, [(0, [9]), (0, [4]), (0, [4]), (0, [300])], [(200, [90, 150, 1])]])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_the_kernels_of_a_gpu_give_the_same_with_gradients(forest, kv_heads, window):
    segments, rows = segments_of_forest(forest)
    inputs = draw(int(segments.cu_seqlens[-1]), kv_heads=kv_heads, width=64, dtype=torch.bfloat16)
    expected = row_by_row(*(x.double() for x in inputs), rows, window=window)
    there = dataclasses.replace(segments, cu_seqlens=segments.cu_seqlens.cuda())
    given = [x.detach().cuda().requires_grad_() for x in inputs]
    found, _ = packed_attention(nn.Identity(), *given, None, scaling=0.3, sliding_window=window, segments=there)
    up = torch.randn_like(expected)
    grads = torch.autograd.grad((found.cpu().double() * up).sum(), given)
    wanted = torch.autograd.grad((expected * up).sum(), inputs)
    for one, other in zip([found, *grads], [expected, *wanted], strict=True):
        error = (one.cpu().double() - other.double()).norm() / other.double().norm()
        assert error < 0.01


@pytest.mark.parametrize("wrong", [{"segments": None}, {"dropout": 0.1}, {"softcap": 30.0}])
def test_what_packed_attention_cannot_compute_it_refuses(wrong):
    segments, _ = segments_of_forest([(0, [5]), (0, [4])])
    with pytest.raises(ValueError, match="attention"):
        packed_attention(nn.Identity(), *draw(9), None, **{"segments": segments, **wrong})
