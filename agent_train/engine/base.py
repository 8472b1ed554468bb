"""The contract of an engine: continue token ids, and take new weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Sampling:
    """The sampling parameters of one completion. Log-probabilities are those of the raw logits divided by `temperature`.

    `top_p` and `top_k` are left out on purpose: an engine that cuts the distribution returns log-probabilities that are
    off by the kept mass.
    """

    max_tokens: int
    temperature: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None


@dataclass(frozen=True)
class Completion:
    """C sampled ids with their log-probabilities (nats) and the weight version that sampled each.

    `finish_reason` is "stop" (a stop token was sampled; it is the last id) or "length".
    """

    ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str


class EngineError(RuntimeError):
    """The engine failed: it did not start, died, or did not answer in time. The message names which and where its log is."""


class Engine(Protocol):
    """An inference engine that holds one set of weights at a time."""

    max_model_len: int

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, episode: str | None = None) -> Completion:
        """Sample one completion of a prompt. Raises EngineError after its timeout or when the engine is gone.

        `episode` names whose turn it is: an engine with replicas sends all its turns to the one that has their prefix.
        """
        ...

    def open_session(self, count: int = 1) -> None:
        """Announce `count` episodes that will ask, before the first of them does."""
        ...

    def close_session(self, count: int = 1) -> None:
        """Say that `count` episodes will not ask again."""
        ...

    async def live(self) -> None:
        """Raise EngineError if the engine cannot answer any more."""
        ...

    async def close(self) -> None:
        """Stop and release everything. May be called twice."""
        ...
