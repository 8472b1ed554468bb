"""The turns of a rollout that runs, kept as they end: an episode that has to be played again goes on from there, without an engine.

They are in memory for an episode whose environment fails, and on disk for a run that goes on after its end.
"""

import asyncio
import contextlib
import errno
import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

from agent_train.engine.base import Completion
from agentgym.storage.jsonl import mend


class DivergedError(RuntimeError):
    """The environment's answer differs from that when the turn was kept, so the journal cannot answer."""


@dataclass(frozen=True)
class JournalTurn:
    """One answer of the engine, and the prompt that it belongs to."""

    shared: int  # first ids of the prompt: those of the player's turn before and its completion, or 0
    new: list[int]  # the prompt's other ids
    completion: Completion
    weights: Mapping[int, int] = field(default_factory=dict)  # checksums of its versions


@dataclass
class _Episode:
    turns: list[JournalTurn] = field(default_factory=list)
    earlier: int = 0  # of these turns those of earlier starts
    schedule: dict[str, float] = field(default_factory=dict)
    reached: int = 0  # turns of the present try so far
    failed_at: set[int] = field(default_factory=set)  # what tries that failed had reached
    anew: bool = False  # it was begun anew in this start
    went_otherwise: bool = False  # a try that diverged went on by itself
    # Turns and `earlier` of a try that diverged, up to there.
    before_divergence: tuple[list[JournalTurn], int] = field(default_factory=lambda: ([], 0))


class Journal:
    """The turns of one step's rollout, those of earlier starts of the run too. A context manager; without a `path` in memory alone.

    What is played again has the answers as they were, given to the same prompts. Rewards and the end are those of the environment
    that plays it now, also where they differ. An episode that ends before its turns do counts as diverged.

    A line is a JSON array of the turns that ended in one pass of the event loop, written at once; one that was cut off by a crash is
    removed. So of a batch of the embedded engine all turns are kept or none, and the batches after it are those of a run that nobody
    disturbed. If a line cannot be written, `note` is told, and later turns are in memory alone.

    `weights` are the checksums of the run's weights by version, as they become known. A run that went back may train other weights
    of a version than those which have sampled.
    """

    def __init__(
        self, path: Path | None = None, note: Callable[[str], None] = print, weights: Mapping[int, int] | None = None
    ):
        self.answered = 0  # turns of earlier starts that were answered again
        self.retried = 0  # turns of this start that were
        self.diverged = 0  # episodes whose environment was not the same again
        self._path = path
        self._note = note
        self._weights = {} if weights is None else weights
        self._sampled: Counter[tuple[int, int | None]] = Counter()  # tokens of earlier starts, by version and checksum
        self._ended: list[dict[str, Any]] = []
        self._episodes: dict[str, _Episode] = defaultdict(_Episode)
        self._file: FileIO | None = None
        if path is None:
            return
        try:
            mend(path)
            self._file = path.open("ab", buffering=0)
            self._episodes.update(_read(path))
        except OSError as error:
            self._give_up(error)

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self._write()
        self._episodes.clear()
        if self._file is not None:
            self._file.close()
            self._file = None

    def begin(self, episode: str, version: int) -> None:
        """Begin a try of an episode; `version` is the engine's. `answer` has the turns of the tries before."""
        found = self._episodes[episode]
        found.reached = 0
        if not found.turns:
            found.schedule = {"version": version, "began": time.time()}

    def answer(self, episode: str, shared: int, new: list[int]) -> Completion | None:
        """The answer to the try's next prompt; None if no try has had one. DivergedError if it was given to another."""
        found = self._episodes[episode]
        if found.reached >= len(found.turns):
            return None
        turn = found.turns[found.reached]
        if (turn.shared, turn.new) != (shared, new):
            self.diverged += 1
            before = found.turns[: found.reached], min(found.earlier, found.reached)
            _forget_turns(found)
            found.before_divergence = before
            raise DivergedError("the environment did not say what it said when the episode was played before")
        if found.reached < found.earlier and not found.failed_at:
            self.answered += 1
        else:
            self.retried += 1
        found.reached += 1
        return turn.completion

    def go_on(self, episode: str) -> None:
        """The try that has diverged goes on from there, with the turns before."""
        found = self._episodes[episode]
        found.turns, found.earlier = found.before_divergence
        found.went_otherwise = True

    def keep(self, episode: str, shared: int, new: list[int], completion: Completion) -> None:
        """Keep the try's next turn, and write it with the others that end in this pass of the event loop."""
        found = self._episodes[episode]
        number = found.reached
        weights = {version: self._weights[version] for version in {*completion.versions} & self._weights.keys()}
        found.turns.append(JournalTurn(shared, new, completion, weights))
        found.reached += 1
        if self._file is None:
            return
        if not self._ended:
            asyncio.get_running_loop().call_soon(self._write)
        record = {"episode": episode, "turn": number, "shared": shared, "new": new, "weights": weights}
        schedule = {} if number else {"schedule": found.schedule}
        self._ended.append(record | schedule | vars(completion))

    def again(self, episode: str) -> bool:
        """True if an episode whose try has failed is to be tried again: by its turns, else once anew.

        Not by its turns where a try has failed there before, or went otherwise: so might the next, and fail elsewhere each time.
        """
        found = self._episodes[episode]
        if found.turns and found.reached not in found.failed_at and not found.went_otherwise:
            found.failed_at.add(found.reached)
            return True
        found.failed_at.add(found.reached)
        _forget_turns(found)
        first, found.anew = not found.anew, True
        return first

    def end(self, episode: str) -> dict[str, float]:
        """Forget an episode that has ended. Returns the engine's version and the time when the first try of its turns began."""
        found = self._episodes.pop(episode)
        self.diverged += found.reached < len(found.turns)
        for turn in found.turns[: min(found.earlier, found.reached)]:
            self._sampled.update((version, turn.weights.get(version)) for version in turn.completion.versions)
        return found.schedule

    def counts(self) -> dict[str, Any]:
        """The fields of `StepMetrics`; to be asked when the versions of all tokens have been trained."""
        other = sum(
            count
            for (version, checksum), count in self._sampled.items()
            if checksum is not None and self._weights.get(version, checksum) != checksum
        )
        replayed = {"journal_turns": self.answered, "retried_turns": self.retried, "diverged": self.diverged}
        return {**replayed, "replaced_tokens": other}

    def _write(self) -> None:
        ended, self._ended = self._ended, []
        if not ended or self._file is None:
            return
        line = json.dumps(ended, separators=(",", ":")).encode() + b"\n"
        try:
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._file.close()
            self._file = None
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._note(f"{self._path}: no more turns are kept for a run that is killed and resumed: {error}")


def _forget_turns(found: _Episode) -> None:
    found.turns.clear()
    found.earlier = 0


def _read(path: Path) -> dict[str, _Episode]:
    """Each episode with its turns from the first on, without gaps. What is no such turn is left out. Turn 0 begins one anew."""
    found: dict[str, _Episode] = {}
    with path.open("rb") as lines:
        for line in lines:
            with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
                for each in json.loads(line):
                    completion = Completion(each["ids"], each["logprobs"], each["versions"], each["finish_reason"])
                    weights = {int(version): checksum for version, checksum in each["weights"].items()}
                    turn = JournalTurn(each["shared"], each["new"], completion, weights)
                    if each["turn"] == 0:
                        found[each["episode"]] = _Episode(schedule=each["schedule"])
                    turns = found.setdefault(each["episode"], _Episode()).turns
                    if each["turn"] <= len(turns):
                        turns[each["turn"] :] = [turn]  # a later try went on otherwise from here
    for episode in found.values():
        episode.earlier = len(episode.turns)
    return found
