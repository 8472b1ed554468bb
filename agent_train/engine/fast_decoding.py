"""Faster decoding with transformers: attention and the cache without copies.

Legend: R rows, L queries, H heads, N tokens so far, C tokens there is room for, D numbers of a head.
"""

from typing import Any

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED = "agentgym-grouped"
ROOM = 64  # tokens, at least; of long ones half as many again


def grouped_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """As transformers' "sdpa" in evaluation mode: R x L x H x D from R x H x L x D queries and keys of fewer heads.

    With a mask transformers repeats keys and values for every head of queries and every token, which takes longer than
    attention itself. torch's function on CPUs takes them as they are.
    """
    if attention_mask is None or query.shape[1] == key.shape[1]:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **settings)
    out_RHLD = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=True)
    return out_RHLD.transpose(1, 2).contiguous(), None


def attend_grouped(model: PreTrainedModel) -> None:
    """Let a model on a CPU use it, if it would use "sdpa"; one that needs another way keeps its own."""
    if model.device.type == "cpu" and model.config._attn_implementation == "sdpa":
        AttentionInterface.register(GROUPED, grouped_attention)
        AttentionMaskInterface.register(GROUPED, sdpa_mask)
        model.set_attn_implementation(GROUPED)


class GrowingLayer(DynamicLayer):
    """Full attention's keys and values; `keys` and `values` are R x H x N x D views of tensors with room for C.

    transformers' own cache copies all of them for every token; this one writes the new ones behind the others.
    """

    keys: Tensor
    values: Tensor

    def __init__(self) -> None:
        super().__init__()
        self._with_room: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append R x H x n x D keys and values; returns all."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if self._with_room is None or end > self._with_room[0].shape[-2]:
            self._with_room = _longer(self.keys, key_states, start, end), _longer(self.values, value_states, start, end)
        for room, states in zip(self._with_room, (key_states, value_states), strict=True):
            room[..., start:end, :] = states
        self.keys, self.values = (room[..., :end, :] for room in self._with_room)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only keep these rows, in this order."""
        super().batch_select_indices(indices)
        self._with_room = None


def growing_cache(config: Any) -> DynamicCache:
    """An empty cache for a model of this configuration. Layers whose attention is not full keep transformers' own."""
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def _longer(old: Tensor, states: Tensor, start: int, end: int) -> Tensor:
    room: Tensor = states.new_empty(*states.shape[:-2], end + max(ROOM, end // 2), states.shape[-1])
    if start:
        room[..., :start, :] = old
    return room
