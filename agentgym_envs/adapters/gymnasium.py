"""Gymnasium environments as text environments. See README.md beside this file."""

import functools
import importlib
import inspect
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import Space, spaces

from agentgym.core.env import Env, Opening, Step
from agentgym.core.messages import Action, user
from agentgym.core.registration import UnknownEnvError
from agentgym.core.tasks import TaskSet
from agentgym.tools.text_forms import NotJson, parse_json, spoken
from agentgym_envs.adapters.foreign import plain, plain_info, seed_tasks, settings_key

MOST_NUMBERS = 256  # in an observation or action that is shown as text
_LISTS = (spaces.MultiDiscrete, spaces.MultiBinary, spaces.Box)
_READABLE = (spaces.Discrete, *_LISTS, spaces.Text, spaces.Tuple, spaces.Dict)
MOST_TURNS = 100  # if the environment has no limit
LONGEST_DESCRIPTION = 4_000  # characters
_RULES = ("description", "reward", "rewards", "episode end", "episode termination")
_TOLD = (*_RULES, "action space", "actions", "observation space", "observations")
_COLOURED = re.compile(r"\x1b\[(\d+(?:;\d+)*)m(.*?)\x1b\[0m", re.DOTALL)
_NAMES = ("gray", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
_COLOURS = dict(enumerate(_NAMES, 30)) | {code: f"on {name}" for code, name in enumerate(_NAMES, 40)}


class GymnasiumEnv(Env):
    """An environment of Gymnasium, or of any package that registers with it."""

    def __init__(
        self,
        name: str,
        settings: Mapping[str, Any] | None = None,
        actions: Sequence[str] = (),
        instruction: str | None = None,
        tasks: TaskSet | None = None,
        max_turns: int | None = None,
        render_mode: str | None = None,
    ):
        module, _, env_name = name.rpartition(":")
        try:
            if module:
                importlib.import_module(module)
            found = gymnasium.spec(env_name)
        except ImportError as error:
            raise ImportError(f"environment 'gymnasium:{name}': cannot import module {module!r}: {error}") from error
        except gymnasium.error.Error as error:
            raise UnknownEnvError(f"no environment 'gymnasium:{name}': {error}") from error
        settings_key(settings or {})
        limit = (settings or {}).get("max_episode_steps", found.max_episode_steps)
        turns = limit if limit and limit > 0 else MOST_TURNS
        super().__init__(tasks or self.default_tasks(name=name), turns if max_turns is None else max_turns, render_mode)
        self.name = name
        self._settings = dict(settings or {})
        self._actions = tuple(actions)
        self._instruction = instruction
        self._inner: gymnasium.Env[Any, Any] | None = None
        self._mask: Any = None
        self._stray = random.Random()

    @classmethod
    def default_tasks(cls, split: str = "train", name: str = "") -> TaskSet:
        return seed_tasks("gymnasium", name, split)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Opening:
        super().reset(seed=seed, options=options)
        inner = self._opened()
        task_seed = self.task.seed if self.task is not None else None
        observation, info = inner.reset(seed=seed if task_seed is None else task_seed)
        self._mask = info.get("action_mask")
        self._stray = random.Random(f"{task_seed} {seed}")
        form = form_of(inner.action_space, self._actions)
        told = self._instruction
        if told is None:
            told = description_of(inspect.getdoc(type(inner.unwrapped)) or "")
        text = f"{told}\n\nAnswer with {form}.\n\n{self._shown(observation)}"
        return [user(text.strip())], plain_info(info)

    def step(self, action: Action) -> Step:
        """Take an action. `info` is the environment's, with `invalid` true if the reply was not an action.

        The random action that replaces an invalid reply depends on the task, the reset's seed and the earlier replies.
        """
        text = self.read(action)
        inner = self._opened()
        try:
            value, wrong = action_of(inner.action_space, text, self._actions), ""
        except InvalidAction as error:
            value = sampled(inner.action_space, self._mask, self._stray)
            wrong = f"{error}. A random action was taken in its place: {written(value)}.\n\n"
        observation, earned, terminated, truncated, given = inner.step(value)
        reward = float(earned)
        self._mask = given.get("action_mask")
        info = plain_info(given)
        if wrong:
            reward = min(reward, 0.0)
            info |= {"invalid": True} | ({"success": False} if "success" in info else {})
        shown, reward, terminated, cut, _ = self.outcome(wrong + self._shown(observation), reward, bool(terminated))
        truncated = cut or bool(truncated and not terminated)
        self.running = not (terminated or truncated)
        return shown, reward, terminated, truncated, info

    def random_action(self, rng: random.Random) -> str:
        value = sampled(self._opened().action_space, self._mask, rng)
        return value if isinstance(value, str) else written(value)

    def close(self) -> None:
        super().close()
        if self._inner is not None:
            self._inner.close()
            self._inner = None

    def _opened(self) -> gymnasium.Env[Any, Any]:
        if self._inner is None:
            inner = opened(functools.partial(gymnasium.make, self.name, disable_env_checker=True), self._settings)
            seen = inner.observation_space
            if numbers_in(seen) > MOST_NUMBERS:
                raise TypeError(
                    f"gymnasium:{self.name}: observations of {numbers_in(seen)} numbers ({seen}) cannot be shown as text"
                )
            check_actions(inner.action_space, f"gymnasium:{self.name}")
            meanings = getattr(inner.unwrapped, "get_action_meanings", None)
            if not self._actions and meanings is not None:
                self._actions = tuple(meanings())
            space = inner.action_space
            size = int(space.n) if isinstance(space, spaces.Discrete) else 0
            if self._actions and len(self._actions) != size:
                raise ValueError(
                    f"gymnasium:{self.name}: {len(self._actions)} names for actions of {space}: give each of {size} a name"
                )
            self._inner = inner
        return self._inner

    def _shown(self, observation: Any) -> str:
        inner = self._opened()
        picture = inner.render() if inner.render_mode == "ansi" else None
        seen = observation if isinstance(observation, str) else written(observation)
        return f"{uncoloured(picture)}\n\nObservation: {seen}" if isinstance(picture, str) else f"Observation: {seen}"


def opened(make: Callable[..., Any], settings: Mapping[str, Any]) -> Any:
    """An environment with these settings that renders as text if it can."""
    inner = make(**settings)
    if "ansi" in inner.metadata.get("render_modes", ()) and "render_mode" not in settings:
        inner.close()
        inner = make(**settings, render_mode="ansi")
    return inner


def description_of(docstring: str) -> str:
    text = re.sub(r"</?[a-z][^>]*>", "", inspect.cleandoc(docstring))
    begin, *sections = re.split(r"^ *## +", text, flags=re.MULTILINE)
    told = [begin.strip()]
    for section in sections:
        title, _, body = section.partition("\n")
        if title.strip(" :").lower() in _TOLD:
            told.append(f"{title.strip()}:\n{inspect.cleandoc(body).strip()}")
    return "\n\n".join(part for part in told if part)[:LONGEST_DESCRIPTION]


def uncoloured(picture: str) -> str:
    """Text art without terminal colours; coloured parts are listed below it."""
    picture = picture.strip("\n")
    marks: list[str] = []
    out = ""
    end = 0
    for found in _COLOURED.finditer(picture):
        out += picture[end : found.start()]
        line, column = out.count("\n") + 1, len(out) - out.rfind("\n")
        colour = " ".join(name for code in found[1].split(";") if (name := _COLOURS.get(int(code))))
        marks.append(f"line {line}, column {column}: {found[2]!r} is {colour or 'marked'}")
        out += found[2]
        end = found.end()
    return "\n".join([out + picture[end:], *marks])


# ---- spaces as text


class InvalidAction(ValueError):
    """A reply that is not an action; the message describes a valid one."""


def _parts(space: Space[Any]) -> Sequence[Space[Any]]:
    if isinstance(space, spaces.Dict):
        return list(space.spaces.values())
    return space.spaces if isinstance(space, spaces.Tuple) else ()


def numbers_in(space: Space[Any]) -> int:
    return sum(map(numbers_in, _parts(space))) if space.shape is None else int(np.prod(space.shape))


def check_actions(space: Space[Any], of: str) -> None:
    if not isinstance(space, _READABLE):
        raise TypeError(f"{of}: actions of {space} cannot be read from text")
    for part in _parts(space):
        check_actions(part, of)
    if numbers_in(space) > MOST_NUMBERS:
        raise TypeError(f"{of}: actions of {numbers_in(space)} numbers ({space}) cannot be read from text")


def sampled(space: Space[Any], mask: Any, rng: random.Random) -> Any:
    """A value of an action space, among the legal ones if there is a mask of them."""
    space.seed(rng.getrandbits(31))
    return space.sample(mask) if isinstance(space, spaces.Discrete) and mask is not None else space.sample()


def written(value: Any) -> str:
    return json.dumps(_rounded(plain(value)), ensure_ascii=False)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return {key: _rounded(item) for key, item in value.items()} if isinstance(value, dict) else value


def form_of(space: Space[Any], names: Sequence[str] = ()) -> str:
    sizes = space.shape or ()
    shape = f" of shape {list(sizes)}" if len(sizes) > 1 else ""
    if isinstance(space, spaces.Discrete):
        low, high = int(space.start), int(space.start + space.n - 1)
        if names:
            return "one of " + ", ".join(f"{name} ({low + i})" for i, name in enumerate(names))
        return f"a whole number from {low} to {high}"
    if isinstance(space, spaces.MultiDiscrete):
        ranges = [f"{low} to {low + n - 1}" for low, n in zip(space.start.flat, space.nvec.flat, strict=True)]
        return f"a JSON list{shape} of {len(ranges)} whole numbers, in the ranges {', '.join(ranges)}"
    if isinstance(space, spaces.MultiBinary):
        return f"a JSON list{shape} of {numbers_in(space)} numbers that are 0 or 1"
    if isinstance(space, spaces.Box):
        limits = [f"{low:g} to {high:g}" for low, high in zip(space.low.flat, space.high.flat, strict=True)]
        limits = limits[:1] if len(set(limits)) == 1 else limits
        return f"a JSON list{shape} of {numbers_in(space)} numbers, in the ranges {', '.join(limits)}"
    if isinstance(space, spaces.Text):
        letters = "".join(sorted(space.characters))
        return f"a text of {space.min_length} to {space.max_length} letters out of {letters!r:.200}"
    if isinstance(space, spaces.Tuple):
        return "a JSON list of: " + "; ".join(form_of(part) for part in space.spaces)
    if isinstance(space, spaces.Dict):
        return "a JSON object with " + "; ".join(f"{k!r}: {form_of(part)}" for k, part in space.spaces.items())
    raise TypeError(f"actions of {space} cannot be read from text")


def action_of(space: Space[Any], text: str, names: Sequence[str] = ()) -> Any:
    """The action in the content of the last `<action>` tag of a reply, or in all text after its last thought."""
    said = spoken(text)
    end = said.rfind("</action>")
    start = said.rfind("<action>", 0, max(end, 0))
    said = (said if start < 0 else said[start + len("<action>") : end]).strip()
    if isinstance(space, spaces.Discrete) and names:
        folded = [name.casefold() for name in names]
        if said.casefold() in folded:
            return space.start + np.int64(folded.index(said.casefold()))
    given = said if isinstance(space, spaces.Text) else parse_json(said)
    if isinstance(given, NotJson):
        raise InvalidAction(f"{said!r:.80} is no action: answer with {form_of(space, names)}, and nothing else")
    try:
        return _value(space, given)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidAction(f"{said!r:.80} is no action ({error}): answer with {form_of(space, names)}") from None


def _value(space: Space[Any], given: Any) -> Any:
    if isinstance(space, spaces.Tuple):
        if not isinstance(given, list) or len(given) != len(space.spaces):
            raise ValueError(f"a list of {len(space.spaces)} is needed")
        return tuple(_value(part, item) for part, item in zip(space.spaces, given, strict=True))
    if isinstance(space, spaces.Dict):
        if not isinstance(given, dict) or set(given) != set(space.spaces):
            raise ValueError(f"an object with {', '.join(map(str, space.spaces))} is needed")
        return {key: _value(part, given[key]) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Text):
        value = given
    elif isinstance(space, spaces.Discrete):
        if type(given) is not int:
            raise TypeError("a whole number is needed")
        value = np.int64(given)
    else:
        value = _array(space, given)
    if not space.contains(value):
        raise ValueError("out of range")
    return value


def _array(space: Space[Any], given: Any) -> Any:
    numbers = np.asarray(given)  # a ragged list raises ValueError
    kinds = "if" if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating) else "i"
    if numbers.dtype.kind not in kinds:
        raise TypeError("whole numbers are needed" if kinds == "i" else "numbers are needed")
    if numbers.shape != space.shape:
        raise ValueError(f"shape {list(space.shape or ())} is needed, not {list(numbers.shape)}")
    with np.errstate(over="ignore"):
        value = numbers.astype(space.dtype)
    if not np.isfinite(value).all():
        raise ValueError("finite numbers are needed")
    # Checked on the uncast numbers: a cast may round onto a limit or wrap around.
    low, high = (space.low, space.high) if isinstance(space, spaces.Box) else (value, value)
    if (numbers < low).any() or (numbers > high).any():
        raise ValueError("out of range")
    return value
