"""What agents return that were written with other packages: told by its form."""

import json
from types import SimpleNamespace

import pytest

from agentgym.evaluate.agents import reply_of_answer
from agentgym.policies.base import Reply

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
COMPLETION = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [
        {"index": 0, "finish_reason": "length", "message": {"role": "assistant", "content": "hi", "tool_calls": [CALL]}}
    ],
    "usage": {
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 2},
    },
}


def ai(content="hi", **more):
    """A message as LangChain makes it: what it has of these names is all that is looked at."""
    return SimpleNamespace(type="ai", content=content, **more)


def test_a_whole_completion_of_the_openai_package_is_its_message_usage_and_finish_reason():
    openai = pytest.importorskip("openai")
    answer = openai.types.chat.ChatCompletion.model_validate(COMPLETION)
    for each in (answer, COMPLETION):
        reply = reply_of_answer(each)
        assert (reply.message["content"], reply.finish_reason) == ("hi", "length")
        assert reply.message["tool_calls"] == [CALL]
        assert reply.usage == {"prompt_tokens": 7, "completion_tokens": 3, "cached_tokens": 2}
    assert reply_of_answer(answer.choices[0].message).message["content"] == "hi"


def test_a_message_of_langchain_has_its_tool_calls_usage_and_finish_reason():
    answer = ai(
        [{"type": "text", "text": "so "}, "it is", {"type": "tool_use", "id": "1"}],
        tool_calls=[{"name": "f", "args": {"x": 1}, "id": "1", "type": "tool_call"}],
        usage_metadata={"input_tokens": 7, "output_tokens": 3, "input_token_details": {"cache_read": 2}},
        response_metadata={"finish_reason": "tool_calls"},
    )
    reply = reply_of_answer(answer)
    assert reply.message == {"role": "assistant", "content": "so it is", "tool_calls": [CALL]}
    assert reply.usage == {"prompt_tokens": 7, "completion_tokens": 3, "cached_tokens": 2}
    assert reply.finish_reason == "tool_calls"
    json.dumps(reply.message)


def test_of_many_messages_the_last_counts():
    human = SimpleNamespace(type="human", content="hello")
    for answer in ([human, ai("one"), ai("two")], {"messages": [human, ai("two")]}, [{"role": "user"}, "two"]):
        assert reply_of_answer(answer).message["content"] == "two"
    given = Reply({"role": "assistant", "content": "mine"})
    assert reply_of_answer(given) is given


@pytest.mark.parametrize("answer", [[], None, 3, SimpleNamespace(type="human", content="x"), {"choices": []}, [None]])
def test_anything_else_is_refused(answer):
    with pytest.raises((TypeError, ValueError, LookupError, AttributeError)):
        reply_of_answer(answer)
