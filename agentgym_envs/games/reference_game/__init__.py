"""A speaker describes one of four things, and a listener finds it. See README.md beside this file.

A level is the things in the speaker's order, the number of the target among them, and the listener's order:
"small red circle, large blue star, small green star, large red circle / 2 / 3142".
"""

import itertools
import random
import re
from typing import Any

from agentgym.core.env import Opening, Step
from agentgym.core.messages import Action
from agentgym.core.players import PlayersEnv
from agentgym.core.tasks import Task, TaskSet
from agentgym.tools.text_forms import spoken
from agentgym_envs.splits import generated_tasks, level_of

SPEAKER, LISTENER = "speaker", "listener"
SIZES, COLOURS, SHAPES = ("small", "large"), ("red", "blue", "green"), ("circle", "square", "star")
THINGS = tuple(" ".join(parts) for parts in itertools.product(SIZES, COLOURS, SHAPES))
COUNT, MOST_WORDS = 4, 2
_LEVEL = re.compile(r"(?P<things>[a-z ,]+) / (?P<target>[1-4]) / (?P<order>[1-4]{4})")
_WORD, _NUMBER = re.compile("[A-Za-z]+"), re.compile(r"\b[1-4]\b")


def fits(thing: str, words: list[str]) -> bool:
    return set(words) <= set(thing.split())


def description(things: list[str], target: int) -> list[str] | None:
    """The fewest words that fit the target alone; None where `MOST_WORDS` are too few."""
    own = things[target].split()
    tries = (list(words) for count in range(1, MOST_WORDS + 1) for words in itertools.combinations(own, count))
    return next((words for words in tries if sum(fits(thing, words) for thing in things) == 1), None)


class ReferenceGame(PlayersEnv):
    """A speaker sees which of four things is meant and says two words; a listener, who sees them in another order, picks one."""

    players = (SPEAKER, LISTENER)
    max_turns = 2

    @classmethod
    def default_tasks(cls, split: str = "train") -> TaskSet:
        return generated_tasks("reference_game", split, _proposed, _content)

    def init(self, task: Task) -> None:
        level = level_of(task, "reference_game")
        found = _LEVEL.fullmatch(level)
        self._things = found["things"].split(", ") if found else []
        if found is None or len(self._things) != COUNT or sorted(found["order"]) != list("1234"):
            raise ValueError(f"reference_game: a level is four things, a target and an order, not {level!r}")
        self._target = int(found["target"]) - 1
        self._shown = [self._things[int(place) - 1] for place in found["order"]]
        super().init(task)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Opening:
        super().reset(seed=seed, options=options)
        self._said: list[str] = []
        others = ", ".join(thing for place, thing in enumerate(self._things) if place != self._target)
        asked = f"Your partner must find one of {COUNT} things by your words. Answer with at most {MOST_WORDS} words."
        self.tell(f"{asked}\nThe thing: {self._things[self._target]}\nThe others: {others}", SPEAKER)
        return self.opening(SPEAKER)

    def step(self, action: Action) -> Step:
        text = spoken(self.read(action))
        if self.turn_of == SPEAKER:
            self._said = _WORD.findall(text)[-MOST_WORDS:]
            rows = "\n".join(f"{number} {thing}" for number, thing in enumerate(self._shown, start=1))
            self.tell(f"Your partner means one of these. Answer with its number.\n{rows}", LISTENER)
            self.tell(f"Your partner says: {' '.join(self._said) or 'nothing'}", LISTENER)
            return self.pass_to(LISTENER, success=False, words=len(self._said))
        numbers = _NUMBER.findall(text)
        right = bool(numbers) and self._shown[int(numbers[-1]) - 1] == self._things[self._target]
        self.tell(f"{'Found' if right else 'Not found'}: it was the {self._things[self._target]}.")
        chance = dict.fromkeys(self.players, 1 / COUNT)  # without either, the other can only guess
        return self.end(float(right), success=right, words=len(self._said), without=chance)

    def expert_action(self) -> str:
        """The fewest words that tell the thing from the others; the first thing that they fit."""
        if self.turn_of == SPEAKER:
            return " ".join(description(self._things, self._target) or [])
        words = [word.lower() for word in self._said]
        return str(next((number for number, thing in enumerate(self._shown, start=1) if fits(thing, words)), 1))

    def random_action(self, rng: random.Random) -> str:
        if self.turn_of == SPEAKER:
            return " ".join(rng.sample((*SIZES, *COLOURS, *SHAPES), MOST_WORDS))
        return str(rng.randint(1, COUNT))


def _proposed(rng: random.Random) -> str | None:
    things, target = rng.sample(THINGS, COUNT), rng.randrange(COUNT)
    order = "".join(rng.sample("1234", COUNT))
    return f"{', '.join(things)} / {target + 1} / {order}" if description(things, target) else None


def _content(level: str) -> str:
    """The things in any order, and the one that is meant."""
    things, target, _ = level.split(" / ")
    return f"{sorted(things.split(', '))} {things.split(', ')[int(target) - 1]}"
