"""Scores Reasoning Gym answers in another process; its import loads the package before the timeout starts."""

from collections.abc import Mapping
from typing import Any

from agentgym_envs.adapters.foreign import imported, settings_key
from agentgym_envs.adapters.reasoning_gym import _data

imported("reasoning_gym")


def score(where: Mapping[str, Any], entry: dict[str, Any], answer: str) -> float | None:
    """The data set's `score_answer` for an answer to one of its entries; None if it cannot parse the answer.

    Some data sets raise instead. The entry is valid, so such an exception is due to the answer.
    """
    try:
        return float(_data(settings_key(where)).score_answer(answer, entry))
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, SyntaxError, RecursionError):
        return None
