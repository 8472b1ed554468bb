"""From packed tokens to log-probabilities and entropies, without ever holding T x V logits; or to a value or score.

Only tokens in the loss mask reach the head, in chunks of tokens and of the vocabulary; the backward pass computes each
chunk again, all but the last. Logits are taken to fp32 before the log-sum-exp, which grows with each part of the
vocabulary.

Legend: T packed tokens, M of them in the loss mask, C tokens of one chunk, V vocabulary, W entries of one part of it, D
hidden size, S samples (segments).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from agent_train.data.packing import MicroBatch
from agent_train.learner.attention import hidden_states


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: Tensor,
        weight_VD: Tensor,
        targets_M: Tensor,
        temperature_M: Tensor,
        chunk: int,
        vocab_chunk: int,
    ) -> Any:
        exact = torch.promote_types(hidden_MD.dtype, torch.float32)
        logprobs_M = torch.empty(len(targets_M), dtype=exact, device=hidden_MD.device)
        lse_M, entropy_M = torch.empty_like(logprobs_M), torch.empty_like(logprobs_M)
        logits = _Logits(hidden_MD, weight_VD, temperature_M, chunk, vocab_chunk)
        last_CV = None
        for tokens in logits.chunks():
            answers = _Answers(targets_M[tokens], exact)
            for entries in logits.parts():
                logits_CW = logits.of(tokens, entries)
                answers.add(logits_CW, entries.start, logits.spare(logits_CW))
                # The last call's buffers are still there when the backward pass begins.
                last_CV = logits_CW if logits.whole else None
            lse_C = answers.top_C + answers.sum_C.log()
            logprobs_M[tokens] = answers.target_C - lse_C
            entropy_M[tokens] = answers.sum_C.log() - answers.dot_C / answers.sum_C
            if last_CV is not None:
                last_CV += (answers.top_C - lse_C)[:, None]
            lse_M[tokens] = lse_C
        ctx.save_for_backward(hidden_MD, weight_VD, targets_M, temperature_M, lse_M, entropy_M)
        ctx.chunk, ctx.vocab_chunk, ctx.last_CV, ctx.blocks = chunk, vocab_chunk, last_CV, logits.blocks
        ctx.set_materialize_grads(False)
        return logprobs_M, entropy_M

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_MD, weight_VD, targets_M, temperature_M, lse_M, entropy_M = ctx.saved_tensors
        logits = _Logits(hidden_MD, weight_VD, temperature_M, ctx.chunk, ctx.vocab_chunk, ctx.blocks)
        last_CV, ctx.last_CV, ctx.blocks = ctx.last_CV, None, None
        # Summed in fp32 over the chunks, whatever the types. A weight that is not trained has no gradient.
        grad_hidden_MD, grad_weight_VD = (
            torch.zeros_like(x, dtype=logits.exact) if needed else None
            for x, needed in zip((hidden_MD, weight_VD), ctx.needs_input_grad, strict=False)
        )
        for tokens in reversed(logits.chunks()):
            for entries in logits.parts():
                if last_CV is None:
                    log_p_CW = logits.of(tokens, entries).sub_(lse_M[tokens, None])
                else:
                    log_p_CW, last_CV = last_CV, None
                grad_CW = _logit_gradient(
                    log_p_CW,
                    logits.spare(log_p_CW),
                    targets_M[tokens] - entries.start,
                    entropy_M[tokens, None],
                    *(None if grad_M is None else grad_M[tokens, None] for grad_M in grads),
                )
                logits.backward(grad_CW, tokens, entries, grad_hidden_MD, grad_weight_VD)
        whole = (None if grad is None else grad.to(hidden_MD.dtype) for grad in (grad_hidden_MD, grad_weight_VD))
        return *whole, None, None, None, None


class _Answers:
    """Running statistics of C tokens over the parts of the vocabulary so far.

    `top_C` is the greatest logit, `sum_C` the sum of exp(logit - top), `dot_C` that times logit - top, `target_C` the
    logit of the target, once its part has come.
    """

    def __init__(self, targets_C: Tensor, dtype: torch.dtype):
        zeros_C = torch.zeros(len(targets_C), dtype=dtype, device=targets_C.device)
        self.targets_C, self.top_C = targets_C, zeros_C + torch.finfo(dtype).min / 2
        self.sum_C = self.dot_C = self.target_C = zeros_C

    def add(self, logits_CW: Tensor, start: int, spare_CW: Tensor) -> None:
        """Take a part of the vocabulary, from entry `start`. It leaves in `logits_CW` the logits less the greatest so far."""
        top_C = torch.maximum(self.top_C, logits_CW.amax(-1))
        inside_C, place_C = _inside(self.targets_C - start, logits_CW.shape[1])
        self.target_C = torch.where(inside_C, logits_CW.gather(1, place_C[:, None])[:, 0], self.target_C)
        logits_CW.sub_(top_C[:, None])
        torch.exp(logits_CW, out=spare_CW)
        shift_C = self.top_C - top_C
        faded_C = shift_C.exp()
        self.dot_C = faded_C * (self.dot_C + self.sum_C * shift_C) + torch.linalg.vecdot(spare_CW, logits_CW)
        self.sum_C = faded_C * self.sum_C + spare_CW.sum(-1)
        self.top_C = top_C


def _logit_gradient(
    log_p_CW: Tensor,
    spare_CW: Tensor,
    targets_C: Tensor,
    entropy_C1: Tensor,
    grad_logprobs_C1: Tensor | None,
    grad_entropy_C1: Tensor | None,
) -> Tensor:
    """The gradient by the logits (over temperature). Both blocks are overwritten."""
    grad_CW = torch.exp(log_p_CW, out=spare_CW)
    if grad_entropy_C1 is None:
        grad_CW.mul_(-grad_logprobs_C1 if grad_logprobs_C1 is not None else 0.0)
    else:
        factor_CW = log_p_CW.add_(entropy_C1).mul_(-grad_entropy_C1)
        grad_CW.mul_(factor_CW if grad_logprobs_C1 is None else factor_CW.sub_(grad_logprobs_C1))
    if grad_logprobs_C1 is not None:
        inside_C, place_C = _inside(targets_C, grad_CW.shape[1])
        grad_CW.scatter_add_(1, place_C[:, None], torch.where(inside_C[:, None], grad_logprobs_C1, 0.0))
    return grad_CW


def _inside(place_C: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """A mask of the ids that lie in a part of the vocabulary, and their places in it, 0 for the others."""
    inside_C = (place_C >= 0) & (place_C < width)
    return inside_C, torch.where(inside_C, place_C, 0)


class _Logits:
    """Blocks of logits over temperature, in fp32 (fp64 where the hidden states are): in two buffers, of which one is spare.

    In full precision the hidden states are divided by the temperature, which are fewer than the logits.
    """

    def __init__(
        self,
        hidden_MD: Tensor,
        weight_VD: Tensor,
        temperature_M: Tensor,
        chunk: int,
        vocab_chunk: int,
        blocks: Tensor | None = None,
    ):
        self.exact = torch.promote_types(hidden_MD.dtype, torch.float32)
        self.scaled = hidden_MD.dtype == self.exact
        self._temperature_M1 = temperature_M[:, None].to(self.exact)
        self._hidden_MD = hidden_MD / self._temperature_M1 if self.scaled else hidden_MD
        self._weight_VD = weight_VD
        self._chunk = chunk
        self._width = min(vocab_chunk or len(weight_VD), len(weight_VD))
        size = min(chunk, len(hidden_MD)) * self._width
        self.blocks = hidden_MD.new_empty(2, size, dtype=self.exact) if blocks is None else blocks

    @property
    def whole(self) -> bool:
        return self._width == len(self._weight_VD)

    def chunks(self) -> list[slice]:
        return [slice(start, start + self._chunk) for start in range(0, len(self._hidden_MD), self._chunk)]

    def parts(self) -> Iterator[slice]:
        size = len(self._weight_VD)
        return (slice(start, min(start + self._width, size)) for start in range(0, size, self._width))

    def of(self, tokens: slice, entries: slice) -> Tensor:
        """logits_CW, in the first buffer."""
        hidden_CD, weight_WD = self._hidden_MD[tokens], self._weight_VD[entries]
        block_CW = self._block(0, len(hidden_CD), len(weight_WD))
        if self.scaled:
            return torch.mm(hidden_CD, weight_WD.T, out=block_CW)
        return block_CW.copy_(hidden_CD @ weight_WD.T).div_(self._temperature_M1[tokens])

    def spare(self, like_CW: Tensor) -> Tensor:
        """A block of the same shape in the other buffer."""
        return self._block(1, *like_CW.shape)

    def backward(
        self,
        grad_CW: Tensor,
        tokens: slice,
        entries: slice,
        grad_hidden_MD: Tensor | None,
        grad_weight_VD: Tensor | None,
    ) -> None:
        """Add the gradients by hidden states and weight, where there are any, of a block of logits."""
        hidden_CD, weight_WD = self._hidden_MD[tokens], self._weight_VD[entries]
        temperature_C1 = self._temperature_M1[tokens]
        if not self.scaled:
            grad_CW = grad_CW.div_(temperature_C1).to(hidden_CD.dtype)
        if grad_hidden_MD is not None:
            own_CD = grad_CW @ weight_WD
            grad_hidden_MD[tokens] += own_CD.div_(temperature_C1) if self.scaled else own_CD
        if grad_weight_VD is not None and self.scaled:
            grad_weight_VD[entries].addmm_(grad_CW.T, hidden_CD)
        elif grad_weight_VD is not None:
            grad_weight_VD[entries] += grad_CW.T @ hidden_CD

    def _block(self, number: int, rows: int, columns: int) -> Tensor:
        return self.blocks[number, : rows * columns].view(rows, columns)


def chunked_head(
    hidden_MD: Tensor, weight_VD: Tensor, targets_M: Tensor, temperature_M: Tensor, chunk: int, vocab_chunk: int = 0
) -> tuple[Tensor, Tensor]:
    """logprobs_M of the targets (token ids) and entropy_M, in nats and fp32 (fp64 where the hidden states are), with gradients.

    `hidden_MD` predict the targets, `weight_VD` is the output embedding, and `temperature_M` divides the logits. A block
    of logits has `chunk` tokens and `vocab_chunk` entries of the vocabulary (0: all); two exist at one time, until the
    backward pass is done.
    """
    return _ChunkedHead.apply(hidden_MD, weight_VD, targets_M, temperature_M, chunk, vocab_chunk)


class PackedPolicy(nn.Module):
    """A causal language model, loaded with the packed attention: micro-batch in, log-probabilities and entropies out.

    Backbone and head are called in one forward, so that FSDP around this module gathers the head's weight too.
    """

    multiple = 1  # backbone and head get a multiple of so many tokens

    def __init__(self, model: Any, head_chunk: int, vocab_chunk: int = 0):
        super().__init__()
        scalings = ("final_logit_softcapping", "logits_scaling", "logit_scale")
        configs = (model.config, model.config.get_text_config())  # a multimodal model has its language model's apart
        wrong = [name for name in scalings if any(getattr(c, name, None) not in (None, 1, 1.0) for c in configs)]
        if model.get_output_embeddings().bias is not None:
            wrong.append("a bias of the output embedding")
        if wrong:
            raise ValueError(f"{type(model).__name__} cannot be trained here: its logits use {', '.join(wrong)}")
        self.model = model
        self.head_chunk = head_chunk
        self.vocab_chunk = vocab_chunk

    def forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """logprobs_T and entropy_T of the masked tokens, fp32, 0 elsewhere. Each token is predicted from the one before it."""
        hidden_TD = hidden_states(self.model, batch, self.multiple)
        index_M = batch.mask_T.nonzero()[:, 0]
        size, more = len(index_M), -len(index_M) % self.multiple
        logprobs_M, entropy_M = chunked_head(
            pad(hidden_TD[batch.previous_T[index_M]], (0, 0, 0, more)),
            self.model.get_output_embeddings().weight,
            pad(batch.ids_T[index_M], (0, more)),
            pad(batch.temperature_T[index_M], (0, more), value=1.0),
            self.head_chunk,
            self.vocab_chunk,
        )
        zeros_T = torch.zeros(len(batch.ids_T), dtype=torch.float32, device=hidden_TD.device)
        return zeros_T.index_copy(0, index_M, logprobs_M[:size]), zeros_T.index_copy(0, index_M, entropy_M[:size])


class PackedValue(nn.Module):
    """A sequence classifier of one label, loaded with the packed attention: micro-batch in, values or scores out.

    With `of_samples` it scores each whole sample, as a reward model does, in place of each token, as a critic does.
    """

    multiple = 1  # the backbone gets a multiple of so many tokens

    def __init__(self, model: Any, of_samples: bool = False):
        super().__init__()
        score = getattr(model, "score", None)
        if not isinstance(score, nn.Linear) or score.bias is not None or score.out_features != 1:
            raise ValueError(f"{type(model).__name__} cannot give values: it has no linear `score` of one number")
        self.model = model
        self.of_samples = of_samples

    def forward(self, batch: MicroBatch) -> Tensor:
        """values_T, before each token that the policy sampled: from the state that predicts it; 0 outside the mask. fp32.

        With `of_samples` scores_S: from the state at `last_sampled`, that token read.
        """
        hidden_TD = hidden_states(self.model, batch, self.multiple)
        index_M = batch.mask_T.nonzero()[:, 0]
        places = last_sampled(batch) if self.of_samples else batch.previous_T[index_M]
        numbers = hidden_TD[places].float() @ self.model.score.weight[0].float()
        if self.of_samples:
            return numbers
        zeros_T = torch.zeros(len(batch.ids_T), dtype=torch.float32, device=hidden_TD.device)
        return zeros_T.index_copy(0, index_M, numbers)


def last_sampled(batch: MicroBatch) -> Tensor:
    """positions_S: of the last sampled token of each sample, of its last token where none was sampled."""
    ends_S = batch.cu_seqlens[1:].long() - 1
    here_T = torch.arange(len(batch.ids_T), device=ends_S.device)
    found_S = torch.full_like(ends_S, -1).scatter_reduce(
        0, batch.segment_T, torch.where(batch.mask_T, here_T, -1), "amax"
    )
    return torch.where(found_S >= 0, found_S, ends_S)
