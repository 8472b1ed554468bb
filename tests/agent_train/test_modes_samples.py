"""Examples as rows: token for token what sampling would have left, and what is learned of it."""

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mode_cases import assistant, call, user
from sample_tokenizers import FORGETFUL, tiny

from agent_train.data.samples import samples_of
from agent_train.rollout.renderer import Renderer
from agent_train.trainer.offline.records import Conversation, DataError, Example
from agent_train.trainer.offline.samples import texts_of, tokenize_examples
from agentgym.core.messages import tool_result
from agentgym.core.trajectory import Tokens, Trajectory, Turn

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def renderer():
    return Renderer(tiny())


@pytest.fixture(scope="module")
def forgetful():
    """Its template leaves thoughts of earlier turns out."""
    tokenizer = copy.deepcopy(tiny())
    tokenizer.chat_template = FORGETFUL
    return Renderer(tokenizer)


def conversation(*messages, first=1, tools=(), env=""):
    return Conversation("data.jsonl:1", list(messages[:first]), list(messages[first:]), list(tools), env)


def rows_of_one(renderer, said):
    (sample,) = tokenize_examples([Example((said,))], renderer)
    return sample.answers[0]


def learned(renderer, row):
    return renderer.decode([token for token, on in zip(row.ids, row.mask, strict=True) if on])


def sampled_row(renderer, said):
    """The row of a policy that happens to sample what the conversation says, as `TokenPolicy` leaves it."""
    turns, messages, previous = [], list(said.prompt), None
    for number, message in enumerate(said.said):
        if message["role"] != "assistant":
            messages.append(message)
            continue
        prompt = renderer.prompt(messages, said.tools, previous)
        text = renderer.text([*messages, message], said.tools, answering=False)[len(prompt.text) :]
        ids = [*renderer.encode(text.partition("<|end|>")[0]), renderer.stop_token_ids[-1]]
        turns.append(Turn([], message, tokens=Tokens(prompt.ids, ids, [0.0] * len(ids), [0] * len(ids))))
        # What the environment and the template see from here on is what was parsed.
        messages.append(renderer.parse(ids, number))
        previous = prompt.answered(ids)
    (row,) = samples_of(Trajectory("x", "", "x", turns=turns))
    return row


TALKS = {
    "text": conversation(user("left or right?"), assistant("right"), user("at 1"), assistant("left")),
    "calls": conversation(
        user("what is there?"),
        call("look", '{"at":  [1, 2]}'),
        tool_result("c1", "ice", "look"),
        {**call("look", "{}"), "content": "again"},
        tool_result("c1", "a hole", "look"),
        assistant("a hole"),
        tools=[TOOL],
    ),
    "thoughts": conversation(user("hm?"), {**assistant("no"), "reasoning_content": "it is a hole"}),
}


@pytest.mark.parametrize("name", TALKS)
def test_rows_are_token_for_token_those_of_sampling(renderer, name):
    (row,) = rows_of_one(renderer, TALKS[name])
    expected = sampled_row(renderer, TALKS[name])
    assert (row.ids, row.mask, row.turn_ends) == (expected.ids, expected.mask, expected.turn_ends)


def test_what_the_assistant_says_and_its_stop_tokens_are_learned_and_nothing_else(renderer):
    (row,) = rows_of_one(renderer, TALKS["text"])
    assert learned(renderer, row) == "right<|end|>left<|end|>"
    (row,) = rows_of_one(renderer, TALKS["calls"])
    calls = learned(renderer, row)
    assert calls.count("<tool_call>") == 2
    assert calls.endswith("a hole<|end|>")
    assert '"at"' in calls
    assert "ice" not in calls


def test_a_rendered_call_reads_back_as_the_call(renderer):
    (row,) = rows_of_one(renderer, TALKS["calls"])
    ids = [token for token, on in zip(row.ids[: row.turn_ends[0]], row.mask, strict=False) if on]
    (found,) = renderer.parse(ids)["tool_calls"]
    assert found["function"]["name"] == "look"
    assert json.loads(found["function"]["arguments"]) == {"at": [1, 2]}


def test_what_the_prompt_says_for_the_assistant_is_not_learned(renderer):
    (row,) = rows_of_one(
        renderer, conversation(user("left or right?"), assistant("right"), user("at 1"), assistant("left"), first=3)
    )
    assert learned(renderer, row) == "left<|end|>"


def test_a_template_that_forgets_thoughts_gives_a_row_for_each_turn(forgetful):
    thinking = [{**assistant(text), "reasoning_content": "so " * 3} for text in ("right", "left")]
    rows = rows_of_one(forgetful, conversation(user("a"), thinking[0], user("b"), thinking[1]))
    assert [learned(forgetful, row) for row in rows] == [
        "<think>so so so </think>right<|end|>",
        "<think>so so so </think>left<|end|>",
    ]
    assert "so" not in forgetful.decode(rows[1].ids[: rows[1].mask.index(True)])


@pytest.mark.parametrize("field", ["tool_calls", "reasoning_content"])
def test_what_the_template_does_not_write_is_refused_by_name(field):
    tokenizer = copy.deepcopy(tiny())
    tokenizer.chat_template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    message = call("look", "{}") if field == "tool_calls" else {**assistant("no"), "reasoning_content": "why"}
    with pytest.raises(DataError, match=rf"data.jsonl:1: {field}: the chat template does not write it"):
        tokenize_examples([Example((conversation(user("a"), message),))], Renderer(tokenizer))


def test_long_examples_are_left_out_whole(renderer):
    short = conversation(user("a"), assistant("b"))
    long = conversation(user("a"), assistant("b " * 50))
    examples = [Example((short, short)), Example((short, long))]
    assert len(tokenize_examples(examples, renderer)) == 2
    assert len(tokenize_examples(examples, renderer, longest=20)) == 1


def test_kto_has_the_next_answer_under_each_prompt(renderer):
    talks = [conversation(user(q), assistant(a)) for q, a in (("one", "uno"), ("two", "due"), ("three", "tre"))]
    samples = tokenize_examples([Example((t,), label=True) for t in talks], renderer, mismatched=True)
    assert [learned(renderer, s.other[0]) for s in samples] == ["due<|end|>", "tre<|end|>", "uno<|end|>"]
    assert all("one" in renderer.decode(row.ids) for row in samples[0].training_samples)


def mismatched(renderer, prompts):
    """What is answered in place of each example's own answer: the number of the example whose answer that is."""
    talks = [conversation(user(prompt), assistant(str(number))) for number, prompt in enumerate(prompts)]
    samples = tokenize_examples([Example((t,), label=True) for t in talks], renderer, mismatched=True)
    return [int(learned(renderer, s.other[0]).removesuffix("<|end|>")) for s in samples]


@pytest.mark.parametrize(
    ("prompts", "others"),
    [
        ("aabb", [2, 3, 0, 1]),  # a run folder has the episodes of a task side by side
        ("aaab", [3, 3, 3, 0]),
        ("aba", [1, 0, 1]),
        ("abca", [1, 2, 0, 2]),
        ("aaa", [1, 2, 0]),  # all one prompt: there is no other
        ("a", [0]),
    ],
)
def test_kto_s_answers_to_other_prompts_are_those_of_other_prompts(renderer, prompts, others):
    assert mismatched(renderer, prompts) == others


@given(prompts=st.text("abcd", min_size=1, max_size=12).filter(lambda text: len(set(text)) > 1))
@settings(max_examples=40, deadline=None)
def test_kto_has_another_prompt_s_answer_wherever_there_is_one(renderer, prompts):
    found = mismatched(renderer, prompts)
    assert all(prompts[other] != own for other, own in zip(found, prompts, strict=True))
    if 2 * max(map(prompts.count, prompts)) == len(prompts) and len(set(prompts)) == 2:
        assert sorted(found) == list(range(len(prompts)))


def test_the_tools_of_an_environment_are_part_of_its_episodes_prompts(renderer):
    (row,) = rows_of_one(renderer, conversation(user("2 + 2?"), assistant("4"), env="gsm8k_tool"))
    assert renderer.decode(row.ids).startswith("<|system|>Tools:")
    with pytest.raises(DataError, match=r"data\.jsonl:1: env: 'no_such_env' cannot be made here"):
        rows_of_one(renderer, conversation(user("a"), assistant("b"), env="no_such_env"))


def test_the_texts_for_a_tokenizer_are_all_that_is_said():
    assert texts_of([Example((TALKS["text"],))]) == ["left or right?", "right", "at 1", "left"]
