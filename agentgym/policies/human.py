"""A person as a policy: each answer is a typed line, or a line of a file."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from agentgym.core.messages import Message, assistant
from agentgym.core.usage_error import instead, nearest
from agentgym.policies.base import EndEpisode, Reply

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
