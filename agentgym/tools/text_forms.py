r"""Strict parsers of the calls and final answers that a model writes in plain text.

    <tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>                              Hermes, Qwen
    <tool_call><function=add><parameter=a>2</parameter></function></tool_call>                 Qwen3-Coder
    [TOOL_CALLS][{"name": "add", "arguments": {"a": 2}}], or [TOOL_CALLS]add[ARGS]{"a": 2}     Mistral
    {"name": "add", "arguments": {"a": 2}}, or "parameters", also in a ```json block,          Qwen2.5-Coder, Llama 3
    if the reply is nothing else and the tool is known
    ```python                                                                                  a fenced block, where the
    print(2)                                                                                   environment says which
    ```                                                                                        tool its language calls

Answers: `<answer>x</answer>` and `\boxed{x}`, the last of several. Thoughts (see `spoken`) hold neither. No text raises, and
reading takes time in proportion to the text's length.
"""

import json
import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

OPEN, CLOSE = "<tool_call>", "</tool_call>"
TEXT_FORM = f'{OPEN}{{"name": "NAME", "arguments": {{...}}}}{CLOSE}'
LISTED = "[TOOL_CALLS]"
XML_FORM = f"{OPEN}<function=NAME><parameter=KEY>VALUE</parameter></function>{CLOSE}"

_TOKEN = re.compile(
    r"</?tool_call>|\[TOOL_CALLS\]|^(?P<indent> {0,3})(?P<fence>`{3,}+)(?P<info>[^`\n]*+)$", re.MULTILINE
)
_SPACE = re.compile(r"\s*+")
_NAMED = re.compile(r"([\w.-]{1,200}+)(?:\[CALL_ID\]\w{1,200}+)?(?:\[ARGS\])?\s*+(?=\{)")
_FUNCTION = re.compile(r"<function=([^<>\n]{1,200}+)>\s*+")
_PARAMETER = re.compile(r"<parameter=([^<>\n]{1,200}+)>")
_END_PARAMETER, _END_FUNCTION = "</parameter>", "</function>"
_JSON_BLOCK = re.compile(r"```(?:json)?[ \t]*+\n(?P<json>.*)\n[ \t]*+```", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """One call that an assistant message makes; name and arguments are not yet checked.

    Attributes:
        id: the call's id in `tool_calls`; None for a call in the text.
        raw: the arguments are texts, to be parsed by their types. The key "" is the one argument of a fenced block, whose
            name only the tool knows.
    """

    name: str
    arguments: dict[str, Any]
    id: str | None = None
    raw: bool = False


@dataclass(frozen=True)
class FinalAnswer:
    """The answer that a text states, stripped, or the problem with its form, to be shown to the model."""

    text: str
    problem: str = ""


def spoken(text: str) -> str:
    """The text without its thoughts: what follows the last `</think>`; "" for a `<think>` at the start that never ends."""
    said = text.rpartition("</think>")[2]
    return "" if said.lstrip().startswith("<think>") else said


def call_text(name: str, **arguments: Any) -> str:
    return f"{OPEN}{json.dumps({'name': name, 'arguments': arguments})}{CLOSE}"


def calls_in(text: str, fenced: Mapping[str, str] = {}, tools: Container[str] = ()) -> Iterator[ToolCall | str]:
    """The calls that a text makes, in order; the first malformed one is last, as its problem.

    `fenced` is the tool that a fenced block calls, by its language in small letters. Other blocks are no calls. `tools` are the
    names that a call without tags may have.
    """
    text, position = spoken(text), 0
    if bare := _bare_call(text, tools):
        yield bare
        return
    outer = 0  # ticks of the fence of an open block that calls no tool
    while token := _TOKEN.search(text, position):
        position = token.end()
        if token[0] == CLOSE:
            yield f"{CLOSE} without {OPEN} before it: write {TEXT_FORM}"
            return
        if token[0] == LISTED:
            blocks, position = listed_blocks(text, position)
            *others, call = map(_read_listed, blocks or [""])
            yield from others
        elif token[0] == OPEN:
            call, position = _read_tagged(text, position)
        elif not fenced:
            continue
        else:
            ticks, language = len(token["fence"]), token["info"].strip().lower()
            if outer or language not in fenced:
                if not outer:
                    outer = ticks
                elif ticks >= outer and not language:
                    outer = 0
                continue
            call, position = _read_block(text, token, language, fenced[language])
        yield call
        if isinstance(call, str):
            return


def _bare_call(text: str, tools: Container[str]) -> ToolCall | None:
    """The call of a known tool that the text, or its one JSON block, is; None for any other text."""
    text = text.strip()
    block = _JSON_BLOCK.fullmatch(text)
    found = parse_json(block["json"] if block else text) if text.startswith(("{", "```")) else None
    if not isinstance(found, dict) or len(found) != 2:
        return None
    name, arguments = found.get("name"), found.get("arguments", found.get("parameters"))
    if not isinstance(name, str) or name not in tools or not isinstance(arguments, dict):
        return None
    return ToolCall(name, arguments)


def _read_block(text: str, opening: re.Match[str], language: str, tool: str) -> tuple[ToolCall | str, int]:
    """The call in a fenced block, and where it ends. Its lines lose the indent of the opening fence, as in a list of Markdown."""
    start = position = opening.end()
    while token := _TOKEN.search(text, position):
        position = token.end()
        if token["fence"] and len(token["fence"]) >= len(opening["fence"]) and not token["info"].strip():
            # Between the line breaks that belong to the two fences; of an empty block they are one.
            code = text[start + 1 : max(start + 1, token.start() - 1)]
            if indent := len(opening["indent"]):
                code = re.sub(rf"^ {{1,{indent}}}", "", code, flags=re.MULTILINE)
            return ToolCall(tool, {"": code}, raw=True), position
    return f"the ```{language} block is not closed: end it with a line of ``` alone", len(text)


def _read_tagged(text: str, start: int) -> tuple[ToolCall | str, int]:
    """The call that begins after `<tool_call>` at `start`, and where it ends."""
    start = _skip(text, start)
    call, end = _read_function(text, start) if text.startswith("<function", start) else _read_object(text, start)
    if not isinstance(call, str):
        start = end = _skip(text, end)
        if text.startswith(CLOSE, end):
            return call, end + len(CLOSE)
        call = f"between {OPEN} and {CLOSE} there must be one call and nothing else: {TEXT_FORM}"
    if text.find(CLOSE, start) < 0:
        call = f"{OPEN} without {CLOSE} after it: write {TEXT_FORM}"
    return call, end


def listed_blocks(text: str, start: int) -> tuple[list[str], int]:
    """The calls behind the `[TOOL_CALLS]` that ends at `start`, each as the text of a JSON object, and where they end.

    None if one of them is malformed. The arguments are as they are written.
    """
    blocks: list[str] = []
    try:
        if named := _NAMED.match(text, start):
            end = _DECODER.raw_decode(text, named.end())[1]
            return [f'{{"name": "{named[1]}", "arguments": {text[named.end() : end]}}}'], end
        position = _skip(text, start)
        while text.startswith("," if blocks else "[", position):
            position = _skip(text, position + 1)
            end = _DECODER.raw_decode(text, position)[1]
            blocks.append(text[position:end])
            position = _skip(text, end)
        return (blocks, position + 1) if text.startswith("]", position) else ([], start)
    except (ValueError, RecursionError):
        return [], start


def _read_listed(block: str) -> ToolCall | str:
    found = parse_json(block)
    name, arguments = (found.get("name"), found.get("arguments")) if isinstance(found, dict) else (None, None)
    if isinstance(name, str) and isinstance(arguments, dict) and found.keys() <= {"name", "arguments", "id"}:
        return ToolCall(name, arguments)
    return f'{LISTED} must be followed by calls: {LISTED}[{{"name": "NAME", "arguments": {{...}}}}]'


def _read_object(text: str, start: int) -> tuple[ToolCall | str, int]:
    wanted = f'between {OPEN} and {CLOSE} there must be one JSON object with "name" and "arguments": {TEXT_FORM}'
    if text.startswith(CLOSE, start):
        return wanted, start
    try:
        found, end = _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        return f"{wanted}. What is there is no JSON: {_shown(error, text)}", start
    if not isinstance(found, dict) or set(found) != {"name", "arguments"}:
        return wanted, end
    if not isinstance(found["name"], str) or not isinstance(found["arguments"], dict):
        return f'"name" must be a string and "arguments" an object: {TEXT_FORM}', end
    return ToolCall(found["name"], found["arguments"]), end


def _read_function(text: str, start: int) -> tuple[ToolCall | str, int]:
    function = _FUNCTION.match(text, start)
    if function is None:
        return f"<function=NAME> is not closed: write {XML_FORM}", start
    arguments: dict[str, Any] = {}
    position = function.end()
    while parameter := _PARAMETER.match(text, position):
        name, end = parameter[1].strip(), text.find(_END_PARAMETER, parameter.end())
        if end < 0:
            return f"<parameter={name}> without {_END_PARAMETER} after it: write {XML_FORM}", position
        if name in arguments:
            return f"the parameter {name!r:.100} is given twice", position
        # The line breaks between a value and its tags do not belong to it.
        arguments[name] = text[parameter.end() : end].removeprefix("\n").removesuffix("\n")
        position = _skip(text, end + len(_END_PARAMETER))
    if not text.startswith(_END_FUNCTION, position):
        return f"after <function={function[1]}> there must be parameters and then {_END_FUNCTION}: {XML_FORM}", position
    return ToolCall(function[1].strip(), arguments, raw=True), position + len(_END_FUNCTION)


def _skip(text: str, start: int) -> int:
    found = _SPACE.match(text, start)
    return found.end() if found else start


def answer_in(text: str, form: Literal["answer", "boxed"] = "answer") -> FinalAnswer | None:
    r"""The last answer that a text states as `<answer>x</answer>` or `\boxed{x}`, or None if it states none."""
    said = spoken(text)
    return _tagged_answer(said) if form == "answer" else _boxed_answer(said)


def _tagged_answer(text: str) -> FinalAnswer | None:
    opened, closed = text.rfind("<answer>"), text.rfind("</answer>")
    if opened < 0 and closed < 0:
        return None
    if opened < 0:
        return FinalAnswer("", "</answer> without <answer> before it: write <answer>...</answer>")
    end = text.find("</answer>", opened)
    if end < 0:
        return FinalAnswer("", "<answer> without </answer> after it: write <answer>...</answer>")
    if closed > end:
        return FinalAnswer("", "</answer> is there twice: write <answer>...</answer> once")
    answer = text[opened + len("<answer>") : end].strip()
    return FinalAnswer(answer, "" if answer else "the answer between <answer> and </answer> is empty")


_BOXED = re.compile(r"\\boxed\s*+\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def _boxed_answer(text: str) -> FinalAnswer | None:
    start = text.rfind("\\boxed")
    if start < 0:
        return None
    opened = _BOXED.match(text, start)
    if opened is None:
        return FinalAnswer("", "\\boxed needs braces: write \\boxed{...}")
    depth = 1
    for brace in _BRACE.finditer(text, opened.end()):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            answer = text[opened.end() : brace.start()].strip()
            return FinalAnswer(answer, "" if answer else "the answer in \\boxed{} is empty")
    return FinalAnswer("", "the braces of \\boxed{...} are not closed")


class NotJson(ValueError):
    """A text that `parse_json` could not parse. Not None, which is JSON too."""


def parse_json(text: str) -> Any:
    """Strict JSON, without NaN, Infinity or a key given twice; a `NotJson` object if the text is not JSON."""
    try:
        found, end = _DECODER.raw_decode(text, _skip(text, 0))
        if _skip(text, end) < len(text):
            return NotJson("something follows the value")
        return found
    except (ValueError, RecursionError) as error:
        return NotJson(_shown(error, text))


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is given twice")
    return found


def _shown(error: Exception, text: str) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at {json.dumps(text[error.pos : error.pos + 30])}"
    return "it is nested too deep" if isinstance(error, RecursionError) else f"{error!s:.100}"


_DECODER = json.JSONDecoder(parse_constant=_refuse, object_pairs_hook=_once_each)
