"""Findings of checks, and the lines of the author's code that they are about."""

import inspect
import os
import re
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

OK, NOTE, PROBLEM = "ok", "note", "problem"
_NOT_THE_AUTHORS = ("agentgym", "gymnasium", "numpy", "builtins", "abc", "typing", "collections", "contextlib")


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
        for each in classes:
            top = each.__module__.partition(".")[0]
            module = sys.modules.get(top)
            if top in _NOT_THE_AUTHORS or module is None:
                continue
            file = getattr(module, "__file__", None)
            if file:
                self._roots.append(os.path.dirname(file) + os.sep if hasattr(module, "__path__") else file)
            else:  # a namespace package
                self._roots += [folder + os.sep for folder in getattr(module, "__path__", ())]

    def owns(self, file: str) -> bool:
        return any(file == root or (root.endswith(os.sep) and file.startswith(root)) for root in self._roots)

    def place_of(self, error: BaseException) -> str:
        return self._first(reversed(list(traceback.walk_tb(error.__traceback__))))

    def place_in(self, frame: FrameType | None) -> str:
        return self._first(traceback.walk_stack(frame)) if frame else ""

    def line_with(self, kind: type, pattern: re.Pattern[str]) -> str:
        try:
            file = inspect.getsourcefile(kind) or ""
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        except (TypeError, OSError, UnicodeDecodeError):
            return ""
        code = ((number, line.partition("#")[0]) for number, line in enumerate(lines, start=1))
        return next((f"{shown(file)}:{number}" for number, line in code if pattern.search(line)), "")

    def _first(self, frames: Iterable[tuple[FrameType, int]]) -> str:
        lines = ((frame.f_code.co_filename, line) for frame, line in frames)
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


def problem(text: str, place: str = "") -> list[Finding]:
    """One problem; the caller of the check adds its name."""
    return [Finding("", PROBLEM, text, place)]


def note(text: str) -> list[Finding]:
    return [Finding("", NOTE, text)]


def ok(text: str) -> list[Finding]:
    return [Finding("", OK, text)]
