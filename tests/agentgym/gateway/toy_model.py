"""A small model that samples: a tokenizer of letters and a few words, and random answers with thoughts, text and tool calls.

It is a real engine, only without weights: a prompt is rendered to ids as the trainer's renderer does it, each id is drawn from a
distribution, and its log-probability is that of the draw. What it samples depends on the seed and the prompt alone.
"""

import asyncio
import hashlib
import json
import math
import random

from agentgym.core.messages import text_of
from agentgym.core.trajectory import Tokens
from agentgym.gateway import ModelAnswer, Refused
from agentgym.gateway.calls import REASONING, TEXT

MARKS = ("<system>", "<user>", "<assistant>", "<tool>", "<end>", "<think>", "</think>", "<call>", "</call>")
WORDS = (" the", " answer", " is", " lake", " north", "the", "an", "is", "er")
VOCABULARY = [*(chr(n) for n in range(32, 127)), "\n", *WORDS, *MARKS]
IDS = {text: id for id, text in enumerate(VOCABULARY)}
END, THINK, THOUGHT, CALL, CALLED = (IDS[mark] for mark in ("<end>", "<think>", "</think>", "<call>", "</call>"))
SAYS = [IDS[word] for word in (*WORDS, *"aeinorst 0123456789", "\n")]


def encode(text):
    """Ids of a text, the longest first: sampled text is often spelt by other ids."""
    ids, place = [], 0
    while place < len(text):
        found = max((word for word in (*MARKS, *WORDS) if text.startswith(word, place)), key=len, default=text[place])
        ids.append(IDS.get(found, IDS["n"]))
        place += len(found)
    return ids


def decode(ids):
    return "".join(VOCABULARY[id] for id in ids)


class ToyModel:
    """A backend. `keeps_thoughts`: the template writes thoughts of earlier turns. `pause`: seconds between two pieces."""

    honours = ("top_p", "temperature", "tool_choice")

    def __init__(self, keeps_thoughts=True, pause=0.0, context=20_000, model="toy", sampler=None):
        self.models = [model]
        self.keeps_thoughts, self.pause, self.context = keeps_thoughts, pause, context
        self.sampler, self.version = sampler or Sampler, 0
        self.log = []  # (episode, prompt ids, sampled ids) of all that was sampled

    # ---- the template

    def text(self, messages, tools=(), answering=True):
        shown = f"<system>tools: {json.dumps(list(tools))}<end>" if tools else ""
        shown += "".join(f"<{message['role']}>{self.said(message)}<end>" for message in messages)
        return shown + ("<assistant>" if answering else "")

    def said(self, message):
        thought = message.get("reasoning_content") if self.keeps_thoughts else None
        calls = "".join(
            f"<call>{call['function']['name']} {call['function']['arguments']}</call>"
            for call in message.get("tool_calls", ())
        )
        return (f"<think>{thought}</think>" if thought else "") + text_of(message) + calls

    def prompt(self, call):
        """Ids that go on from those of the call before, where the template writes the past as it was sampled."""
        if isinstance(call.prompt, list):
            return call.prompt
        if call.prompt is not None:
            return encode(call.prompt)
        text, after = self.text(call.messages, call.tools), call.after
        if after is not None:
            tokens = after.tokens()
            before = self.text(after.conversation(), call.tools) + decode(tokens.completion_ids)
            if text.startswith(before) and self.text(after.conversation(), call.tools) == decode(tokens.prompt_ids):
                return [*tokens.prompt_ids, *tokens.completion_ids, *encode(text[len(before) :])]
        return encode(text)

    # ---- sampling

    async def answer(self, call, episode, told):
        prompt = self.prompt(call)
        if len(prompt) + 1 > self.context:
            raise Refused(400, "the prompt is too long", "context_length_exceeded")
        sampler = self.sampler(prompt, call.used, self.context - len(prompt))
        version = self.version
        for kind, text in sampler.run(tools=call.tools):
            if self.pause:
                await asyncio.sleep(self.pause)
            told(kind, text)
        ids = sampler.ids
        message = sampler.message(turn=sum(message["role"] == "assistant" for message in call.messages))
        self.log.append((episode, prompt, ids))
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        tokens = Tokens(prompt, ids, sampler.logprobs, [version] * len(ids), sampler.reason)
        reason = "tool_calls" if message.get("tool_calls") and sampler.reason == "stop" else sampler.reason
        return ModelAnswer(message, tokens, usage, reason, sampler.stopped)

    async def count(self, call):
        return len(self.prompt(call))


class Sampler:
    """Draws one answer: `run` yields what may be told, and the ids are there in the end."""

    def __init__(self, prompt, used, room):
        key = hashlib.sha256(repr((used.get("seed", random.random()), prompt)).encode()).digest()
        self.random = random.Random(key)
        self.most = min(used.get("max_tokens", 60), room)
        self.stops = used.get("stop") or []
        self.ids, self.logprobs = [], []
        self.reason, self.stopped = "stop", None
        self.thought, self.content, self.calls = "", "", []

    def draw(self, among):
        """One id, each as likely as the others. False where there is no room."""
        if len(self.ids) >= self.most:
            self.reason = "length"
            return False
        self.ids.append(self.random.choice(among))
        self.logprobs.append(-math.log(len(among)))
        return True

    def spell(self, text):
        return all(self.draw([id]) for id in encode(text))

    def run(self, tools):
        if self.random.random() < 0.3:
            if not self.draw([THINK]):
                return
            for _ in range(self.random.randint(1, 6)):
                if not self.draw(SAYS):
                    return
                piece = decode(self.ids[-1:])
                self.thought += piece
                yield REASONING, piece
            if not self.draw([THOUGHT]):
                return
        for _ in range(self.random.randint(0 if tools else 1, 12)):
            if not self.draw(SAYS):
                return
            piece = decode(self.ids[-1:])
            stop = next((stop for stop in self.stops if stop in self.content + piece), None)
            if stop is not None:
                whole = (self.content + piece).partition(stop)[0]
                self.content, self.stopped = whole, stop
                return
            self.content += piece
            if not self.stops:  # else it may still begin a stop string
                yield TEXT, piece
        if tools and self.random.random() < 0.7:
            self.call(self.random.choice(tools)["function"]["name"])
        if self.reason == "stop":
            self.draw([END])

    def call(self, name):
        """A tool call; its JSON is not always spelt as `json.dumps` does it."""
        gap = self.random.choice(["", " ", "  "])
        arguments = f'{{"n":{gap}{self.random.randint(0, 99)}}}'
        if self.draw([CALL]) and self.spell(f"{name} {arguments}") and self.draw([CALLED]):
            self.calls.append((name, arguments))

    def message(self, turn):
        message = {"role": "assistant", "content": self.content}
        if self.thought:
            message["reasoning_content"] = self.thought
        if self.calls:
            message["tool_calls"] = [
                {"id": f"t{turn}c{place}", "type": "function", "function": {"name": name, "arguments": arguments}}
                for place, (name, arguments) in enumerate(self.calls)
            ]
        return message
