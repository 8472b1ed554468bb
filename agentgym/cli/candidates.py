"""What can stand at the end of a command line that is being typed: read off the parser, whose metavars say what values are.

ENV is an environment, SPLIT a split, RUN a folder that holds a run, DATA a data set, IMAGE an image of sandboxes; FILE, DIR and
arguments of type `Path` are files and folders.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

SPLITS = {"test": "what is evaluated", "train": "what is trained on"}
RUN_FILES = ("run.json", "config.yaml")  # that an evaluation's folder has, and a training run's
MOST_RUNS = 200
ENV_FILES = (".py", ".yaml", ".yml")  # an environment's own file, and a suite's


@dataclass(frozen=True)
class Candidate:
    """A word, and a line about it."""

    word: str
    about: str = ""


def candidates(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[Candidate]:
    """What the last word may become; empty where nobody knows.

    Args:
        parser: of the whole command line.
        words: those typed up to the cursor, without the program's name; the last one may be empty.
    """
    *before, last = words or [""]
    place = _Place(parser)
    for word in before:
        if not place.take(word):
            return []
    option, equals, value = last.partition("=")
    if place.waiting is not None:
        found = _values(place.waiting, last)
    elif equals and option in place.options:
        found = [Candidate(f"{option}={c.word}", c.about) for c in _values(place.options[option], value)]
    elif last.startswith("-") and not place.ended:
        found = place.offered_options()
    else:
        found = place.offered_arguments(last)
    return [c for c in found if c.word.startswith(last)]


class _Place:
    """Where in the command line the reader is: in which parser, after which option, at which argument."""

    def __init__(self, parser: argparse.ArgumentParser):
        self.used: set[str] = set()
        self.ended = False  # by "--"
        self._enter(parser)

    def _enter(self, parser: argparse.ArgumentParser) -> None:
        self.options = dict(parser._option_string_actions)
        self.arguments = [action for action in parser._actions if not action.option_strings]
        self.waiting: argparse.Action | None = None  # the option whose value comes next

    def take(self, word: str) -> bool:
        """Go over a word that is finished. False where it makes no sense."""
        if word == "--" and not self.ended:
            self.ended, self.waiting = True, None
            return True
        if not self.ended and word.startswith("-") and len(word) > 1:
            option, equals, _ = word.partition("=")
            action = self.options.get(option)
            if action is not None:
                self.used.update(action.option_strings)
                self.waiting = None if equals or action.nargs == 0 else action
                return True
            if self.waiting is None:
                return option[:2] in self.options  # -n5
        if self.waiting is not None:
            if self.waiting.nargs not in ("*", "+"):
                self.waiting = None
            return True
        return self._take_argument(word)

    def _take_argument(self, word: str) -> bool:
        if not self.arguments:
            return False
        action = self.arguments[0]
        if isinstance(action, argparse._SubParsersAction):
            if word in action.choices:
                self._enter(action.choices[word])
                return True
            return False
        if action.nargs not in ("*", "+"):
            self.arguments.pop(0)
        return True

    def offered_options(self) -> list[Candidate]:
        """The options that were not given yet; those that may be given again, too."""
        return [
            Candidate(name, action.help or "")
            for name, action in self.options.items()
            if action.help != argparse.SUPPRESS or name.startswith("--h")
            if name not in self.used or isinstance(action, argparse._AppendAction)
        ]

    def offered_arguments(self, last: str) -> list[Candidate]:
        """What the next argument may be; where it is nothing that is known, the options."""
        found = _values(self.arguments[0], last) if self.arguments else []
        return found if found or last else self.offered_options()


def _values(action: argparse.Action, last: str) -> list[Candidate]:
    if isinstance(action, argparse._SubParsersAction):
        told = {choice.dest: choice.help or "" for choice in action._choices_actions}
        return [Candidate(name, told.get(name, "")) for name in action.choices]
    if action.choices is not None:
        return [Candidate(str(choice)) for choice in action.choices]
    kind = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    if kind in _KINDS:
        return _KINDS[kind](last)
    if action.type is Path or kind in ("FILE", "DIR"):
        return _files(last, folders_only=kind == "DIR")
    return []


def _envs(last: str) -> list[Candidate]:
    from agentgym.core.registration import adapters, registry

    ours = [Candidate(spec.id, spec.description) for spec in registry.values()]
    ours += [Candidate(f"{prefix}:", adapter.description) for prefix, adapter in adapters.items()]
    if not last or any(candidate.word.startswith(last) for candidate in ours):
        return ours
    return [file for file in _files(last) if file.word.endswith(("/", *ENV_FILES))]


def _splits(last: str) -> list[Candidate]:
    return [Candidate(name, about) for name, about in SPLITS.items()]


def _images(last: str) -> list[Candidate]:
    from agentgym.sandbox.images.build import image_names

    return [Candidate(name) for name in image_names()]


def _data(last: str) -> list[Candidate]:
    from agentgym.datasets.catalogue import data_sets

    return [Candidate(name, data.items) for name, data in data_sets().items()]


def _runs(last: str) -> list[Candidate]:
    """The runs in `runs/`, newest first, and whatever folders the word leads into."""
    here = Path("runs")
    found = _sorted_runs(here.iterdir()) if here.is_dir() else []
    known = [Candidate(str(path), "run") for path in found[:MOST_RUNS]]
    return known + [c for c in _files(last) if c.word.rstrip("/") not in {k.word for k in known}]


def _sorted_runs(folders: Iterable[Path]) -> list[Path]:
    runs = [folder for folder in folders if any((folder / name).is_file() for name in RUN_FILES)]
    return sorted(runs, key=lambda folder: folder.stat().st_mtime, reverse=True)


def _files(last: str, folders_only: bool = False) -> list[Candidate]:
    """The files and folders that a word may become. Hidden ones only where the word asks for them."""
    above, name = os.path.split(last)
    try:
        entries = sorted(os.scandir(os.path.expanduser(above) or "."), key=lambda entry: entry.name)
    except OSError:
        return []
    found = []
    for entry in entries:
        if entry.name.startswith(name) and (name.startswith(".") or not entry.name.startswith(".")):
            path = os.path.join(above, entry.name)
            if entry.is_dir():
                found.append(Candidate(f"{path}/"))
            elif not folders_only:
                found.append(Candidate(path))
    return found


_KINDS: dict[str, Callable[[str], list[Candidate]]] = {
    "ENV": _envs,
    "SPLIT": _splits,
    "RUN": _runs,
    "DATA": _data,
    "IMAGE": _images,
}
