"""Guess a number: what each guess is told, the replies that count, and the expert."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import agentgym
from agentgym.core.tasks import Task
from agentgym_envs.games.guess_number import GuessNumber


def begin(answer=42, **kwargs):
    env = GuessNumber(**kwargs)
    env.reset(options={"task": Task("mine", answer=answer)})
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


@given(highest=st.integers(10, 300), data=st.data())
def test_the_expert_finds_every_number_in_time_whatever_was_guessed_before(highest, data):
    env = begin(data.draw(st.integers(1, highest)), highest=highest, max_turns=12)
    before = data.draw(st.lists(st.integers(1, highest), max_size=3))
    while env.running:
        *_, info = env.step(str(before.pop()) if before else env.expert_action())
    assert info["success"]


def test_halving_needs_no_more_than_the_turns_of_the_default():
    for highest in (10, 100, 127, 128):
        env = agentgym.make("guess_number", highest=highest)
        for number in range(1, highest + 1):
            env.reset(options={"task": Task("mine", answer=number)})
            while env.running:
                *_, info = env.step(env.expert_action())
            assert info["success"], (highest, number)


def test_each_number_is_in_one_split():
    splits = [{task.answer for task in GuessNumber.default_tasks(split)} for split in ("train", "test")]
    assert splits[0] | splits[1] == set(range(1, 101))
    assert not splits[0] & splits[1]


@pytest.mark.parametrize("answer", [0, 101, True, "42", 4.0])
def test_a_task_that_nobody_can_solve_is_refused(answer):
    with pytest.raises(ValueError, match=r"task 'mine' needs answer= a whole number from 1 to 100, not "):
        begin(answer)


@pytest.mark.parametrize("highest", [9, 10_001, 12.0, True])
def test_a_wrong_highest_number_is_refused(highest):
    with pytest.raises(ValueError, match="guess_number: highest must be a whole number from 10 to 10000"):
        GuessNumber(highest=highest)
