"""Causal attention over packed samples: each sees itself only, and no T x T mask is ever made.

transformers knows it as `PACKED`; a model loaded with that name asks for no mask and hands `segments` through. On CUDA
in half precision one variable-length kernel does a whole micro-batch; elsewhere each run of equally long samples is one
call of scaled dot-product attention. Where samples share prefixes, `shared_attention` does it.

Legend: T packed tokens, S samples, n stretches of one length L, H query heads, K key/value heads, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from agent_train.data.packing import MicroBatch, Prefix
from agent_train.learner.shared_attention import Trunk, band, shared_attention

PACKED = "agentgym_packed"
# Additions of some architectures that this function does not compute.
UNSUPPORTED = ("softcap", "s_aux", "head_mask", "position_bias")


@dataclass(frozen=True)
class Segments:
    """The bounds of the samples in a packed micro-batch."""

    cu_seqlens: Tensor  # S+1 boundaries, int32, on the model's device
    longest: int  # length of the longest sample, with the prefix that it shares
    # `(n, L)` for each run of neighbouring stretches of equal length, in order. A stretch is a sample, a shared prefix,
    # or what a sample has beyond it.
    runs: tuple[tuple[int, int], ...]
    trunks: tuple[Trunk, ...] = ()  # the shared prefixes
    # of FlexAttention, by sliding window, once one is made
    masks: dict[int | None, Any] = field(default_factory=dict, compare=False)


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
    if segments.trunks:
        return shared_attention(
            query, key, value, segments.runs, segments.trunks, scaling, window, segments.masks
        ), None
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return _varlen(query, key, value, segments, scaling, window), None
    return _by_runs(query, key, value, segments, scaling, window), None


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None, window: int | None
) -> Tensor:
    query_THD, key_TKD, value_TKD = (x[0].transpose(0, 1) for x in (query, key, value))
    out_THD = varlen_attn(
        query_THD,
        key_TKD,
        value_TKD,
        segments.cu_seqlens,
        segments.cu_seqlens,
        segments.longest,
        segments.longest,
        scale=scaling,
        # A window of W counts the token itself; the kernel counts those to its left. -1 is all of them.
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query_THD.shape[1] != key_TKD.shape[1],
    )
    return out_THD.unsqueeze(0)


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


def hidden_states(model: Any, batch: MicroBatch) -> Tensor:
    """hidden_TD of a micro-batch, behind the last layer of a transformers model with packed attention."""
    hidden_TD: Tensor = model.base_model(
        input_ids=batch.ids_T[None],
        position_ids=batch.positions_T[None],
        use_cache=False,
        segments=segments_of(batch.lengths, batch.cu_seqlens, batch.prefixes),
    ).last_hidden_state[0]
    return hidden_TD


def register() -> str:
    """Make the function known to transformers and return its name. May be called again."""
    AttentionInterface.register(PACKED, packed_attention)
    return PACKED
