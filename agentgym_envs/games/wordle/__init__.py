"""Wordle: find a five-letter word. See README.md beside this file."""

import random
import re
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

from agentgym.core.env import Env, Opening, Step
from agentgym.core.messages import Action, user
from agentgym.core.tasks import Task, TaskSet
from agentgym.datasets import require
from agentgym_envs.data_sets import WORDLE
from agentgym_envs.settings import check_choice
from agentgym_envs.splits import check_split, split_of

HIT, NEAR, MISS = "GYX"
History = tuple[tuple[str, str], ...]
LEGAL = "answer with one word of five letters a-z"
_FIVE = re.compile(r"\b[a-z]{5}\b")
_TAGGED = re.compile(r"<(?:guess|answer)>([^<]*)")


@lru_cache(maxsize=4)
def _read(path: Path) -> tuple[str, ...]:
    words = tuple(sorted(set(path.read_text(encoding="utf-8").split())))
    wrong = [word for word in words if not _FIVE.fullmatch(word)]
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


def read_word(text: str) -> str | None:
    """The last five-letter word, in any case, of the last <guess> or <answer> tag, else of the whole text."""
    text = text.lower()
    tagged = _TAGGED.findall(text)
    found = _FIVE.findall(tagged[-1] if tagged else text)
    return found[-1] if found else None


class Wordle(Env):
    """Find a five-letter word. Each letter of a guess is marked: G right place, Y elsewhere in the word, X absent."""

    max_turns = 6

    def __init__(
        self,
        words: str = "own",
        strict: bool = False,
        tasks: TaskSet | None = None,
        max_turns: int | None = None,
        render_mode: str | None = None,
    ):
        self._words = word_list(words)
        self._listed = frozenset(self._words) if strict else None
        super().__init__(self.default_tasks("train", words) if tasks is None else tasks, max_turns, render_mode)

    @classmethod
    def default_tasks(cls, split: str = "train", words: str = "own") -> TaskSet:
        """One task for each word of the list; one word in eight is a test word."""
        check_split("wordle", split)
        chosen = [word for word in word_list(words) if split_of(word) == split]
        tasks = [Task(id=f"wordle-{word}", answer=word, metadata={"split": split}) for word in chosen]
        return TaskSet(tasks, name=f"wordle/{split}", source=f"words={words!r}").shuffled(0)

    def init(self, task: Task) -> None:
        if not isinstance(task.answer, str) or not _FIVE.fullmatch(task.answer):
            raise ValueError(f"wordle: task {task.id!r} needs answer= a word of five letters a-z, not {task.answer!r}")
        self._answer = task.answer
        super().init(task)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Opening:
        super().reset(seed=seed, options=options)
        self._history: History = ()
        self._invalid = 0
        rules = (
            f"Guess a five-letter word in {self.max_turns} turns. Each letter is marked: G right place, "
            "Y elsewhere in the word, X absent. Answer with one word."
        )
        return [user(rules)], {}

    def step(self, action: Action) -> Step:
        word = read_word(self.read(action))
        if word is None:
            return self._refused(LEGAL)
        if self._listed is not None and word not in self._listed:
            return self._refused(f"{word} is not in the word list; {LEGAL}")
        signs = feedback(word, self._answer)
        self._history += ((word, signs),)
        if signs == HIT * 5:
            return self._outcome(f"Correct: {self._answer}.", found=True)
        return self._outcome(f"{' '.join(word)}\n{' '.join(signs)}")

    def expert_action(self) -> str:
        return best_guess(self._words, self._history)

    def random_action(self, rng: random.Random) -> str:
        return rng.choice(self._words)

    def _refused(self, why: str) -> Step:
        self._invalid += 1
        return self._outcome(f"invalid: {why}")

    def _outcome(self, text: str, found: bool = False) -> Step:
        """After the last guess the game is lost (terminated), not truncated."""
        over = found or self.turn >= self.max_turns
        if over and not found:
            text = f"{text}\nOut of turns: the word was {self._answer}."
        return self.outcome(text, float(found), over, success=found, invalid=self._invalid)
