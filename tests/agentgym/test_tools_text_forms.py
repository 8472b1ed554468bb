"""The forms of calls and answers in plain text: read strictly, told clearly, never an exception, in time linear in the text."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentgym.tools.schemas import sole_argument, typed
from agentgym.tools.text_forms import FinalAnswer, NotJson, answer_in, calls_in, parse_json, spoken
from agentgym.tools.toolset import ToolCall, ToolSet, tool


@tool
def python(code: str) -> str:
    """Run code.

    Args:
        code: the text.
    """
    return f"ran {code!r}"


@tool
def find(query: str, limit: int = 3, tags: list[str] | None = None, exact: bool = False, odd: str | int = "") -> str:
    """Find."""
    return json.dumps([query, limit, tags, exact, odd])


TOOLS = ToolSet([python, find], fenced={"python": "python", "PY": "python"})


def said(text):
    return {"role": "assistant", "content": text}


def calls(text):
    return TOOLS.calls_of(said(text))


def xml(name, **parameters):
    inner = "".join(f"\n<parameter={k}>\n{v}\n</parameter>" for k, v in parameters.items())
    return f"<tool_call>\n<function={name}>{inner}\n</function>\n</tool_call>"


class TestMistralsCalls:
    @pytest.mark.parametrize(
        "text",
        [
            'I look.[TOOL_CALLS] [{"name": "find", "arguments": {"query": "a"}}, {"name": "python", "arguments": {"code": ""}, "id": "x"}]',
            '[TOOL_CALLS]find[ARGS]{"query": "a"}[TOOL_CALLS]python[CALL_ID]abc123456[ARGS]{"code": ""}',
            '[TOOL_CALLS]find{"query": "a"}[TOOL_CALLS]python{"code": ""}',
        ],
    )
    def test_lists_and_named_calls_are_read(self, text):
        assert calls(text) == [ToolCall("find", {"query": "a"}), ToolCall("python", {"code": ""})]

    @pytest.mark.parametrize(
        "behind",
        [
            "",
            "[]",
            "[{}]",
            '[{"name": "find"}]',
            '[{"name": "find", "arguments": {}}',
            "find",
            "find[ARGS]{",
            '[{"name": "find", "arguments": {}, "x": 1}]',
            "[" * 5000,
        ],
    )
    def test_what_is_malformed_is_told(self, behind):
        problem = calls(f"[TOOL_CALLS]{behind}")
        assert isinstance(problem, str)
        assert '[TOOL_CALLS][{"name": "NAME", "arguments": {...}}]' in problem


class TestCallsWithoutTags:
    """What Qwen2.5-Coder and Llama 3 write where their server has no parser of calls."""

    @pytest.mark.parametrize(
        "text",
        [
            '{"name": "find", "arguments": {"query": "a"}}',
            ' {"name": "find", "parameters": {"query": "a"}}\n',
            '```json\n{\n  "name": "find",\n  "arguments": {"query": "a"}\n}\n```',
            '```\n{"arguments": {"query": "a"}, "name": "find"}\n```\n',
            '<think>It is in there.</think>\n{"name": "find", "arguments": {"query": "a"}}',
        ],
    )
    def test_a_reply_that_is_nothing_but_a_call_of_a_known_tool_is_that_call(self, text):
        assert calls(text) == [ToolCall("find", {"query": "a"})]

    @pytest.mark.parametrize(
        "text",
        [
            '{"name": "Ada", "arguments": {"query": "a"}}',  # data of an answer, and no tool
            'I call {"name": "find", "arguments": {"query": "a"}}',
            '{"name": "find", "arguments": {"query": "a"}} and so on',
            '{"name": "find", "arguments": {"query": "a"}, "id": 1}',
            '{"name": "find", "query": "a"}',
            '{"name": "find", "arguments": "a"}',
            '{"name": ["find"], "arguments": {}}',
            '[{"name": "find", "arguments": {"query": "a"}}]',
            '{"name": "find", "arguments": {"query": "a"}',
            '```text\n{"name": "find", "arguments": {"query": "a"}}\n```',
            '{"name": "find", "name": "find", "arguments": {}}',
        ],
    )
    def test_other_json_is_none(self, text):
        assert calls(text) == []

    def test_a_text_of_a_tool_that_holds_a_call_runs_once_as_a_block(self):
        text = '```python\n{"name": "find", "arguments": {"query": "a"}}\n```'
        assert calls(text) == [ToolCall("python", {"code": '{"name": "find", "arguments": {"query": "a"}}'})]

    def test_it_is_answered_as_any_call_in_the_text(self):
        (answer,) = TOOLS.answer(said('{"name": "find", "arguments": {"query": 1}}'))
        assert answer["content"].startswith("<tool_response>\nError: find: ")


class TestFencedBlocks:
    @pytest.mark.parametrize(
        ("text", "code"),
        [
            ("```python\nx = 1\n```", "x = 1"),
            ("I compute.\n```py\nx = 1\nprint(x)\n```\nand wait", "x = 1\nprint(x)"),
            ("```Python \nx\n```", "x"),
            ("  ```python\n  x\n  ```  ", "x"),
            ("````python\n```\nx\n```\n````", "```\nx\n```"),
            ("```python\nx\n````", "x"),
            ("```python\n\n```", ""),
            ("```python\n```", ""),
            ("```python\nprint('```')\n```", "print('```')"),
            ("```python\nx = '</tool_call>'\n```", "x = '</tool_call>'"),
            ("```text\nno\n```\n```python\nx\n```", "x"),
            ("```python\n\n\nx\n\n```", "\n\nx\n"),
        ],
    )
    def test_a_block_of_a_listed_language_is_a_call_with_its_text(self, text, code):
        assert calls(text) == [ToolCall("python", {"code": code})]

    @pytest.mark.parametrize(
        "text",
        [
            "```\nx\n```",
            "```js\nx\n```",
            "`python x`",
            "use ```python here",
            "    ```python\n    x\n    ```",
            "````text\n```python\nx\n```\n````",
            "```text\n```python\nx\n```",
            "```text\n```js\n```python\nx\n```",
            "<think>```python\nx\n```</think>No.",
            "<think>\n```python\nx\n```",
            "~~~python\nx\n~~~",
        ],
    )
    def test_other_text_is_none(self, text):
        assert calls(text) == []

    def test_calls_of_all_forms_are_run_in_the_order_of_the_text(self):
        text = (
            '```python\n1\n```\n<tool_call>{"name": "find", "arguments": {"query": "é"}}</tool_call>\n```py\n2\n```\n'
        )
        text += xml("find", query="b")
        assert calls(text) == [
            ToolCall("python", {"code": "1"}),
            ToolCall("find", {"query": "é"}),
            ToolCall("python", {"code": "2"}),
            ToolCall("find", {"query": "b"}),
        ]
        answer = TOOLS.answer(said(text))[0]["content"]
        assert answer.count("<tool_response>") == 4

    def test_a_call_in_a_block_of_no_tool_is_a_call(self):
        text = '```json\n<tool_call>{"name": "find", "arguments": {"query": "a"}}</tool_call>\n```'
        assert calls(text) == [ToolCall("find", {"query": "a"})]

    def test_a_block_that_is_not_closed_is_told(self):
        for text in ("```python\nx = 1", "```python", "````python\nx\n```", "```py\nx\n```python\ny"):
            assert "block is not closed: end it with a line of ``` alone" in calls(text)

    def test_without_the_setting_blocks_call_nothing(self):
        assert ToolSet([python]).calls_of(said("```python\nx\n```")) == []

    def test_only_a_tool_that_takes_one_text_can_be_called_so(self):
        @tool
        def two(a: str, b: str) -> str:
            """Two."""
            return a + b

        @tool
        def number(a: int) -> str:
            """Number."""
            return str(a)

        for name in ("two", "number", "nothing"):
            with pytest.raises(ValueError, match=rf"```x block cannot call '{name}'"):
                ToolSet([two, number], fenced={"x": name})
        assert ToolSet([find], fenced={"q": "find"}).calls_of(said("```q\nwho\n```")) == [
            ToolCall("find", {"query": "who"})
        ]


class TestFunctionForm:
    def test_parameters_are_read_by_their_types(self):
        call = xml("find", query="[1]", limit="5", tags='["a", "é"]', exact="true", odd="7")
        assert calls(call) == [
            ToolCall("find", {"query": "[1]", "limit": 5, "tags": ["a", "é"], "exact": True, "odd": "7"})
        ]

    def test_code_keeps_its_lines_and_signs(self):
        code = 'if a < b and "</p>" != x:\n    print("<tag>")\n'
        assert calls(xml("python", code=code)) == [ToolCall("python", {"code": code})]

    def test_a_value_of_another_type_is_told_when_it_is_called(self):
        assert TOOLS.answer(said(xml("find", query="x", limit="five")))[0]["content"] == (
            '<tool_response>\nError: find: argument "limit" must be integer, not string\n</tool_response>'
        )

    def test_no_parameters_and_unknown_tools_are_calls(self):
        assert calls("<tool_call><function=now></function></tool_call>") == [ToolCall("now", {})]
        assert "there is no tool 'now'" in TOOLS.answer(said(xml("now", x="1")))[0]["content"]

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("<tool_call><function=find</function></tool_call>", "<function=NAME> is not closed"),
            ("<tool_call><function=find><parameter=query>x</function></tool_call>", "without </parameter> after it"),
            ("<tool_call><function=find>query</function></tool_call>", "there must be parameters and then </function>"),
            ("<tool_call><function=find></tool_call>", "there must be parameters and then </function>"),
            ("<tool_call><function=find></function>", "<tool_call> without </tool_call>"),
            ("<tool_call><function=find></function>x</tool_call>", "one call and nothing else"),
            (
                "<tool_call><function=f><parameter=a>1</parameter><parameter=a>2</parameter></function></tool_call>",
                "'a' is given twice",
            ),
        ],
    )
    def test_a_malformed_one_is_told(self, text, says):
        assert says in calls(text)


class TestJsonForm:
    def test_tags_inside_the_json_are_text(self):
        code = "print('</tool_call><tool_call>')"
        text = f"<tool_call>{json.dumps({'name': 'python', 'arguments': {'code': code}})}</tool_call>"
        assert calls(text) == [ToolCall("python", {"code": code})]

    def test_what_is_no_json_is_shown(self):
        problem = calls('<tool_call>{"name": \'find\', "arguments": {}}</tool_call>')
        assert "What is there is no JSON: Expecting value at \"'find'" in problem

    def test_two_objects_in_one_pair_of_tags_are_told(self):
        one = '{"name": "find", "arguments": {"query": "a"}}'
        assert "one call and nothing else" in calls(f"<tool_call>{one}\n{one}</tool_call>")

    def test_calls_before_a_malformed_one_are_not_run(self):
        good = '<tool_call>{"name": "python", "arguments": {"code": "1"}}</tool_call>'
        assert TOOLS.answer(said(good + "<tool_call>")) == [
            {"role": "user", "content": f"Error: {calls(good + '<tool_call>')}"}
        ]


class TestAnswers:
    @pytest.mark.parametrize(
        ("text", "answer"),
        [
            ("so <answer> 42 </answer>.", "42"),
            ("<answer>1</answer> no, <answer>2</answer>", "2"),
            ("<think><answer>1</answer></think><answer>a\nb</answer>", "a\nb"),
            ("<answer>a <answer>b</answer>", "b"),
            ("<answer>a < b</answer>", "a < b"),
        ],
    )
    def test_tags(self, text, answer):
        assert answer_in(text) == FinalAnswer(answer)

    @pytest.mark.parametrize(
        ("text", "answer"),
        [
            (r"so \boxed{42}.", "42"),
            (r"\boxed{1}, or rather \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
            (r"\boxed {x}", "x"),
            (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
            (r"\boxed{\{1, 2}", r"\{1, 2"),
            (r"\boxed{\boxed{5}}", "5"),
            (r"\boxed{a \\ b}", r"a \\ b"),
        ],
    )
    def test_boxes(self, text, answer):
        assert answer_in(text, "boxed") == FinalAnswer(answer)

    @pytest.mark.parametrize(
        "text", ["", "42", "<think><answer>1</answer></think>", "<think>\\boxed{1} <answer>1</answer>"]
    )
    def test_none(self, text):
        assert answer_in(text) is None
        assert answer_in(text, "boxed") is None

    @pytest.mark.parametrize(
        ("text", "form", "says"),
        [
            ("<answer>42", "answer", "<answer> without </answer>"),
            ("42</answer>", "answer", "</answer> without <answer>"),
            ("<answer>42</answer></answer>", "answer", "twice"),
            ("<answer> </answer>", "answer", "is empty"),
            (r"\boxed{42", "boxed", "not closed"),
            (r"\boxed{\frac{1}{2}", "boxed", "not closed"),
            (r"\boxed 42", "boxed", "needs braces"),
            (r"\boxed{ }", "boxed", "is empty"),
        ],
    )
    def test_a_malformed_one_is_told(self, text, form, says):
        found = answer_in(text, form)
        assert found.text == ""
        assert says in found.problem


def test_thoughts_are_not_said():
    assert spoken("<think>a</think>b") == "b"
    assert spoken("a</think>b</think>c") == "c"
    assert spoken(" <think>a") == ""
    assert spoken("the tag <think> begins a thought") == "the tag <think> begins a thought"


@pytest.mark.parametrize("text", ["NaN", "[1,]", '{"a": 1, "a": 2}', "1 2", "", "[" * 100_000, "1" * 100_000, "'a'"])
def test_only_strict_json_is_json(text):
    assert isinstance(parse_json(text), NotJson)


PIECES = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", '{"name": "python", "arguments": {"code": "1"}}', '{"name":', "<function=find>",
        "<parameter=query>", "</parameter>", "</function>", "\n```python\n", "\n```\n", "````", "```", "\n", "<think>",
        "</think>", "<answer>", "</answer>", "\\boxed{", "}", "{", "\\", "\ud800", "\x00", " ",
    ]
)  # fmt: skip
TEXTS = st.lists(PIECES | st.text(st.characters(), max_size=4), max_size=20).map("".join)


@settings(max_examples=500, deadline=None)
@given(TEXTS)
@example("```python\n```")
def test_no_text_raises(text):
    list(calls_in(text))
    for message in TOOLS.answer(said(text)):
        message["content"].encode("utf-8")
    for form in ("answer", "boxed"):
        found = answer_in(text, form)
        assert found is None or bool(found.text) != bool(found.problem)


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(codec="utf-8", exclude_characters="\r")))
def test_every_code_comes_back_out_of_a_long_enough_fence(code):
    fence = "`" * (max(3, 1 + max((len(run) for run in code.split("\n") if set(run.strip()) == {"`"}), default=0)))
    if spoken(f"{fence}python\n{code}\n{fence}") != f"{fence}python\n{code}\n{fence}":
        return  # it speaks of thoughts
    assert calls(f"{fence}python\n{code}\n{fence}") == [ToolCall("python", {"code": code})]


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(codec="utf-8")))
def test_every_code_comes_back_out_of_the_json_form(code):
    call = f"<tool_call>{json.dumps({'name': 'python', 'arguments': {'code': code}})}</tool_call>"
    if "</think>" not in code:
        assert calls(call) == [ToolCall("python", {"code": code})]


MEGABYTE = 1 << 20


@pytest.mark.parametrize(
    "piece",
    [
        "<tool_call>", "</tool_call>", "<tool_call>{", '<tool_call>{"name": "python", "arguments": {"code": "1"}}</tool_call>',
        "<tool_call><function=f>", "<tool_call><function=f><parameter=a>", "<parameter=a>", "</parameter>", "`", "```",
        "```\n", "```python\n", "\n```python\n```", "\n````\n```", "\n   ```", " ", "\n", "{", "[", "<think>", "</think>",
        "<answer>", "</answer>", "<answer></answer>", "\\boxed", "\\boxed{", "\\boxed ", "\\", "}", "<function=", "\n``` `",
    ],
)  # fmt: skip
@pytest.mark.parametrize("before", ["", "<tool_call>", "<tool_call><function=f><parameter=a>", "```python\n", "\\boxed{", '<tool_call>{"name": "'])  # fmt: skip
def test_a_megabyte_takes_no_longer_than_its_length(piece, before):
    text = before + piece * (MEGABYTE // len(piece))
    began = time.monotonic()
    calls(text)
    answer_in(text)
    answer_in(text, "boxed")
    assert time.monotonic() - began < 20  # a quadratic reading takes hours


@pytest.mark.parametrize("indent", ["", " ", "   "])
def test_a_block_in_a_list_of_markdown_loses_the_indent_of_its_fence(indent):
    text = f"1. Run it:\n\n{indent}```python\n{indent}if x:\n{indent}    y()\n\n{indent}```\n\n2. Wait."
    assert calls(text) == [ToolCall("python", {"code": "if x:\n    y()\n"})]


def test_fences_of_every_length_take_no_longer_than_their_text():
    text = "".join("\n" + "`" * n + ("python" if n % 2 else "") for n in range(3, 1400))
    began = time.monotonic()
    calls(text)
    calls(text[::-1])
    assert time.monotonic() - began < 20


def test_an_argument_of_any_type_is_read_as_json_or_as_text():
    parameters = {"properties": {"x": True, "y": True}}
    assert typed({"x": "1", "y": "one"}, parameters) == {"x": 1, "y": "one"}
    assert sole_argument({"properties": {"x": True}}) is None


def test_python_s_words_are_read_where_no_text_is_taken():
    """As chat templates write them that turn values to strings."""
    parameters = {
        "properties": {"on": {"type": "boolean"}, "text": {"type": "string"}, "none": {"type": ["null", "integer"]}}
    }
    assert typed({"on": "True", "text": "True", "none": " None"}, parameters) == {
        "on": True,
        "text": "True",
        "none": None,
    }
