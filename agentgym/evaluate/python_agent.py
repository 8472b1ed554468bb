"""The user's own agent in Python, named `package.module:name`. It may be

- a class with `act(messages, tools)`: made once for each episode, with the agent's kwargs;
- an object with `act(messages, tools)`: one for all episodes, many at a time;
- a function of `(messages)` or `(messages, tools)`, which gets the kwargs with every call. So does a class or an object that
  is called.

All may be `def` or `async def`. A `def` runs in a thread per episode, so that it never blocks the others. The answer is
described by `reply_of_answer`. Raising `EndEpisode` ends the episode; anything else that is raised fails it, and the error
names the place in the user's file.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from agentgym.core.executor import EnvExecutor
from agentgym.core.messages import Message, assistant
from agentgym.core.tracebacks import place_of
from agentgym.policies.base import EndEpisode, EndpointUsage, Reply
from agentgym.policies.chat import reply_of

if TYPE_CHECKING:
    from agentgym.core.env import Env

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
    message: Message = {"role": "assistant", "content": _content(said.content)}
    calls = [
        {
            "id": call.get("id") or "",
            "type": "function",
            "function": {"name": call["name"], "arguments": json.dumps(call["args"], ensure_ascii=False)},
        }
        for call in getattr(said, "tool_calls", None) or ()
    ]
    if calls:
        message["tool_calls"] = calls
    finish = (getattr(said, "response_metadata", None) or {}).get("finish_reason")
    usage = _usage(getattr(said, "usage_metadata", None) or {})
    return Reply(assistant(message), usage=usage, finish_reason=finish if isinstance(finish, str) else None)


def _content(content: Any) -> Any:
    """Text unchanged; of a list of parts, the joined text parts, since tool calls are separate fields."""
    if isinstance(content, str) or content is None:
        return content
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    return "".join(part.get("text", "") for part in parts if part.get("type") == "text")


def _usage(counted: Mapping[str, Any]) -> dict[str, int]:
    details = {name: counted.get(f"{name}_token_details") or {} for name in ("input", "output")}
    found = {
        "prompt_tokens": counted.get("input_tokens"),
        "completion_tokens": counted.get("output_tokens"),
        "cached_tokens": details["input"].get("cache_read"),
        "reasoning_tokens": details["output"].get("reasoning"),
    }
    return {name: count for name, count in found.items() if isinstance(count, int)}


class AgentError(RuntimeError):
    """The user's agent raised, or its answer is unusable. Names the line in the user's files."""


@dataclass(frozen=True)
class PythonAgent:
    """A target that was found and fits.

    Attributes:
        target: how the user named it.
        found: the class, object or function itself.
        kwargs: of the class, or of every call of a function.
        with_tools: whether it takes the tools beside the messages.
        folder: where the user's files are, by which errors find their place.
    """

    target: str
    found: Any
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    with_tools: bool = True
    folder: str = ""

    @classmethod
    def load(cls, target: str, kwargs: Mapping[str, Any]) -> PythonAgent:
        """Import the target, also from the current directory. Raises ValueError if it cannot be used."""
        module = _module(target)
        found: Any = module
        for part in target.partition(":")[2].split("."):
            if not hasattr(found, part):
                near = ", ".join(name for name in vars(module) if not name.startswith("_")) or "nothing"
                raise ValueError(f"agent {target!r}: module {module.__name__!r} has no {part!r}; it has {near}"[:400])
            found = getattr(found, part)
        with_tools = _check(target, found, kwargs)
        return cls(target, found, dict(kwargs), with_tools, str(Path(module.__file__ or ".").resolve().parent))


class PythonPolicy:
    def __init__(self, agent: PythonAgent):
        self._agent = agent
        self._answer: Callable[..., Any] | None = None
        self._player: Any = None
        self._env: tuple[Any, Any] | None = None
        self._lane: EnvExecutor | None = None

    @property
    def calls(self) -> EndpointUsage | None:
        """The requests that the user's object counted; None where one object plays all episodes."""
        found = getattr(self._player, "calls", None)
        return found if isinstance(found, EndpointUsage) and inspect.isclass(self._agent.found) else None

    def attach(self, env: Env, call: Any) -> None:
        """Play in this environment, where the user's object wants to know it."""
        self._env = (env, call)

    async def act(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Reply:
        """Raises the agent's own EndEpisode, and AgentError for any other error or an invalid answer."""
        # Copies, since an agent may write into its messages, and they belong to the trajectory.
        given = [copy.deepcopy(list(messages))]
        if self._agent.with_tools:
            given.append(copy.deepcopy(list(tools)))
        try:
            answer = await self._run(given)
        except (EndEpisode, AgentError):
            raise
        except (Exception, SystemExit) as error:
            raise AgentError(f"{_what(error)} ({place_of(error, self._agent.folder)})") from error
        try:
            return reply_of_answer(answer)
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            words = f"{self._agent.target} answered with no text, message, completion or Reply: {error}"
            raise AgentError(words[:500]) from error

    async def _run(self, given: list[Any]) -> Any:
        agent = self._agent
        kwargs = {} if inspect.isclass(agent.found) else agent.kwargs
        if _is_async(agent.found):
            if self._answer is None:
                self._player = _make(agent)
                self._answer = self._entered()
            return await self._answer(*given, **kwargs)
        if self._lane is None:
            self._lane = EnvExecutor(f"agentgym agent {agent.target}")
            weakref.finalize(self, self._lane.stop).atexit = False
        if self._answer is None:
            # In the agent's own thread, as its calls: its objects may refuse other threads.
            self._player = await self._lane.call(_make, agent)
            self._answer = self._entered()
        outcome = await self._lane.call(_caught, self._answer, given, kwargs)
        if isinstance(outcome, BaseException):
            raise outcome
        return await outcome if inspect.isawaitable(outcome) else outcome

    def _entered(self) -> Callable[..., Any]:
        """The function to call for each turn; the environment is passed on first."""
        if self._env is not None and hasattr(self._player, "attach"):
            self._player.attach(*self._env)
        return self._player.act if hasattr(self._player, "act") else self._player


def _make(agent: PythonAgent) -> Any:
    return agent.found(**agent.kwargs) if inspect.isclass(agent.found) else agent.found


def _caught(function: Callable[..., Any], given: list[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result, or SystemExit as a value: raised, it would end the thread."""
    try:
        return function(*given, **kwargs)
    except SystemExit as error:
        return error


def _module(target: str) -> ModuleType:
    name, colon, rest = target.partition(":")
    if name.endswith(".py"):
        raise ValueError(f"agent {target!r}: write {name[:-3].replace('/', '.')}:{rest or 'run'} for a file {name}")
    if not (colon and rest and all(part.isidentifier() for part in f"{name}.{rest}".split("."))):
        raise ValueError(f"agent {target!r}: write package.module:name")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            where = f"looked in {Path.cwd()} and what is installed"
            raise ValueError(f"agent {target!r}: there is no module {error.name!r} ({where})") from error
        raise ValueError(f"agent {target!r}: module {name!r} needs {error.name!r}, which is not installed") from error
    except (Exception, SystemExit) as error:
        place = place_of(error, str(Path.cwd()))
        raise ValueError(f"agent {target!r}: importing it failed: {_what(error)} ({place})") from error


def _entry(found: Any) -> Any:
    """The function called for each turn, unbound where `found` is a class."""
    return getattr(found, "act", None) or (getattr(found, "__call__", None) if inspect.isclass(found) else found)  # noqa: B004


def _is_async(found: Any) -> bool:
    entry = _entry(found)
    return inspect.iscoroutinefunction(entry) or inspect.iscoroutinefunction(getattr(entry, "__call__", None))  # noqa: B004


def _check(target: str, found: Any, kwargs: Mapping[str, Any]) -> bool:
    """True if the target also takes the tools. Raises ValueError if it is nothing to call, or takes other arguments."""
    if inspect.isclass(found):
        if not hasattr(found, "act") and "__call__" not in dir(found):
            raise ValueError(f"agent {target!r}: class {found.__name__} has no act(messages, tools)")
        if problem := _problem(found, [], kwargs):
            raise ValueError(f"agent {target!r}: {found.__name__} cannot be made: {problem}")
        return _takes_tools(target, _entry(found), [None], {})
    if not callable(_entry(found)):
        raise ValueError(f"agent {target!r} is {found!r:.40}: a function or something with act() is needed")
    if kwargs and hasattr(found, "act"):
        raise ValueError(f"agent {target!r} is an object, not a class: it takes no kwargs, so not {', '.join(kwargs)}")
    return _takes_tools(target, _entry(found), [], kwargs)


def _takes_tools(target: str, entry: Callable[..., Any], bound: list[Any], kwargs: Mapping[str, Any]) -> bool:
    """By signature; a second parameter with a default and another name than "tools" is a setting of the user's own."""
    try:
        parameters = list(inspect.signature(entry).parameters.values())
    except (TypeError, ValueError):  # functions in C have no signature
        return True
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][len(bound) :]
    second = places[1] if len(places) > 1 else None
    wants = second and second.name not in kwargs and (second.default is second.empty or second.name == "tools")
    both = bool(wants) or any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if problem := _problem(entry, [*bound, [], []] if both else [*bound, []], kwargs):
        more = f" and {', '.join(kwargs)}" if kwargs else ""
        raise ValueError(f"agent {target!r} must take (messages) or (messages, tools){more}: {problem}")
    return both


def _problem(entry: Callable[..., Any], args: list[Any], kwargs: Mapping[str, Any]) -> str:
    signature = None
    try:
        signature = inspect.signature(entry)
        signature.bind(*args, **kwargs)
    except (TypeError, ValueError) as error:
        return f"{error}; it takes {signature}" if signature else ""
    return ""


def _what(error: BaseException) -> str:
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return " ".join(f"{type(error).__name__}: {text}".split())[:500].removesuffix(":")
