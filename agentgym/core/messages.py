"""Chat messages in the OpenAI form.

A message is a plain dict, so that it goes to JSON, to an endpoint and to a chat template as it is:
`{"role": "user", "content": "hi"}`, with `tool_calls`, `tool_call_id`, `name` or content parts where they apply.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]
Observation: TypeAlias = list[Message]
Action: TypeAlias = str | Message

ROLES = ("system", "user", "assistant", "tool")


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(action: Action) -> Message:
    """An action as an assistant message: text is wrapped, a message is checked and copied. Raises TypeError, ValueError."""
    if isinstance(action, str):
        return {"role": "assistant", "content": action}
    if not isinstance(action, Mapping):
        raise TypeError(f"an action is text or an assistant message, not {type(action).__name__}: {action!r}")
    problem = problem_of(action)
    if problem or action["role"] != "assistant":
        raise ValueError(f"not an assistant message ({problem or 'role is ' + repr(action['role'])}): {action!r}")
    return dict(action)


def tool_result(call_id: str, text: str, name: str | None = None) -> Message:
    message: Message = {"role": "tool", "tool_call_id": call_id, "content": text}
    if name is not None:
        message["name"] = name
    return message


def text_of(message: Action) -> str:
    """The text of a message or action: its content, or its text parts joined; "" if it has none."""
    if isinstance(message, str):
        return message
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content if part.get("type") == "text")


def instructed(messages: Sequence[Message], instruction: str) -> Observation:
    """Copies of a task's messages, with an instruction at the end of the last one. Raises ValueError if there are none."""
    if not messages:
        raise ValueError("no messages: there is nothing to put an instruction after")
    *before, last = messages
    content = last.get("content")
    asked: Any = [*(content or []), {"type": "text", "text": f"\n\n{instruction}"}]
    if isinstance(content, str):
        asked = f"{content}\n\n{instruction}"
    return [*(dict(message) for message in before), {**last, "content": asked}]


def problem_of(message: object) -> str | None:
    """The problem with a message, or None if it is valid."""
    if not isinstance(message, (dict, Mapping)):  # dict first: it takes a fraction of the time
        return f"a message is a dict, not {type(message).__name__}"
    if message.get("role") not in ROLES:
        return f"role must be one of {', '.join(ROLES)}, not {message.get('role')!r}"
    content = message.get("content")
    if content is None:
        return None if message["role"] == "assistant" else "content is missing"
    if isinstance(content, str):
        return None
    parts: Sequence[Any] = content if isinstance(content, Sequence) else [None]
    if not all(isinstance(part, Mapping) and isinstance(part.get("type"), str) for part in parts):
        return f"content must be text or a list of typed parts, not {type(content).__name__}"
    texts = [part.get("text", "") for part in parts if part["type"] == "text"]
    odd = next((type(text).__name__ for text in texts if not isinstance(text, str)), None)
    return None if odd is None else f"the text of a content part must be a string, not {odd}"
