"""Agents: a command line becomes an `AgentSpec`, which makes the policy of each episode."""

from __future__ import annotations

import copy
import inspect
import json
import random
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentgym.agents.named import check_tools
from agentgym.agents.programs import COMMAND, agent_of
from agentgym.agents.target import find, words_of
from agentgym.core.executor import EnvExecutor
from agentgym.core.messages import Action, Message, assistant
from agentgym.core.tracebacks import place_of
from agentgym.core.usage_error import instead
from agentgym.evaluate.plan import AgentSpec, read_text, read_values
from agentgym.policies.base import (
    EndEpisode,
    EndpointError,
    EndpointUsage,
    ExpertPolicy,
    NullPolicy,
    Policy,
    RandomPolicy,
    Reply,
    ScriptedPolicy,
)
from agentgym.policies.chat import reply_of
from agentgym.rollout.episode import Episode

if TYPE_CHECKING:
    from agentgym.core.env import Env
    from agentgym.evaluate.budget import Prices
    from agentgym.gateway import Gateway, Upstream

MakePolicy = Callable[[Episode], Policy]
BUILT_IN = ("expert", "random", "null")
# Settings of a chat that say how it is asked, and not what; they may differ between a run and its resumption.
ASKING = frozenset({"timeout", "retries", "stream"})


def chat(
    model: str,
    base_url: str | None = None,
    *,
    serve: str | Path | None = None,
    name: str | None = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
    extra: Mapping[str, Any] | None = None,
    system: str | None = None,
    send_reasoning: bool = False,
    timeout: float | None = None,
    retries: int | None = None,
    stream: bool = False,
) -> AgentSpec:
    """A model behind an OpenAI-compatible endpoint; arguments as in `ChatPolicy`. The key is no part of it.

    Args:
        base_url: the endpoint. None for a model folder that is served for the run only; see `located`.
        serve: that folder.
        name: default: the model's.
    """
    return AgentSpec(name or model, "chat", _settings(**locals()))


def _settings(name: object, serve: str | Path | None, extra: Mapping[str, Any] | None, **given: Any) -> dict[str, Any]:
    """Those that were given, as JSON; the name is none."""
    given |= {"serve": None if serve is None else str(Path(serve).resolve()), "extra": dict(extra or {})}
    return {key: value for key, value in given.items() if value is not None and value is not False and value != {}}


def located(agent: AgentSpec, base_url: str, model: str | None = None) -> AgentSpec:
    """The same chat at the endpoint that serves its folder. Runs do not store it."""
    found = {"base_url": base_url, "model": model or agent.settings["model"]}
    return replace(agent, settings={**agent.settings, **found})


def built_in(policy: str, mistakes: float = 0.0, name: str | None = None) -> AgentSpec:
    """One of `BUILT_IN`: "expert" (`mistakes` is the chance of a random action), "random" or "null"."""
    if policy not in BUILT_IN:
        raise ValueError(f"no policy {policy!r}{instead(policy, BUILT_IN)}")
    return AgentSpec(name or policy, policy, {"mistakes": mistakes} if mistakes else {})


def scripted(answers: Sequence[Action] | Mapping[str, Sequence[Action]], name: str = "scripted") -> AgentSpec:
    """The same answers in every episode, or answers by the task's id."""
    return AgentSpec(name, "scripted", {"answers": dict(answers) if isinstance(answers, Mapping) else list(answers)})


def scripted_file(script: str | Path, name: str | None = None) -> AgentSpec:
    """A script from a file: `.json` has a list of answers, or an object with a list per task; other files one answer per line."""
    path = Path(script)
    answers = read_values(path) if path.suffix == ".json" else read_text(path).splitlines()
    if not isinstance(answers, list | dict):
        raise ValueError(f"script {path}: a list of answers is needed, or an object of lists by task id")
    return scripted(answers, name or path.stem)


def python(agent: str, kwargs: Mapping[str, Any] | None = None, name: str | None = None) -> AgentSpec:
    """The user's own agent, named `package.module:name`. It may be

    - a class with `act(messages, tools)`: made once for each episode, with the agent's kwargs;
    - an object with `act(messages, tools)`: one for all episodes, many at a time;
    - a function of `(messages)` or `(messages, tools)`, or a class or an object that is called: kwargs come with every call.

    All may be `def`, which runs in a thread per episode and never blocks the others, or `async def`. `reply_of_answer` says what
    an answer may be. `EndEpisode` ends the episode; anything else that is raised fails it, and the error names the user's line.
    """
    return AgentSpec(name or agent, "python", {"target": agent, **({"kwargs": dict(kwargs)} if kwargs else {})})


def playing(
    agent: str,
    model: str,
    base_url: str | None = None,
    *,
    serve: str | Path | None = None,
    name: str | None = None,
    image: str | None = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
    extra: Mapping[str, Any] | None = None,
    timeout: float | None = None,
    retries: int | None = None,
) -> AgentSpec:
    """An agent that plays by itself, `command:WORDS`, `package.module:function` or a name, in front of a model; see `chat` for the others.

    The model's settings are of calls that do not have their own. With an image a command runs in a sandbox. Its policies are those
    of a spec that is `behind` a gateway.
    """
    return AgentSpec(name or f"{agent.removeprefix(COMMAND)[:80]} on {model}", "playing", _settings(**locals()))


@asynccontextmanager
async def behind(agent: AgentSpec, folder: Path, prices: Prices | None = None) -> AsyncIterator[AgentSpec]:
    """The agent with a gateway before its model, if it plays by itself. The folder gets the record. Runs do not store the agent.

    Raises ValueError if the model's endpoint does not answer.
    """
    if agent.kind != "playing":
        yield agent
        return
    from agentgym.gateway import Gateway

    engine = _engine(**agent.settings)
    try:
        await engine.start()
    except EndpointError as error:
        raise ValueError(f"agent {agent.name!r}: {error}") from error
    cost, local = prices.cost if prices else None, "image" in agent.settings
    async with Gateway(engine, folder, cost_of=cost, local=local) as gateway:
        yield replace(agent, settings={**agent.settings, "gateway": gateway})


def policy_maker(agent: AgentSpec) -> MakePolicy:
    """The function that makes the policy of each episode.

    Raises:
        ValueError: an unknown kind or setting, a bad URL, a target that is not there or takes other arguments.
    """
    maker = _MAKERS.get(agent.kind)
    if maker is None:
        raise ValueError(f"agent {agent.name!r}: there is no kind {agent.kind!r}, only {', '.join(_MAKERS)}")
    try:
        return maker(**agent.settings)
    except TypeError as error:
        raise ValueError(f"agent {agent.name!r} ({agent.kind}): {error}") from error


def check_plays(agent: AgentSpec, env: Env) -> None:
    """Raise ValueError if the environment lacks a method or a tool that the agent needs, or has several players and the agent plays as one."""
    name = {"expert": "expert_action", "random": "random_action"}.get(agent.kind)
    if name is not None and not hasattr(env.unwrapped, name):
        raise ValueError(f"agent {agent.name!r} cannot play {type(env.unwrapped).__name__}: it has no {name}()")
    if agent.kind != "playing":
        return
    if getattr(env.unwrapped, "players", None):
        raise ValueError(
            f"agent {agent.name!r} plays as one agent, but {type(env.unwrapped).__name__} has several players"
        )
    check_tools(agent.settings["agent"], env)


def _chat_maker(model: str, base_url: str | None = None, serve: str | None = None, **settings: Any) -> MakePolicy:
    from agentgym.policies.chat import ChatPolicy

    if not base_url:
        served = f" of {serve}, which is not served yet" if serve else ""
        raise ValueError(f"model {model!r}: the base_url of its endpoint{served} is missing")
    make = partial(ChatPolicy, model, base_url, None, **settings)
    make(seed=0)
    return lambda episode: make(seed=_sampling_seed(episode))


def _engine(
    agent: str,
    model: str,
    base_url: str | None = None,
    serve: str | None = None,
    image: str | None = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
    extra: Mapping[str, Any] | None = None,
    **how: Any,
) -> Upstream:
    from agentgym.gateway import Upstream

    if not base_url:
        raise ValueError(f"model {model!r}: the base_url of its endpoint is missing")
    own = {"temperature": temperature, "max_tokens": max_tokens}
    return Upstream(
        base_url, model, defaults={k: v for k, v in own.items() if v is not None} | dict(extra or {}), **how
    )


def _playing_maker(gateway: Gateway | None = None, **settings: Any) -> MakePolicy:
    from agentgym.agents.play import AgentPolicy

    _engine(**settings)
    agent = agent_of(settings["agent"], settings.get("image"))

    def make(episode: Episode) -> Policy:
        if gateway is None:
            raise ValueError("an agent that plays by itself is made `behind` a gateway")
        return AgentPolicy(agent, gateway, _sampling_seed(episode))

    return make


def _expert_maker(mistakes: float = 0.0) -> MakePolicy:
    ExpertPolicy(mistakes=mistakes)
    return lambda episode: ExpertPolicy(mistakes=mistakes, rng=_generator(episode))


def _sampling_seed(episode: Episode) -> int | None:
    """Each task has its own seed: with the same draws in all tasks, their successes would not be independent."""
    return None if episode.seed is None else random.Random(f"{episode.seed} {episode.task.id}").getrandbits(31)


def _generator(episode: Episode) -> random.Random:
    """A generator seeded for this episode, or random play would repeat itself."""
    return random.Random(f"{(episode.seed or 0) - episode.sample} {episode.task.id} {episode.sample}")


def _scripted_maker(answers: Sequence[Action] | Mapping[str, Sequence[Action]]) -> MakePolicy:
    for task, script in answers.items() if isinstance(answers, Mapping) else [("", answers)]:
        if not isinstance(script, list | tuple):
            raise ValueError(f"a script is a list of answers, or an object of lists by task id, not {script!r:.80}")
        for number, answer in enumerate(script, start=1):
            try:
                assistant(answer)
            except (TypeError, ValueError) as error:
                raise ValueError(f"the script's answer {f'{task} {number}'.strip()}: {error}") from error
    return lambda episode: ScriptedPolicy(answers.get(episode.task.id, ()) if isinstance(answers, Mapping) else answers)


def _python_maker(target: str, kwargs: Mapping[str, Any] | None = None) -> MakePolicy:
    found, module = find(target)
    given = dict(kwargs or {})
    with_tools = _check(target, found, given)
    folder = str(Path(module.__file__ or ".").resolve().parent)
    return lambda episode: PythonPolicy(target, found, given, with_tools, folder)


_MAKERS: dict[str, Callable[..., MakePolicy]] = {
    "chat": _chat_maker,
    "expert": _expert_maker,
    "random": lambda: lambda episode: RandomPolicy(rng=_generator(episode)),
    "null": lambda: lambda episode: NullPolicy(),
    "scripted": _scripted_maker,
    "python": _python_maker,
    "playing": _playing_maker,
}

_AI = ("ai", "AIMessageChunk")  # what LangChain's messages of a model call their type


def reply_of_answer(answer: Any) -> Reply:
    """Convert an agent's answer to a `Reply`, with usage and finish reason if it has them.

    Args:
        answer: a text; an assistant message or a chat completion, as an object of the `openai` package or as a dict; a message
            of LangChain; a list of such messages, of which the last counts, or a dict with one under "messages", as an agent
            of LangGraph returns it; or a `Reply`. Another form raises TypeError, ValueError, LookupError or AttributeError.
    """
    if isinstance(answer, Reply):
        return answer
    if isinstance(answer, list | tuple):
        if not answer:
            raise ValueError("an empty list of messages")
        return reply_of_answer(answer[-1])
    if isinstance(answer, Mapping) and "messages" in answer and "role" not in answer:
        return reply_of_answer(answer["messages"])
    if not isinstance(answer, str | Mapping):
        if hasattr(answer, "type") and hasattr(answer, "content"):
            return _langchain_reply(answer)
        if hasattr(answer, "model_dump"):
            answer = answer.model_dump(exclude_none=True)
    if isinstance(answer, Mapping) and "choices" in answer:
        return reply_of(answer)
    return Reply(assistant(answer))


def _langchain_reply(said: Any) -> Reply:
    if said.type not in _AI:
        raise ValueError(f"the last message is of type {said.type!r}, not from a model")
    content = said.content
    if not isinstance(content, str | None):  # parts: tool calls are separate fields
        parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
        content = "".join(part.get("text", "") for part in parts if part.get("type") == "text")
    message: Message = {"role": "assistant", "content": content}
    for call in getattr(said, "tool_calls", None) or ():
        function = {"name": call["name"], "arguments": json.dumps(call["args"], ensure_ascii=False)}
        called = {"id": call.get("id") or "", "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(called)
    finish = (getattr(said, "response_metadata", None) or {}).get("finish_reason")
    counted = getattr(said, "usage_metadata", None) or {}
    usage = {
        "prompt_tokens": counted.get("input_tokens"),
        "completion_tokens": counted.get("output_tokens"),
        "cached_tokens": (counted.get("input_token_details") or {}).get("cache_read"),
        "reasoning_tokens": (counted.get("output_token_details") or {}).get("reasoning"),
    }
    return Reply(
        assistant(message),
        usage={name: count for name, count in usage.items() if isinstance(count, int)},
        finish_reason=finish if isinstance(finish, str) else None,
    )


class AgentError(RuntimeError):
    """The user's agent raised, or its answer is unusable. Names the line in the user's files."""


class PythonPolicy:
    """The user's own agent in one episode.

    Args:
        found: the class, object or function that `target` names.
        kwargs: of the class, or of every call of a function.
        with_tools: True if it takes tools beside messages.
        folder: of the user's files, to locate errors.
    """

    def __init__(self, target: str, found: Any, kwargs: Mapping[str, Any], with_tools: bool, folder: str):
        self._target, self._found, self._kwargs = target, found, kwargs
        self._with_tools, self._folder = with_tools, folder
        self._is_class = inspect.isclass(found)
        self._answer: Callable[..., Any] | None = None
        self._player: Any = None
        self._env: tuple[Any, Any] | None = None
        self._lane: EnvExecutor | None = None

    @property
    def calls(self) -> EndpointUsage | None:
        """The requests that the user's object counted; None where one object plays all episodes."""
        found = getattr(self._player, "calls", None)
        return found if isinstance(found, EndpointUsage) and self._is_class else None

    def attach(self, env: Env, call: Any) -> None:
        """Pass the environment to the user's object, if it has a method for that."""
        self._env = (env, call)

    async def act(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Reply:
        """Raises the agent's own EndEpisode, and AgentError for any other error or an invalid answer."""
        # Copies, since an agent may write into its messages, and they belong to the trajectory.
        given = [copy.deepcopy(list(messages))]
        if self._with_tools:
            given.append(copy.deepcopy(list(tools)))
        try:
            answer = await self._run(given)
        except (EndEpisode, AgentError):
            raise
        except (Exception, SystemExit) as error:
            cause = error.__cause__ if isinstance(error.__cause__, SystemExit) else error  # as the executor wraps it
            raise AgentError(f"{words_of(cause)} ({place_of(cause, self._folder)})") from error
        try:
            return reply_of_answer(answer)
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            words = f"{self._target} answered with no text, message, completion or Reply: {error}"
            raise AgentError(words[:500]) from error

    async def _run(self, given: list[Any]) -> Any:
        entry = _entry(self._found)
        if any(inspect.iscoroutinefunction(each) for each in (entry, getattr(entry, "__call__", None))):  # noqa: B004
            return await self._asked(given)
        if self._lane is None:
            self._lane = EnvExecutor(f"agentgym agent {self._target}")
            weakref.finalize(self, self._lane.stop).atexit = False
        return await self._lane.call(self._asked, given)

    def _asked(self, given: list[Any]) -> Any:
        """The answer. The user's object is made here too, as it may refuse another thread than that of its calls."""
        if self._answer is None:
            self._player = self._found(**self._kwargs) if self._is_class else self._found
            if self._env is not None and hasattr(self._player, "attach"):
                self._player.attach(*self._env)
            self._answer = getattr(self._player, "act", self._player)
        return self._answer(*given, **({} if self._is_class else self._kwargs))


def _entry(found: Any) -> Any:
    """The function called for each turn, unbound where `found` is a class."""
    return getattr(found, "act", None) or (getattr(found, "__call__", None) if inspect.isclass(found) else found)  # noqa: B004


def _check(target: str, found: Any, kwargs: Mapping[str, Any]) -> bool:
    """True if the target also takes the tools. Raises ValueError if it is nothing to call, or takes other arguments."""
    if inspect.isclass(found):
        if not hasattr(found, "act") and "__call__" not in dir(found):
            raise ValueError(f"agent {target!r}: class {found.__name__} has no act(messages, tools)")
        _bind(f"agent {target!r}: {found.__name__} cannot be made", found, [], kwargs)
        bound = isinstance(inspect.getattr_static(found, "act", None), staticmethod | classmethod)
        return _takes_tools(target, _entry(found) if bound else partial(_entry(found), None), {})
    if not callable(_entry(found)):
        raise ValueError(f"agent {target!r} is {found!r:.40}: a function or something with act() is needed")
    if kwargs and hasattr(found, "act"):
        raise ValueError(f"agent {target!r} is an object, not a class: it takes no kwargs, so not {', '.join(kwargs)}")
    return _takes_tools(target, _entry(found), kwargs)


def _takes_tools(target: str, entry: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    """By signature; a second parameter with a default and another name than "tools" is a setting of the user's own."""
    try:
        parameters = list(inspect.signature(entry).parameters.values())
    except (TypeError, ValueError):  # functions in C have no signature
        return True
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    wants = any(p.name not in kwargs and (p.default is p.empty or p.name == "tools") for p in places[1:2])
    both = wants or any(p.kind is p.VAR_POSITIONAL for p in parameters)
    more = f" and {', '.join(kwargs)}" if kwargs else ""
    _bind(f"agent {target!r} must take (messages) or (messages, tools){more}", entry, [None] * (1 + both), kwargs)
    return both


def _bind(what: str, entry: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(entry)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ValueError(f"{what}: {error}; it takes {signature}") from error
