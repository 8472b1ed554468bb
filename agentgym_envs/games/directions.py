"""Reads a move on a grid from free text."""

from __future__ import annotations

import re

DIRECTIONS = ("up", "down", "left", "right")
LEGAL = "answer up, down, left or right"
_WORD = re.compile(r"\b(?:up|down|left|right)\b")


def read_direction(text: str) -> str | None:
    """The last direction word of a text, in any case, or None.

    A reply that thinks aloud names its choice last: "not up, so <answer>right</answer>" is "right".
    """
    text = text.lower()
    if text in DIRECTIONS:
        return text
    found = _WORD.findall(text)
    return found[-1] if found else None
