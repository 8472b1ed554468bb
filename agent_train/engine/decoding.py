"""Sampling completions of a batch of prompts with a transformers model.

Legend: R requests of a batch, P longest prompt, M most new tokens, V vocabulary.
Prompts are padded on the left, so that every row samples from its last position; position ids count only real tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from agent_train.algorithms.losses import running_sum
from agent_train.engine.base import Completion, Sampling


@dataclass(eq=False)
class Request:
    prompt_ids: list[int]
    sampling: Sampling
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def order(self) -> tuple[int, int, list[int]]:
        """A key that does not depend on when the request came. Prompts of similar length come together."""
        seed = -1 if self.sampling.seed is None else self.sampling.seed
        return len(self.prompt_ids), seed, self.prompt_ids

    @property
    def finish_reason(self) -> str | None:
        if self.ids and self.ids[-1] in self.sampling.stop_token_ids:
            return "stop"
        return "length" if len(self.ids) >= self.sampling.max_tokens else None


@torch.inference_mode()
def decode(model: Any, requests: Sequence[Request], version: int) -> list[Completion]:
    """Sample a completion of every request, in their order; `version` is written to every token."""
    from agent_train.engine.fast_decoding import growing_cache

    device = next(model.parameters()).device
    running = list(requests)
    uniforms_RM = _uniforms(running).to(device)
    temperatures_R = torch.tensor([r.sampling.temperature for r in running], device=device)
    # The episodes of a group begin with the same prompt: it is computed once.
    row_of = {prompt: row for row, prompt in enumerate(dict.fromkeys(tuple(r.prompt_ids) for r in running))}
    rows_R = torch.tensor([row_of[tuple(r.prompt_ids)] for r in running], device=device)
    longest = max(map(len, row_of))
    ids_RP = torch.tensor([[0] * (longest - len(ids)) + [*ids] for ids in row_of], device=device)
    mask_RP = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in row_of], device=device)
    positions_RP = (mask_RP.cumsum(1) - 1).clamp_min(0)
    cache = growing_cache(model.config)
    for step in range(uniforms_RM.shape[1]):
        logits_RV = model(
            input_ids=ids_RP,
            attention_mask=mask_RP,
            position_ids=positions_RP,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        if step == 0 and len(row_of) < len(running):
            cache.batch_select_indices(rows_R)
            logits_RV, mask_RP, positions_RP = logits_RV[rows_R], mask_RP[rows_R], positions_RP[rows_R]
        sampled_R, logprobs_R = sample(logits_RV, temperatures_R, uniforms_RM[:, step])
        for request, token, logprob in zip(running, sampled_R.tolist(), logprobs_R.tolist(), strict=True):
            if request.finish_reason is None:
                request.ids.append(token)
                request.logprobs.append(logprob)
        going = [row for row, request in enumerate(running) if request.finish_reason is None]
        if not going:
            break
        if len(going) <= len(running) // 2:
            rows = torch.tensor(going, device=device)
            running = [running[row] for row in going]
            cache.batch_select_indices(rows)
            uniforms_RM, temperatures_R = uniforms_RM[rows], temperatures_R[rows]
            sampled_R, mask_RP, positions_RP = sampled_R[rows], mask_RP[rows], positions_RP[rows]
        ids_RP = sampled_R[:, None]
        mask_RP = torch.cat([mask_RP, mask_RP.new_ones(len(running), 1)], dim=1)
        # Those of rows that have ended stand still: a model that learns positions has no more than its longest sequence.
        lives_R1 = torch.tensor([[request.finish_reason is None] for request in running], device=device)
        positions_RP = positions_RP[:, -1:] + lives_R1
    return [Completion(r.ids, r.logprobs, [version] * len(r.ids), r.finish_reason or "length") for r in requests]


def sample(
    logits_RV: torch.Tensor, temperatures_R: torch.Tensor, uniforms_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token a row from softmax(logits / temperature), and its log-probability under that distribution, in float32.

    The token is where the cumulative distribution passes the row's uniform number. Temperature 0 takes the most likely
    token, and its log-probability is that of temperature 1.
    """
    greedy_R = temperatures_R == 0
    scaled_RV = logits_RV.float() / torch.where(greedy_R, 1.0, temperatures_R)[:, None]
    logprobs_RV = scaled_RV.log_softmax(-1)
    cumulative_RV = running_sum(logprobs_RV.double().exp(), -1)
    thresholds_R1 = (uniforms_R * cumulative_RV[:, -1])[:, None]
    drawn_R = torch.searchsorted(cumulative_RV, thresholds_R1, right=True)[:, 0].clamp_max(logits_RV.shape[1] - 1)
    sampled_R = torch.where(greedy_R, logits_RV.argmax(-1), drawn_R)
    return sampled_R, logprobs_RV.gather(1, sampled_R[:, None])[:, 0]


def _uniforms(requests: Sequence[Request]) -> torch.Tensor:
    """R x M numbers in [0, 1), each row from its request's seed alone."""
    uniforms_RM = torch.zeros(len(requests), max(r.sampling.max_tokens for r in requests), dtype=torch.float64)
    for row, request in enumerate(requests):
        generator, seed, count = torch.Generator(), request.sampling.seed, request.sampling.max_tokens
        generator.manual_seed(generator.seed() if seed is None else seed % (1 << 63))
        uniforms_RM[row, :count] = torch.rand(count, dtype=torch.float64, generator=generator)
    return uniforms_RM
