"""The timeline of a run: where each part spent its time, as `timeline.json` in Chrome's trace event format, for https://ui.perfetto.dev.

Its array of events is never closed, as the format allows: the file can be appended to, and survives a kill.
"""

import bisect
import json
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentgym.core.trajectory import Trajectory, Turn
from agentgym.storage.jsonl import mend

Row = tuple[str, int]  # a kind of part and which of them: ("policy rank", 0)
LOOP: Row = ("loop", 0)
LARGEST = 64 << 20  # bytes of a file
_WRITE_SECONDS = 1.0


class Timeline:
    """Appends spans and counts to a file; without a path it keeps nothing. One thread uses it, and no failure of the disk ends a run.

    Times are `time.monotonic()` of this process; in the file they are microseconds since 1970, so that a resumed run appends. A
    file of LARGEST bytes becomes `timeline.earlier.json`, in place of the one before.
    """

    def __init__(self, path: Path | None = None):
        self.path = path
        self._zero = time.time() - time.monotonic()
        self._rows: dict[Row, str] = {}  # those that the file names, with their numbers there
        self._lines: list[str] = []
        self._written = time.monotonic()
        self._free: list[tuple[float, int]] = []  # rows of episodes and since when they are free, the first one first
        if path is not None:
            mend(path)

    def add(self, row: Row, name: str, begun: float, ended: float | None = None) -> None:
        """A span of a row. `ended` None is now. Spans of one row lie beside or inside each other."""
        if self.path is None:
            return
        now = time.monotonic() if ended is None else ended
        start, end = int((self._zero + begun) * 1e6), int((self._zero + now) * 1e6)
        self._lines.append(f'"ph":"X",{self._numbers(row)},"name":{json.dumps(name)},"ts":{start},"dur":{end - start}')
        if now - self._written > _WRITE_SECONDS:
            self.write()

    @contextmanager
    def span(self, name: str, row: Row = LOOP) -> Iterator[None]:
        """The block as a span, however it ends."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self.add(row, name, begun)

    def count(self, row: Row, name: str, value: int) -> None:
        """A number that changes with time, drawn as a curve: the row's, by this name."""
        if self.path is not None:
            now = int((self._zero + time.monotonic()) * 1e6)
            numbers, curve = self._numbers(row), f"{name} of {row[0]} {row[1]}"
            self._lines.append(f'"ph":"C",{numbers},"name":{json.dumps(curve)},"ts":{now},"args":{{"count":{value}}}')

    def episode(self, trajectory: Trajectory) -> None:
        """An episode that has just ended: its answers ("engine") and steps ("environment"), in a row that was free."""
        if self.path is None:
            return
        ended = time.monotonic()
        begun = ended - trajectory.seconds
        last = bisect.bisect_right(self._free, (begun, len(self._free))) - 1
        row = ("episode", self._free.pop(last)[1] if last >= 0 else len(self._free))
        self._free.append((ended, row[1]))
        self.add(row, trajectory.id, begun, ended)
        seconds = sum(turn.step_seconds for turn in trajectory.turns) + sum(c.act_seconds for c in trajectory.calls())
        # Of a failed one the last call is not among its turns.
        at = begun if trajectory.failed else max(begun, ended - seconds)
        for call in trajectory.calls():
            acted = min(at + call.act_seconds, ended)
            self.add(row, "engine", at, acted)
            at = acted
            if isinstance(call, Turn):
                at = min(acted + call.step_seconds, ended)
                self.add(row, "environment", acted, at)

    def write(self) -> None:
        """Write what is held back, up to a second of it."""
        lines, self._lines, self._written = self._lines, [], time.monotonic()
        if self.path is None or not lines:
            return
        try:
            with self.path.open("ab") as out:
                comma = "," if out.tell() else "["
                out.write((comma + ",".join(f"{{{line}}}\n" for line in lines)).encode())
                size = out.tell()
            if size > LARGEST:
                self.path.replace(self.path.with_suffix(".earlier.json"))
                self._rows = {}
        except OSError:
            self.path = None

    def _numbers(self, row: Row) -> str:
        if row not in self._rows:
            kind, number = row
            process = zlib.crc32(kind.encode()) % 2000  # the same in every start of the run
            self._rows[row] = numbers = f'"pid":{process},"tid":{process * 1_000_000 + number}'
            for event, name in (("process_name", kind), ("thread_name", f"{kind} {number}")):
                self._lines.append(f'"ph":"M",{numbers},"name":"{event}","args":{json.dumps({"name": name})}')
        return self._rows[row]
