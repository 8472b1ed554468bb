"""Tools: schemas from signatures, calls from messages, and answers that a model can act on."""

from __future__ import annotations

import json
import time
from typing import Any, Literal, Optional

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from agentgym.core.env import MessagesSpace
from agentgym.tools.toolset import ToolCall, ToolError, ToolSet, tool


@tool
def search(
    query: str, limit: int = 5, mode: Literal["fast", "exact"] = "fast", tags: list[str] | None = None
) -> list[str]:
    """Search the index.

    Finds documents by meaning.

    Args:
        query: what to look for,
            in a few words.
        limit (int): most results.
        mode: how to search.

    Returns:
        Titles.
    """
    return [f"{query}/{mode}/{n}" for n in range(limit)] + (tags or [])


@tool
def divide(a: float, b: float) -> float:
    """Divide a by b."""
    if b == 0:
        raise ToolError("b is 0: choose another")
    return a / b


@tool
def now() -> str:
    """The time."""
    return "noon"


TOOLS = ToolSet([search, divide, now])


def text_call(name, arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def native(*calls):
    items = [{"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, n, a in calls]
    return {"role": "assistant", "content": None, "tool_calls": items}


def said(text):
    return {"role": "assistant", "content": text}


class TestSchema:
    def test_signature_and_docstring_become_an_openai_function_schema(self):
        assert search.schema == {
            "type": "function",
            "function": {
                "name": "search",
                "description": "Search the index. Finds documents by meaning.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "query": {"type": "string", "description": "what to look for, in a few words."},
                        "limit": {"type": "integer", "description": "most results.", "default": 5},
                        "mode": {
                            "type": "string",
                            "enum": ["fast", "exact"],
                            "description": "how to search.",
                            "default": "fast",
                        },
                        "tags": {
                            "anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}],
                            "default": None,
                        },
                    },
                    "required": ["query"],
                    "additionalProperties": False,
                },
            },
        }

    @pytest.mark.parametrize(
        ("hint", "schema"),
        [
            (str, {"type": "string"}),
            (int, {"type": "integer"}),
            (float, {"type": "number"}),
            (bool, {"type": "boolean"}),
            (list, {"type": "array"}),
            (dict, {"type": "object"}),
            (Any, {}),
            (list[int], {"type": "array", "items": {"type": "integer"}}),
            (dict[str, float], {"type": "object", "additionalProperties": {"type": "number"}}),
            (
                list[dict[str, bool]],
                {"type": "array", "items": {"type": "object", "additionalProperties": {"type": "boolean"}}},
            ),
            (Literal["a", "b"], {"type": "string", "enum": ["a", "b"]}),
            (Literal[1, 2], {"type": "integer", "enum": [1, 2]}),
            (Literal["a", 1], {"enum": ["a", 1]}),
            (int | None, {"anyOf": [{"type": "integer"}, {"type": "null"}]}),
            (Optional[str], {"anyOf": [{"type": "string"}, {"type": "null"}]}),  # noqa: UP045
            (int | str, {"anyOf": [{"type": "integer"}, {"type": "string"}]}),
        ],
    )
    def test_types(self, hint, schema):
        def function(x):
            """Do it."""

        function.__annotations__ = {"x": hint}
        assert tool(function).parameters["properties"]["x"] == schema

    def test_a_bound_method_is_a_tool_without_self(self):
        class Shelf:
            def put(self, book: str) -> str:
                """Put a book."""
                return f"{book} on {id(self)}"

        shelf = Shelf()
        made = tool(shelf.put)
        assert list(made.parameters["properties"]) == ["book"]
        assert made.run({"book": "x"}) == f"x on {id(shelf)}"

    def test_schemas_are_json(self):
        assert json.loads(json.dumps(TOOLS.schemas)) == TOOLS.schemas

    def test_what_makes_no_tool_is_refused_by_name(self):
        def bare(x: int):
            pass

        def untyped(x):
            """Do."""

        def odd(x: set):
            """Do."""

        def many(*x: int):
            """Do."""

        def stray(x: int):
            """Do.

            Args:
                y: nobody.
            """

        def default(x: object = object()):
            """Do."""

        async def later(x: int):
            """Do."""

        wrong = {
            bare: "'bare' has no docstring",
            untyped: "argument 'x' has no type",
            odd: "no JSON schema for the type",
            many: "by name",
            stray: "describes 'y'",
            default: "no JSON schema",
            later: "is async",
        }
        for function, message in wrong.items():
            with pytest.raises(TypeError, match=message):
                tool(function)

    def test_two_tools_of_one_name_are_refused(self):
        with pytest.raises(ValueError, match="'now'"):
            ToolSet([now, now])


class TestCalls:
    def test_native_calls_are_read_in_order(self):
        message = native(("1", "divide", '{"a": 1, "b": 2}'), ("2", "now", ""), ("3", "now", {}))
        assert TOOLS.calls_of(message) == [
            ToolCall("divide", {"a": 1, "b": 2}, "1"),
            ToolCall("now", {}, "2"),
            ToolCall("now", {}, "3"),
        ]

    @pytest.mark.parametrize("arguments", ["{}", "{malformed"])
    def test_native_calls_hide_those_in_the_text(self, arguments):
        message = native(("1", "now", arguments)) | {"content": text_call("search", {"query": "x"})}
        assert [m["role"] for m in TOOLS.answer(message)] == ["tool"]
        assert "search" not in str(TOOLS.calls_of(message))

    def test_text_calls_are_read_in_order(self):
        text = f"I look.\n{text_call('now', {})}\nand {text_call('search', {'query': 'größe 漢字'})} done"
        assert TOOLS.calls_of(said(text)) == [ToolCall("now", {}), ToolCall("search", {"query": "größe 漢字"})]

    def test_a_message_without_a_call_makes_none(self):
        for message in (
            said("just words"),
            said(None),
            said(""),
            {"role": "assistant", "content": None, "tool_calls": []},
        ):
            assert TOOLS.calls_of(message) == []
            assert TOOLS.answer(message) == []

    def test_a_call_that_is_only_thought_of_is_none(self):
        assert TOOLS.calls_of(said(f"<think>maybe {text_call('now', {})}</think>No.")) == []

    @pytest.mark.parametrize(
        "text",
        [
            "<tool_call>",
            "</tool_call>",
            "<tool_call>{}</tool_call>",
            "<tool_call>now</tool_call>",
            '<tool_call>{"name": "now"}</tool_call>',
            '<tool_call>{"name": "now", "arguments": {}, "id": 1}</tool_call>',
            '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>',
            '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
            '<tool_call>{"name": "now", "name": "now", "arguments": {}}</tool_call>',
            '<tool_call>{"name": "now", "arguments": {"x": NaN}}</tool_call>',
            '<tool_call>{"name": "now", "arguments": {}}',
            '<tool_call>{"name": "now", "arguments": {}}<tool_call>{"name": "now", "arguments": {}}</tool_call>',
            '<tool_call>{"name": "now", "arguments": {}}</tool_call></tool_call>',
            '<tool_call>[{"name": "now", "arguments": {}}]</tool_call>',
            "<tool_call>" + "[" * 100_000 + "</tool_call>",
        ],
    )
    def test_a_malformed_text_call_is_told(self, text):
        problem = TOOLS.calls_of(said(text))
        assert isinstance(problem, str)
        assert "<tool_call>" in problem
        assert TOOLS.answer(said(text)) == [{"role": "user", "content": f"Error: {problem}"}]

    @pytest.mark.parametrize("item", [None, 3, [], {}, {"function": {}}, {"function": {"name": 1, "arguments": "{}"}}])
    def test_a_malformed_native_call_is_answered_all_the_same(self, item):
        message = {
            "role": "assistant",
            "content": None,
            "tool_calls": [item, native(("b", "now", "{}"))["tool_calls"][0]],
        }
        assert isinstance(TOOLS.calls_of(message), str)
        first, second = TOOLS.answer(message)
        assert first["content"].startswith("Error: ")
        assert first["tool_call_id"] == "call_0"
        assert second == {"role": "tool", "tool_call_id": "b", "content": "noon"}

    def test_arguments_that_are_no_object_are_told(self):
        for arguments in ("[1]", "{", '"x"', 3, "null x"):
            assert "'divide'" in TOOLS.calls_of(native(("1", "divide", arguments)))

    def test_text_calls_are_answered_in_one_user_message(self):
        text = text_call("now", {}) + text_call("divide", {"a": 1, "b": 4})
        assert TOOLS.answer(said(text)) == [
            {
                "role": "user",
                "content": "<tool_response>\nnoon\n</tool_response>\n<tool_response>\n0.25\n</tool_response>",
            }
        ]

    @pytest.mark.parametrize(
        "form", [lambda n: native(*((str(i), "wait", {}) for i in range(n))), lambda n: said(text_call("wait", {}) * n)]
    )
    def test_calls_that_come_after_the_time_of_their_message_are_not_run(self, form):
        ran = []

        def wait() -> str:
            """Wait."""
            ran.append(1)
            time.sleep(0.06)
            return "done"

        answer = ToolSet([wait], seconds=0.1).answer(form(4))
        assert len(ran) == 2
        assert (
            "".join(message["content"] for message in answer).count("not run: the calls before it took 0.1 seconds")
            == 2
        )


class TestCall:
    @pytest.mark.parametrize(
        ("name", "arguments", "says"),
        [
            ("serch", {}, "there is no tool 'serch'; the tools are: search, divide, now"),
            ("divide", {"a": 1}, 'divide: the argument "b" is missing; the arguments are: a, b'),
            ("divide", {"a": 1, "b": 2, "c": 3}, 'divide: there is no argument "c"; the arguments are: a, b'),
            ("divide", {"a": "1", "b": 2}, 'divide: argument "a" must be number, not string'),
            ("divide", {"a": True, "b": 2}, 'divide: argument "a" must be number, not boolean'),
            ("divide", {"a": -(10**400), "b": 2}, 'divide: argument "a" is too large'),
            ("divide", {"a": 1, "b": 0}, "b is 0: choose another"),
            ("search", {"query": None}, 'search: argument "query" must be string, not null'),
            ("search", {"query": "x", "limit": 2.0}, 'search: argument "limit" must be integer, not number'),
            ("search", {"query": "x", "mode": "é"}, 'search: argument "mode" must be one of "fast", "exact", not "é"'),
            ("search", {"query": "x", "tags": "a"}, 'search: argument "tags" must be array or null, not string'),
            ("search", {"query": "x", "tags": ["a", 1]}, 'search: argument "tags" at 1 must be string, not integer'),
            ("now", {"x": 1}, 'now: there is no argument "x"; the arguments are: none'),
            ("now", [], "now: arguments must be an object, not array"),
        ],
    )
    def test_a_wrong_call_is_told_what_to_change(self, name, arguments, says):
        assert TOOLS.call(name, arguments) == f"Error: {says}"

    def test_an_item_of_the_wrong_type_is_named_by_its_place(self):
        @tool
        def total(numbers: list[int], weights: dict[str, float] = {}) -> int:  # noqa: B006
            """Add."""
            return sum(numbers) + len(weights)

        assert (
            total.run({"numbers": [1, 2, "x"]}) == 'Error: total: argument "numbers" at 2 must be integer, not string'
        )
        assert total.run({"numbers": [], "weights": {"é": "x"}}).endswith(
            'argument "weights" at "é" must be number, not string'
        )
        assert total.run({"numbers": [1, 2]}) == "3"

    def test_true_is_no_1_of_a_literal(self):
        @tool
        def pick(x: Literal[1, 2]) -> int:
            """Pick."""
            return x

        assert pick.run({"x": True}).startswith("Error: ")
        assert pick.run({"x": 1}) == "1"

    def test_results_are_text_or_json(self):
        assert TOOLS.call("now", {}) == "noon"
        assert TOOLS.call("search", {"query": "ü", "limit": 1, "tags": None}) == '["ü/fast/0"]'
        assert TOOLS.call("divide", {"a": 1, "b": 2}) == "0.5"

    def test_an_exception_of_the_tool_itself_is_a_failure_of_the_env(self):
        @tool
        def broken(x: int) -> int:
            """Break."""
            raise OSError("disk")

        with pytest.raises(OSError, match="disk"):
            broken.run({"x": 1})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
PIECES = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        '{"name":',
        '"divide"',
        ',"arguments":{',
        '"a":1',
        "}",
        "}}",
        "<think>",
        "</think>",
        "\ud800",
    ]
)
TEXTS = st.lists(PIECES | st.text(st.characters(), max_size=5), max_size=12).map("".join)


def assert_usable(messages):
    assert MessagesSpace().contains(messages)
    for message in messages:
        message["content"].encode("utf-8")


@settings(max_examples=150, deadline=None)
@given(TEXTS)
def test_no_text_raises(text):
    TOOLS.calls_of(said(text))
    assert_usable(TOOLS.answer(said(text)))


@settings(max_examples=150, deadline=None)
@given(JSON, st.sampled_from(["search", "divide", "now", "x"]))
def test_no_arguments_raise(arguments, name):
    for written in (arguments, json.dumps(arguments)):
        message = native(("1", name, written))
        TOOLS.calls_of(message)
        assert_usable(TOOLS.answer(message))
    assert_usable(TOOLS.answer(said(text_call(name, arguments))))


@settings(max_examples=100, deadline=None)
@given(JSON)
def test_no_native_calls_raise(calls):
    assert_usable(TOOLS.answer({"role": "assistant", "content": None, "tool_calls": calls}))


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(
        st.text(), JSON.filter(lambda v: "NaN" not in json.dumps(v) and "Inf" not in json.dumps(v)), max_size=3
    )
)
def test_every_call_written_as_json_is_read_back(arguments):
    text = text_call("now", arguments)
    assume(
        "</think>" not in text and text.count("tool_call>") == 2
    )  # a text that holds the tags cannot be told from them
    assert TOOLS.calls_of(said(text)) == [ToolCall("now", arguments)]
