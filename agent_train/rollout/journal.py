"""The turns of a rollout that runs, on disk as they end: a run that goes on plays its episodes again up to there, without an engine."""

import asyncio
import contextlib
import errno
import json
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from agent_train.engine.base import Completion
from agentgym.storage.jsonl import mend


class DivergedError(RuntimeError):
    """The environment said otherwise than when the turn was written, so the journal cannot answer it."""


@dataclass(frozen=True)
class JournalTurn:
    """One answer of the engine, and the prompt that it belongs to."""

    shared: int  # first ids of the prompt: those of the turn before and its completion, or 0
    new: list[int]  # the prompt's other ids
    completion: Completion


class Journal:
    """The turns of one step's rollout, those of earlier starts of the run too. A context manager.

    A line is a JSON array of the turns that ended in one pass of the event loop, written at once; one that was cut off by a crash is
    removed. So of a batch of the embedded engine all turns are kept or none, and the batches after it are those of a run that nobody
    disturbed. If a line cannot be written, `note` is told, and later turns are not kept.
    """

    def __init__(self, path: Path, note: Callable[[str], None]):
        self.answered = 0  # turns of earlier starts that were answered again
        self.diverged = 0  # episodes of earlier starts that were begun again, see DivergedError
        self._path = path
        self._note = note
        self._ended: list[dict[str, Any]] = []
        self._turns: dict[str, deque[JournalTurn]] = {}
        self._file: FileIO | None = None
        try:
            mend(path)
            self._file = path.open("ab", buffering=0)
            self._turns = _read(path)
        except OSError as error:
            self._give_up(error)

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self._write()
        if self._file is not None:
            self._file.close()
            self._file = None

    def take(self, episode: str) -> deque[JournalTurn]:
        """The turns of an episode in earlier starts, of its last try; none when asked again, for a try in this one."""
        return self._turns.pop(episode, deque())

    def keep(self, episode: str, number: int, turn: JournalTurn) -> None:
        """Write a turn with the others that end in this pass of the event loop. Turn 0 begins the episode anew."""
        if not self._ended:
            asyncio.get_running_loop().call_soon(self._write)
        prompt = {"episode": episode, "turn": number, "shared": turn.shared, "new": turn.new}
        self._ended.append(prompt | vars(turn.completion))

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


def _read(path: Path) -> dict[str, deque[JournalTurn]]:
    """The turns of each episode from its first on, without gaps. What is no such turn is left out."""
    found: dict[str, deque[JournalTurn]] = {}
    with path.open("rb") as lines:
        for line in lines:
            with contextlib.suppress(ValueError, TypeError, KeyError):
                for each in json.loads(line):
                    completion = Completion(each["ids"], each["logprobs"], each["versions"], each["finish_reason"])
                    turn = JournalTurn(each["shared"], each["new"], completion)
                    turns = found.setdefault(each["episode"], deque())
                    if each["turn"] == 0:
                        turns.clear()
                    if each["turn"] == len(turns):
                        turns.append(turn)
    return found
