"""The calls of an episode as a tree: each hangs on the call whose prompt and sampled ids are the longest exact beginning of its prompt.

Ids are kept as bytes, and only those that the parent does not have.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Literal

from agentgym.core.messages import Message
from agentgym.core.trajectory import Tokens
from agentgym.gateway.calls import ModelAnswer, ModelCall

_WIDTH = 4  # bytes of an id
# Why tokens cannot be trained on. A setting that was honoured goes by its own name.
NO_IDS, UNDELIVERED, INCOMPLETE = "no token ids", "undelivered", "incomplete episode"


def _packed(ids: Sequence[int]) -> bytes:
    return array("i", ids).tobytes()


@dataclass(eq=False)
class Call:
    """A call that was answered."""

    number: int  # in the episode, in the order in which calls came
    parent: Call | None  # by ids; None: it begins a sequence
    after: Call | None  # by messages: the call whose conversation and answer this one goes on from
    ids: bytes  # of the prompt behind the parent's, then those sampled; empty where the model does not tell them
    logprobs: array[float]  # of the sampled ids
    versions: list[tuple[int, int]]  # (version, number of tokens) of the sampled ids, in their order
    asked: ModelCall  # with the messages behind `after` and its answer alone, and without tools
    answer: ModelAnswer
    tools: str = ""  # the digest of their schemas
    why: str | None = None  # why the prompt's ids do not go on from those of `after`, or of any call

    def __post_init__(self) -> None:
        self.children: list[Call] = []
        self.followers: list[Call] = []  # the other side of `after`
        # Tokens up to the last one sampled, and messages up to the answer.
        self.depth: int = (self.parent.depth if self.parent else 0) + len(self.ids) // _WIDTH
        self.length: int = (self.after.length if self.after else 0) + len(self.asked.messages) + 1

    @property
    def sampled(self) -> int:
        return len(self.logprobs) or self.answer.usage.get("completion_tokens", 0)

    def unusable(self, undelivered: Collection[int] = (), incomplete: bool = False) -> str | None:
        """Why its sampled tokens cannot be trained on."""
        reasons = [] if self.logprobs else [NO_IDS]
        reasons += [*self.asked.unusable, *[UNDELIVERED] * (self.number in undelivered), *[INCOMPLETE] * incomplete]
        return reasons[0] if reasons else None

    def line(self, up: Literal["parent", "after"]) -> Iterator[Call]:
        """It, and the calls that it goes on from, the last first."""
        call: Call | None = self
        while call is not None:
            yield call
            call = getattr(call, up)

    def tokens(self) -> Tokens | None:
        """The exact tokens; None where the model does not tell them."""
        if not self.logprobs:
            return None
        ids = array("i", b"".join(reversed([call.ids for call in self.line("parent")]))).tolist()
        start = len(ids) - len(self.logprobs)
        versions = [version for version, count in self.versions for _ in range(count)]
        return Tokens(ids[:start], ids[start:], self.logprobs.tolist(), versions, self.answer.finish_reason)

    def conversation(self) -> list[Message]:
        """All messages of the prompt."""
        parts = [[*call.asked.messages, call.answer.message] for call in self.line("after")]
        return [message for part in reversed(parts) for message in part][:-1]

    def to_json(self) -> dict[str, Any]:
        ids = array("i", self.ids).tolist()
        start = len(ids) - len(self.logprobs)
        record: dict[str, Any] = {"number": self.number, "tools": self.tools, "why": self.why}
        record |= {name: call.number for name in ("parent", "after") if (call := getattr(self, name)) is not None}
        record |= {"shared": self.depth - len(ids), "new": ids[:start], "sampled": ids[start:]}
        record |= {"logprobs": self.logprobs.tolist(), "versions": self.versions}
        for name in ("asked", "answer"):
            record[name] = {
                key: value for key, value in vars(getattr(self, name)).items() if value not in (None, [], {})
            }
        return record


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
        if call.asked.messages:
            (call.after.followers if call.after else self.openings).append(call)

    def read(self, record: Mapping[str, Any]) -> Call:
        """A call as `to_json` wrote it, not added yet. Raises KeyError, TypeError, ValueError for another record."""
        parent, after = (self.calls[record[name]] if name in record else None for name in ("parent", "after"))
        if record["shared"] != (parent.depth if parent else 0):
            raise ValueError(f"call {record['number']} does not fit its parent")
        ids, logprobs = _packed(record["new"] + record["sampled"]), array("d", record["logprobs"])
        versions = [(version, count) for version, count in record["versions"]]
        forms = ModelCall(**record["asked"]), ModelAnswer(**record["answer"]), record["tools"], record["why"]
        return Call(record["number"], parent, after, ids, logprobs, versions, *forms)

    def grown(self, number: int, call: ModelCall, answer: ModelAnswer, tools: str) -> Call:
        """A call that was answered now, with its place in the tree; it is not added yet."""
        tokens, after = answer.tokens, call.after
        asked = replace(call, messages=call.messages[after.length if after else 0 :], tools=[], after=None)
        forms = asked, replace(answer, tokens=None), tools
        if tokens is None or not 0 < len(tokens.completion_ids) == len(tokens.logprobs) == len(tokens.versions):
            return Call(number, None, after, b"", array("d"), [], *forms)
        asked.prompt = None  # the ids have it
        prompt = _packed(tokens.prompt_ids)
        parent = self.longest(prompt)
        ids = prompt[parent.depth * _WIDTH if parent else 0 :] + _packed(tokens.completion_ids)
        versions = [(version, len(list(run))) for version, run in groupby(tokens.versions)]
        made = Call(number, parent, after, ids, array("d", tokens.logprobs), versions, *forms)
        made.why = self._why(made)
        return made

    def longest(self, prompt: bytes) -> Call | None:
        """The call whose tokens are the longest beginning of a prompt; of several the first."""
        found, left = [], list(self.roots)
        while left:
            call = left.pop()
            if prompt.startswith(call.ids, call.depth * _WIDTH - len(call.ids)):
                found.append(call)
                left += call.children
        return min(found, key=lambda call: (-call.depth, call.number), default=None)

    def last_said(self, messages: Sequence[Message]) -> Call | None:
        """The call whose messages and answer are the longest beginning of these messages; of several the first."""
        found, left = [], list(self.openings)
        while left:
            call = left.pop()
            said, new = call.length - 1, call.asked.messages
            if messages[said : said + 1] == [call.answer.message] and messages[said - len(new) : said] == new:
                found.append(call)
                left += call.followers
        return min(found, key=lambda call: (-call.length, call.number), default=None)

    def share(self, undelivered: Collection[int] = (), incomplete: bool = False) -> dict[str, Any]:
        """Sampled tokens, those that can be trained on, why the others cannot, and why prompts did not go on from calls before."""
        lost, calls = Counter[str](), self.calls.values()
        for call in calls:
            if reason := call.unusable(undelivered, incomplete):
                lost[reason] += call.sampled
        sampled = sum(call.sampled for call in calls)
        forks = Counter(call.why for call in calls if call.why)
        return {"sampled": sampled, "trainable": sampled - lost.total(), "lost": dict(lost), "forks": dict(forks)}

    def _why(self, made: Call) -> str | None:
        """Why the ids of a prompt go on from no call, or not from those of the call that its messages go on from."""
        line, new, after = set(made.line("parent")), made.asked.messages, made.after
        if after is not None and after.ids and after not in line:
            return "tools changed" if made.tools != after.tools else _change(after.answer.message, "re-tokenised")
        for call in reversed(after.followers if after else self.openings):
            place, said = len(call.asked.messages), call.answer.message
            if call not in line and new[:place] == call.asked.messages:
                # Asked again, or the client wrote otherwise what the call said.
                return _change(said, "earlier message edited", new[place]) if len(new) > place else None
        if made.parent is not None or not self.calls:
            return None
        own = [message for message in new if message["role"] != "system"]
        for call in self.openings:
            rest = [message for message in call.asked.messages if message["role"] != "system"]
            if own[: len(rest)] == rest:
                return "system prompt changed"
        return "new conversation"


def _change(said: Message, otherwise: str, mine: Message | None = None) -> str:
    """What was changed of an answer: the first of its parts without which it is the client's `mine`, or which it has."""
    for part, reason in (("reasoning_content", "thoughts removed"), ("tool_calls", "tool call rewritten")):
        if mine is None and said.get(part):
            return reason
        if mine is not None:
            said, mine = {**said, part: ""}, {**mine, part: ""}
            if said == mine:
                return reason
    return otherwise
