"""Guess a number: what each guess is told, the replies that count, and the expert."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.core.tasks import Task
from agentgym_envs.games.guess_number import GuessNumber


def begin(level="1 100 42", **kwargs):
    env = GuessNumber(**kwargs)
    env.reset(options={"task": Task("mine", metadata={"level": level})})
    return env


def told(env, reply):
    return env.step(reply)[0][0]["content"]


def test_a_guess_is_told_where_it_lies_and_the_number_ends_the_game():
    env = begin()
    assert told(env, "41") == "41 is too low"
    assert told(env, "43") == "43 is too high"
    observation, reward, terminated, truncated, info = env.step("42")
    assert (observation[0]["content"], reward, terminated, truncated) == ("Correct: 42.", 1.0, True, False)
    assert info == {"success": True, "invalid": 0}


def test_the_game_is_lost_after_the_last_guess():
    env = begin(max_turns=2)
    assert not env.step("1")[2]
    observation, reward, terminated, truncated, info = env.step("100")
    assert observation[0]["content"] == "100 is too high\nOut of turns: the number was 42."
    assert (reward, terminated, truncated, info["success"]) == (0.0, True, False, False)


@pytest.mark.parametrize(
    ("reply", "guess"),
    [
        ("7", 7),
        ("I guess 41.", 41),
        ("not 50 but 25", 25),
        ("<think>between 1 and 49</think><answer>25</answer>", 25),
        ("1-50: 25!", 25),
        ("0", None),
        ("101", None),
        ("007", 7),
        ("2.5", None),
        ("42nd", None),
        ("forty", None),
        ("9" * 5_000, None),
    ],
)
def test_the_last_whole_number_counts(reply, guess):
    where = "invalid: answer with a number from 1 to 100"
    if guess is not None:
        where = f"{guess} is too {'low' if guess < 42 else 'high'}"
    assert told(begin(), reply) == where


@pytest.mark.parametrize(
    ("reply", "guess"),
    [
        ("1,234", 1234),
        ("not 2,000 but 1,234.", 1234),
        ("I guess 1,234, or more", 1234),
        ("12,345", 12345),
        ("600, 700", 700),
        ("600,7000", 7000),
        ("1,2,345", 345),
        ("1,234.5", None),
        ("2,345,678", None),
    ],
)
def test_a_number_of_a_large_range_may_be_grouped_by_commas(reply, guess):
    where = "invalid: answer with a number from 1 to 20000"
    if guess is not None:
        where = f"{guess} is too {'low' if guess < 7500 else 'high'}"
    assert told(begin("1 20000 7500", max_turns=20), reply) == where


def test_a_list_in_a_range_below_a_thousand_is_a_list():
    assert told(begin("100 999 500"), "100,200") == "200 is too low"


@pytest.mark.parametrize("level", ["1 100 42", "90 109 100", "0 3 0"])
def test_the_opening_tells_the_range_and_so_does_a_refusal(level):
    low, high, _ = level.split()
    env = GuessNumber()
    opening, _ = env.reset(options={"task": Task("mine", metadata={"level": level})})
    assert opening[0]["content"] == f"Guess a number from {low} to {high} in 7 turns. Answer with one number."
    assert told(env, f"{int(high) + 1}") == f"invalid: answer with a number from {low} to {high}"


@given(width=st.integers(4, 300), low=st.integers(0, 1000), data=st.data())
def test_the_expert_finds_every_number_in_time_whatever_was_guessed_before(width, low, data):
    numbers = st.integers(low, low + width - 1)
    env = begin(f"{low} {low + width - 1} {data.draw(numbers)}", max_turns=12)
    before = data.draw(st.lists(numbers, max_size=3))
    while env.running:
        *_, info = env.step(str(before.pop()) if before else env.expert_action())
    assert info["success"]


@pytest.mark.parametrize("width", [4, 100, 127, 128])
def test_halving_needs_no_more_than_the_turns_of_the_default(width):
    for number in range(width):
        env = begin(f"0 {width - 1} {number}", width=width)
        while env.running:
            *_, info = env.step(env.expert_action())
        assert info["success"], number


def test_a_level_has_the_width_and_no_more_than_the_highest_number():
    for split in ("train", "test"):
        for task in GuessNumber.default_tasks(split, width=20, highest=25).take(60):
            low, high, number = map(int, task.metadata["level"].split())
            assert 1 <= low <= number <= high <= 25
            assert high - low == 19


@pytest.mark.parametrize("level", ["1 100", "1 100 101", "100 1 50", "1 100 x", "-1 5 3"])
def test_a_level_that_nobody_can_solve_is_refused(level):
    with pytest.raises(ValueError, match='a level is like "1 100 42"'):
        begin(level)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"width": 3}, "width must be a whole number from 4 to"),
        ({"width": True}, "width must be a whole number"),
        ({"width": 100, "highest": 99}, "highest must be a whole number from 100 to"),
    ],
)
def test_a_wrong_setting_is_refused(wrong, told):
    with pytest.raises(ValueError, match=f"guess_number: {told}"):
        GuessNumber(**wrong)
