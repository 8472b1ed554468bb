"""The page and some runs in one HTML file, which needs no server and asks for nothing."""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations, islice
from pathlib import Path
from typing import Any

from agentgym import __version__
from agentgym.storage.files import write_text
from agentgym.viewer import answers
from agentgym.viewer.answers import BadRequest
from agentgym.viewer.index import EpisodeFile, NotServed
from agentgym.viewer.rows import Row
from agentgym.viewer.run import Run
from agentgym.viewer.runs import Runs
from agentgym.viewer.server import encoded, static_files
from agentgym.viewer.summary import details
from agentgym.viewer.token_texts import token_texts

# What a browser still opens without stalling.
MOST_BYTES = 200_000_000
MOST_ROWS = 50_000
MOST_COMPARED = 4
_STYLE = re.compile(r'<link\s+rel="stylesheet"\s+href="([\w.-]+)"\s*/?>')
_SCRIPT = re.compile(r'<script\s+(?:defer\s+)?src="([\w.-]+)"(?:\s+defer)?\s*></script>')
_ELSEWHERE = re.compile(r"""\b(?:src|href|action)\s*=\s*["'](?!#|data:)""", re.IGNORECASE)
_FETCHED = re.compile(r"""@import|url\((?!['"]?(?:data:|#))""", re.IGNORECASE)


@dataclass
class Exported:
    """A written export.

    Attributes:
        path: the file.
        runs, episodes, bytes: how much is in it.
        note: what was left out, None if nothing was.
    """

    path: Path
    runs: int
    episodes: int
    bytes: int
    note: str | None


@dataclass
class _Data:
    runs: list[dict[str, Any]] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, Any] = field(default_factory=dict)
    episodes: dict[str, dict[str, Any]] = field(default_factory=dict)
    compare: dict[str, Any] = field(default_factory=dict)


def export(runs: Runs, path: Path, episodes: int) -> Exported:
    """Write runs into one file.

    Args:
        runs: which; all of them.
        path: a name that ends in .html; a file that is there is written over.
        episodes: most episodes of each run that are in it whole, in turn from each cell. The rows of lists are all in it.

    Raises:
        ValueError: there is no run, or the name is none of a page.
        OSError: the file cannot be written.
    """
    if path.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"--export writes a page: name a file that ends in .html, not {path}")
    found = sorted(runs.look(), key=lambda run: run.path.name)
    if not found:
        raise ValueError(f"no runs in {', '.join(map(str, runs.roots))}")
    data, left_out = _Data(), []
    size = 0
    for run in found:
        _read(run)
        shown = details(run)
        data.details[run.id] = shown
        data.runs.append({name: shown[name] for name in shown if name not in _ONLY_DETAILS})
        data.metrics[run.id] = run.metrics.update()
        files = list(run.files.values())
        rows = [(file, row) for file in files for row in file.rows]
        data.rows[run.id] = [run.row_json(file, row) for file, row in rows[:MOST_ROWS]]
        chosen = data.episodes[run.id] = {}
        for file, row in islice(_in_turn(files), episodes):
            size += row.size
            if size > MOST_BYTES:
                break
            key, episode = _episode(run, file, row)
            chosen[key] = episode
        left_out += _left_out(run, len(rows), len(chosen))
    data.runs.sort(key=lambda run: run["created"], reverse=True)
    data.compare = _comparisons(runs, found)
    note = "; ".join(left_out) or None
    record = {"exported": time.time(), "version": __version__, "note": note, **vars(data)}
    page = page_of(record)
    write_text(path, page)
    return Exported(path, len(found), sum(map(len, data.episodes.values())), len(page.encode()), note)


_ONLY_DETAILS = frozenset({"cells", "steps", "results", "config", "versions", "problems"})


def _read(run: Run) -> None:
    """Read all of a run, however long that takes."""
    run.advance(0.0)
    while run.indexing < 1.0:
        run.advance(1.0)


def _in_turn(files: list[EpisodeFile]) -> Iterator[tuple[EpisodeFile, Row]]:
    """The episodes that count, one of each file in turn."""
    waiting = [iter([row for row in file.rows if not row.superseded]) for file in files]
    open_files = list(zip(files, waiting, strict=True))
    while open_files:
        still = []
        for file, rows in open_files:
            row = next(rows, None)
            if row is not None:
                still.append((file, rows))
                yield file, row
        open_files = still


def _episode(run: Run, file: EpisodeFile, row: Row) -> tuple[str, dict[str, Any]]:
    record, shown = file.record(row), run.row_json(file, row)
    return shown["key"], {"episode": record, "row": shown, "tokens": token_texts(run, record)}


def _left_out(run: Run, rows: int, episodes: int) -> list[str]:
    here = sum(file.episodes for file in run.files.values())
    said = [f"{run.path.name}: {episodes:,} of {here:,} episodes are in this file"] if episodes < here else []
    return said + ([f"{run.path.name}: {MOST_ROWS:,} of {rows:,} rows"] if rows > MOST_ROWS else [])


def _comparisons(runs: Runs, found: list[Run]) -> dict[str, Any]:
    """Each two of a few evaluations, as far as they can be compared."""
    evaluations = [run.id for run in found if run.kind == "evaluation"]
    compared = {}
    for a, b in combinations(evaluations, 2) if len(evaluations) <= MOST_COMPARED else ():
        for first, second in ((a, b), (b, a)):
            try:
                compared[f"{first} {second}"] = answers.compare(runs, {"a": first, "b": second})
            except (BadRequest, NotServed):
                continue
    return compared


def page_of(data: dict[str, Any]) -> str:
    """The page with its styles, scripts and data inside. Its own policy lets nothing else run, and nothing be fetched.

    Raises:
        ValueError: the page's own files name something that would not be in it.
    """
    files = {name: content.decode() for name, (_, content) in static_files().items()}
    page = files["index.html"]
    styles = [_checked(name, files.get(name), "</style") for name in _STYLE.findall(page)]
    scripts = [_checked(name, files.get(name), "</script") for name in _SCRIPT.findall(page)]
    page = _SCRIPT.sub("", _STYLE.sub("", page))
    if outside := _ELSEWHERE.search(page):
        raise ValueError(f"index.html names what an exported file would not have: {page[outside.start() :][:80]!r}")
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src {' '.join(map(_hash, styles))}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    head = f'<head>\n<meta http-equiv="Content-Security-Policy" content="{policy}">'
    body = [f'<script type="application/json" id="agentgym-data">{embedded(data)}</script>']
    body += [f"<script>{script}</script>" for script in scripts]
    page = page.replace("<head>", head, 1)
    page = page.replace("</head>", "".join(f"<style>{style}</style>\n" for style in styles) + "</head>", 1)
    return page.replace("</body>", "\n".join(body) + "\n</body>", 1)


def embedded(data: Any) -> str:
    """JSON for the inside of a script element: no `<` is left in it that could end the element or begin a comment."""
    return encoded(data).decode("ascii").replace("<", "\\u003c")


def _checked(name: str, content: str | None, end: str) -> str:
    if content is None:
        raise ValueError(f"index.html names {name}, which is not there")
    if end in content.lower() or "<!--" in content or (name.endswith(".css") and _FETCHED.search(content)):
        raise ValueError(f"{name} has {end}, a comment of HTML or another file in it, and cannot stand inside a page")
    # Line ends as a browser reads them, or its hash would differ.
    return content.replace("\r\n", "\n")


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
