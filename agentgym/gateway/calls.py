"""A model call in one form for all protocols, the backend that answers it, and the policy for settings that spoil sampled tokens."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from agentgym.core.messages import Message, text_of
from agentgym.core.trajectory import Tokens

if TYPE_CHECKING:
    from agentgym.gateway.tree import Call

TEXT, REASONING = "text", "reasoning"
Told: TypeAlias = Callable[[str, str], None]
# Settings that leave the distribution of the tokens alone, or that every sampler honours exactly.
_FREE = ["max_tokens", "stop", "n", "seed", "logprobs", "top_logprobs", "parallel_tool_calls"]
_FREE += ["reasoning_effort", "thinking", "chat_template_kwargs"]
# Values of others by which they do nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("top_p", "typical_p", "repetition_penalty", "best_of"), (1,)),
    **dict.fromkeys(("min_p", "presence_penalty", "frequency_penalty", "echo"), (0,)),
    **{"top_k": (0, -1), "logit_bias": ({},), "suffix": ("",)},
    **{"tool_choice": ("auto", "none"), "response_format": ({"type": "text"},)},
}


class Refused(Exception):
    """A request that gets an error of this HTTP status, in the form of its protocol. `engine_status` is the engine's, if it refused."""

    def __init__(self, status: int, why: str, code: str | None = None, engine_status: int | None = None):
        super().__init__(why)
        self.status, self.code, self.engine_status = status, code, engine_status


@dataclass(eq=False)
class ModelCall:
    """One prompt that is answered once. Messages and tools are in OpenAI's chat form, settings have its names."""

    model: str
    messages: list[Message] = field(default_factory=list)
    prompt: str | list[int] | None = None  # text or token ids, which are continued in place of messages
    tools: list[dict[str, Any]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)  # as asked
    used: dict[str, Any] = field(default_factory=dict)  # as the backend is to use them
    changed: list[str] = field(default_factory=list)  # settings that are not honoured
    unusable: list[str] = field(default_factory=list)  # settings that are, so that the tokens cannot be trained on
    streams: bool = False  # the client reads the answer while it is sampled
    after: Call | None = None  # the call of the episode whose messages and answer these messages begin with

    def new_messages(self) -> list[Message]:
        """The messages after `after` and its answer."""
        return self.messages[self.after.length if self.after else 0 :]


@dataclass
class ModelAnswer:
    """A backend's answer; `usage` and `finish_reason` are those of `Reply`."""

    message: Message
    tokens: Tokens | None = None  # None from a model that does not tell them
    usage: dict[str, int] = field(default_factory=dict)
    finish_reason: str = "stop"
    stop: str | None = None  # the stop string that ended it: the sampled ids go up to its end, the text ends before it
    more: dict[str, Any] = field(default_factory=dict)  # further fields of the answer, as they are (`logprobs`)

    def parts(self) -> tuple[tuple[str, str], ...]:
        return (REASONING, self.message.get("reasoning_content") or ""), (TEXT, text_of(self.message))


class Backend(Protocol):
    """Samples the answers. One object answers many calls at a time."""

    models: Sequence[str]  # names of what it serves; the first stands for names that it does not know
    honours: Collection[str] | None  # settings that it knows beside those that leave the distribution alone; None: all

    async def answer(self, call: ModelCall, episode: str, told: Told) -> ModelAnswer:
        """Sample an answer. Raises `Refused` with the status for the client.

        `told` gets REASONING, then TEXT, piece by piece, with which the answer's message then begins: nothing that may still become
        a tool call, a thought or a stop string.
        """

    async def count(self, call: ModelCall) -> int:
        """The prompt's length in tokens. Raises `Refused` if it cannot tell."""


@dataclass(frozen=True)
class Settings:
    """How the gateway treats settings of a call that make its tokens unusable for training.

    "strict" refuses them, "override" uses the run's own instead, "mask" honours them and marks the tokens. Raises ValueError for a
    temperature that is none.
    """

    policy: Literal["strict", "override", "mask"] = "override"
    temperature: float | None = None  # of a run that trains; None: nothing is trained on, so all settings are honoured
    max_tokens: int | None = None  # of one answer, at most

    def __post_init__(self) -> None:
        if self.temperature is not None and not 0 <= self.temperature < math.inf:
            raise ValueError(f"a temperature is a number of at least 0, not {self.temperature}")

    def settle(self, call: ModelCall, backend: Backend) -> None:
        """Decide which of a call's settings are used. Raises `Refused`."""
        asked, known = {"model": call.model, **call.settings}, backend.honours
        harmless = {**_NEUTRAL, "temperature": (self.temperature,), "model": backend.models}
        looked_at = asked if self.temperature is not None else ("model",)
        odd = [name for name in looked_at if name not in _FREE and asked[name] not in harmless.get(name, ())]
        # A free choice of tools is every engine's own, and none leaves them out of the prompt.
        free = [*_FREE, *(["tool_choice"] if asked.get("tool_choice") in _NEUTRAL["tool_choice"] else [])]
        unknown = [n for n in call.settings if known is not None and n not in known and n not in free]
        if self.policy == "strict" and (refused := [*odd, *unknown]):
            why = "what is sampled is trained on" if odd else "the engine does not know it"
            setting = f"{refused[0]}={json.dumps(asked[refused[0]]):.100}"
            raise Refused(400, f"{setting} cannot be honoured: {why}", "unsupported_value")
        if self.policy == "mask" and self.temperature is not None:
            call.unusable = [name for name in odd if name not in unknown]
        call.changed += [name for name in dict.fromkeys([*odd, *unknown]) if name not in call.unusable]
        call.used = {name: value for name, value in call.settings.items() if name not in call.changed}
        if self.temperature is not None and "temperature" not in call.unusable:
            call.used["temperature"] = self.temperature
        if self.max_tokens is not None:
            call.used["max_tokens"] = min(call.used.get("max_tokens", self.max_tokens), self.max_tokens)
