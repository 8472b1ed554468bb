"""Word lists, feedback, and the expert's guess."""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache
from pathlib import Path

from agentgym.core.tasks import Task, TaskSet
from agentgym.datasets import require
from agentgym_envs.data_sets import WORDLE
from agentgym_envs.settings import check_choice
from agentgym_envs.splits import check_split, split_of

HIT, NEAR, MISS = "GYX"
_WORD = re.compile(r"[a-z]{5}")
History = tuple[tuple[str, str], ...]


@lru_cache(maxsize=4)
def _read(path: Path) -> tuple[str, ...]:
    words = tuple(sorted(set(path.read_text(encoding="utf-8").split())))
    wrong = [word for word in words if not _WORD.fullmatch(word)]
    if wrong or not words:
        what = f"{wrong[0]!r} is not a word of five letters a-z" if wrong else "it is empty"
        raise ValueError(f"wordle: {path}: {what}")
    return words


def word_list(words: str) -> tuple[str, ...]:
    """The sorted words of a list."""
    if words == "own":
        return _read(Path(__file__).with_name("words.txt"))
    check_choice("wordle: words", words, ("own", "data"))
    return _read(require("wordle", WORDLE))


def word_tasks(words: str, split: str) -> TaskSet:
    check_split("wordle", split)
    chosen = [word for word in word_list(words) if split_of(word) == split]
    tasks = [Task(id=f"wordle-{word}", answer=word, metadata={"split": split}) for word in chosen]
    return TaskSet(tasks, name=f"wordle/{split}", source=f"words={words!r}").shuffled(0)


def feedback(guess: str, answer: str) -> str:
    """Five marks: G right letter and place, Y letter elsewhere, X letter not in the word.

    A letter is marked Y only as often as the answer still contains it: "allay" for "label" gives Y Y Y X X.
    """
    spare = Counter(a for g, a in zip(guess, answer, strict=True) if g != a)
    signs = []
    for g, a in zip(guess, answer, strict=True):
        if g == a:
            signs.append(HIT)
        elif spare[g] > 0:
            spare[g] -= 1
            signs.append(NEAR)
        else:
            signs.append(MISS)
    return "".join(signs)


def consistent(words: tuple[str, ...], history: History) -> list[str]:
    for guess, signs in history:
        words = tuple(word for word in words if feedback(guess, word) == signs)
    return list(words)


@lru_cache(maxsize=20_000)
def best_guess(words: tuple[str, ...], history: History) -> str:
    """The guess that leaves the fewest words possible on average; ties prefer a possible word.

    An impossible word can be more informative: it may tell light, might, night, right and sight apart. Long lists are
    judged on a sample of 60 possible words, so play is not perfect.
    """
    possible = consistent(words, history)
    if len(possible) <= 2:
        return possible[0] if possible else words[0]
    sample = possible[:: -(-len(possible) // 60)]
    pool = possible if len(possible) > 60 else words
    pool = pool[:: -(-len(pool) // 1_000)]

    def left(guess: str) -> tuple[int, bool]:
        groups = Counter(feedback(guess, word) for word in sample)
        return sum(size * size for size in groups.values()), guess not in possible

    return min([*pool, *sample], key=left)
