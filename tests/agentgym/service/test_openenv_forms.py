"""What an OpenEnv server says, as the text that a policy sees."""

import pytest

from agentgym.service.openenv.forms import form_of, shown, shown_result, sole_text


def test_observations_are_shown_as_text():
    assert shown({"text": "all", "metadata": {"x": 1}, "empty": "", "none": None}) == "all"
    assert shown({"a": "one", "b": [1, 2], "c": "two\nlines"}) == "a: one\nb: [1, 2]\nc:\ntwo\nlines"
    assert "characters left out" in shown({"text": "x" * 100_000})


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ("plain", "plain"),
        ({"data": 3}, "3"),
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "a\nb"),
        ({"content": [{"type": "text", "text": "bad"}], "is_error": True}, "Error: bad"),
        ({"content": [], "structured_content": {"result": 1}}, '{"result": 1}'),
        ({"any": "thing"}, '{"any": "thing"}'),
        (None, "null"),
    ],
)
def test_results_of_tools_are_shown_as_text(result, text):
    assert shown_result(result) == text


def test_an_action_is_one_text_only_where_no_other_field_must_be_given():
    text = {"type": "string"}
    assert sole_text({"properties": {"metadata": {}, "code": text}, "required": ["code"]}) == "code"
    assert sole_text({"properties": {"code": text, "n": {"type": "integer"}}, "required": ["code"]}) == "code"
    assert sole_text({"properties": {"code": text, "n": {"type": "integer"}}, "required": ["code", "n"]}) is None
    assert sole_text({"properties": {"move": {"type": "string", "enum": ["a"]}}, "required": ["move"]}) is None


MOVE = {"enum": ["left", "right"], "title": "Move", "type": "string"}
REFERRING = {
    "$defs": {
        "Move": MOVE,
        "Speed": {"enum": [1, 2], "type": "integer"},
        "Node": {"type": "object", "properties": {"move": {"$ref": "#/$defs/Move"}, "next": {"$ref": "#/$defs/Node"}}},
    },
    "properties": {
        "move": {"$ref": "#/$defs/Move", "description": "where to"},
        "wrapped": {"allOf": [{"$ref": "#/$defs/Move"}], "default": "left"},
        "speed": {"anyOf": [{"$ref": "#/$defs/Speed"}, {"type": "null"}], "default": None},
        "path": {"type": "array", "items": {"$ref": "#/$defs/Move"}},
        "node": {"$ref": "#/$defs/Node"},
        "lost": {"$ref": "#/$defs/Nowhere"},
        "metadata": {"type": "object"},
    },
    "required": ["move"],
}


def test_enums_behind_references_are_shown_by_their_values():
    """As Pydantic writes `move: Move` of a Python enum."""
    assert form_of(REFERRING, []).told.splitlines()[1:] == [
        '- move (one of "left", "right"): where to',
        '- wrapped (one of "left", "right", optional)',
        "- speed (one of 1, 2 or null, optional)",
        '- path (array, each one of "left", "right", optional)',
        "- node (object, optional)",
        "- lost (value, optional)",
    ]
    assert sole_text(REFERRING) is None, "an enum is no free text"
    [tool] = form_of(REFERRING, []).schemas
    assert tool["function"]["parameters"]["properties"]["move"]["enum"] == ["left", "right"]


def test_an_environment_with_an_action_of_its_own_calls_its_tools_without_a_step():
    tool = {"name": "look", "inputSchema": {"type": "object", "properties": {}}}
    assert not form_of({"properties": {"code": {"type": "string"}}}, [tool]).by_step
    assert form_of({"properties": {"metadata": {}}}, [tool]).by_step
    assert form_of({"properties": {"tool_name": {"type": "string"}}}, [tool]).by_step
