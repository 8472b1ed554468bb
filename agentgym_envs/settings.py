"""Checks of an environment's settings. All raise ValueError."""

from collections.abc import Iterable
from typing import Any


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    if value not in (known := tuple(choices)):
        raise ValueError(f"{name} must be one of {', '.join(known)}, not {value!r}")


def check_number(name: str, value: Any, low: float, high: float, *, whole: bool = False) -> None:
    kind = "whole number" if whole else "number"
    number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not number or not low <= value <= high:
        raise ValueError(f"{name} must be a {kind} from {low:g} to {high:g}, not {value!r}")
