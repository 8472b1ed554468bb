"""Answers of foreign agents as a `Reply`: recognised by their form, so that no other package is needed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from agentgym.core.messages import Message, assistant
from agentgym.policies.base import Reply
from agentgym.policies.completions import reply_of

_AI = ("ai", "AIMessageChunk")  # what LangChain's messages of a model call their type


def reply_of_answer(answer: Any) -> Reply:
    """The reply of an agent's answer, with usage and finish reason where it tells them.

    Args:
        answer: a text; an assistant message or a chat completion, as an object of the `openai` package or as a dict; a message
            of LangChain; a list of such messages, of which the last counts, or a dict with one under "messages", as an agent
            of LangGraph returns it; or a `Reply`.

    Raises:
        TypeError, ValueError, LookupError, AttributeError: it is none of these.
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
        raise ValueError(f"the last message is of type {said.type!r}, and no model's")
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
    """Text as it is; of parts those with text, as tool calls stand beside them."""
    if isinstance(content, str) or content is None:
        return content
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    return "".join(part.get("text", "") for part in parts if part.get("type") == "text")


def _usage(counted: Mapping[str, Any]) -> dict[str, int]:
    """LangChain's count by the names of `Reply.usage`."""
    details = {name: counted.get(f"{name}_token_details") or {} for name in ("input", "output")}
    found = {
        "prompt_tokens": counted.get("input_tokens"),
        "completion_tokens": counted.get("output_tokens"),
        "cached_tokens": details["input"].get("cache_read"),
        "reasoning_tokens": details["output"].get("reasoning"),
    }
    return {name: count for name, count in found.items() if isinstance(count, int)}
