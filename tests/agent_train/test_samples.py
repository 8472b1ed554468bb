"""A trajectory becomes rows by the prefix rule: what was sampled is what is trained, once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_tokenizers import renderer

from agent_train.data.samples import samples_of
from agentgym.core.messages import user
from agentgym.core.trajectory import Tokens, Trajectory, Turn


def trajectory(*turns: Tokens | None) -> Trajectory:
    return Trajectory(
        "t/0", "env", "t", turns=[Turn([], {"role": "assistant", "content": ""}, tokens=t) for t in turns]
    )


def tokens(prompt: list[int], sampled: list[int], version: int = 0) -> Tokens:
    return Tokens(prompt, sampled, [-0.5 - i for i in range(len(sampled))], [version] * len(sampled))


def conversation(name: str, completions: list[list[int]]) -> Trajectory:
    """The trajectory of a conversation in which these ids were sampled."""
    render = renderer(name)
    messages, previous, turns = [user("go")], None, []
    for number, ids in enumerate(completions):
        prompt = render.prompt(messages, (), previous)
        turns.append(tokens(prompt.ids, ids, version=number))
        previous = prompt.answered(ids)
        messages += [render.parse(ids), user("on")]
    return trajectory(*turns)


def said(name: str, text: str) -> list[int]:
    return [*renderer(name).encode(text), renderer(name).stop_token_ids[0]]


def test_turns_that_extend_one_another_are_one_row():
    (row,) = samples_of(trajectory(tokens([1, 2], [3, 4], version=5), tokens([1, 2, 3, 4, 9], [6], version=7)), 0.7)
    assert row.ids == [1, 2, 3, 4, 9, 6]
    assert row.mask == [False, False, True, True, False, True]
    assert row.logprobs == [0.0, 0.0, -0.5, -1.5, 0.0, -0.5]
    assert row.versions == [-1, -1, 5, 5, -1, 7]
    assert row.turn_ends == [4, 6]
    assert (row.trajectory, row.group, row.temperature) == ("t/0", "t", 0.7)


@pytest.mark.parametrize("second", [[1, 2, 3], [1, 2, 3, 5, 9], [7, 2, 3, 4, 9], [9]])
def test_a_prompt_that_does_not_extend_begins_a_row(second):
    rows = samples_of(trajectory(tokens([1, 2], [3, 4]), tokens(second, [6])))
    assert [row.ids for row in rows] == [[1, 2, 3, 4], [*second, 6]]
    assert [row.mask for row in rows] == [[False] * 2 + [True] * 2, [False] * len(second) + [True]]


@given(data=st.data())
def test_every_sampled_id_is_trained_once_and_nothing_else(data):
    """Whatever the prompts do: masked ids are the engine's ids in order, each with its own log-probability and version."""
    turns, context = [], []
    for number in range(data.draw(st.integers(0, 5))):
        extends = data.draw(st.booleans())
        prompt = (context if extends else []) + data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
        turn = tokens(prompt, data.draw(st.lists(st.integers(0, 3), max_size=4)), version=number)
        turns.append(turn)
        context = prompt + turn.completion_ids
    rows = samples_of(trajectory(*turns))
    for name, field in (("ids", "completion_ids"), ("logprobs", "logprobs"), ("versions", "versions")):
        trained = [value for row in rows for value, masked in zip(getattr(row, name), row.mask, strict=True) if masked]
        assert trained == [value for turn in turns for value in getattr(turn, field)]
    assert all(not row.mask[0] and any(row.mask) for row in rows)
    assert sum(len(row.turn_ends) for row in rows) == sum(bool(turn.completion_ids) for turn in turns)


def test_a_template_that_forgets_thoughts_gives_two_rows_of_one_weight():
    said_twice = [said("forgetful", "<think>hole</think>right"), said("forgetful", "<think>goal</think>up")]
    rows = samples_of(conversation("forgetful", said_twice))
    assert [[i for i, m in zip(row.ids, row.mask, strict=True) if m] for row in rows] == said_twice
    assert len(samples_of(conversation("tiny", said_twice))) == 1


@pytest.mark.parametrize("name", ["tiny", "many_encodings", "tekken"])
def test_the_stop_token_is_trained_and_the_bridge_is_not(name):
    (row,) = samples_of(conversation(name, [said(name, "right"), renderer(name).encode("up")]))
    stop = renderer(name).stop_token_ids[0]
    assert row.ids[row.turn_ends[0] - 1] == stop
    assert row.mask[row.turn_ends[0] - 1]
    assert not row.mask[row.turn_ends[0]]
    assert row.turn_ends[-1] == len(row.ids)
    assert row.ids[-1] != stop


def test_a_cut_turn_is_followed_by_an_end_that_is_not_trained():
    cut = renderer("tiny").encode("right")
    (row,) = samples_of(conversation("tiny", [cut, cut]))
    assert row.ids[row.turn_ends[0]] == renderer("tiny").stop_token_ids[0]
    assert sum(row.mask) == 2 * len(cut)


def test_an_encoding_of_the_engine_s_own_goes_into_the_row():
    one = renderer("many_encodings").encode("a")
    sampled = one * 8 + [renderer("many_encodings").stop_token_ids[0]]
    (row,) = samples_of(conversation("many_encodings", [sampled, sampled]))
    assert [i for i, m in zip(row.ids, row.mask, strict=True) if m] == sampled * 2
    assert renderer("many_encodings").encode("a" * 8) != one * 8


def test_a_trajectory_that_sampled_nothing_gives_no_rows():
    assert samples_of(trajectory()) == []
    assert samples_of(trajectory(None)) == []
    assert samples_of(trajectory(tokens([1, 2], []))) == []


def test_an_empty_turn_between_others_leaves_them_one_row():
    (row,) = samples_of(trajectory(tokens([1], [2]), tokens([1, 2, 8], []), tokens([1, 2, 8, 9], [3])))
    assert row.ids == [1, 2, 8, 9, 3]
    assert row.mask == [False, True, False, False, True]


def test_tokens_that_do_not_fit_together_are_refused():
    with pytest.raises(ValueError, match="t/0, turn 1: 2 sampled ids, 1 log-probabilities"):
        samples_of(trajectory(tokens([1], [2]), Tokens([1, 2], [3, 4], [0.0], [0, 0])))
    with pytest.raises(ValueError, match="prompt is empty"):
        samples_of(trajectory(tokens([], [2])))
