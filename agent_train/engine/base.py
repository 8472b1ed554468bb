"""The contract of an engine: continue token ids, and take new weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agent_train.cluster.lost import LostError

if TYPE_CHECKING:
    from agent_train.weights.sync import TensorInfo, WeightAddress


@dataclass(frozen=True)
class Sampling:
    """The sampling parameters of one completion. Log-probabilities are those of the raw logits divided by `temperature`.

    There is no top-p and no top-k: an engine that cuts the distribution returns log-probabilities that are off by the kept mass.
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


@dataclass(frozen=True)
class Load:
    """A replica's own report: requests that wait in it, and the used share of its key-value cache, 0 to 1."""

    waiting: int
    cache: float


class EngineError(RuntimeError):
    """The engine failed: it did not start, died, or did not answer in time. Names which one and where its log is."""


class EngineLostError(EngineError, LostError):
    """A replica was killed or does not answer, and none took its place."""


class Engine:
    """An inference engine that holds one set of weights at a time.

    An episode that will ask again holds a session between its turns, so that an engine can wait for a batch of all of them:
    its batches are then the same in every run.
    """

    max_model_len: int  # longest prompt and completion together, in tokens
    version: int = 0  # of its weights
    live_sessions: int = 0

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, episode: str | None = None) -> Completion:
        """Sample one completion. All turns of an `episode` go to the replica that has their prefix.

        Nothing else limits its time: EngineError if it takes too long.
        """
        raise NotImplementedError

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, episode: str | None, told: Callable[[list[int]], None]
    ) -> Completion:
        """As `generate`. `told` gets the ids piece by piece as they are sampled, from an engine that streams."""
        return await self.generate(prompt_ids, sampling, episode)

    @property
    def receivers(self) -> int:
        """Ranks of a weight group that it takes."""
        return 1

    @property
    def connected(self) -> bool:
        """True if all of them are in a weight group."""
        raise NotImplementedError

    async def connect_weights(self, address: WeightAddress) -> None:
        """Join the weight group from rank `address.rank_offset` on. Call it while the sender joins."""
        raise NotImplementedError

    async def receive_weights(self, manifest: Sequence[TensorInfo], version: int) -> dict[str, int]:
        """Receive and load the tensors that the sender broadcasts meanwhile, then raise the version; the checksum of each.

        It returns when they serve, and nothing that was computed by others is left in caches. If it fails, nothing is
        generated, because its weights are mixed, until a later load succeeds.
        """
        raise NotImplementedError

    async def fetch_weights(self, folder: str | Path) -> list[dict[str, int]]:
        """Have every worker read a folder of `Learner.save_weights`, to load it next; the checksums that each found.

        None are found where the folder changes weights that a worker does not hold. What serves is left as it is.
        """
        raise NotImplementedError

    async def load_fetched(self, version: int) -> dict[str, int]:
        """Load what the workers have fetched; as `receive_weights`."""
        raise NotImplementedError

    async def load_adapter(self, folder: str | Path, version: int) -> dict[str, int]:
        """Serve the adapter of a folder (absolute, in PEFT's format, new each time) as a version; as `receive_weights`."""
        raise NotImplementedError

    @property
    def lacks_weights(self) -> bool:
        """True if a replica waits for the weights that the others have."""
        return False

    async def stale(self) -> None:
        """Return when it `lacks_weights`."""
        await asyncio.Event().wait()

    async def losses(self) -> int:
        """Check its replicas; returns how many have died and were replaced so far. After each, weights can be sent again."""
        return 0

    async def loads(self) -> list[Load]:
        """The load of each replica that reports it."""
        return []

    async def sleep(self) -> None:
        """Release the device's memory until weights are received again. Call it while no request is in flight."""

    async def live(self) -> None:
        """Raise EngineError if the engine cannot answer any more."""

    async def close(self) -> None:
        """Stop and release everything. May be called twice."""

    def open_session(self, count: int = 1) -> None:
        """Announce `count` episodes. Open those of a whole batch before the first of them asks."""
        self.live_sessions += count

    def close_session(self, count: int = 1) -> None:
        """Announce that `count` episodes will not ask again."""
        if count > self.live_sessions:
            raise ValueError(f"{count} sessions closed, but only {self.live_sessions} are open")
        self.live_sessions -= count

    def play_beside(self, other: Engine) -> None:
        """Announce that episodes hold their sessions at the `other` engine too, and ask either engine, one at a time."""

    def check_request(self, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        """Raise ValueError for a request that no engine can answer."""
        if not prompt_ids:
            raise ValueError("generate: the prompt has no token ids")
        if sampling.max_tokens < 1:
            raise ValueError(f"generate: max_tokens must be at least 1, not {sampling.max_tokens}")
        if sampling.temperature < 0:
            raise ValueError(f"generate: temperature must not be negative, not {sampling.temperature}")
        if len(prompt_ids) + sampling.max_tokens > self.max_model_len:
            asked = f"{len(prompt_ids)} prompt tokens and {sampling.max_tokens} new ones"
            remedy = "shorten the prompt or raise engine.max_model_len"
            raise ValueError(f"generate: {asked} are more than max_model_len {self.max_model_len}: {remedy}")
