"""Tools: typed functions that an agent may call."""

import inspect
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentgym.core.messages import Message, text_of, tool_result, user
from agentgym.tools.schemas import describe, problem_of_arguments, sole_argument, typed
from agentgym.tools.text_forms import ToolCall, calls_in, parse_json


class ToolError(Exception):
    """Raised inside a tool: its text answers the call. Any other exception is a failure of the environment."""


@dataclass(frozen=True)
class Tool:
    """A function that an agent may call.

    Attributes:
        parameters: JSON schema of the arguments, an object.
        check: given arguments and `parameters`, says what is wrong with the arguments, or None.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    function: Callable[..., Any] = field(repr=False)
    check: Callable[[Any, Mapping[str, Any]], str | None] = field(default=problem_of_arguments, repr=False)

    @property
    def schema(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function itself, unchecked."""
        return self.function(*args, **kwargs)

    def run(self, arguments: Mapping[str, Any]) -> str:
        """The function's result as text (JSON unless it is text), or "Error: " and what is wrong."""
        if problem := self.check(arguments, self.parameters):
            return _error(f"{self.name}: {problem}")
        try:
            result = self.function(**arguments)
        except ToolError as error:
            return _error(str(error))
        return _clean(result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str))


def tool(function: Callable[..., Any]) -> Tool:
    """Make a tool of a typed function with a docstring. Use it as a decorator, or on a bound method.

    Arguments are `str`, `int`, `float`, `bool`, `list`, `list[T]`, `dict`, `dict[str, T]`, `Literal[...]`, `Any`, `None` and
    unions. The docstring's first part describes the tool, its "Args" section the arguments.

    Raises:
        TypeError: no docstring, an argument without a type or with another one, `*args`, an `async def`, or a documented
            argument that the function does not have.
    """
    if inspect.iscoroutinefunction(function):
        raise TypeError(f"tool {function.__name__!r} is async: a tool is a plain `def`")
    return Tool(function.__name__, *describe(function), function)


class ToolSet:
    """The tools of one environment.

    Args:
        tools: tools, or functions to make tools of.
        fenced: the tool that a fenced block of a language calls with the block's text: `{"py": "python"}`. Default: none.
        seconds: once the calls of a message took so long, its other calls are answered with an error. Default: all run.

    Raises:
        ValueError: two tools have one name; `fenced` names an unknown tool, or one that does not take one text.
        TypeError: a function makes no tool.
    """

    def __init__(
        self,
        tools: Iterable[Tool | Callable[..., Any]],
        fenced: Mapping[str, str] | None = None,
        seconds: float = math.inf,
    ):
        self._seconds = seconds
        self._tools: dict[str, Tool] = {}
        for item in tools:
            made = item if isinstance(item, Tool) else tool(item)
            if made.name in self._tools:
                raise ValueError(f"two tools are called {made.name!r}")
            self._tools[made.name] = made
        self._fenced = {language.lower(): name for language, name in (fenced or {}).items()}
        for language, name in self._fenced.items():
            if name not in self._tools or sole_argument(self._tools[name].parameters) is None:
                raise ValueError(f"a ```{language} block cannot call {name!r}: name a tool that takes one text")

    def __iter__(self) -> Iterator[Tool]:
        return iter(self._tools.values())

    def __len__(self) -> int:
        return len(self._tools)

    def __getitem__(self, name: str) -> Tool:
        return self._tools[name]

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [item.schema for item in self]

    def calls_of(self, message: Message) -> list[ToolCall] | str:
        """The calls that an assistant message makes, in order, or the problem with one. They are not yet checked."""
        calls = []
        for call in self._read(message):
            if isinstance(call, str):
                return call
            calls.append(call)
        return calls

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Run a tool: its result as text, or a text beginning with "Error: " that says what to change."""
        if not isinstance(name, str) or name not in self._tools:
            return _error(f"there is no tool {name!r:.100}; the tools are: {', '.join(self._tools) or 'none'}")
        return self._tools[name].run(arguments)

    def answer(self, message: Message) -> list[Message]:
        """Run every call of an assistant message: the messages that answer it, [] if it makes no call.

        Each native call is answered by a `tool` message with its id, even a malformed one. Calls in the text are answered by one
        `user` message with a `<tool_response>` for each; if one of them is malformed, none is run.
        """
        until = time.monotonic() + self._seconds

        def in_time(call: ToolCall) -> str:
            if time.monotonic() < until:
                return self.call(call.name, call.arguments)
            return _error(f"not run: the calls before it took {self._seconds:g} seconds. Call again in the next reply")

        if native := _native_calls(message):
            return [
                tool_result(_id_of(raw, place), _error(call) if isinstance(call, str) else in_time(call))
                for place, (raw, call) in enumerate(zip(native, self._read(message), strict=True))
            ]
        calls = self.calls_of(message)
        if isinstance(calls, str):
            return [user(_error(calls))]
        results = [f"<tool_response>\n{in_time(call)}\n</tool_response>" for call in calls]
        return [user("\n".join(results))] if results else []

    def _read(self, message: Message) -> list[ToolCall | str]:
        if native := _native_calls(message):
            return [_read_native(raw, place) for place, raw in enumerate(native)]
        calls: list[ToolCall | str] = []
        for call in calls_in(text_of(message), self._fenced, self._tools):
            if isinstance(call, str) or not call.raw:
                calls.append(call)
            else:
                parameters = self._tools[call.name].parameters if call.name in self._tools else {}
                calls.append(ToolCall(call.name, typed(call.arguments, parameters)))
        return calls


def shortened(text: str, most: int) -> str:
    """A result cut to `most` characters: its beginning and its end, and how many are left out."""
    if len(text) <= most:
        return text
    head, tail = text[: most - most // 2], text[len(text) - most // 2 :]
    return f"{head}\n[... {len(text) - most} characters left out ...]\n{tail}"


def _native_calls(message: Message) -> list[Any]:
    native = message.get("tool_calls") or []
    return native if isinstance(native, list) else [native]


def _id_of(raw: Any, place: int) -> str:
    given = raw.get("id") if isinstance(raw, Mapping) else None
    return given if isinstance(given, str) and given else f"call_{place}"


def _read_native(raw: Any, place: int) -> ToolCall | str:
    function = raw.get("function") if isinstance(raw, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return "a tool call needs a function with a name and arguments"
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = parse_json(arguments) if arguments.strip() else {}  # endpoints send "" for a call without arguments
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return f"the arguments of {function['name']!r:.100} must be a JSON object, for example {{}}"
    return ToolCall(function["name"], arguments, _id_of(raw, place))


def _error(text: str) -> str:
    return _clean(f"Error: {text}")


def _clean(text: str) -> str:
    """Text that UTF-8 can encode: a lone surrogate, which JSON escapes can hold, becomes a question mark."""
    return text.encode("utf-8", "replace").decode("utf-8")
