"""Findings of checks, and an environment under check, whose calls run in a separate thread or task and under a time limit."""

import asyncio
import inspect
import itertools
import json
import os
import random
import re
import sys
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from agentgym.core.env import is_async, is_finite
from agentgym.core.executor import EnvExecutor
from agentgym.core.messages import Action, Message, problem_of
from agentgym.core.registration import EnvSpec
from agentgym.core.trajectory import REWARDS, TURN_OF

MAX_STEPS = 1_000  # of an episode that does not end by itself
_counter = itertools.count(1)
OK, NOTE, PROBLEM = "ok", "note", "problem"
_NOT_THE_AUTHORS = {"agentgym", "gymnasium", "numpy", "builtins", "abc", "typing", "collections", "contextlib"}


@dataclass(frozen=True)
class Finding:
    """The outcome of one check: "ok", "note" or "problem", whose text says what to change, and the author's line if known."""

    check: str
    state: str
    text: str = ""
    place: str = ""

    def __str__(self) -> str:
        return f"{self.text} ({self.place})" if self.place else self.text


class Home:
    """The author's files: the packages or modules that an environment's classes come from."""

    def __init__(self, classes: Iterable[type]):
        self._roots: list[str] = []
        for name in {each.__module__.partition(".")[0] for each in classes} - _NOT_THE_AUTHORS:
            module = sys.modules.get(name)
            folders = [folder + os.sep for folder in getattr(module, "__path__", ())]
            self._roots += folders or filter(None, [getattr(module, "__file__", None)])

    def owns(self, file: str) -> bool:
        return file.startswith(tuple(self._roots))

    def place_of(self, error: BaseException) -> str:
        frames = reversed(list(traceback.walk_tb(error.__traceback__)))
        return self.first((frame.f_code.co_filename, line) for frame, line in frames)

    def place_in(self, frame: FrameType | None) -> str:
        frames = traceback.walk_stack(frame) if frame else ()
        return self.first((outer.f_code.co_filename, line) for outer, line in frames)

    def line_with(self, kind: type, pattern: re.Pattern[str]) -> str:
        try:
            file = inspect.getsourcefile(kind) or ""
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        except (TypeError, OSError, UnicodeDecodeError):
            return ""
        code = ((number, line.partition("#")[0]) for number, line in enumerate(lines, start=1))
        return next((f"{shown(file)}:{number}" for number, line in code if pattern.search(line)), "")

    def first(self, lines: Iterable[tuple[str, int]]) -> str:
        """The first of these lines, of files, that is the author's."""
        return next((f"{shown(file)}:{line}" for file, line in lines if self.owns(file)), "")


def shown(file: str) -> str:
    """A file's path as the author would write it: relative if it lies below the current folder."""
    try:
        near = os.path.relpath(file)
    except (ValueError, OSError):  # another drive, or a current folder that is gone
        return file
    return file if near.startswith(os.pardir) else near


def said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


def named(check: str, found: Iterable[Finding]) -> list[Finding]:
    return [replace(finding, check=check) for finding in found]


def problem(*texts: str, place: str = "") -> list[Finding]:
    """A problem for each text; the caller of the check adds its name."""
    return [Finding("", PROBLEM, text, place) for text in texts]


def note(text: str) -> list[Finding]:
    return [Finding("", NOTE, text)]


def ok(text: str) -> list[Finding]:
    return [Finding("", OK, text)]


class Hung(BaseException):
    """A call did not return in time. Not an Exception: a check that expects an environment to raise must let it through."""

    def __init__(self, what: str, seconds: float, place: str):
        super().__init__(f"{what} had not returned after {seconds:g} s: give whatever it waits for a timeout")
        self.place = place


@dataclass
class Played:
    """One episode, as JSON text, so that later changes cannot reach it.

    `shown` has the opening and the answer to each action: observation, reward, terminated, truncated, info; `opening` the very
    messages that `reset` returned; `problems` the faults of its values in words. `ended` is False if it was left too long.
    """

    seed: int
    task: dict[str, Any] | None = None
    actions: list[Action] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)
    opening: list[Message] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    success: Any = None
    ended: bool = False
    problems: list[str] = field(default_factory=list)

    def difference(self, other: "Played") -> str:
        for turn, (one, two) in enumerate(zip(self.shown, other.shown, strict=False)):
            if one != two:
                pairs = enumerate(itertools.zip_longest(one, two))
                start = max(0, next(at for at, (a, b) in pairs if a != b) - 30)
                return f"at turn {turn}: ...{one[start : start + 60]!r} and then ...{two[start : start + 60]!r}"
        if len(self.shown) == len(other.shown):
            return ""
        return f"in length: {len(self.shown) - 1} and {len(other.shown) - 1} turns"


@dataclass
class Subject:
    """One environment under check. `sole`: its server allowed no second session beside it."""

    env: Any
    spec: EnvSpec | None
    home: Home
    timeout: float
    executor: EnvExecutor = field(default_factory=lambda: EnvExecutor(f"agentgym check {next(_counter)}"))
    hung: bool = False
    sole: bool = False

    @classmethod
    async def made(cls, spec: EnvSpec, timeout: float) -> "Subject":
        subject = cls(None, spec, Home([]), timeout)
        try:
            factory = await subject.call("importing the environment", spec.load)
            kind = factory if isinstance(factory, type) else type("", (), {"__module__": factory.__module__})
            subject.home = Home([kind])
            subject.env = await subject.call("making the environment", spec.make)
        except BaseException:
            subject.executor.stop()
            raise
        subject.home = home_of(subject.env)
        return subject

    @property
    def bare(self) -> Any:
        return self.env.unwrapped

    @property
    def is_async(self) -> bool:
        return bool(self.bare.async_methods)

    async def call(
        self, what: str, function: Callable[..., Any], *args: Any, patience: float = 1.0, **kwargs: Any
    ) -> Any:
        """The result of a call; `patience` multiplies the time limit. Raises Hung."""
        waiting = asyncio.ensure_future(self.executor.call(function, *args, **kwargs))
        seconds = self.timeout * patience
        await asyncio.wait({waiting}, timeout=seconds)
        if waiting.done():
            return waiting.result()
        self.hung = True
        place = self._where()
        waiting.cancel()
        raise Hung(what, seconds, place)

    def _where(self) -> str:
        if place := self.home.place_in(sys._current_frames().get(self.executor.thread or 0)):
            return place
        for task in asyncio.all_tasks():
            waited: Any = task.get_coro() if task.get_name() == self.executor.name else None
            while (frame := getattr(waited, "cr_frame", None)) is not None:
                place = self.home.place_in(frame) or place
                waited = waited.cr_await
        return place

    async def reset(self, seed: int | None, task: Any = None) -> tuple[list[Message], dict[str, Any]]:
        """Start an episode. If `init` is async, which `reset` cannot call, a task is drawn by the seed and bound first."""
        if task is None and is_async(self.bare, "init"):
            tasks = await self.call("tasks", lambda: self.bare.tasks)
            task = await self.call("tasks", tasks.__getitem__, random.Random(seed).randrange(len(tasks)))
        if task is not None:
            await self.call("init", self.env.init, task)
        result = await self.call("reset", self.env.reset, seed=seed)
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(f"reset must return (observation, info), not {result!r:.200}")
        return result

    async def step(self, action: Action) -> Any:
        result = await self.call("step", self.env.step, action)
        if not isinstance(result, tuple) or len(result) != 5:
            five = "(observation, reward, terminated, truncated, info)"
            raise TypeError(f"step must return {five}, not {result!r:.200}: end it with `return self.outcome(...)`")
        return result

    async def close(self) -> None:
        if not self.hung:
            await self.call("close", self.env.close)
        self.executor.stop()

    async def _random_action(self, rng: random.Random) -> Action:
        own = getattr(self.bare, "random_action", None)
        return self.env.action_space.sample() if own is None else await self.call("random_action", own, rng)

    async def play(self, seed: int, actions: Sequence[Action] | None = None, task: Any = None) -> Played:
        return [played async for played in self.playing(seed, actions, task)][-1]

    async def playing(self, seed: int, actions: Sequence[Action] | None, task: Any = None) -> AsyncIterator[Played]:
        """As `play`, a step at a time: yields the same episode after each."""
        rng = random.Random(seed)
        self.env.action_space.seed(seed)
        played = Played(seed)
        begun = time.perf_counter()
        played.opening, info = await self.reset(seed, task)
        bound = getattr(self.bare, "task", None)
        played.task = None if bound is None else bound.to_json()
        players = getattr(self.bare, "players", ())
        played.problems += problems_of(played.opening, 0.0, info) or _problems_of_players(info, players, True)
        if not played.problems:
            played.shown.append(_text_of([played.opening, info]))
        yield played
        for turn in range(MAX_STEPS if actions is None else len(actions)):
            if played.problems or played.ended or (turn and time.perf_counter() - begun > self.timeout):
                return
            action = await self._random_action(rng) if actions is None else actions[turn]
            played.actions.append(action)
            observation, reward, terminated, truncated, info = await self.step(action)
            goes_on = not (terminated or truncated)
            played.problems += problems_of(observation, reward, info) or _problems_of_players(info, players, goes_on)
            if not played.problems:
                played.shown.append(_text_of([observation, float(reward), bool(terminated), bool(truncated), info]))
                played.rewards.append(float(reward))
                if terminated or truncated:
                    played.ended, played.success = True, info.get("success")
            yield played


def home_of(env: Any) -> Home:
    """The files of an environment's and its wrappers' authors."""
    classes: list[type] = []
    while True:
        classes += type(env).__mro__
        if not hasattr(env, "env"):
            return Home(classes)
        env = env.env


def _text_of(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=lambda v: f"<{type(v).__name__}>")


def problems_of(observation: Any, reward: Any, info: Any) -> list[str]:
    if not isinstance(observation, list):
        return [f"an observation must be a list of messages, not {type(observation).__name__}: {observation!r:.200}"]
    if not isinstance(info, dict):
        return [f"the info must be a dict, not {type(info).__name__}: {info!r:.200}"]
    problems = [f"an observation has a bad message: {p}: {m!r:.200}" for m in observation if (p := problem_of(m))]
    if not is_finite(reward):
        problems.append(f"the reward must be a finite number, not {reward!r:.200}")
    for name, value in (("observation", observation), ("info", info)):
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            problems.append(f"the {name} must be plain JSON values: {error}: {value!r:.200}")
    if not isinstance(info.get("success", True), bool):
        problems.append(f"info['success'] must be True or False, not {info['success']!r:.200}")
    return problems


def _problems_of_players(info: dict[str, Any], players: Sequence[str], goes_on: bool) -> list[str]:
    """The problems with what an info says of players, in an environment that has any."""
    if not players:
        return []
    names, rewards, problems = ", ".join(players), info.get(REWARDS, {}), []
    if goes_on and info.get(TURN_OF) not in players:
        advice = "end reset by self.opening(player) and step by self.pass_to(player)"
        problems.append(f"info[{TURN_OF!r}] must be one of {names}, not {info.get(TURN_OF)!r:.200}: {advice}")
    if not (isinstance(rewards, dict) and rewards.keys() <= set(players) and all(map(is_finite, rewards.values()))):
        problems.append(f"info[{REWARDS!r}] must be finite numbers by player ({names}), not {rewards!r:.200}")
    return problems
