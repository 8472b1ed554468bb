"""Edits of a text file as an agent requests them. The answer to a mistaken request is a `ToolError`."""

import itertools
import re

from agentgym.tools.toolset import ToolError

AROUND = 4  # lines shown before and after an edit


def numbered(text: str, first: int = 1, last: int | None = None) -> str:
    """Lines `first` to `last`, counted from 1 and both included, each after its number. `last` None: to the end."""
    lines = lines_of(text)
    chosen = lines[first - 1 : len(lines) if last is None else last]
    return "\n".join(f"{number:6}\t{line}" for number, line in enumerate(chosen, first))


def in_range(text: str, view_range: list[int]) -> tuple[int, int]:
    """The first and last line that [first, last] asks for; a last of -1 is the end."""
    count = len(lines_of(text))
    if len(view_range) != 2:
        raise ToolError("view_range must be two numbers, [first, last]")
    first, last = view_range[0], count if view_range[1] == -1 else min(view_range[1], count)
    if not 1 <= first <= max(count, 1) or last < first:
        raise ToolError(f"view_range {view_range} is not in the file, which has {count} lines")
    return first, last


def replaced(text: str, old: str, new: str) -> tuple[str, int]:
    """The text with its only `old` replaced, and the line where that began. Its line ends stay, if they are all the same."""
    if _ends_as_windows(text):
        made, line = replaced(*(each.replace("\r\n", "\n") for each in (text, old, new)))
        return made.replace("\n", "\r\n"), line
    if not old:
        raise ToolError("old_str is empty: give the text to replace, or use insert")
    if old == new:
        raise ToolError("old_str and new_str are the same: nothing to change")
    found = text.count(old)
    if found == 0:
        mixed = "\r\n" in text and "\r" not in old and "\n" in old
        why = ". Some of the file's lines end with \\r\\n: replace within one line, or use bash" if mixed else ""
        raise ToolError(f"old_str is not in the file. It must be exactly as there, with all spaces{why}")
    if found > 1:
        places = itertools.islice(re.finditer(re.escape(old), text), 20)  # of what may be millions
        lines = ", ".join(str(text.count("\n", 0, place.start()) + 1) for place in places)
        raise ToolError(
            f"old_str is {found} times in the file, at lines {lines}: add lines around it to make it unique"
        )
    before, _, after = text.partition(old)
    return before + new + after, before.count("\n") + 1


def inserted(text: str, line: int, new: str) -> str:
    """The text with `new` after a line; 0 is before the first. Its line ends stay, if they are all the same."""
    if _ends_as_windows(text):
        return inserted(text.replace("\r\n", "\n"), line, new.replace("\r\n", "\n")).replace("\n", "\r\n")
    lines = _lines(text)
    if not 0 <= line <= len(lines):
        raise ToolError(f"insert_line must be from 0 to {len(lines)}, the number of lines, not {line}")
    ends = text.endswith("\n") or not text
    made = "\n".join([*lines[:line], *new.removesuffix("\n").split("\n"), *lines[line:]])
    return f"{made}\n" if ends else made


def _ends_as_windows(text: str) -> bool:
    return 0 < text.count("\n") == text.count("\r\n")


def around(text: str, first: int, count: int) -> str:
    """The numbered lines of an edit that put `count` lines at line `first`, with those about it."""
    return numbered(text, max(1, first - AROUND), first + max(count, 1) - 1 + AROUND)


def lines_of(text: str) -> list[str]:
    """The lines of a text, without ends; "" has none."""
    return [line.removesuffix("\r") for line in _lines(text)]


def _lines(text: str) -> list[str]:
    return text.removesuffix("\n").split("\n") if text else []
