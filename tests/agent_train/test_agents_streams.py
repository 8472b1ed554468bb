"""Streams of agents in training: what is told of an answer before its end is what the answer then begins with."""

import asyncio
import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sample_tokenizers import TOKENIZERS, renderer

from agent_train.engine.base import Completion, Engine
from agent_train.rollout.agents import EngineBackend
from agent_train.rollout.journal import Journal
from agent_train.rollout.renderer import Renderer
from agentgym.core.messages import text_of, user
from agentgym.gateway import ModelCall
from agentgym.gateway.calls import TEXT

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
PARTS = (
    "<think>",
    "</think>",
    CALL,
    "<tool_call>",
    "</tool_call>",
    "<",
    "\n",
    " ",
    "up",
    "stop",
    "st",
    "é",
    "\U0001f600",
    "日",
)


class Says(Engine):
    """A double that samples given ids, in given pieces, and is otherwise no engine."""

    max_model_len = 4096

    def __init__(self, pieces):
        self.pieces = pieces

    async def stream(self, prompt_ids, sampling, episode, told):
        for piece in self.pieces:
            told(list(piece))
        ids = [id for piece in self.pieces for id in piece]
        return Completion(ids, [0.0] * len(ids), [0] * len(ids), "stop")


def streamed(render: Renderer, pieces, call: ModelCall):
    """What is told of an answer, and the answer."""
    told = []
    backend = EngineBackend(Says(pieces), render)
    backend.begin("e", "key", Journal())
    answer = asyncio.run(backend.answer(call, "e", lambda kind, text: told.append((kind, text))))
    assert all(kind == TEXT for kind, _ in told)
    return "".join(text for _, text in told), answer


def pieces_of(ids, ends):
    return [ids[begin:end] for begin, end in itertools.pairwise([0, *sorted(ends), len(ids)])]


@pytest.mark.parametrize("name", [*TOKENIZERS, "forgetful"])
@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_an_answer_begins_with_what_was_told_of_it(name, data):
    render = renderer(name)
    text = "".join(data.draw(st.lists(st.sampled_from(PARTS), min_size=1, max_size=8)))
    ids = [*render.encode(text), render.stop_token_ids[-1]]
    pieces = pieces_of(ids, data.draw(st.lists(st.integers(0, len(ids)), max_size=len(ids))))
    stop = data.draw(st.sampled_from([None, ["stop"], ["\n", "up"], [""]]))
    used = {} if stop is None else {"stop": stop}
    asked = data.draw(st.sampled_from([{"messages": [user("go")]}, {"prompt": "go"}]))
    told, answer = streamed(render, pieces, ModelCall("policy", used=used, streams=True, **asked))
    assert text_of(answer.message).startswith(told)


def test_text_is_told_as_it_comes():
    render = renderer("tiny")
    ids = render.encode("left or up\n")
    told, answer = streamed(render, [[id] for id in ids], ModelCall("policy", [user("go")], streams=True))
    assert (told, text_of(answer.message)) == ("left or up", "left or up\n")


def test_thoughts_and_calls_come_whole():
    render = renderer("tiny")
    for text, sure in (
        (f"up{CALL}", "up"),
        (f"up\n{CALL}", "up"),
        ("<think>up</think>left", ""),
        ("up</think>left", ""),
    ):
        ids = render.encode(text)
        assert streamed(render, [ids], ModelCall("policy", [user("go")], streams=True))[0] == sure, text


OTHER = CALL.replace('"f"', '"g"')


@pytest.mark.parametrize(
    ("text", "stop", "names", "stopped"),
    [
        (f"up{CALL}\nObservation: 7", "Observation:", ["f"], None),
        (f"up{CALL}{OTHER}\nObservation: 7", "Observation:", ["f", "g"], None),
        (f"up Observation: 7{CALL}", "Observation:", [], "Observation:"),
        (f"up{CALL}", "arguments", [], "arguments"),
        (f"up{CALL}", "</tool_call>", [], "</tool_call>"),
        (f"up{CALL}{OTHER}", '"g"', ["f"], None),
    ],
)
def test_a_stop_string_behind_tool_calls_leaves_them(text, stop, names, stopped):
    """As agents have that read text, too, such as smolagents."""
    render = renderer("tiny")
    call = ModelCall("policy", [user("go")], used={"stop": [stop]}, streams=True)
    _, answer = streamed(render, [render.encode(text)], call)
    assert [each["function"]["name"] for each in answer.message.get("tool_calls", [])] == names
    assert (answer.finish_reason, answer.stop) == ("tool_calls" if names else "stop", stopped)
    assert stop not in text_of(answer.message)


def test_what_was_told_is_no_thought_any_more():
    render = renderer("forgetful")
    pieces = [render.encode("up"), render.encode("</think>left")]
    told, answer = streamed(render, pieces, ModelCall("policy", [user("go")], streams=True))
    assert told == "up"
    assert answer.message == {"role": "assistant", "content": "up</think>left"}
