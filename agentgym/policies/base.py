"""Policies answer the messages of an environment."""

from __future__ import annotations

import json
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from agentgym.core.messages import Action, Message, assistant
from agentgym.core.trajectory import Tokens
from agentgym.core.usage_error import instead, nearest

if TYPE_CHECKING:
    from agentgym.core.env import Env

    Caller = Callable[..., Awaitable[Any]]


@dataclass(frozen=True)
class Reply:
    """One answer: the assistant message, its exact tokens if the policy knows them, and the endpoint's token counts.

    Attributes:
        usage: the endpoint's counts: prompt_tokens, completion_tokens, and their parts cached_tokens and reasoning_tokens.
        finish_reason: why the endpoint stopped: "stop", "tool_calls", "length" (the answer was cut off),
            "content_filter" (part or all of it is withheld); None if unknown.
        request: only of a summary, which is not an answer: the messages that request it. The environment does not see it, and the
            policy is called again.
        failure: the cause of an agent failure in place of an answer: the episode ends at the environment's floor.
    """

    message: Message
    tokens: Tokens | None = None
    usage: dict[str, int] = field(default_factory=dict)
    finish_reason: str | None = None
    request: list[Message] | None = None
    failure: str | None = None


@dataclass
class EndpointUsage:
    """Requests and tokens of one episode at an endpoint, over all tries, failed turns included.

    Attributes:
        retries: retried requests by cause: an HTTP status ("429"), "timeout", "connection", "cut" (a body or stream that ended
            early), "garbage" (not a chat completion).
        waited: seconds between tries, and before the first if the endpoint had refused others as too many.
    """

    requests: int = 0
    retries: dict[str, int] = field(default_factory=dict)
    usage: dict[str, int] = field(default_factory=dict)
    waited: float = 0.0


@runtime_checkable
class Policy(Protocol):
    """Answers an environment. One object serves one episode at a time."""

    async def act(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Reply: ...


class EndEpisode(Exception):
    """A policy ends the episode without a failure: the loop truncates it with this reason, such as "context"."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


class EndpointError(RuntimeError):
    """A chat endpoint refused a request (`status` is then the HTTP status), or kept failing. The message has the server's words."""

    def __init__(self, what: str, status: int | None = None):
        super().__init__(what)
        self.status = status


KEY_REFUSED = 401
"""The HTTP status of a refused key. Such a request is not retried."""


class ScriptedPolicy:
    """Answers from a script: a list of texts, messages or replies in turn, or a function of the conversation.

    A list that runs out ends the episode with the reason `end`.
    """

    def __init__(self, script: Sequence[Action | Reply] | Callable[[Sequence[Message]], Action], end: str = "script"):
        self._end = end
        self._script = script if callable(script) else iter(script)

    async def act(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Reply:
        if callable(self._script):
            return Reply(assistant(self._script(messages)))
        for action in self._script:
            return action if isinstance(action, Reply) else Reply(assistant(action))
        raise EndEpisode(self._end)


class ByPlayer:
    """A policy for each player by name; `rest` answers for the others."""

    def __init__(self, policies: Mapping[str, Policy], rest: Policy | None = None):
        self._policies, self._rest = policies, rest

    def attach(self, env: Env, call: Caller) -> None:
        for policy in (*self._policies.values(), self._rest):
            if policy is not None and hasattr(policy, "attach"):
                policy.attach(env, call)

    def for_player(self, name: str) -> Policy:
        """The policy of a player. Raises LookupError if it has none."""
        if name in self._policies:
            return self._policies[name]
        if self._rest is None:
            raise LookupError(f"there is no policy for {name!r}, only for {', '.join(self._policies)}")
        found: Policy = self._rest.for_player(name) if hasattr(self._rest, "for_player") else self._rest
        return found

    async def act(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Reply:
        if self._rest is None:
            raise LookupError(f"the environment has one agent, and these policies are for {', '.join(self._policies)}")
        return await self._rest.act(messages, tools)


class NullPolicy:
    async def act(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Reply:
        return Reply(assistant(""))


class _EnvPolicy:
    """Gets its actions from methods of the environment."""

    def __init__(self, rng: random.Random | None, *names: str):
        self.rng = rng or random.Random(0)
        self._names = names
        self._methods: dict[str, Callable[..., Action]] = {}

    def attach(self, env: Env, call: Caller) -> None:
        """Play in this environment; `run_episode` calls this, and `call` runs the environment's methods in the right thread."""
        kind = type(env.unwrapped).__name__
        for name in self._names:
            if not hasattr(env.unwrapped, name):
                raise TypeError(f"{kind} has no {name}(): this policy needs an environment that defines it")
            self._methods[name] = getattr(env.unwrapped, name)
        self._call = call

    async def _ask(self, name: str, *args: Any) -> Reply:
        if not self._methods:
            raise RuntimeError("this policy plays in no environment yet: run it by run_episode")
        return Reply(assistant(await self._call(self._methods[name], *args)))


class ExpertPolicy(_EnvPolicy):
    """Plays the environment's `expert_action()`, or with probability `mistakes` its `random_action(rng)`."""

    def __init__(self, mistakes: float = 0.0, rng: random.Random | None = None):
        if not 0 <= mistakes <= 1:
            raise ValueError(f"mistakes is a chance from 0 to 1, not {mistakes!r}")
        self._mistakes = mistakes
        super().__init__(rng, "expert_action", *(["random_action"] if mistakes else []))

    async def act(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Reply:
        if self._mistakes and self.rng.random() < self._mistakes:
            return await self._ask("random_action", self.rng)
        return await self._ask("expert_action")


class RandomPolicy(_EnvPolicy):
    """Plays random legal actions of an environment that has `random_action(rng)`."""

    def __init__(self, rng: random.Random | None = None):
        super().__init__(rng, "random_action")

    async def act(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Reply:
        return await self._ask("random_action", self.rng)


# ---- a person

HELP = """A line is your answer. A line that begins with / is a command:
  /call NAME {"argument": 1}   call a tool; /call NAME alone, or with a plain text, where that is all it takes
  /long                        an answer of several lines, up to a line with only a dot
  /tools                       the tools, and what they take
  /help                        this
  /quit                        end the episode (so does the end of the input, Ctrl-D)
  //text                       the answer /text"""
_END = "."


class HumanPolicy:
    """Asks a person for each answer: `read` returns the next line for a prompt, or raises EOFError or KeyboardInterrupt."""

    def __init__(self, read: Callable[[str], str], say: Callable[[str], None]):
        self._read, self._say = read, say
        self._calls = 0
        self._begun = False

    async def act(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Reply:
        if not self._begun:
            self._begun = True
            if tools:
                self._say(described(tools))
            self._say("/help shows what you can type")
        try:
            while True:
                message = self._understood(self._read("> "), tools)
                if message is not None:
                    return Reply(assistant(message))
        except EOFError:
            raise EndEpisode("quit") from None
        except KeyboardInterrupt:
            raise EndEpisode("interrupted") from None

    def _understood(self, line: str, tools: Sequence[dict[str, Any]]) -> str | Message | None:
        """The answer that a line gives; None for a command that gives none."""
        if line.startswith("//"):
            return line[1:]
        if not line.startswith("/"):
            return line
        command, _, rest = line.partition(" ")
        if command == "/quit":
            raise EndEpisode("quit")
        if command == "/long":
            return self._lines()
        if command == "/call":
            return self._call(rest.strip(), tools)
        if command == "/tools":
            self._say(described(tools) if tools else "there are no tools")
        elif command == "/help":
            self._say(HELP)
        else:
            known = ("/call", "/long", "/tools", "/help", "/quit")
            self._say(f"there is no command {command}{nearest(command, known)} (//{line[1:]} answers {line})")
        return None

    def _lines(self) -> str:
        lines = []
        while (line := self._read(". ")) != _END:
            lines.append(line)
        return "\n".join(lines)

    def _call(self, text: str, tools: Sequence[dict[str, Any]]) -> Message | None:
        name, _, given = text.partition(" ")
        known = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
        if name not in known:
            self._say(f"there is no tool {name!r}{instead(name, known or ['none'])}" if name else HELP)
            return None
        arguments = self._arguments(given.strip(), known[name])
        if not isinstance(arguments, dict):
            self._say(f"{name}: {arguments}")
            return None
        self._calls += 1
        function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
        call = {"id": f"call_{self._calls}", "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}

    def _arguments(self, given: str, schema: dict[str, Any]) -> dict[str, Any] | str:
        """The arguments of a call, or the problem with them. A tool with one text argument may get plain text."""
        properties, needed = schema.get("properties") or {}, schema.get("required") or ()
        texts = [name for name in needed if properties.get(name, {}).get("type") == "string"]
        only = texts[0] if len(texts) == 1 == len(needed) else None
        if not given and not needed:
            return {}
        if not given and only:
            self._say(f"{only}, up to a line with only a dot:")
            return {only: self._lines()}
        try:
            arguments = json.loads(given)
        except ValueError as error:
            if only and not given.startswith("{"):
                return {only: given}
            return f"its arguments are no JSON ({error}): {given}"
        if isinstance(arguments, dict):
            return arguments
        return {only: given} if only else f"its arguments are a JSON object, not {given}"


def described(tools: Sequence[dict[str, Any]]) -> str:
    lines = []
    for tool in tools:
        function = tool["function"]
        schema = function.get("parameters") or {}
        needed = schema.get("required") or ()
        fields = ", ".join(
            f"{json.dumps(name)}: {field.get('type', 'any')}{'' if name in needed else '?'}"
            for name, field in (schema.get("properties") or {}).items()
        )
        about = " ".join(str(function.get("description", "")).split())
        lines.append(f"  /call {function['name']} {{{fields}}}    {about}".rstrip())
    return "\n".join(["tools:", *lines])
