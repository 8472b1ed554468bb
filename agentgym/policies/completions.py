"""Chat completions as endpoints write them: one JSON object, or a stream of server-sent events, read into a `Reply`."""

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from agentgym.core.messages import Message, assistant
from agentgym.policies.base import Reply

REASONING = ("reasoning_content", "reasoning")


class Passing(Exception):
    """A failure that is retried.

    Attributes:
        cause: "timeout", "connection", "cut" (a body or stream that ended early), "garbage" (not a chat completion), or the number
            of an endpoint's error.
        wait: seconds that the server asked for.
        busy: whether it has too much to do.
    """

    def __init__(self, what: str, cause: str = "garbage", wait: float | None = None):
        super().__init__(what)
        self.cause, self.wait = cause, wait
        self.busy = cause == "429" or wait is not None


def read_completion(body: bytes) -> Reply:
    try:
        record = json.loads(body)
        _raise_error_of(record)
        return reply_of(record)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        shown = body[:200].decode(errors="replace")
        raise Passing(f"no chat completion ({error!r}): {shown!r}") from error


def reply_of(record: Mapping[str, Any]) -> Reply:
    choice = record["choices"][0]
    return _reply(choice["message"], record.get("usage"), choice.get("finish_reason"))


async def read_stream(chunks: AsyncIterator[bytes]) -> Reply:
    message: Message = {"role": "assistant", "content": None}
    calls: dict[int, dict[str, Any]] = {}
    usage, reason, begun = None, None, False
    async for data in _events(chunks):
        if data.strip() == "[DONE]":
            break
        try:
            record = json.loads(data)
            _raise_error_of(record)
            usage = record.get("usage") or usage
            for choice in record["choices"][:1]:  # the last chunk may have the usage alone
                begun = True
                _grow(message, calls, choice.get("delta") or {})
                reason = choice.get("finish_reason") or reason
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise Passing(f"no chunk of a chat completion ({error!r}): {data[:200]!r}") from error
    else:
        if reason is None:
            raise Passing("the stream ended before the answer did", "cut")
    if not begun:
        raise Passing("the stream has no answer in it")
    return _reply({**message, "tool_calls": [calls[number] for number in sorted(calls)]}, usage, reason)


async def _events(chunks: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """The data of each event: its `data:` lines, up to the empty line that ends it. One that was cut is left out."""
    rest, data = b"", []
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            text = line.rstrip(b"\r").decode(errors="replace")
            if text.startswith("data:"):
                data.append(text[5:].removeprefix(" "))
            elif not text and data:
                yield "\n".join(data)
                data = []


def _grow(message: Message, calls: dict[int, dict[str, Any]], delta: Mapping[str, Any]) -> None:
    """Add a chunk to a message and to its tool calls by their numbers."""
    for name in ("content", *REASONING):
        if delta.get(name) or delta.get(name) == "":
            message[name] = (message.get(name) or "") + delta[name]
    for part in delta.get("tool_calls") or ():
        place = part.get("index")
        # Where calls are not numbered, one with a name begins and one without goes on.
        number = place if isinstance(place, int) else len(calls) - (0 if part["function"].get("name") else 1)
        empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
        call = calls.setdefault(max(number, 0), empty)
        call["id"] = call["id"] or part.get("id") or ""
        call["type"] = part.get("type") or call["type"]
        function = part.get("function") or {}
        call["function"]["name"] += function.get("name") or ""
        call["function"]["arguments"] += function.get("arguments") or ""


def _raise_error_of(record: Any) -> None:
    """Raise the error in a body: routers answer 200 with the error of the endpoint behind them."""
    if isinstance(record, Mapping) and record.get("error") and not record.get("choices"):
        error = record["error"]
        code = error.get("code") if isinstance(error, Mapping) else None
        raise Passing(f"answered an error: {str(error)[:500]}", str(code) if isinstance(code, int) else "garbage")


def _reply(given: Mapping[str, Any], usage: Any, finish_reason: Any) -> Reply:
    message: Message = {"role": "assistant", "content": given.get("content")}
    if given.get("tool_calls"):
        message["tool_calls"] = [_checked_call(call) for call in given["tool_calls"]]
    message |= {name: given[name] for name in REASONING if given.get(name)}
    reason = finish_reason if isinstance(finish_reason, str) else None
    return Reply(assistant(message), usage=token_counts(usage), finish_reason=reason)


def _checked_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    if not isinstance(function["name"], str):
        raise TypeError(f"the name of a tool call is {function['name']!r}")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        function = {**function, "arguments": json.dumps({} if arguments is None else arguments, ensure_ascii=False)}
    return {**call, "function": dict(function)}


def token_counts(given: Any) -> dict[str, int]:
    """An endpoint's token counts by the names of `Reply.usage`; missing ones are left out."""
    if not isinstance(given, Mapping):
        return {}
    details = {name: given.get(f"{name}_tokens_details") for name in ("prompt", "completion")}
    prompt, completion = (each if isinstance(each, Mapping) else {} for each in details.values())
    found = {
        "prompt_tokens": given.get("prompt_tokens"),
        "completion_tokens": given.get("completion_tokens"),
        "cached_tokens": prompt.get("cached_tokens", given.get("prompt_cache_hit_tokens")),
        "reasoning_tokens": completion.get("reasoning_tokens"),
    }
    return {name: n for name, n in found.items() if isinstance(n, int) and not isinstance(n, bool) and n >= 0}


def as_sent(messages: list[Message], send_reasoning: bool) -> list[Message]:
    """Messages in the form that endpoints accept: without reasoning unless asked for, and without null tool calls."""
    found = []
    for message in messages:
        sent = message
        if message.get("role") == "assistant":
            sent = {name: value for name, value in message.items() if send_reasoning or name not in REASONING}
            if sent.get("content") is None and not sent.get("tool_calls"):
                sent["content"] = ""
        found.append(sent)
    return found
