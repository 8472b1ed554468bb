"""Chat messages to token ids and back, by the tokenizer's own chat template.

Sampled ids are never encoded again: a later prompt is the previous prompt, the sampled completion, and the text that the template
writes after it, encoded by itself. Where the template writes the past otherwise than it was sampled (it drops earlier think blocks,
trims, re-orders the JSON of a tool call), the prompt is encoded from scratch, and a new training sample begins there.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_train.learner.roles import tokenizer_of
from agentgym.core.messages import Message, assistant, text_of, tool_result, user
from agentgym.tools.text_forms import LISTED, OPEN, listed_blocks, spoken

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tool = Mapping[str, Any]

_PROBE = "MARK7XQ"
_ANY_TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
# The date for templates that ask for today's, so that a run that goes on tomorrow has the prompts of today. It is the date
# that Llama 3 takes where it can ask nobody.
_DATE = datetime.date(2024, 7, 26)
_TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_ARGUMENTS = re.compile(r'"arguments"\s*:\s*')


class RendererError(ValueError):
    """The tokenizer has no usable chat template, or the template refuses these messages."""


@dataclass(frozen=True)
class Rendered:
    """A prompt: its ids, the text that the template wrote, and the ids that were sampled after it, stop token included."""

    ids: list[int]
    text: str
    completion: list[int] = field(default_factory=list)

    def answered(self, completion: Sequence[int]) -> Rendered:
        return Rendered(self.ids, self.text, list(completion))


class Renderer:
    """Renders conversations for one tokenizer. RendererError if it has no usable chat template, or no stop token.

    `eos_ids` are further ids that end an answer, those of the model's generation config. `end_of_turn` is the token with which the
    template ends an assistant turn (the eos token where it has no special one), `stop_token_ids` that, the eos token and `eos_ids`.
    """

    _plain_arguments = True

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_ids: Sequence[int] = ()):
        if not getattr(tokenizer, "chat_template", None):
            name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
            remedy = "use an instruction-tuned model, or add a chat_template to its folder"
            raise RendererError(f"the tokenizer of {name} has no chat template: {remedy}")
        self.tokenizer = tokenizer
        prompt = self.text([user(_PROBE)])
        if _PROBE not in prompt:
            raise RendererError("the chat template leaves out what the user says")
        answered = self.text([user(_PROBE), assistant(_PROBE), user(".")])
        lead = answered[len(prompt) :].partition(_PROBE)[0] if answered.startswith(prompt) else ""
        if self._special_ids & {*self.encode(lead)}:  # as in the channels of gpt-oss
            problem = f"the chat template leaves {lead!r} before an answer to the model, and such answers are not read"
            raise RendererError(f"{problem}: take a model or a chat_template whose prompt ends where the answer begins")
        # The space that the template writes before an answer, as after "[/INST]".
        self._lead = "" if lead.strip() else lead
        self._thinks = prompt.rstrip().endswith("<think>")
        self._anchor_ids = self.encode(prompt)[-8:]
        self._anchor = self._decode(self._anchor_ids)
        self.end_of_turn, self.stop_token_ids = self._find_stop_tokens(eos_ids)
        # True if the template writes the text of a tool call's arguments as it is, and does not quote it once more. Two spaces: one
        # that reads the text and writes it again keeps one.
        arguments = '{"a":  "b"}'
        called = _calling("", [_call("f", arguments, "call00000")])
        try:
            self._plain_arguments = arguments in self.text([user("."), called], answering=False)
        except RendererError:
            self._plain_arguments = False

    @classmethod
    def of_folder(cls, model_dir: str | Path) -> Renderer:
        """For the tokenizer of a model folder; `generation_config.json` says what else ends an answer, as it does to vLLM."""
        return cls(tokenizer_of(model_dir), eos_ids_of(model_dir))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; only special tokens that are written out in it are added."""
        return list(self.tokenizer.encode(_whole(text), add_special_tokens=False))

    def decode(self, completion_ids: Sequence[int]) -> str:
        """The text of a completion, special tokens kept, as it reads after a prompt."""
        # Behind the end of a prompt its first space is kept, which some tokenizers drop at the start of a text.
        whole = self._decode([*self._anchor_ids, *completion_ids])
        return whole[len(self._anchor) :] if whole.startswith(self._anchor) else self._decode(completion_ids)

    def text(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, answering: bool = True) -> str:
        """The template's text of a conversation; with `answering`, up to the start of the assistant's answer."""
        view = [{**message, "content": text_of(message)} for message in messages]
        for message in view:
            if message.get("tool_calls") and not self._plain_arguments:
                message["tool_calls"] = [_with_arguments_read(call) for call in message["tool_calls"]]
        try:
            given = {"tools": list(tools) or None, "tokenize": False, "add_generation_prompt": answering}
            return _whole(str(self.tokenizer.apply_chat_template(view, strftime_now=_DATE.strftime, **given)))
        except Exception as error:  # a template is code of the model's author: jinja errors, TypeError, anything
            roles = ", ".join(str(message.get("role")) for message in messages)
            why = f"{type(error).__name__}: {error}"
            raise RendererError(f"the chat template refuses the roles [{roles}]: {why}") from error

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), previous: Rendered | None = None
    ) -> Rendered:
        """The next prompt of a conversation, in which the assistant's messages are as `parse` returned them.

        The ids of `previous` and its completion are a prefix of the new ones if the template writes the past as it was sampled.
        """
        text = self.text(messages, tools)
        if previous is not None and text.startswith(said := previous.text + self.decode(previous.completion)):
            return Rendered([*previous.ids, *previous.completion, *self.encode(text[len(said) :])], text)
        return Rendered(self.encode(text), text)

    def certain(self, text: str, prompt: str = "") -> str:
        """The beginning of a text, the first part of a completion after a prompt, that is content whatever follows.

        Nothing of what may still become a thought or a tool call.
        """
        begun, opening = text.lstrip(), "<think>"
        thinks = (
            prompt.rstrip().endswith(opening) or "</think>" in text or begun[: len(opening)] == opening[: len(begun)]
        )
        if thinks or self._lead.startswith(text):
            return ""
        return until(text.removeprefix(self._lead), (OPEN, LISTED, "</think>")).removesuffix("\n")

    def parse(self, completion_ids: Sequence[int], turn: int = 0, *, thoughts: bool = True) -> Message:
        """The assistant message of a completion, in the OpenAI form.

        `<tool_call>` blocks that hold JSON, and Mistral's `[TOOL_CALLS]`, become `tool_calls`, their arguments the exact text that
        was sampled, if the template writes such calls and their results; else they stay in the content, which environments read too.
        `<think>` goes into `reasoning_content` if the template then writes the sampled text again, or if it cuts thoughts
        out of the content anyway; else it stays in the content. Thoughts hold no calls, and neither do those that were cut off.

        A stop token at the end is left out. `turn` is part of the ids of tool calls. Without `thoughts`, nothing is reasoning.
        """
        said = list(completion_ids)
        if said and said[-1] in self.stop_token_ids:
            said.pop()
        text = self.decode(said)
        content = text.removeprefix(self._lead)
        if "</think>" not in text and (self._thinks or not (OPEN in text or LISTED in text)):
            return assistant(content)
        readings = list(_readings(content, turn, thoughts))
        if not all(map(self._writes_calls, readings)):
            readings = list(_readings(content, None, thoughts))
        if faithful := next((message for message in readings if self._writes(message, text)), None):
            return faithful
        if "reasoning_content" in readings[0]:
            past = self.text([user(_PROBE), assistant(text), user(_PROBE)])
            thought = readings[0]["reasoning_content"].strip()
            if "</think>" not in past or (thought and thought not in past):
                return readings[0]
        return next(message for message in readings if "reasoning_content" not in message)

    def _writes(self, message: Message, text: str) -> bool:
        """True if the template, given the message as the last one or with an answer to it, writes the sampled text."""
        before = [user(_PROBE)]
        answer = [tool_result(call["id"], _PROBE, call["function"]["name"]) for call in message.get("tool_calls", [])]
        try:
            said = self.text(before) + text
            return any(
                self.text([*before, message, *after], answering=False).startswith(said)
                for after in ([], answer or [user(_PROBE)])
            )
        except RendererError:
            return False

    def _writes_calls(self, message: Message) -> bool:
        """True if the template writes all tool calls of a message, and their results; so of one without calls."""
        told, results = [], []
        for number, call in enumerate(message.get("tool_calls", [])):
            name = f"{_PROBE}c{number}"
            told.append({**call, "function": {**call["function"], "name": name}})
            results.append(tool_result(call["id"], f"{_PROBE}r{number}", name))
        try:
            text = self.text([user("."), {**message, "tool_calls": told}, *results], [_ANY_TOOL]) if told else ""
        except RendererError:
            return False
        return all(call["function"]["name"] in text for call in told) and all(text_of(each) in text for each in results)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    @property
    def _special_ids(self) -> set[int]:
        added = self.tokenizer.added_tokens_decoder.items()
        return {*self.tokenizer.all_special_ids, *(id for id, token in added if token.special)}

    def _find_stop_tokens(self, eos_ids: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """The special token behind an assistant's text (an end of turn, or the next role's), and all that stop an answer."""
        stops: list[int] = [] if self.tokenizer.eos_token_id is None else [int(self.tokenizer.eos_token_id)]
        _, found, behind = self.text([user("."), assistant(_PROBE), user(".")], answering=False).rpartition(_PROBE)
        if not found:
            raise RendererError("the chat template leaves out what the assistant says")
        special = self._special_ids | {*self.tokenizer.added_tokens_decoder}
        # Some templates write a line break before it.
        end_of_turn = next((id for id in self.encode(behind) if id in special), next(iter(stops), None))
        if end_of_turn is None:
            problem = (
                "the tokenizer has no eos token and the chat template ends an assistant turn with no special token"
            )
            raise RendererError(f"{problem}: nothing would stop the model")
        return end_of_turn, tuple(dict.fromkeys([*stops, end_of_turn, *eos_ids]))


def eos_ids_of(model_dir: str | Path) -> list[int]:
    """`eos_token_id` of a model folder's `generation_config.json`: one id, several, or none."""
    path = Path(model_dir) / "generation_config.json"
    if not path.is_file():
        return []
    try:
        found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id", [])
    except (OSError, ValueError, AttributeError) as error:
        raise RendererError(f"{path} cannot be read: {error}") from error
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
        raise RendererError(f"{path}: eos_token_id is {found!r}, not a token id or a list of them")
    return ids


def until(text: str, marks: Sequence[str]) -> str:
    """The text before the first of the marks, and without an end that may become one."""
    for mark in marks:
        text = text.partition(mark)[0]
        begun = next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)
        text = text[: len(text) - begun]
    return text


def _readings(text: str, turn: int | None, thoughts: bool) -> Iterator[Message]:
    """Messages that a sampled text may stand for, from the most structured to the plainest; without a turn no calls."""
    for reasoning, rest in [*(_split_thoughts(text) if thoughts else ()), (None, text)]:
        for content, calls in [(rest, [])] if turn is None else _split_calls(rest, turn):
            message = _calling(content, calls) if calls else assistant(content)
            if reasoning is not None:
                message["reasoning_content"] = reasoning
            yield message


def _split_thoughts(text: str) -> Iterator[tuple[str, str]]:
    """Reasoning and the rest, without the line breaks between them and then exactly as sampled.

    The opening tag may be missing: some templates write it at the end of the prompt.
    """
    head, found, rest = text.partition("</think>")
    if not found:
        return
    opened, tag, reasoning = head.partition("<think>")
    if tag and opened.strip():
        return
    inside = reasoning if tag else head
    yield inside.strip("\n"), rest.lstrip("\n")
    yield inside, rest


def _split_calls(text: str, turn: int) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Content and tool calls; the content without the line break before the first call, then exactly as sampled."""
    begin = len(text) - len(spoken(text))
    blocks = [(block.start(), block.group(1)) for block in _TOOL_CALL.finditer(text, begin)] or [*_listed(text, begin)]
    calls = [_read_call(block, f"t{turn:04d}c{index:03d}") for index, (_, block) in enumerate(blocks)]
    good = [call for call in calls if call is not None]
    if len({call["id"] for call in good}) < len(good):
        good = [{**call, "id": f"t{turn:04d}c{index:03d}"} for index, call in enumerate(good)]
    if not good:
        yield text, []
        return
    content = text[: blocks[0][0]]
    yield content.removesuffix("\n"), good
    yield content, good


def _listed(text: str, position: int) -> Iterator[tuple[int, str]]:
    """Where the `[TOOL_CALLS]` of each call begins, and the call."""
    while (begun := text.find(LISTED, position)) >= 0:
        blocks, position = listed_blocks(text, begun + len(LISTED))
        if not blocks:
            return
        yield from ((begun, block) for block in blocks)


def _whole(text: str) -> str:
    """With "?" for half of a surrogate pair, which a model may write in JSON and no tokenizer takes."""
    return text.encode("utf-8", "replace").decode()


def _read_call(block: str, call_id: str) -> dict[str, Any] | None:
    """A tool call from the JSON of a block, its arguments as sampled; None if it is not the JSON of a call."""
    try:
        value = json.loads(block)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    if re.fullmatch("[A-Za-z0-9]{9}", str(value.get("id"))):
        call_id = str(value["id"])  # Mistral's models write one, and its template writes it again
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):
        return _call(value["name"], arguments, call_id)
    for key in _ARGUMENTS.finditer(block):
        with contextlib.suppress(ValueError):
            found, end = json.JSONDecoder().raw_decode(block, key.end())
            if found == arguments:
                return _call(value["name"], block[key.end() : end], call_id)
    return _call(value["name"], json.dumps(arguments, ensure_ascii=False), call_id)


def _call(name: str, arguments: str, call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _calling(content: str, calls: list[dict[str, Any]]) -> Message:
    return {"role": "assistant", "content": content, "tool_calls": calls}


def _with_arguments_read(call: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call whose arguments are an object; text that is no JSON object stays text."""
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        value = json.loads(call["function"]["arguments"])
        if isinstance(value, dict):
            return {**call, "function": {**call["function"], "arguments": value}}
    return dict(call)
