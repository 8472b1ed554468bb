"""Checks of requests that all engines share."""

from __future__ import annotations

from collections.abc import Sequence

from agent_train.engine.base import Sampling


def check_request(prompt_ids: Sequence[int], sampling: Sampling, max_model_len: int) -> None:
    """Refuse what no engine can answer.

    Raises:
        ValueError: the prompt is empty, it and `max_tokens` do not fit, or a number is out of range.
    """
    if not prompt_ids:
        raise ValueError("generate: the prompt has no token ids")
    if sampling.max_tokens < 1:
        raise ValueError(f"generate: max_tokens must be at least 1, not {sampling.max_tokens}")
    if sampling.temperature < 0:
        raise ValueError(f"generate: temperature must not be negative, not {sampling.temperature}")
    if len(prompt_ids) + sampling.max_tokens > max_model_len:
        raise ValueError(
            f"generate: {len(prompt_ids)} prompt tokens and {sampling.max_tokens} new ones are more than "
            f"max_model_len {max_model_len}: shorten the prompt or raise engine.max_model_len"
        )
