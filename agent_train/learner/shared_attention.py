"""Attention where packed samples share prefixes: the tokens of a prefix are there once, and the samples that follow it all see them.

Elsewhere than on CUDA each stretch attends to itself, the samples of a prefix then attend to it in one call without a
mask, and the two answers are joined by their log-sum-exps. On CUDA it is FlexAttention with a mask of blocks.

Legend: T packed tokens, N tokens that follow a prefix, P tokens of it, n stretches of one length L, H query heads, K
key/value heads, D head size.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

Runs = Sequence[tuple[int, int]]
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class Trunk:
    """A prefix in the packed tokens: it lies at `start:fork`, and what the samples have beyond it at `fork:end`."""

    start: int
    fork: int
    end: int


def shared_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    runs: Runs,
    trunks: Sequence[Trunk],
    scaling: float | None = None,
    window: int | None = None,
    masks: dict[int | None, Any] | None = None,
) -> Tensor:
    """query (1, H, T, D), key and value (1, K, T, D) -> (1, T, H, D).

    `runs` are `(n, L)` of neighbouring stretches of equal length: each prefix is one, and so is what each sample has
    beyond it. `window` is the number of tokens that each sees, with itself. `masks` keeps the masks of FlexAttention
    for the next layer.
    """
    if query.is_cuda:
        return flex(query, key, value, runs, trunks, scaling, window, masks)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _Joined.apply(query[0], key[0], value[0], runs, trunks, scaling, window)[None]


def band(size: int, window: int | None, device: torch.device) -> Tensor:
    """Booleans (size, size): the tokens that each token sees of its stretch."""
    seen = torch.ones(size, size, dtype=torch.bool, device=device).tril()
    return seen if window is None else seen.triu(1 - window)


class _Joined(torch.autograd.Function):
    """Exact also in its gradient: a call's backward pass needs of the whole only the final answer and its log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any,
        query_HTD: Tensor,
        key_KTD: Tensor,
        value_KTD: Tensor,
        runs: Runs,
        trunks: Sequence[Trunk],
        scaling: float,
        window: int | None,
    ) -> Tensor:
        heads, size, width = query_HTD.shape
        out_THD = query_HTD.new_empty(size, heads, width)
        calls = list(_calls(runs, trunks, window, query_HTD))
        lse_HT: Tensor | None = None
        for call in calls:
            queries, keys = call.queries, call.keys
            answer, lse = _flash(
                queries.of(query_HTD),
                keys.of(key_KTD),
                keys.of(value_KTD),
                0.0,
                call.causal,
                attn_mask=call.mask,
                scale=scaling,
            )
            answer_NHD, lse_HN = answer.transpose(1, 2).flatten(0, 1), lse.transpose(0, 1).flatten(1)
            if lse_HT is None:
                lse_HT = lse_HN.new_empty(heads, size)
            if call.adds:
                own_HN = lse_HT[:, queries.place].clone()
                both_HN = torch.logaddexp(own_HN, lse_HN)
                share_NH1 = (lse_HN - both_HN).exp().T[..., None].to(out_THD.dtype)
                out_THD[queries.place].lerp_(answer_NHD, share_NH1)
                lse_HN = both_HN
            else:
                out_THD[queries.place] = answer_NHD
            lse_HT[:, queries.place] = lse_HN
        ctx.save_for_backward(query_HTD, key_KTD, value_KTD, out_THD, lse_HT)
        ctx.calls, ctx.scaling = calls, scaling
        return out_THD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query_HTD, key_KTD, value_KTD, out_THD, lse_HT = ctx.saved_tensors
        grad_HTD, out_HTD = grads[0].transpose(0, 1), out_THD.transpose(0, 1)
        found = [torch.empty_like(x.transpose(0, 1)).transpose(0, 1) for x in (query_HTD, key_KTD, value_KTD)]
        for call in ctx.calls:
            queries, keys = call.queries, call.keys
            parts = _flash_backward(
                queries.of(grad_HTD),
                queries.of(query_HTD),
                keys.of(key_KTD),
                keys.of(value_KTD),
                queries.of(out_HTD),
                queries.of(lse_HT[..., None])[..., 0].contiguous(),
                0.0,
                call.causal,
                attn_mask=call.mask,
                scale=ctx.scaling,
            )
            for whole, part, where in zip(found, parts, (queries, keys, keys), strict=True):
                # All stretches attend to themselves before any of them attends to a prefix.
                if call.adds:
                    where.of(whole).add_(part)
                else:
                    where.of(whole).copy_(part)
        return *found, None, None, None, None


@dataclass(frozen=True)
class _Where:
    """`n` neighbouring stretches of equal length at `place`."""

    place: slice
    n: int

    def of(self, x_HTD: Tensor) -> Tensor:
        """A view (n, H, L, D) of these tokens."""
        return x_HTD[:, self.place].unflatten(1, (self.n, -1)).transpose(0, 1)


@dataclass(frozen=True)
class _Call:
    """One call of attention. `adds`: to what the queries know of themselves already."""

    queries: _Where
    keys: _Where
    causal: bool
    mask: Tensor | None
    adds: bool


def _calls(runs: Runs, trunks: Sequence[Trunk], window: int | None, like: Tensor) -> Iterator[_Call]:
    start = 0
    for n, length in runs:
        where = _Where(slice(start, start + n * length), n)
        mask = None
        if window is not None and length > window:
            mask = _additive(band(length, window, like.device), like)
        yield _Call(where, where, mask is None, mask, False)
        start += n * length
    position_T = _positions(runs, trunks) if window is not None else None
    for trunk in trunks:
        mask = None
        if position_T is not None and window is not None:
            ahead_NP = position_T[trunk.fork : trunk.end, None] - position_T[trunk.start : trunk.fork]
            mask = _additive((ahead_NP < window).to(like.device), like)
        yield _Call(
            _Where(slice(trunk.fork, trunk.end), 1), _Where(slice(trunk.start, trunk.fork), 1), False, mask, True
        )


def _additive(seen: Tensor, like: Tensor) -> Tensor:
    """Finite, so that a token that sees nothing has an answer, whose share then is 0."""
    return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill(
        ~seen, torch.finfo(like.dtype).min / 2
    )


def _positions(runs: Runs, trunks: Sequence[Trunk]) -> Tensor:
    """position_T of each token in its sample."""
    position_T = torch.cat([torch.arange(length) for n, length in runs for _ in range(n)])
    for trunk in trunks:
        position_T[trunk.fork : trunk.end] += trunk.fork - trunk.start
    return position_T


def flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    runs: Runs,
    trunks: Sequence[Trunk],
    scaling: float | None,
    window: int | None,
    masks: dict[int | None, Any] | None,
    attend: Callable[..., Tensor] | None = None,
) -> Tensor:
    """`shared_attention` by FlexAttention. `attend` None is torch's `flex_attention`, compiled."""
    attend = attend or torch.compile(flex_attention)
    known = {} if masks is None else masks
    if window not in known:
        known[window] = block_mask(runs, trunks, window, query.device)
    out = attend(query, key, value, block_mask=known[window], scale=scaling, enable_gqa=query.shape[1] != key.shape[1])
    return out.transpose(1, 2)


def block_mask(runs: Runs, trunks: Sequence[Trunk], window: int | None, device: torch.device) -> Any:
    """FlexAttention's mask of the tree: a token sees its own stretch and the prefix before it, from itself backwards."""
    sizes = torch.tensor([length for n, length in runs for _ in range(n)])
    stretch_T = torch.arange(len(sizes)).repeat_interleave(sizes)
    prefix_T = stretch_T.clone()
    for trunk in trunks:
        prefix_T[trunk.fork : trunk.end] = stretch_T[trunk.start]
    position_T = _positions(runs, trunks).to(device)
    stretch_T, prefix_T = stretch_T.to(device), prefix_T.to(device)

    def sees(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        same = (stretch_T[q] == stretch_T[k]) | (prefix_T[q] == stretch_T[k])
        near = (k <= q) if window is None else (k <= q) & (position_T[q] - position_T[k] < window)
        return same & near

    size = len(stretch_T)
    # Compiled, it makes no T x T mask on its way to the blocks.
    return create_block_mask(sees, None, None, size, size, device=str(device), _compile=device.type == "cuda")
