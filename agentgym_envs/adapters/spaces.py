"""Gymnasium spaces as text: writing values, describing actions to an agent, and parsing its reply."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from agentgym.tools.text_forms import spoken
from agentgym_envs.adapters.foreign import plain

MOST_NUMBERS = 256  # in an observation or action that is shown as text
_READABLE = (
    *(spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Box, spaces.Text),
    *(spaces.Tuple, spaces.Dict),
)


class Unreadable(ValueError):
    """A reply that is not an action; the message describes a valid one."""


def numbers_in(space: Space[Any]) -> int:
    return sum(map(numbers_in, _parts(space))) if space.shape is None else int(np.prod(space.shape))


def _parts(space: Space[Any]) -> Sequence[Space[Any]]:
    if isinstance(space, spaces.Dict):
        return list(space.spaces.values())
    return space.spaces if isinstance(space, spaces.Tuple) else ()


def check_observations(space: Space[Any], of: str) -> None:
    if numbers_in(space) > MOST_NUMBERS:
        raise TypeError(f"{of}: observations of {numbers_in(space)} numbers ({space}) cannot be shown as text")


def check_actions(space: Space[Any], of: str) -> None:
    if not isinstance(space, _READABLE):
        raise TypeError(f"{of}: actions of {space} cannot be read from text")
    for part in _parts(space):
        check_actions(part, of)
    if numbers_in(space) > MOST_NUMBERS:
        raise TypeError(f"{of}: actions of {numbers_in(space)} numbers ({space}) cannot be read from text")


def written(value: Any) -> str:
    return json.dumps(_rounded(plain(value)), ensure_ascii=False)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return {key: _rounded(item) for key, item in value.items()} if isinstance(value, dict) else value


def form_of(space: Space[Any], names: Sequence[str] = ()) -> str:
    if isinstance(space, spaces.Discrete):
        low, high = int(space.start), int(space.start + space.n - 1)
        if names:
            return "one of " + ", ".join(f"{name} ({low + i})" for i, name in enumerate(names))
        return f"a whole number from {low} to {high}"
    if isinstance(space, spaces.MultiDiscrete):
        ranges = [f"{low} to {low + n - 1}" for low, n in zip(space.start.flat, space.nvec.flat, strict=True)]
        return f"a JSON list{_shaped(space)} of {len(ranges)} whole numbers, in the ranges {', '.join(ranges)}"
    if isinstance(space, spaces.MultiBinary):
        return f"a JSON list{_shaped(space)} of {numbers_in(space)} numbers that are 0 or 1"
    if isinstance(space, spaces.Box):
        limits = [f"{low:g} to {high:g}" for low, high in zip(space.low.flat, space.high.flat, strict=True)]
        limits = limits[:1] if len(set(limits)) == 1 else limits
        return f"a JSON list{_shaped(space)} of {numbers_in(space)} numbers, in the ranges {', '.join(limits)}"
    if isinstance(space, spaces.Text):
        letters = "".join(sorted(space.characters))
        return f"a text of {space.min_length} to {space.max_length} letters out of {letters!r:.200}"
    if isinstance(space, spaces.Tuple):
        return "a JSON list of: " + "; ".join(form_of(part) for part in space.spaces)
    if isinstance(space, spaces.Dict):
        return "a JSON object with " + "; ".join(f"{k!r}: {form_of(part)}" for k, part in space.spaces.items())
    raise TypeError(f"actions of {space} cannot be read from text")


def _shaped(space: Space[Any]) -> str:
    shape = space.shape or ()
    return f" of shape {list(shape)}" if len(shape) > 1 else ""


def said_action(text: str) -> str:
    """The action in a reply: the content of the last `<action>` tag, or all text after the last thought."""
    said = spoken(text)
    end = said.rfind("</action>")
    start = said.rfind("<action>", 0, max(end, 0))
    return (said if start < 0 else said[start + len("<action>") : end]).strip()


def action_of(space: Space[Any], text: str, names: Sequence[str] = ()) -> Any:
    said = said_action(text)
    if isinstance(space, spaces.Discrete) and names:
        folded = [name.casefold() for name in names]
        if said.casefold() in folded:
            return space.start + np.int64(folded.index(said.casefold()))
    if isinstance(space, spaces.Text):
        given: Any = said
    else:
        try:
            given = json.loads(said, parse_constant=_refuse)
        except (ValueError, RecursionError):
            raise Unreadable(
                f"{said!r:.80} is no action: answer with {form_of(space, names)}, and nothing else"
            ) from None
    try:
        return _value(space, given)
    except (ValueError, TypeError, OverflowError) as error:
        raise Unreadable(f"{said!r:.80} is no action ({error}): answer with {form_of(space, names)}") from None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number")


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
    value = numbers.astype(space.dtype)
    if isinstance(space, spaces.Box):
        # Checked on the uncast numbers: a cast may round onto a limit or wrap around.
        if (numbers < space.low).any() or (numbers > space.high).any():
            raise ValueError("out of range")
    elif (value != numbers).any():
        raise ValueError("out of range")
    return value
