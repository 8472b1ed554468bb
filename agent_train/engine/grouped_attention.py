"""Attention of padded rows on a CPU, where several heads of queries share one of keys.

With a mask transformers repeats keys and values for every head of queries and every token, which takes longer than attention
itself. torch's function on CPUs takes them as they are.
"""

from typing import Any

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED = "agentgym-grouped"


def grouped_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """As transformers' "sdpa" in evaluation mode: R x L x H x D from R x H x L x D queries and keys of fewer heads."""
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
