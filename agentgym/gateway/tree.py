"""The calls of an episode as a tree: each hangs on the call whose prompt and sampled ids are the longest exact beginning of its prompt.

Ids are kept as bytes, and only those that the parent does not have.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from typing import Any, Literal

from agentgym.core.messages import Message
from agentgym.core.trajectory import Tokens
from agentgym.gateway.calls import ModelAnswer, ModelCall

_WIDTH = 4  # bytes of an id
# Why tokens cannot be trained on. A setting that was honoured goes by its own name.
NO_IDS, UNDELIVERED, INCOMPLETE = "no token ids", "undelivered", "incomplete episode"
_NOWHERE, _START, _BARE = -1, 0, 1  # the last two are before any message: of conversations, and without system messages
_FEW = 8  # siblings that are quicker tried one by one
_ids_of = attrgetter("ids")


def _packed(ids: Sequence[int]) -> bytes:
    return array("i", ids).tobytes()


@dataclass(eq=False)
class Call:
    """An answered call."""

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
        self.children: list[Call] = []  # sorted by ids
        self.followers: list[Call] = []  # the other side of `after`
        self.place = _START  # after its answer
        self.added = 0  # the number of calls that were added by then
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
        """This call and those that it goes on from, the last first."""
        call: Call | None = self
        while call is not None:
            yield call
            call = getattr(call, up)

    def tokens(self) -> Tokens | None:
        """The exact tokens; None if the model does not return them."""
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
    """The answered calls of an episode, by their numbers.

    They are found by places: a place is a point of a conversation, and conversations with the same messages so far share it.
    """

    calls: dict[int, Call] = field(default_factory=dict)
    roots: list[Call] = field(default_factory=list)  # sorted by ids
    _places: dict[tuple[int, Hashable], int] = field(default_factory=dict)  # by the place and message before
    _asked: dict[int, list[Call]] = field(default_factory=dict)  # calls by the place at which their prompts end
    _said: dict[int, Call] = field(default_factory=dict)  # by that at which their answers end; of several the first

    def add(self, call: Call) -> None:
        self.calls[call.number] = call
        call.added = len(self.calls)
        if call.ids:
            insort(call.parent.children if call.parent else self.roots, call, key=_ids_of)
        if new := call.asked.messages:
            asked = self._put(new, call.after.place if call.after else _START)
            call.place = self._put([call.answer.message], asked)
            self._said[call.place] = min(call, self._said.get(call.place, call), key=lambda each: each.number)
            self._asked.setdefault(asked, []).append(call)
            if call.after:
                call.after.followers.append(call)
            else:
                self._asked.setdefault(self._put(_without_system(new), _BARE), [])

    def _put(self, messages: Sequence[Message], place: int) -> int:
        for message in messages:
            place = self._places.setdefault((place, _key(message)), len(self._places) + 2)
        return place

    def _along(self, messages: Sequence[Message], place: int) -> Iterator[int]:
        """The places behind each of the messages that follow a place, as far as calls have been there."""
        for message in messages:
            place = self._places.get((place, _key(message)), _NOWHERE)
            if place == _NOWHERE:
                return
            yield place

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
        """A newly answered call with its place in the tree; it is not added yet."""
        tokens, after = answer.tokens, call.after
        asked = replace(call, messages=call.new_messages(), tools=[], after=None)
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
        """The call whose tokens are the longest prefix of a prompt; of several the first."""
        found, left = [], [(self.roots, 0)]
        while left:
            siblings, start = left.pop()
            near = siblings if len(siblings) <= _FEW else _beginnings(siblings, prompt[start:])
            fitting = [call for call in near if prompt.startswith(call.ids, start)]
            found += fitting
            left += [(call.children, call.depth * _WIDTH) for call in fitting]
        return min(found, key=lambda call: (-call.depth, call.number), default=None)

    def last_said(self, messages: Sequence[Message]) -> Call | None:
        """The call whose messages and answer are the longest prefix of these messages; of several the first."""
        said = [self._said[place] for place in self._along(messages, _START) if place in self._said]
        return said[-1] if said else None

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
        """The reason why a prompt's ids continue no call, or not the call that its messages continue."""
        new, after = made.asked.messages, made.after
        if after is not None and after.ids and after not in made.line("parent"):
            return "tools changed" if made.tools != after.tools else _change(after.answer.message, "re-tokenised")
        ends = self._along(new, after.place if after else _START)
        asked = [call for place in ends for call in self._asked.get(place, ()) if call.after is after]
        for call in sorted(asked, key=lambda call: call.added, reverse=True):
            place, said = len(call.asked.messages), call.answer.message
            if call not in made.line("parent"):
                # Asked again, or the client wrote otherwise what the call said.
                return _change(said, "earlier message edited", new[place]) if len(new) > place else None
        if made.parent is not None or not self.calls:
            return None
        bare = (_BARE, *self._along(_without_system(new), _BARE))
        return "system prompt changed" if any(place in self._asked for place in bare) else "new conversation"


def _beginnings(siblings: Sequence[Call], ids: bytes) -> Iterator[Call]:
    """The siblings, sorted by ids, whose ids are a prefix of these."""
    end = len(siblings)
    while end := bisect_right(siblings, ids, hi=end, key=_ids_of):
        end -= 1
        near = siblings[end].ids
        if ids.startswith(near):
            yield siblings[end]
        else:  # the others are a beginning of both
            size = min(len(near), len(ids))
            rest = int.from_bytes(near[:size], "big") ^ int.from_bytes(ids[:size], "big")
            ids = ids[: size - (rest.bit_length() + 7) // 8]


def _key(value: Any) -> Hashable:
    """A key that is equal for equal JSON values only; texts are not copied."""
    if not isinstance(value, dict):
        return tuple(map(_key, value)) if isinstance(value, list) else value
    try:
        return frozenset(value.items())
    except TypeError:  # it has lists or objects
        return frozenset(zip(value, map(_key, value.values()), strict=True))


def _without_system(messages: Sequence[Message]) -> list[Message]:
    return [message for message in messages if message["role"] != "system"]


def _change(said: Message, otherwise: str, mine: Message | None = None) -> str:
    """The part of an answer that the client changed: the first one without which it equals `mine`, or that it has at all."""
    for part, reason in (("reasoning_content", "thoughts removed"), ("tool_calls", "tool call rewritten")):
        if mine is None and said.get(part):
            return reason
        if mine is not None:
            said, mine = {**said, part: ""}, {**mine, part: ""}
            if said == mine:
                return reason
    return otherwise
