"""The tokens of one micro-batch over several ranks (Ulysses), and the head's tokens over all ranks of one replica.

Every rank of a replica gets the same micro-batch. The layers see a contiguous part of its tokens on each rank; inside
attention the ranks exchange tokens for heads. Behind the last layer the hidden states are gathered, each rank takes its
stripe of the tokens to predict, and the answers are added up: every rank computes the same loss.

Legend: T packed tokens, P of them on one rank (T / ranks, rounded up), H query heads, K key/value heads, D head or
hidden size, R ranks.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_to_all_single
from transformers import AttentionInterface

from agent_train.data.packing import MicroBatch
from agent_train.learner.attention import PACKED, packed_attention

ULYSSES = f"{PACKED}_ulysses"


@dataclass(frozen=True)
class SequenceParallelGroup:
    """The ranks that share the tokens of a micro-batch, and its `replica`: these times those that share the layers."""

    sequence: dist.ProcessGroup
    replica: dist.ProcessGroup

    @property
    def tensor_size(self) -> int:
        return self.replica.size() // self.sequence.size()

    def part(self, size: int) -> slice:
        """This rank's stretch of T tokens that were padded to a multiple of the ranks."""
        length = -(-size // self.sequence.size())
        return slice(self.sequence.rank() * length, (self.sequence.rank() + 1) * length)

    def padding(self, size: int) -> int:
        return -size % self.sequence.size()


def _exchanged(blocks: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-to-all, with its gradient: block r of the first dimension goes to rank r."""
    # The collective reads and writes memory in order, whatever the strides.
    sent = blocks.contiguous()
    received: Tensor = all_to_all_single(torch.empty_like(sent), sent, group=group)
    return received


class _Gather(torch.autograd.Function):
    """The hidden states of all tokens. Backward: the own part of the sum over all ranks of the replica.

    Tensor-parallel ranks each pass on their gradient in full, so theirs is divided by their number.
    """

    @staticmethod
    def forward(ctx: Any, own_PD: Tensor, spread: SequenceParallelGroup, size: int) -> Tensor:
        ctx.spread, ctx.size = spread, size
        own_PD = own_PD.contiguous()
        parts = [torch.empty_like(own_PD) for _ in range(spread.sequence.size())]
        dist.all_gather(parts, own_PD, group=spread.sequence)
        return torch.cat(parts)[:size]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        spread: SequenceParallelGroup = ctx.spread
        whole_TD = nn.functional.pad(grads[0], (0, 0, 0, spread.padding(ctx.size))).contiguous()
        dist.all_reduce(whole_TD, group=spread.replica)
        return whole_TD[spread.part(ctx.size)] / spread.tensor_size, None, None


class _Join(torch.autograd.Function):
    """The sum over the replica's ranks, of which each has some elements and zeros elsewhere. Backward: the same to each.

    The head's gradients are averaged over tensor-parallel ranks, which each have part of the sum: so it is multiplied.
    """

    @staticmethod
    def forward(ctx: Any, stripe: Tensor, spread: SequenceParallelGroup) -> Tensor:
        ctx.spread = spread
        whole = stripe.clone()
        dist.all_reduce(whole, group=spread.replica)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.spread.tensor_size, None


def ulysses_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    spread: SequenceParallelGroup | None = None,
    spread_tokens: int = 0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`packed_attention` over all ranks: query (1, H, P, D), key and value (1, K, P, D) -> (1, P, H, D). `spread_tokens` is T."""
    if spread is None or spread.sequence.size() == 1:
        return packed_attention(module, query, key, value, attention_mask, **kwargs)
    repeats = max(1, spread.sequence.size() // key.shape[1])
    wide = (query, key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1))
    # From all heads of this rank's tokens to this rank's heads of all T tokens: (H, P, D) -> (H / R, T, D).
    blocks = [x[0].unflatten(0, (spread.sequence.size(), -1)) for x in wide]
    received = [_exchanged(x_RHPD, spread.sequence).transpose(0, 1).flatten(1, 2) for x_RHPD in blocks]
    query, key, value = (x_HTD[None, :, :spread_tokens] for x_HTD in received)
    out_1THD, _ = packed_attention(module, query, key, value, attention_mask, **kwargs)
    padded_THD = nn.functional.pad(out_1THD[0], (0, 0, 0, 0, 0, spread.padding(spread_tokens)))
    blocks_RPHD = padded_THD.unflatten(0, (spread.sequence.size(), -1))
    return _exchanged(blocks_RPHD, spread.sequence).transpose(0, 1).flatten(1, 2).unsqueeze(0), None


def check_heads(query: int, key: int, ranks: int) -> None:
    """Raises ValueError where `ranks` cannot share the heads evenly."""
    if query % ranks or (key % ranks and ranks % key):
        raise ValueError(
            f"learner.sequence_parallel={ranks} cannot share {query} query and {key} key/value heads: "
            "it has to divide the query heads, and to divide the key/value heads or be a multiple of them"
        )


def spread_over(policy: Any, spread: SequenceParallelGroup) -> None:
    """Let a packed module (`PackedPolicy`, `PackedValue`) run over the ranks of a replica; it is called with whole micro-batches."""
    # Blocks that are compiled have a name of their own for the same function.
    if spread.sequence.size() > 1 and policy.model.config._attn_implementation == PACKED:
        AttentionInterface.register(ULYSSES, ulysses_attention)
        policy.model.config._attn_implementation = ULYSSES

    def own_stripe(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The head then looks at every n-th of the masked tokens."""
        batch: MicroBatch = args[0]
        masked_M = batch.mask_T.nonzero()[:, 0][spread.replica.rank() :: spread.replica.size()]
        mask_T = torch.zeros_like(batch.mask_T).index_fill(0, masked_M, True)
        return (dataclasses.replace(batch, mask_T=mask_T), *args[1:]), kwargs

    def own_tokens(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        size = kwargs["input_ids"].shape[1]
        padded = {
            name: nn.functional.pad(kwargs[name], (0, spread.padding(size))) for name in ("input_ids", "position_ids")
        }
        cut = {name: whole_1T[:, spread.part(size)] for name, whole_1T in padded.items()}
        return args, {**kwargs, **cut, "spread": spread, "spread_tokens": size}

    def all_tokens(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        output.last_hidden_state = _Gather.apply(output.last_hidden_state[0], spread, kwargs["spread_tokens"])[None]
        return output

    def joined(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return tuple(_Join.apply(x_T, spread) for x_T in output)
        # Values are cheap: every rank computes all of them, and one of them counts.
        mine = torch.arange(len(output), device=output.device) % spread.replica.size() == spread.replica.rank()
        return _Join.apply(torch.where(mine, output, 0.0), spread)

    if not hasattr(policy.model, "score"):
        policy.register_forward_pre_hook(own_stripe, with_kwargs=True)
    policy.register_forward_hook(joined)
    policy.model.base_model.register_forward_pre_hook(own_tokens, with_kwargs=True)
    policy.model.base_model.register_forward_hook(all_tokens, with_kwargs=True)
