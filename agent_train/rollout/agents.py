"""Agents that play by themselves, in training: the run's engine behind a gateway, by exact tokens."""

from __future__ import annotations

import secrets
import weakref
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from agent_train.config.combinations import run_agent
from agent_train.config.schema import Config
from agent_train.engine.base import Completion, Engine, Sampling
from agent_train.rollout.journal import DivergedError, Journal
from agent_train.rollout.renderer import Rendered, Renderer, RendererError, until
from agentgym.agents.play import AgentPolicy
from agentgym.agents.programs import Agent
from agentgym.core.messages import Message, assistant, text_of
from agentgym.core.trajectory import Tokens
from agentgym.gateway import Gateway, ModelAnswer, ModelCall, Passed, Refused, Settings
from agentgym.gateway.calls import TEXT, Told

MODEL = "policy"  # what agents ask for


@dataclass(eq=False)
class _Said:
    """The conversation of an episode: each prompt with its answer, as the template's text and as ids."""

    key: str  # in the journal
    journal: Journal
    answers: list[tuple[str, list[int]]] = field(default_factory=list)


class EngineBackend:
    """The run's engine for a gateway. A prompt goes on from the exact ids of the longest one before that its text begins with."""

    models: Sequence[str] = (MODEL,)
    honours: Collection[str] | None = ("temperature",)

    def __init__(self, engine: Engine, renderer: Renderer):
        self._engine, self._renderer = engine, renderer
        self._episodes: dict[str, _Said] = {}

    def begin(self, episode: str, key: str, journal: Journal) -> None:
        """Accept calls of an episode until `forget`; the journal knows it by `key`."""
        journal.begin(key, self._engine.version)
        self._episodes[episode] = _Said(key, journal)

    def forget(self, episode: str) -> None:
        del self._episodes[episode]

    async def answer(self, call: ModelCall, episode: str, told: Told) -> ModelAnswer:
        """Text is told as it is sampled, where the engine streams; thoughts and tool calls come whole."""
        said = self._episodes[episode]
        prompt = self._prompt(call, said.answers)
        room = self._engine.max_model_len - len(prompt.ids)
        if room < 1:
            why = f"the prompt's {len(prompt.ids)} tokens exceed the model's maximum context length"
            raise Refused(400, f"{why} of {self._engine.max_model_len}", "context_length_exceeded")
        sampling = Sampling(
            min(call.used.get("max_tokens", room), room),
            call.used.get("temperature", 1.0),
            self._renderer.stop_token_ids,
            call.used.get("seed"),
        )
        stops = [stop for stop in call.used.get("stop") or () if stop]  # an empty one stops nothing
        pieces = _Pieces(self._renderer, call, prompt.text, stops, told)
        completion = await self._completion(prompt, sampling, said, pieces.add if call.streams else None)
        completion, stop = self._cut(completion, stops)
        ids = completion.ids
        if not isinstance(call.prompt, list):
            said.answers.append((prompt.text + self._renderer.decode(ids), [*prompt.ids, *ids]))
        message = self._message(call, ids, not pieces.told)
        if stop is not None:
            message = _before(message, stop, self._renderer.decode(ids).partition(stop)[0])
            stop = None if message.get("tool_calls") else stop  # it came behind them
        reason = "tool_calls" if message.get("tool_calls") else completion.finish_reason
        tokens = Tokens(prompt.ids, ids, completion.logprobs, completion.versions, completion.finish_reason)
        return ModelAnswer(
            message, tokens, {"prompt_tokens": len(prompt.ids), "completion_tokens": len(ids)}, reason, stop
        )

    async def count(self, call: ModelCall) -> int:
        return len(self._prompt(call, ()).ids)

    def _prompt(self, call: ModelCall, answers: Sequence[tuple[str, list[int]]]) -> Rendered:
        if isinstance(call.prompt, list):
            if not call.prompt or not all(0 <= id < len(self._renderer.tokenizer) for id in call.prompt):
                raise Refused(400, "the prompt is a list of at least one of the model's token ids")
            return Rendered(call.prompt, "")
        try:
            tools = () if call.used.get("tool_choice") == "none" else call.tools
            text = self._renderer.text(call.messages, tools) if call.prompt is None else call.prompt
        except RendererError as error:
            raise Refused(400, str(error)) from error
        begun = [each for each in answers if text.startswith(each[0])]
        before, ids = max(begun, key=lambda each: len(each[0]), default=("", []))
        return Rendered([*ids, *self._renderer.encode(text[len(before) :])], text)

    async def _completion(
        self, prompt: Rendered, sampling: Sampling, said: _Said, told: Callable[[list[int]], None] | None
    ) -> Completion:
        """From the journal while the agent asks as it did before, then from the engine, and into the journal."""
        last = said.answers[-1][1] if said.answers else []
        shared = len(last) if prompt.ids[: len(last)] == last else 0
        new = prompt.ids[shared:]
        try:
            completion = said.journal.answer(said.key, shared, new)
        except DivergedError:  # its calls were in another order, say: from here on it plays anew
            said.journal.go_on(said.key)
            completion = None
        if completion is None:
            if told is None:
                completion = await self._engine.generate(prompt.ids, sampling, said.key)
            else:
                completion = await self._engine.stream(prompt.ids, sampling, said.key, told)
            said.journal.keep(said.key, shared, new, completion)
        return completion

    def _cut(self, completion: Completion, stops: Sequence[str]) -> tuple[Completion, str | None]:
        """The completion up to its first stop string, all of whose tokens stay, and that string."""
        ids, decode = completion.ids, self._renderer.decode
        text = decode(ids)
        stop = min((stop for stop in stops if stop in text), key=text.index, default=None)
        if stop is None:
            return completion, None
        count = bisect_left(range(len(ids)), True, key=lambda n: stop in decode(ids[:n]))
        parts = ids[:count], completion.logprobs[:count], completion.versions[:count]
        return Completion(*parts, finish_reason="stop"), stop

    def _message(self, call: ModelCall, ids: Sequence[int], thoughts: bool) -> Message:
        if call.prompt is None:
            turn = sum(message["role"] == "assistant" for message in call.messages)
            return self._renderer.parse(ids, turn, thoughts=thoughts)
        said = ids[:-1] if ids[-1] in self._renderer.stop_token_ids else ids
        return assistant(self._renderer.decode(said))


class _Pieces:
    """An answer that is being sampled, of which the text that is sure to stay is told."""

    def __init__(self, renderer: Renderer, call: ModelCall, prompt: str, stops: Sequence[str], told: Told):
        self._renderer, self._chats, self._prompt = renderer, call.prompt is None, prompt
        self._stops, self._tell = stops, told
        self._ids: list[int] = []
        self._text = ""  # of the ids up to `_read`; the last that were read begin at `_from`
        self._read, self._from = 0, 0
        self.told = ""

    def add(self, ids: list[int]) -> None:
        self._ids += [id for id in ids if id not in self._renderer.stop_token_ids]
        # Of the last ids alone: an answer may be long. The first ids of a character are no text yet.
        before = self._renderer.decode(self._ids[self._from : self._read])
        now = self._renderer.decode(self._ids[self._from :])
        if not now.startswith(before) or now.endswith("\ufffd"):
            return
        self._text, self._from, self._read = self._text + now[len(before) :], self._read, len(self._ids)
        sure = self._renderer.certain(self._text, self._prompt) if self._chats else self._text
        sure = until(sure, self._stops)
        if sure.startswith(self.told) and sure != self.told:
            self._tell(TEXT, sure[len(self.told) :])
            self.told = sure


def _before(message: Message, stop: str, text: str) -> Message:
    """A message up to a stop string in its thoughts, its text or its calls, before which `text` was said."""
    thought = message.get("reasoning_content") or ""
    if stop in thought:
        return {**assistant(""), "reasoning_content": thought.partition(stop)[0]}
    found = {**message, "content": text_of(message).partition(stop)[0]}
    if stop in text_of(message) or text.count("</tool_call>") < len(message.get("tool_calls", [])):
        found.pop("tool_calls", None)
    return found


@dataclass(frozen=True)
class Agents:
    """Makes the policy of each episode, which lets the run's agent play it."""

    agent: Agent
    backend: EngineBackend
    gateway: Gateway
    incomplete: bool

    def policy(self, key: str, seed: int | None, journal: Journal) -> AgentPolicy:
        """`key` is the episode's name in the journal."""
        id = f"{key}-{secrets.token_hex(4)}"  # every try is an episode of its own
        self.backend.begin(id, key, journal)
        policy = AgentPolicy(self.agent, self.gateway, seed, self.incomplete, id)
        weakref.finalize(policy, self.backend.forget, id).atexit = False
        return policy


@asynccontextmanager
async def agents_of(config: Config, folder: Path, engine: Engine, renderer: Renderer) -> AsyncIterator[Agents | None]:
    """The run's agents behind a gateway of their own, whose record is in the folder; None for a run without."""
    settings, sampling = config.agent, config.sampling
    if settings.run is None:
        yield None
        return
    backend = EngineBackend(engine, renderer)
    policy = Settings(settings.settings, sampling.temperature, sampling.max_tokens)  # type: ignore[arg-type]  # a choice
    passed = dict(Passed.named(text) for text in settings.passed)
    agent, local = run_agent(settings.run, config), settings.image is not None
    async with Gateway(backend, folder, settings=policy, passed=passed, local=local) as gateway:
        yield Agents(agent, backend, gateway, settings.incomplete)
