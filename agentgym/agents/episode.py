"""One episode as an agent sees it that plays by itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from agentgym.core.messages import Action, Message, assistant, text_of, user

if TYPE_CHECKING:
    from agentgym.policies.base import Caller

_Answer: TypeAlias = "asyncio.Future[list[Message]]"
OVER = "The episode is over."
# The only tool of an environment without tools.
ACT = {
    "name": "act",
    "description": "Say something to the environment, and get its answer.",
    "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
}


@dataclass(eq=False)
class AgentEpisode:
    """The argument of a function that plays an episode.

    Attributes:
        messages: the environment's opening.
        tools: of the environment, in OpenAI's form.
        base_url, key, model: where to ask the model, up to and with /v1, the API key, and the name to ask for.
        mcp_url: where the tools are, with the key as bearer token.
        socket: a Unix socket at which both are too, if the gateway has one.
        over: whether the environment has ended the episode.
    """

    messages: list[Message]
    tools: Sequence[Mapping[str, Any]]
    base_url: str
    key: str
    model: str
    mcp_url: str
    socket: str = ""
    seed: int | None = None
    over: bool = False
    in_env_thread: Caller | None = None  # calls a function where the environment runs, which may hold sandboxes there
    _actions: asyncio.Queue[tuple[Message, _Answer]] = field(default_factory=asyncio.Queue)
    _answer: _Answer | None = None  # to the action that the environment has

    async def step(self, action: Action) -> list[Message]:
        """Send the environment a text or an assistant message, which may call tools, and return its answer. Once `over`, the episode has ended."""
        message, answer = assistant(action), asyncio.get_running_loop().create_future()
        if self.over:
            return [user(OVER)]
        self._actions.put_nowait((message, answer))
        told: list[Message] = await answer
        return told

    @property
    def opening(self) -> str:
        """The opening as one text."""
        return "\n\n".join(filter(None, map(text_of, self.messages)))

    # ---- the environment's side

    async def acted(self) -> Message:
        """The agent's next action."""
        message, self._answer = await self._actions.get()
        return message

    def tell(self, observation: Sequence[Message], over: bool = False) -> None:
        """Answer the action that the environment took; once the episode is over, answer the waiting ones too."""
        self.over = over
        answers = [(self._answer, list(observation))] if self._answer is not None else []
        while over and not self._actions.empty():
            answers.append((self._actions.get_nowait()[1], [user(OVER)]))
        for answer, told in answers:
            if not answer.done():
                answer.set_result(told)


class BlockingEpisode:
    """The episode for a plain `def`, in whose thread `step` waits."""

    def __init__(self, episode: AgentEpisode, loop: asyncio.AbstractEventLoop):
        self._episode, self._loop = episode, loop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._episode, name)

    def step(self, action: Action) -> list[Message]:
        return asyncio.run_coroutine_threadsafe(self._episode.step(action), self._loop).result()


class EpisodeTools:
    """The environment's tools for the Model Context Protocol; `act` alone where it has none. See `agentgym.gateway.mcp.Tools`."""

    def __init__(self, episode: AgentEpisode):
        self._episode = episode
        self.schemas: list[Mapping[str, Any]] = list(episode.tools) or [{"type": "function", "function": ACT}]
        self._calls = 0

    async def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        if self._episode.tools:
            self._calls += 1
            function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
            call = {"id": f"call_{self._calls}", "type": "function", "function": function}
            told = await self._episode.step({"role": "assistant", "content": None, "tool_calls": [call]})
        else:
            told = await self._episode.step(str(arguments.get("text", "")))
        text = "\n\n".join(filter(None, map(text_of, told)))
        return (f"{text}\n\n{OVER}" if self._episode.over and not text.endswith(OVER) else text), False
