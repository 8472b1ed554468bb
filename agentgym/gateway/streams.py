"""An exchange as server-sent events in its protocol's form."""

from __future__ import annotations

import json
from typing import Any

from agentgym.gateway.calls import REASONING, TEXT
from agentgym.gateway.episodes import Exchange
from agentgym.gateway.forms import Body


class Stream:
    """Writes one exchange: the step "begin", then `tell` for what is told, then `end` or the step "failed".

    A protocol's `events(body, exchange, step, answer, block, *data)` yields the names and the data of the events of a step: "begin",
    "end", "ping"; "failed" with a `Refused`; "open", "delta", "close" with TEXT or REASONING and text, for "close" all of it; "call"
    with a number and a tool call. `answer` and `block` count from 0.
    """

    def __init__(self, protocol: Any, body: Body, exchange: Exchange):
        self._protocol, self._body, self._exchange = protocol, body, exchange
        self._said: dict[int, dict[str, list[str]]] = {}
        self._block, self._number = -1, 0

    def step(self, step: str, *data: Any, answer: int = 0) -> bytes:
        out = []
        for name, value in self._protocol.events(self._body, self._exchange, step, answer, self._block, *data):
            if name.startswith("response."):
                value["sequence_number"] = self._number
            self._number += 1
            text = value if isinstance(value, str) else json.dumps({"type": name, **value} if name else value)
            out.append(f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n")
        return "".join(out).encode()

    def tell(self, answer: int, kind: str, text: str) -> bytes:
        said, out = self._said.setdefault(answer, {}), b""
        if kind == REASONING and TEXT in said:
            return out  # no block is opened again; the whole answer has it
        if kind not in said:
            out = self._close(answer)
            self._block += 1
            out += self.step("open", kind, "", answer=answer)
        said.setdefault(kind, []).append(text)
        return out + self.step("delta", kind, text, answer=answer)

    def _close(self, answer: int) -> bytes:
        kind, pieces = next(reversed(self._said[answer].items()), ("", []))
        return self.step("close", kind, "".join(pieces), answer=answer) if kind else b""

    def end(self) -> bytes:
        """The rest of the answer that was not sent yet, and the end of the stream."""
        out = []
        for number, answer in enumerate(self._exchange.answers):
            said, calls = self._said.setdefault(number, {}), answer.message.get("tool_calls") or ()
            for kind, whole in answer.parts():
                rest = whole[sum(map(len, said.get(kind, ()))) :]
                if rest or (kind == TEXT and TEXT not in said and not calls):
                    out.append(self.tell(number, kind, rest))
            out.append(self._close(number))
            for place, call in enumerate(calls):
                self._block += 1
                out.append(self.step("call", place, call, answer=number))
        return b"".join([*out, self.step("end")])
