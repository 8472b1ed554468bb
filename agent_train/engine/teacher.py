"""A teacher behind an endpoint: its log-probability, at temperature 1, of each token that the policy sampled, by exact ids.

A teacher that is a model folder is a frozen role of the learner.
"""

import asyncio
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from agent_train.cluster.lost import side_by_side
from agent_train.config.schema import Config
from agent_train.data.samples import TrainingSample
from agent_train.engine.base import EngineError
from agent_train.engine.http import open_client, post
from agent_train.learner.roles import tokenizer_of

IDS_AT_ONCE = 4096  # whose text is asked for in one request
ABOVE_ZERO = 1e-4  # rounding may lift a log-probability so far over 0
RULED_OUT = -9999.0  # vLLM's word for minus infinity, which JSON has not


class TeacherError(EngineError):
    """The teacher's endpoint does not answer, or its answer is invalid."""


class Teacher:
    """An endpoint of vLLM that scores given ids. Make one with `await Teacher.connect(...)`."""

    def __init__(self, config: Config, client: aiohttp.ClientSession):
        self.url = str(config.teacher.url).rstrip("/").removesuffix("/v1")
        self.model = config.teacher.model
        self._seconds = config.engine.request_timeout
        self._places = asyncio.Semaphore(config.engine.max_concurrent)
        self._client = client

    @classmethod
    async def connect(cls, config: Config, policy_dir: str | Path) -> "Teacher":
        """Reach the endpoint, with the key in `TEACHER_API_KEY`, and check that it means the same by each id as the policy."""
        teacher = cls(config, open_client(os.environ.get("TEACHER_API_KEY", "")))
        try:
            await teacher._check_vocabulary(await asyncio.to_thread(tokenizer_of, policy_dir))
        except BaseException:
            await teacher.close()
            raise
        return teacher

    async def logprobs(self, samples: Sequence[TrainingSample]) -> list[list[float]]:
        """The teacher's log-probability of each sampled token of each sample, in nats, 0.0 elsewhere."""
        async with side_by_side() as asking:
            asked = [asking.create_task(self._score(sample)) for sample in samples]
        return [each.result() for each in asked]

    async def close(self) -> None:
        await self._client.close()

    async def _score(self, sample: TrainingSample) -> list[float]:
        if not any(sample.mask):
            return [0.0] * len(sample.ids)
        # One token has to be sampled; it is ignored.
        body = {"prompt": sample.ids, "max_tokens": 1, "temperature": 0.0}
        body |= {"prompt_logprobs": 0, "return_token_ids": True}
        async with self._places:
            answer = await self._ask("/v1/completions", body)
        try:
            choice = answer["choices"][0]
            return _read(choice["prompt_logprobs"], choice.get("prompt_token_ids"), sample)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            why = error if isinstance(error, ValueError) else f"it cannot be read ({type(error).__name__}: {error})"
            raise self._wrong(
                f"the answer to {len(sample.ids)} ids of trajectory {sample.trajectory!r}: {why}"
            ) from error

    async def _check_vocabulary(self, tokenizer: Any) -> None:
        """Have the endpoint spell all ids of the policy, and compare."""
        for first in range(0, len(tokenizer), IDS_AT_ONCE):
            ids = list(range(first, min(first + IDS_AT_ONCE, len(tokenizer))))
            answer = await self._ask("/detokenize", {"tokens": ids})
            text = answer.get("prompt") if isinstance(answer, dict) else None
            if not isinstance(text, str):
                raise self._wrong("it does not say which text ids stand for")
            if text != tokenizer.decode(ids):
                differs = (
                    f"it spells the ids {ids[0]} to {ids[-1]} differently: take a teacher with the policy's tokenizer"
                )
                raise self._wrong(f"another vocabulary than the policy's: {differs}")

    async def _ask(self, path: str, body: dict[str, Any]) -> Any:
        try:
            named = {"model": self.model, **body} if self.model else body
            return await post(self._client, self.url, path, named, self._seconds, "teacher")
        except json.JSONDecodeError as error:
            raise self._wrong(f"what it answers to {path} is not JSON: {error}") from error
        except (ValueError, EngineError) as error:
            raise TeacherError(str(error)) from error

    def _wrong(self, what: str) -> TeacherError:
        return TeacherError(f"teacher: {self.url}: {what}")


def _read(scored: Any, ids: Any, sample: TrainingSample) -> list[float]:
    if ids is not None and ids != sample.ids:
        raise ValueError("it scored other ids than it was sent")
    if len(scored) != len(sample.ids):
        raise ValueError(f"it scored {len(scored)} tokens")
    logprobs = [0.0] * len(sample.ids)
    for position, (entry, token) in enumerate(zip(scored, sample.ids, strict=True)):
        if not sample.mask[position]:
            continue
        if not isinstance(entry, dict) or str(token) not in entry:
            raise ValueError(f"it says nothing of id {token} at position {position}")
        found = float(entry[str(token)]["logprob"])
        if math.isnan(found) or found > ABOVE_ZERO:
            raise ValueError(f"{found} is no log-probability (id {token} at position {position})")
        logprobs[position] = -math.inf if found <= RULED_OUT else min(found, 0.0)
    return logprobs
