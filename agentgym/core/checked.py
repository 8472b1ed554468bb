"""What environments and policies return, checked: an error says which call returned what."""

from __future__ import annotations

import contextlib
import math
import numbers
from typing import Any

import numpy as np

from agentgym.core.messages import Observation, assistant, problem_of
from agentgym.policies.base import Reply


def numbers_in(info: dict[str, Any]) -> dict[str, float]:
    """The finite numbers of an info, truth values as 0.0 and 1.0."""
    found = {}
    for name, value in info.items():
        with contextlib.suppress(OverflowError):  # a whole number that no float can hold
            if isinstance(value, numbers.Real | np.bool_) and math.isfinite(value):
                found[str(name)] = float(value)
    return found


def _checked_observation(observation: Any, call: str) -> Observation:
    if not isinstance(observation, list):
        raise TypeError(f"{call} must return a list of messages as its observation, not {type(observation).__name__}")
    for message in observation:
        if problem := problem_of(message):
            raise ValueError(f"{call} returned a bad message: {problem}: {message!r:.200}")
    return list(observation)


def checked_reset(result: Any) -> tuple[Observation, dict[str, Any]]:
    """The observation and info that `reset` returned. What is no dict is no info.

    Raises:
        TypeError, ValueError: it is no `(observation, info)`.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(f"reset must return (observation, info), not {result!r:.200}")
    observation, info = result
    return _checked_observation(observation, "reset"), dict(info) if isinstance(info, dict) else {}


def checked_step(result: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
    """Gymnasium's five values of what `step` returned.

    Raises:
        TypeError, ValueError: it is none of these.
    """
    if not isinstance(result, tuple) or len(result) != 5:
        raise TypeError(f"step must return (observation, reward, terminated, truncated, info), not {result!r:.200}")
    observation, reward, terminated, truncated, info = result
    if not isinstance(reward, numbers.Real | np.bool_) or not math.isfinite(reward):
        raise ValueError(f"step must return a finite number as its reward, not {reward!r}")
    if not isinstance(info, dict):
        raise TypeError(f"step must return a dict as its info, not {type(info).__name__}")
    return _checked_observation(observation, "step"), float(reward), bool(terminated), bool(truncated), dict(info)


def checked_reply(reply: Any) -> Reply:
    """What `act` returned.

    Raises:
        TypeError, ValueError: it is no reply.
    """
    if not isinstance(reply, Reply):
        raise TypeError(f"act must return a Reply, not {type(reply).__name__}")
    assistant(reply.message)
    return reply
