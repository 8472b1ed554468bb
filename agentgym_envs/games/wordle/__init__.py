"""Wordle: find a five-letter word. See README.md beside this file."""

from __future__ import annotations

import random
import re
from typing import Any

from agentgym.core.env import Env, Opening, Step
from agentgym.core.messages import Action, user
from agentgym.core.tasks import Task, TaskSet
from agentgym_envs.games.wordle.words import HIT, History, best_guess, feedback, word_list, word_tasks

LEGAL = "answer with one word of five letters a-z"
_FIVE = re.compile(r"\b[a-z]{5}\b")
_TAGGED = re.compile(r"<(?:guess|answer)>([^<]*)")


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
        return word_tasks(words, split)

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
