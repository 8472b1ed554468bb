"""Wordle: marks, guesses, the word lists and the expert."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.core.tasks import Task, TaskSet
from agentgym_envs.games.wordle import Wordle, best_guess, consistent, feedback, read_word, word_list

HOUSE = Task("house", answer="house")
LETTERS = st.text("abcde", min_size=5, max_size=5)


def begin(task=HOUSE, **kwargs):
    env = Wordle(**kwargs)
    env.reset(options={"task": task})
    return env


@pytest.mark.parametrize(
    ("guess", "answer", "marks"),
    [
        ("house", "house", "GGGGG"),
        ("mouse", "house", "XGGGG"),
        ("shout", "house", "YYYYX"),
        ("allay", "label", "YYYXX"),
        ("label", "allay", "YYXXY"),
        ("eerie", "erase", "GXYXG"),
        ("speed", "abide", "XXYXY"),
        ("zzzzz", "house", "XXXXX"),
    ],
)
def test_marks(guess, answer, marks):
    assert feedback(guess, answer) == marks


@given(LETTERS, LETTERS)
def test_each_letter_is_marked_as_often_as_both_words_have_it(guess, answer):
    marks = feedback(guess, answer)
    for letter in "abcde":
        marked = sum(g == letter and m != "X" for g, m in zip(guess, marks, strict=True))
        assert marked == min(guess.count(letter), answer.count(letter))
    assert [m == "G" for m in marks] == [g == a for g, a in zip(guess, answer, strict=True)]


def test_a_guess_is_shown_with_its_marks_and_the_word_ends_the_game():
    env = begin()
    assert env.step("shout")[0][0]["content"] == "s h o u t\nY Y Y Y X"
    observation, reward, terminated, truncated, info = env.step("House!")
    assert (observation[0]["content"], reward, terminated, truncated) == ("Correct: house.", 1.0, True, False)
    assert info["success"] is True


def test_six_guesses_and_the_game_is_lost():
    env = begin()
    for _ in range(5):
        assert not env.step("mouse")[2]
    observation, reward, terminated, truncated, info = env.step("mouse")
    assert observation[0]["content"] == "m o u s e\nX G G G G\nOut of turns: the word was house."
    assert (reward, terminated, truncated, info["success"]) == (0.0, True, False, False)


def test_the_last_guess_may_win():
    env = begin(max_turns=2)
    env.step("what?")
    assert env.step("house")[1:3] == (1.0, True)


@pytest.mark.parametrize(
    ("reply", "word"),
    [
        ("crane", "crane"),
        ("CRANE", "crane"),
        ("I try crane.", "crane"),
        ("<guess>crane</guess>", "crane"),
        ("<think>maybe slate</think><answer> Crane </answer> my final word", "crane"),
        ("<guess>slate</guess> no, <guess>crane</guess>", "crane"),
        ("[crane]", "crane"),
        ("cranes", None),
        ("çrane crâne", None),
        ("<guess>cranes</guess> crane", None),
    ],
)
def test_the_last_five_letter_word_counts(reply, word):
    assert read_word(reply) == word


def test_a_strict_game_takes_only_listed_words():
    env = begin(strict=True)
    observation, _, _, _, info = env.step("abcde")
    assert (
        observation[0]["content"] == "invalid: abcde is not in the word list; answer with one word of five letters a-z"
    )
    assert info["invalid"] == 1
    assert begin().step("abcde")[4]["invalid"] == 0


def test_the_own_list_is_sound():
    words = word_list("own")
    assert len(words) > 600
    assert all(len(word) == 5 and word.isascii() and word.isalpha() and word.islower() for word in words)


def test_the_expert_finds_every_word_of_the_own_list():
    env = Wordle()
    for split in ("train", "test"):
        for task in Wordle.default_tasks(split):
            env.reset(options={"task": task})
            while env.running:
                *_, info = env.step(env.expert_action())
            assert info["success"], task.answer


def test_the_expert_goes_beyond_possible_words_where_these_tell_too_little():
    words = tuple(
        sorted(["light", "might", "night", "right", "sight", "tight", "eight", "fight", "slimy", "storm", "trend"])
    )
    history = (("eight", feedback("eight", "night")),)
    assert set(consistent(words, history)) == {"light", "might", "night", "right", "sight", "fight", "tight"}
    assert best_guess(words, history) in {"slimy", "storm", "trend"}


def test_a_word_outside_the_list_leaves_the_expert_a_legal_guess():
    env = begin(Task("odd", answer="zyzzy"))
    while env.running:
        guess = env.expert_action()
        assert guess in word_list("own")
        env.step(guess)


def test_a_list_of_the_users(tmp_path, monkeypatch):
    (tmp_path / "wordle").mkdir()
    (tmp_path / "wordle" / "words").write_text("aback\nabbey\nzebra\nyacht\n" + "\n".join(word_list("own")))
    monkeypatch.setenv("AGENTGYM_DATA", str(tmp_path))
    answers = {task.answer for split in ("train", "test") for task in Wordle.default_tasks(split, words="data")}
    assert answers == {"aback", "abbey", *word_list("own")}
    assert {t.answer for split in ("train", "test") for t in TaskSet.load("wordle", split, words="data")} == answers
    assert begin(Task("a", answer="aback"), words="data", strict=True).step("abbey")[4]["invalid"] == 0


def test_a_list_with_something_else_is_named(tmp_path, monkeypatch):
    (tmp_path / "wordle").mkdir()
    (tmp_path / "wordle" / "words").write_text("house\nfour\n")
    monkeypatch.setenv("AGENTGYM_DATA", str(tmp_path))
    with pytest.raises(ValueError, match="'four' is not a word of five letters"):
        Wordle(words="data")


def test_a_missing_list_is_told_how_to_get(monkeypatch):
    monkeypatch.delenv("AGENTGYM_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match="set AGENTGYM_DATA"):
        Wordle(words="data")


@pytest.mark.data
def test_the_expert_on_the_full_list():
    env, found, tasks = Wordle(words="data"), 0, Wordle.default_tasks("test", words="data").take(15)
    for task in tasks:
        env.reset(options={"task": task})
        while env.running:
            *_, info = env.step(env.expert_action())
        found += info["success"]
    assert found >= 12


def test_bad_settings_and_answers_are_refused():
    with pytest.raises(ValueError, match="words must be one of own, data"):
        Wordle(words="german")
    for answer in ("hous", "HOUSE", "houses", 5, "héllo"):
        with pytest.raises(ValueError, match="five letters"):
            Wordle().init(Task("bad", answer=answer))
