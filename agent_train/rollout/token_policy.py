"""A policy on token ids: prompts extend exactly, and the exact sampled tokens go into the trajectory."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from agent_train.engine.base import Engine, Sampling
from agent_train.rollout.renderer import Rendered, Renderer
from agent_train.trainer.schedule import derive_seed
from agentgym.core.messages import Message
from agentgym.core.trajectory import Tokens
from agentgym.policies.base import EndEpisode, Reply


class TokenPolicy:
    """Answers one episode with an engine. One object per episode: it holds the tokens said so far.

    Args:
        sampling: for every turn; its `stop_token_ids` default to the renderer's, its `seed` is replaced.
        seed: of the episode; each turn's seed derives from it, and the engine knows the episode by it. None: unseeded.
    """

    def __init__(self, engine: Engine, renderer: Renderer, sampling: Sampling, seed: int | None):
        self._engine = engine
        self._renderer = renderer
        self._sampling = replace(sampling, stop_token_ids=sampling.stop_token_ids or renderer.stop_token_ids)
        self._seed = seed
        self._episode = None if seed is None else f"{seed:x}"
        self._previous: Rendered | None = None
        self._turn = 0

    async def act(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Reply:
        """Sample the answer to the whole conversation so far."""
        prompt = self._renderer.prompt(messages, tools, self._previous)
        if len(prompt.ids) + self._sampling.max_tokens > self._engine.max_model_len:
            raise EndEpisode("context")
        seed = None if self._seed is None else derive_seed(self._seed, "turn", self._turn)
        completion = await self._engine.generate(prompt.ids, replace(self._sampling, seed=seed), self._episode)
        message = self._renderer.parse(completion.ids, self._turn)
        self._previous = prompt.answered(completion.ids)
        self._turn += 1
        tokens = Tokens(
            prompt_ids=prompt.ids,
            completion_ids=list(completion.ids),
            logprobs=list(completion.logprobs),
            versions=list(completion.versions),
            finish_reason=completion.finish_reason,
        )
        usage = {"prompt_tokens": len(prompt.ids), "completion_tokens": len(completion.ids)}
        return Reply(message, tokens, usage)
