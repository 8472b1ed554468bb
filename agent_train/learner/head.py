"""From packed tokens to log-probabilities and entropies, without ever holding T x V logits.

Only tokens in the loss mask reach the head, in chunks; the backward pass computes each chunk again. The logits are taken to
fp32 before the log-sum-exp.

Legend: T packed tokens, M of them in the loss mask, C tokens of one chunk, V vocabulary, D hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from agent_train.learner.attention import segments_of
from agent_train.packing import MicroBatch


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_MD: Tensor, weight_VD: Tensor, targets_M: Tensor, temperature_M: Tensor, chunk: int
    ) -> Any:
        logprobs_M = torch.empty(len(targets_M), dtype=torch.float32, device=hidden_MD.device)
        entropy_M = torch.empty_like(logprobs_M)
        for part in _chunks(len(targets_M), chunk):
            log_p_CV = _log_softmax(hidden_MD[part], weight_VD, temperature_M[part])
            logprobs_M[part] = log_p_CV.gather(1, targets_M[part, None])[:, 0]
            entropy_M[part] = -(log_p_CV.exp() * log_p_CV).sum(-1)
        ctx.save_for_backward(hidden_MD, weight_VD, targets_M, temperature_M, entropy_M)
        ctx.chunk = chunk
        ctx.set_materialize_grads(False)
        return logprobs_M, entropy_M

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_logprobs_M, grad_entropy_M = grads
        hidden_MD, weight_VD, targets_M, temperature_M, entropy_M = ctx.saved_tensors
        grad_hidden_MD = torch.zeros_like(hidden_MD)
        # Summed in fp32 over the chunks, whatever the weight's type.
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32)
        for part in _chunks(len(targets_M), ctx.chunk):
            log_p_CV = _log_softmax(hidden_MD[part], weight_VD, temperature_M[part])
            p_CV = log_p_CV.exp()
            grad_CV = torch.zeros_like(p_CV)
            if grad_entropy_M is not None:
                grad_CV -= grad_entropy_M[part, None] * p_CV * (log_p_CV + entropy_M[part, None])
            if grad_logprobs_M is not None:
                grad_C1 = grad_logprobs_M[part, None]
                grad_CV -= grad_C1 * p_CV
                grad_CV.scatter_add_(1, targets_M[part, None], grad_C1)
            grad_CV = (grad_CV / temperature_M[part, None]).to(hidden_MD.dtype)
            grad_hidden_MD[part] = grad_CV @ weight_VD
            grad_weight_VD += grad_CV.T @ hidden_MD[part]
        return grad_hidden_MD, grad_weight_VD.to(weight_VD.dtype), None, None, None


def _chunks(size: int, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, size, chunk)]


def _log_softmax(hidden_CD: Tensor, weight_VD: Tensor, temperature_C: Tensor) -> Tensor:
    logits_CV = (hidden_CD @ weight_VD.T).float() / temperature_C[:, None]
    return logits_CV.log_softmax(-1)


def chunked_head(
    hidden_MD: Tensor, weight_VD: Tensor, targets_M: Tensor, temperature_M: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of its distribution, both in nats and fp32, with gradients.

    Args:
        hidden_MD: the hidden states that predict the targets.
        weight_VD: the output embedding.
        targets_M: token ids.
        temperature_M: divides the logits, fp32, positive.
        chunk: tokens whose logits exist at one time.

    Returns:
        logprobs_M and entropy_M.
    """
    return _ChunkedHead.apply(hidden_MD, weight_VD, targets_M, temperature_M, chunk)


class PackedPolicy(nn.Module):
    """A causal language model as the learner calls it: micro-batch in, log-probabilities and entropies out.

    Backbone and head are called in one forward, so that what is sharded around this module gathers the head's weight too,
    also where it is tied to the input embedding.

    Args:
        model: a transformers causal language model, loaded with the packed attention.
        head_chunk: tokens whose logits exist at one time.

    Raises:
        ValueError: the model changes its logits after the output embedding, which the chunked head would not repeat.
    """

    def __init__(self, model: Any, head_chunk: int):
        super().__init__()
        wrong = [
            n
            for n in ("final_logit_softcapping", "logits_scaling", "logit_scale")
            if getattr(model.config, n, None) not in (None, 1, 1.0)
        ]
        if model.get_output_embeddings().bias is not None:
            wrong.append("a bias of the output embedding")
        if wrong:
            raise ValueError(f"{type(model).__name__} cannot be trained here: its logits use {', '.join(wrong)}")
        self.model = model
        self.head_chunk = head_chunk

    def forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """logprobs_T and entropy_T of the masked tokens, fp32, 0 elsewhere. Each token is predicted from the one before it."""
        hidden_TD = self.model.base_model(
            input_ids=batch.ids_T[None],
            position_ids=batch.positions_T[None],
            use_cache=False,
            segments=segments_of(batch.lengths, batch.cu_seqlens, batch.prefixes),
        ).last_hidden_state[0]
        index_M = batch.mask_T.nonzero()[:, 0]
        logprobs_M, entropy_M = chunked_head(
            hidden_TD[batch.previous_T[index_M]],
            self.model.get_output_embeddings().weight,
            batch.ids_T[index_M],
            batch.temperature_T[index_M],
            self.head_chunk,
        )
        zeros_T = torch.zeros(len(batch.ids_T), dtype=torch.float32, device=hidden_TD.device)
        return zeros_T.index_copy(0, index_M, logprobs_M), zeros_T.index_copy(0, index_M, entropy_M)
