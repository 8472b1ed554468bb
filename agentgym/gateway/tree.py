"""The calls of one episode as a tree: each hangs on the call whose prompt and sampled ids are the longest exact beginning of its prompt.

Ids are kept as bytes, and only those that the parent does not have.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from agentgym.core.messages import Message
from agentgym.core.trajectory import Tokens
from agentgym.gateway.calls import ModelAnswer, ModelCall

WIDTH = 4  # bytes of an id
# Why tokens cannot be trained on; a setting that was honoured is named by its own name.
NO_IDS, UNDELIVERED, INCOMPLETE = "no token ids", "undelivered", "incomplete episode"


def packed(ids: Sequence[int]) -> bytes:
    return array("i", ids).tobytes()


def unpacked(ids: bytes) -> list[int]:
    return array("i", ids).tolist()


@dataclass(eq=False)
class Call:
    """A call that was answered.

    Attributes:
        number: in the episode, in the order in which calls came.
        parent: by ids; None: it begins a sequence.
        after: by messages: the call whose conversation and answer this one goes on from.
        ids: of the prompt behind the parent's, then those sampled. Empty where the model does not tell them.
        logprobs: of the sampled ids.
        versions: (version, number of tokens) of the sampled ids, in their order.
        messages: those behind `after` and its answer.
        prompt: of `/v1/completions`, where the ids are not known.
        tools: the digest of their schemas.
        asked, used: the settings.
        changed: names of settings that were not honoured.
        unusable: names of settings that were honoured, so that the tokens cannot be trained on.
        why: why the prompt's ids do not go on from those of `after`, or of any call.
    """

    number: int
    parent: Call | None
    after: Call | None
    ids: bytes
    logprobs: array[float]
    versions: list[tuple[int, int]]
    messages: list[Message]
    prompt: str | list[int] | None
    tools: str
    asked: dict[str, Any]
    used: dict[str, Any]
    changed: list[str]
    unusable: list[str]
    message: Message
    usage: dict[str, int]
    finish_reason: str
    stop: str | None
    more: dict[str, Any]
    why: str | None = None

    def __post_init__(self) -> None:
        self.children: list[Call] = []
        self.followers: list[Call] = []  # the other side of `after`
        self.depth: int = (self.parent.depth if self.parent else 0) + len(self.ids) // WIDTH  # tokens up to the last one sampled
        self.length: int = (self.after.length if self.after else 0) + len(self.messages) + 1  # messages with the answer

    @property
    def sampled(self) -> int:
        """Sampled tokens."""
        return len(self.logprobs) or self.usage.get("completion_tokens", 0)

    def tokens(self) -> Tokens | None:
        """The exact tokens; None where the model does not tell them."""
        if not self.logprobs:
            return None
        parts, call = [self.ids], self.parent
        while call is not None:
            parts.append(call.ids)
            call = call.parent
        ids = unpacked(b"".join(reversed(parts)))
        start = len(ids) - len(self.logprobs)
        versions = [version for version, count in self.versions for _ in range(count)]
        return Tokens(ids[:start], ids[start:], self.logprobs.tolist(), versions, self.finish_reason)

    def conversation(self) -> list[Message]:
        """All messages of the prompt."""
        parts, call = [self.messages], self.after
        while call is not None:
            parts += [[call.message], call.messages]
            call = call.after
        return [message for part in reversed(parts) for message in part]

    def to_json(self) -> dict[str, Any]:
        """A JSON object, without what is empty."""
        record = {name: vars(self)[name] for name in _FIELDS}
        start = len(self.ids) // WIDTH - len(self.logprobs)
        ids = unpacked(self.ids)
        record |= {"shared": self.parent.depth if self.parent else 0, "new": ids[:start], "sampled": ids[start:]}
        record |= {name: getattr(self, name).number if getattr(self, name) else None for name in ("parent", "after")}
        record["logprobs"] = self.logprobs.tolist()
        return {name: value for name, value in record.items() if value not in (None, [], {}, "")}


_FIELDS = [name for name in Call.__dataclass_fields__ if name != "ids"]
_TEXTS = {"tools": "", "prompt": None, "stop": None, "why": None}
_LISTS, _TABLES = ("versions", "messages", "changed", "unusable"), ("asked", "used", "usage", "more")


@dataclass
class Tree:
    """The answered calls of an episode, by their numbers."""

    calls: dict[int, Call] = field(default_factory=dict)
    roots: list[Call] = field(default_factory=list)
    openings: list[Call] = field(default_factory=list)  # roots by messages

    def add(self, call: Call) -> None:
        self.calls[call.number] = call
        if call.ids:
            (call.parent.children if call.parent else self.roots).append(call)
        if call.messages:
            (call.after.followers if call.after else self.openings).append(call)

    def read(self, record: Mapping[str, Any]) -> Call:
        """A call as `to_json` wrote it, not added yet. Raises KeyError, TypeError, ValueError for another record."""
        given = {**_TEXTS, **{name: [] for name in _LISTS}, **{name: {} for name in _TABLES}, **record}
        parent, after = (self.calls[given[name]] if name in record else None for name in ("parent", "after"))
        if given.pop("shared", 0) != (parent.depth if parent else 0):
            raise ValueError(f"call {given['number']} does not fit its parent")
        ids = packed([*given.pop("new", ()), *given.pop("sampled", ())])
        versions = [(version, count) for version, count in given["versions"]]
        logprobs = array("d", given.get("logprobs", ()))
        return Call(**{**given, "parent": parent, "after": after, "ids": ids, "logprobs": logprobs, "versions": versions})

    def grown(self, number: int, call: ModelCall, answer: ModelAnswer, tools: str) -> Call:
        """A call that was answered now, with its place in the tree; it is not added yet."""
        tokens = answer.tokens
        if tokens and not 0 < len(tokens.completion_ids) == len(tokens.logprobs) == len(tokens.versions):
            tokens = None
        parent, ids, versions = None, b"", []
        if tokens:
            ids = packed(tokens.prompt_ids)
            parent = self.longest(ids)
            ids = ids[parent.depth * WIDTH if parent else 0 :] + packed(tokens.completion_ids)
            versions = [(version, len(list(run))) for version, run in groupby(tokens.versions)]
        after = call.after
        about = call.settings, call.used, call.changed, call.unusable
        said = answer.message, answer.usage, answer.finish_reason, answer.stop, answer.more
        logprobs = array("d", tokens.logprobs if tokens else ())
        messages = call.messages[after.length if after else 0 :]
        prompt = None if tokens else call.prompt
        made = Call(number, parent, after, ids, logprobs, versions, messages, prompt, tools, *about, *said)
        goes_on = parent is not None and (after is None or not after.ids or _is_above(after, parent))
        if ids and self.calls and not goes_on:
            made.why = self._why(made, call.messages)
        return made

    def longest(self, prompt: bytes) -> Call | None:
        """The call whose tokens are the longest beginning of a prompt; of several the first."""
        best, left = None, [(call, 0) for call in self.roots]
        while left:
            call, start = left.pop()
            if prompt.startswith(call.ids, start):
                if best is None or (-call.depth, call.number) < (-best.depth, best.number):
                    best = call
                left += [(child, start + len(call.ids)) for child in call.children]
        return best

    def last_said(self, messages: Sequence[Message]) -> Call | None:
        """The call whose messages and answer are the longest beginning of these messages; of several the first."""
        best, left = None, [(call, 0) for call in self.openings]
        while left:
            call, start = left.pop()
            end = call.length - 1
            if end < len(messages) and messages[end] == call.message and messages[start:end] == call.messages:
                if best is None or (-call.length, call.number) < (-best.length, best.number):
                    best = call
                left += [(follower, call.length) for follower in call.followers]
        return best

    def _why(self, made: Call, messages: Sequence[Message]) -> str | None:
        """Why the ids of a prompt go on from no call, or not from those of the call that its messages go on from."""
        if made.after is not None:  # the template, or other tools, wrote the past otherwise than it was sampled
            if made.tools != made.after.tools:
                return "tools changed"
            if made.after.message.get("reasoning_content"):
                return "thoughts removed"
            return "tool call re-serialised" if made.after.message.get("tool_calls") else "re-tokenised"
        nearest, why = 0, "new conversation"
        for call in self.calls.values():
            said = [*call.conversation(), call.message]
            place = next((n for n, (one, other) in enumerate(zip(messages, said, strict=False)) if one != other), None)
            if place is None:
                return None  # asked again
            shared, reason = _difference(messages, said, place)
            if reason and shared >= nearest:
                nearest, why = shared, reason
        return why

    def share(self, undelivered: Collection[int] = (), incomplete: bool = False) -> dict[str, Any]:
        """Sampled tokens, those that can be trained on, why the others cannot, and why prompts did not go on from calls before."""
        lost = Counter[str]()
        for call in self.calls.values():
            reasons = [*call.unusable, *[UNDELIVERED] * (call.number in undelivered), *[INCOMPLETE] * incomplete]
            if not call.logprobs:
                reasons.insert(0, NO_IDS)
            if reasons:
                lost[reasons[0]] += call.sampled
        sampled = sum(call.sampled for call in self.calls.values())
        forks = Counter(call.why for call in self.calls.values() if call.why)
        return {"sampled": sampled, "trainable": sampled - lost.total(), "lost": dict(lost), "forks": dict(forks)}


def _is_above(call: Call, below: Call | None) -> bool:
    while below is not None and below is not call:
        below = below.parent
    return below is call


def _difference(mine: Sequence[Message], said: Sequence[Message], place: int) -> tuple[int, str | None]:
    """What a client changed of what was said, at the first message that differs; None: it is another conversation."""
    one, other = mine[place], said[place]
    if place == 0 and "system" in (one["role"], other["role"]):
        own, rest = ([message for message in side if message["role"] != "system"] for side in (mine, said))
        return len(rest), "system prompt changed" if own[: len(rest)] == rest else None
    if one["role"] == other["role"] == "assistant":
        if {**one, "reasoning_content": ""} == {**other, "reasoning_content": ""}:
            return place, "thoughts removed"
        if _as_read(one) == _as_read(other):
            return place, "tool call re-serialised"
    return place, "earlier message edited" if any(message["role"] == "user" for message in mine[:place]) else None


def _as_read(message: Message) -> Any:
    """A message with the arguments of its tool calls as values, however they are written."""

    def value(text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            return text

    calls = [(call["function"]["name"], value(call["function"]["arguments"])) for call in message.get("tool_calls", ())]
    return {**message, "tool_calls": calls, "reasoning_content": ""}
