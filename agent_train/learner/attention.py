"""Causal attention over packed samples: each sees itself only, and no T x T mask is ever made.

transformers knows it as `PACKED` and hands `segments` through. On CUDA in half precision one variable-length kernel
does a whole micro-batch; elsewhere each run of equally long samples is one call of scaled dot-product attention.

Where samples share prefixes, the tokens of a prefix are there once. On CUDA it is FlexAttention. Elsewhere each stretch
attends to itself, what follows a prefix then attends to it without a mask, and the answers are joined by their
log-sum-exps.

Legend: T packed tokens, S samples, n stretches of one length L, N tokens that follow a prefix, P tokens of it, H query
heads, K key/value heads, D head size.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from inspect import signature
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from agent_train.algorithms.losses import single
from agent_train.data.packing import FILLER_ID, MicroBatch, Prefix

PACKED = "agentgym_packed"
MULTIPLE = 64
# Additions of some architectures that this function does not compute.
UNSUPPORTED = ("softcap", "s_aux", "head_mask", "position_bias")
# torch 2.11 takes fewer key than query heads without being told so, and later versions do not.
_GROUPED = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Trunk(NamedTuple):
    """A prefix in the packed tokens: it lies at `start:fork`, and what the samples have beyond it at `fork:end`."""

    start: int
    fork: int
    end: int


@dataclass(frozen=True)
class Segments:
    """The bounds of the samples in a packed micro-batch."""

    cu_seqlens: Tensor  # S+1 boundaries, int32, on the model's device
    longest: int  # length of the longest sample, with the prefix that it shares
    # `(n, L)` for each run of neighbouring stretches of equal length, in order. A stretch is a sample, a shared prefix,
    # or what a sample has beyond it.
    runs: tuple[tuple[int, int], ...]
    trunks: tuple[Trunk, ...] = ()  # the shared prefixes
    masks: dict[int | None, Any] = field(default_factory=dict, compare=False)  # FlexAttention's, by sliding window


def segments_of(lengths: tuple[int, ...], cu_seqlens: Tensor, prefixes: Sequence[Prefix] = ()) -> Segments:
    ends = [0, *accumulate(lengths)]
    trunks = [Trunk(ends[p.first], ends[p.first] + p.length, ends[p.first + p.samples]) for p in prefixes]
    stretches, longest = list(lengths), max(lengths)
    for prefix in reversed(prefixes):
        rest = stretches[prefix.first] - prefix.length
        longest = max(longest, prefix.length + max(lengths[prefix.first + 1 : prefix.first + prefix.samples]))
        stretches[prefix.first : prefix.first + 1] = [prefix.length, rest]
    runs = tuple((len(list(run)), length) for length, run in groupby(stretches))
    return Segments(cu_seqlens, longest, runs, tuple(trunks))


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    segments: Segments | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention in the form that transformers calls: query (1, H, T, D), key and value (1, K, T, D) -> (1, T, H, D)."""
    wrong = [name for name in UNSUPPORTED if kwargs.get(name) is not None]
    if segments is None or attention_mask is not None or dropout or query.shape[0] != 1 or wrong:
        found = ", ".join(wrong) or f"mask {attention_mask is not None}, dropout {dropout}, batch {query.shape[0]}"
        raise ValueError(
            f"packed attention in {type(module).__name__} needs segments, one packed sequence, no mask, no dropout ({found})"
        )
    window = sliding_window if sliding_window is not None and sliding_window < segments.longest else None
    if segments.trunks and query.is_cuda:
        return flex(query, key, value, segments, scaling, window), None
    if segments.trunks or on_cpu_in_half(query.device, query.dtype):
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        return _Joined.apply(query[0], key[0], value[0], segments, scaling, window)[None], None
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        query_THD, key_TKD, value_TKD = (x[0].transpose(0, 1) for x in (query, key, value))
        bounds = (segments.cu_seqlens, segments.cu_seqlens, segments.longest, segments.longest)
        # A window of W counts the token itself; the kernel counts those to its left. -1 is all of them.
        seen = (-1 if window is None else window - 1, 0)
        out_THD = varlen_attn(query_THD, key_TKD, value_TKD, *bounds, scale=scaling, window_size=seen, **_GROUPED)
        return out_THD.unsqueeze(0), None
    return _by_runs(query, key, value, segments, scaling, window), None


def on_cpu_in_half(device: torch.device, dtype: torch.dtype) -> bool:
    """True if oneDNN computes matrix products: it makes kernels for each new shape, and keeps them.

    Attention has as many shapes as samples have lengths, so `_Joined` computes it there, in fp32, which takes as long.
    Other layers get multiples of `MULTIPLE` tokens.
    """
    return device.type == "cpu" and dtype in (torch.bfloat16, torch.float16)


def _by_runs(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None, window: int | None
) -> Tensor:
    sizes = [n * length for n, length in segments.runs]
    parts = []
    for (n, length), *run in zip(segments.runs, *(x[0].split(sizes, dim=1) for x in (query, key, value)), strict=True):
        query_nHLD, key_nKLD, value_nKLD = (x.unflatten(1, (n, -1)).transpose(0, 1) for x in run)
        narrow = window is not None and length > window
        out_nHLD = scaled_dot_product_attention(
            query_nHLD,
            key_nKLD,
            value_nKLD,
            attn_mask=band(length, window, query.device) if narrow else None,
            is_causal=not narrow,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        parts.append(out_nHLD.transpose(1, 2).flatten(0, 1))
    return torch.cat(parts).unsqueeze(0)


def band(size: int, window: int | None, device: torch.device) -> Tensor:
    """Booleans (size, size): the tokens that each token sees of its stretch."""
    seen = torch.ones(size, size, dtype=torch.bool, device=device).tril()
    return seen if window is None else seen.triu(1 - window)


class _Joined(torch.autograd.Function):
    """Attention to shared prefixes, exact also in its gradient: that needs of the whole only the final answer and its log-sum-exp.

    It computes in fp32 at least, and keeps for the backward pass what it was given, in its own precision.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query_HTD: Tensor,
        key_KTD: Tensor,
        value_KTD: Tensor,
        segments: Segments,
        scaling: float,
        window: int | None,
    ) -> Tensor:
        given_HTD, dtype = (query_HTD, key_KTD, value_KTD), query_HTD.dtype
        query_HTD, key_KTD, value_KTD = map(single, given_HTD)
        heads, size, width = query_HTD.shape
        out_THD = query_HTD.new_empty(size, heads, width)
        calls = list(_calls(segments, window, query_HTD))
        lse_HT: Tensor | None = None
        for call in calls:
            given = (call.queries_of(query_HTD), call.keys_of(key_KTD), call.keys_of(value_KTD))
            answer, lse = _flash(*given, 0.0, call.causal, attn_mask=call.mask, scale=scaling)
            answer_NHD, lse_HN = answer.transpose(1, 2).flatten(0, 1), lse.transpose(0, 1).flatten(1)
            if lse_HT is None:
                lse_HT = lse_HN.new_empty(heads, size)
            if call.adds:
                own_HN = lse_HT[:, call.queries].clone()
                both_HN = torch.logaddexp(own_HN, lse_HN)
                share_NH1 = (lse_HN - both_HN).exp().T[..., None].to(out_THD.dtype)
                out_THD[call.queries].lerp_(answer_NHD, share_NH1)
                lse_HN = both_HN
            else:
                out_THD[call.queries] = answer_NHD
            lse_HT[:, call.queries] = lse_HN
        out_THD = out_THD.to(dtype)
        ctx.save_for_backward(*given_HTD, out_THD, lse_HT)
        ctx.calls, ctx.scaling = calls, scaling
        return out_THD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *saved, lse_HT = ctx.saved_tensors
        query_HTD, key_KTD, value_KTD, out_THD = map(single, saved)
        grad_HTD, out_HTD = single(grads[0]).transpose(0, 1), out_THD.transpose(0, 1)
        found = [torch.empty_like(x.transpose(0, 1)).transpose(0, 1) for x in (query_HTD, key_KTD, value_KTD)]
        for call in ctx.calls:
            parts = _flash_backward(
                call.queries_of(grad_HTD),
                call.queries_of(query_HTD),
                call.keys_of(key_KTD),
                call.keys_of(value_KTD),
                call.queries_of(out_HTD),
                call.queries_of(lse_HT[..., None])[..., 0].contiguous(),
                0.0,
                call.causal,
                attn_mask=call.mask,
                scale=ctx.scaling,
            )
            for whole, part, place in zip(found, parts, (call.queries_of, call.keys_of, call.keys_of), strict=True):
                # All stretches attend to themselves before any of them attends to a prefix.
                if call.adds:
                    place(whole).add_(part)
                else:
                    place(whole).copy_(part)
        return *(x.to(grads[0].dtype) for x in found), None, None, None


class _AttentionCall(NamedTuple):
    """One call of attention: `n` neighbouring stretches to themselves, or what follows a prefix to it."""

    n: int
    queries: slice
    keys: slice
    mask: Tensor | None
    adds: bool  # to what the queries know of themselves already

    @property
    def causal(self) -> bool:
        return self.mask is None and not self.adds

    def queries_of(self, x_HTD: Tensor) -> Tensor:
        """A view (n, H, L, D) of the tokens that ask."""
        return x_HTD[:, self.queries].unflatten(1, (self.n, -1)).transpose(0, 1)

    def keys_of(self, x_KTD: Tensor) -> Tensor:
        return x_KTD[:, self.keys].unflatten(1, (self.n, -1)).transpose(0, 1)


def _calls(segments: Segments, window: int | None, like: Tensor) -> Iterator[_AttentionCall]:
    def additive(seen: Tensor) -> Tensor:
        """Finite, so that a token that sees nothing has an answer, whose share then is 0."""
        zeros = torch.zeros(seen.shape, dtype=like.dtype, device=like.device)
        return zeros.masked_fill(~seen, torch.finfo(like.dtype).min / 2)

    start = 0
    for n, length in segments.runs:
        place = slice(start, start + n * length)
        narrow = window is not None and length > window
        yield _AttentionCall(n, place, place, additive(band(length, window, like.device)) if narrow else None, False)
        start += n * length
    position_T = _positions(segments)
    for trunk in segments.trunks:
        mask = None
        if window is not None:
            ahead_NP = position_T[trunk.fork : trunk.end, None] - position_T[trunk.start : trunk.fork]
            mask = additive((ahead_NP < window).to(like.device))
        yield _AttentionCall(1, slice(trunk.fork, trunk.end), slice(trunk.start, trunk.fork), mask, True)


def _positions(segments: Segments) -> Tensor:
    """position_T of each token in its sample."""
    position_T = torch.cat([torch.arange(length) for n, length in segments.runs for _ in range(n)])
    for trunk in segments.trunks:
        position_T[trunk.fork : trunk.end] += trunk.fork - trunk.start
    return position_T


def flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    scaling: float | None,
    window: int | None,
    attend: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Attention to shared prefixes by FlexAttention. `attend` None is torch's `flex_attention`, compiled once for all sizes."""
    attend = attend or torch.compile(flex_attention, dynamic=True)
    if window not in segments.masks:
        segments.masks[window] = block_mask(segments, window, query.device)
    mask, fewer_keys = segments.masks[window], query.shape[1] != key.shape[1]
    return attend(query, key, value, block_mask=mask, scale=scaling, enable_gqa=fewer_keys).transpose(1, 2)


def block_mask(segments: Segments, window: int | None, device: torch.device) -> Any:
    """FlexAttention's mask of the tree: a token sees its own stretch and the prefix before it, from itself backwards."""
    sizes = torch.tensor([length for n, length in segments.runs for _ in range(n)])
    stretch_T = torch.arange(len(sizes)).repeat_interleave(sizes)
    prefix_T = stretch_T.clone()
    for trunk in segments.trunks:
        prefix_T[trunk.fork : trunk.end] = stretch_T[trunk.start]
    stretch_T, prefix_T, position_T = (x_T.to(device) for x_T in (stretch_T, prefix_T, _positions(segments)))

    def sees(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        same = (stretch_T[q] == stretch_T[k]) | (prefix_T[q] == stretch_T[k])
        near = (k <= q) if window is None else (k <= q) & (position_T[q] - position_T[k] < window)
        return same & near

    size = len(stretch_T)
    # Compiled, it makes no T x T mask on its way to the blocks.
    return create_block_mask(sees, None, None, size, size, device=str(device), _compile=device.type == "cuda")


def hidden_states(model: Any, batch: MicroBatch, multiple: int = 1) -> Tensor:
    """hidden_TD of a micro-batch, behind the last layer of a transformers model with packed attention.

    The model gets a multiple of `multiple` tokens: behind the micro-batch's own lies a sample of fillers.
    """
    size, lengths, bounds = len(batch.ids_T), batch.lengths, batch.cu_seqlens
    ids_T, positions_T = batch.ids_T, batch.positions_T
    if more := -size % multiple:
        ids_T = pad(ids_T, (0, more), value=FILLER_ID)
        positions_T = torch.cat([positions_T, torch.arange(more, device=ids_T.device)])
        lengths, bounds = (*lengths, more), pad(bounds, (0, 1), value=size + more)
    hidden_TD: Tensor = model.base_model(
        input_ids=ids_T[None],
        position_ids=positions_T[None],
        use_cache=False,
        segments=segments_of(lengths, bounds, batch.prefixes),
    ).last_hidden_state[0]
    return hidden_TD[:size]


AttentionInterface.register(PACKED, packed_attention)
