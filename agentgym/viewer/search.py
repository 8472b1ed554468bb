"""A text in the messages of episodes. A search goes through the files in a thread; what it found so far is there at once."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from agentgym.viewer.index import EpisodeFile, open_regular, parsed
from agentgym.viewer.rows import texts_of

_BATCH = 200
_Key = tuple[str, int]


@dataclass
class Search:
    """A case-insensitive search: places of lines by file. It continues when the files grow.

    Attributes:
        text: what is looked for.
        found: the starts of the lines that have it, by file.
    """

    text: str
    found: dict[_Key, set[int]] = field(default_factory=dict)
    _looked: dict[_Key, int] = field(default_factory=dict)
    _stopped: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def has(self, file: EpisodeFile, start: int) -> bool:
        """Whether the line was found to have the text."""
        return start in self.found.get(_key(file), ())

    def share(self, files: Sequence[EpisodeFile]) -> float:
        """The share of the rows that was searched, 0 to 1."""
        total = sum(len(file.rows) for file in files)
        looked = sum(min(self._looked.get(_key(file), 0), len(file.rows)) for file in files)
        return looked / total if total else 1.0

    def go_on(self, files: Sequence[EpisodeFile], seconds: float) -> None:
        """Look through what is left, in a thread; returns when that is done, or after this long."""
        if self.share(files) == 1.0 or self._stopped.is_set():
            return
        with self._lock:  # several requests ask at once: one of them starts the thread
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, args=(list(files),), name="search", daemon=True)
                self._thread.start()
            thread = self._thread
        thread.join(seconds)

    def stop(self) -> None:
        """End the thread; nobody asks any more."""
        self._stopped.set()

    def _run(self, files: list[EpisodeFile]) -> None:
        needles = _Needles(self.text)
        for file in files:
            while not self._stopped.is_set() and self._batch(file, needles):
                pass

    def _batch(self, file: EpisodeFile, needles: _Needles) -> bool:
        """Look through the next rows of a file; whether there were any."""
        key, rows = _key(file), file.rows
        done = self._looked.get(key, 0)
        batch = rows[done : done + _BATCH]
        if not batch:
            return False
        found = self.found.setdefault(key, set())
        try:
            with open_regular(file.path) as stored:
                for row in batch:
                    stored.seek(row.start)
                    if needles.in_line(stored.read(row.size)):
                        found.add(row.start)
        except OSError:
            self._looked[key] = len(rows)  # the file is gone; its index says so
            return False
        self._looked[key] = done + len(batch)
        return True


def _key(file: EpisodeFile) -> _Key:
    return str(file.path), file.generation


class _Needles:
    """A text as it stands in a line of JSON, so that most lines need not be parsed, or made lower case as text, which is slow."""

    def __init__(self, text: str):
        self.text = text.lower()
        self.raw = json.dumps(self.text, ensure_ascii=False)[1:-1]
        self.plain = max(re.findall(r"[\x20-\x7e]*", self.raw), key=len).encode()
        self.ascii = self.text.isascii()
        self.caseless = self.text.upper() == self.text
        self.bytes = self.raw.encode("utf-8", "surrogatepass")

    def in_line(self, line: bytes) -> bool:
        """Whether a message of the stored episode has the text."""
        if self.plain not in line.lower():
            return False
        if (
            not self.ascii and b"\\u" not in line and not self._in_text(line)
        ):  # with an escape in it, only parsing tells
            return False
        try:
            return any(self.text in text.lower() for text in texts_of(parsed(line)))
        except (ValueError, KeyError, TypeError):
            return False

    def _in_text(self, line: bytes) -> bool:
        return self.bytes in line if self.caseless else self.raw in line.decode("utf-8", "replace").lower()
