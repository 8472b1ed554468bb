"""The page and its data as one HTML file, which needs no server and no network: `agentgym view --export`, and `report.html`."""

import base64
import functools
import hashlib
import re
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files as package_files
from itertools import islice, permutations, zip_longest
from pathlib import Path
from typing import Any

from agentgym import __version__
from agentgym.storage.files import write_text
from agentgym.viewer import answers
from agentgym.viewer.answers import BadRequest, details, with_results
from agentgym.viewer.index import EpisodeFile, NotServed, encoded
from agentgym.viewer.query import OUTCOMES, Found
from agentgym.viewer.run import Kind, Run, Runs, run_id

# Sizes that browsers open without stalling.
MOST_BYTES, REPORT_BYTES = 200_000_000, 20_000_000
MOST_ROWS = 50_000
MOST_COMPARED = 4
# Of the episodes of a report: how many of each outcome, and how many are searched for them, since errors are rare.
OF_EACH_OUTCOME = 3
LOOKED_THROUGH = 5_000
TYPES = {"html": "text/html; charset=utf-8", "css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"}
_ONLY_DETAILS = frozenset({"cells", "steps", "results", "config", "versions", "problems"})
_STYLE = re.compile(r'<link\s+rel="stylesheet"\s+href="([\w.-]+)"\s*/?>')
_SCRIPT = re.compile(r'<script\s+(?:defer\s+)?src="([\w.-]+)"(?:\s+defer)?\s*></script>')


@dataclass
class Exported:
    """A written export. `note` says what was left out; None if nothing was."""

    path: Path
    runs: int
    episodes: int
    bytes: int
    note: str | None


def _empty() -> dict[str, Any]:
    names = ("details", "metrics", "rows", "episodes", "compare")
    return {"exported": time.time(), "version": __version__, "runs": [], **{name: {} for name in names}}


def _add(data: dict[str, Any], run: Run, shown: dict[str, Any], rows: Iterable[Found], whole: Iterable[Found]) -> None:
    data["details"][run.id] = shown
    data["runs"].append({name: shown[name] for name in shown if name not in _ONLY_DETAILS})
    data["metrics"][run.id] = run.metrics.updated()
    data["rows"][run.id] = [run.row_json(file, row) for file, row in rows]
    chosen = (answers.whole_episode(run, file, row) for file, row in whole)
    data["episodes"][run.id] = {answer["row"]["key"]: answer for answer in chosen}


def write_report(folder: Path, kind: Kind) -> Path:
    """Write `report.html`, the viewer's page of this run with a few whole episodes of each outcome, into its folder.

    Raises OSError if the folder holds no such run, or cannot be written.
    """
    (folder / ("run.json" if kind == "evaluation" else "metrics.jsonl")).stat()
    run = Run(run_id(folder), folder.resolve(), kind)
    run.refresh()
    wanted: dict[str, Collection[str]] = {}
    if kind == "training":
        evaluated = [stem for stem in run.files if stem.startswith("eval-")] or list(run.files)
        run.files = {stem: run.files[stem] for stem in dict.fromkeys((*evaluated[:1], *evaluated[-1:]))}
    shown = details(run, live=False)
    if kind == "evaluation":
        shown = with_results(shown)
        for cell in shown["cells"]:
            success, errors = cell["success"], cell["errors"]
            there = {"success": success, "failure": success is not None and success < 1, "error": errors}
            wanted[cell["name"]] = [outcome for outcome in OUTCOMES if there[outcome]]
    examples = ((file, row) for file in run.files.values() for row in _examples(file, wanted.get(file.name, OUTCOMES)))
    rows = list(_fitting(examples, REPORT_BYTES))
    shown["problems"] = run.problems
    data, here = _empty(), shown["episodes"]
    _add(data, run, shown, rows, rows)
    note = f"{len(rows):,} of {here:,} episodes are in this file; `agentgym view {folder}` shows all of them."
    report = folder / "report.html"
    write_text(report, page_of({**data, "note": note if len(rows) < here else None, "home": run.id}))
    return report


def _examples(file: EpisodeFile, outcomes: Collection[str]) -> list[Any]:
    """The first few episodes of each outcome; no more is read than these take."""

    def found() -> list[Any]:
        kinds = ((row for row in file.rows if row.outcome == kind and not row.superseded) for kind in outcomes)
        return [row for rows in kinds for row in islice(rows, OF_EACH_OUTCOME)]

    file.update(lambda: len(file.rows) < LOOKED_THROUGH and len(found()) < OF_EACH_OUTCOME * len(outcomes))
    return found()


def export(runs: Runs, path: Path, episodes: int) -> Exported:
    """Write runs into one file.

    Args:
        runs: which; all of them.
        path: a name that ends in .html; a file that is there is written over.
        episodes: most episodes of each run that are in it whole, in turn from each cell. The rows of lists are all in it.

    Raises:
        ValueError: there is no run, or the path does not end in .html.
        OSError: the file cannot be written.
    """
    if path.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"--export writes a page: name a file that ends in .html, not {path}")
    found = sorted(runs.look(), key=lambda run: run.path.name)
    if not found:
        raise ValueError(f"no runs in {', '.join(map(str, runs.roots))}")
    data, left_out, left = _empty(), [], MOST_BYTES
    for run in found:
        run.advance(0.0)
        while run.indexing < 1.0:
            run.advance(1.0)
        rows = [(file, row) for file in run.files.values() for row in file.rows]
        whole = list(_fitting(islice(_in_turn(run.files.values()), episodes), left))
        left -= sum(row.size for _, row in whole)
        _add(data, run, details(run), rows[:MOST_ROWS], whole)
        if len(whole) < (here := sum(file.episodes for file in run.files.values())):
            left_out.append(f"{run.path.name}: {len(whole):,} of {here:,} episodes are in this file")
        if len(rows) > MOST_ROWS:
            left_out.append(f"{run.path.name}: {MOST_ROWS:,} of {len(rows):,} rows")
    data["runs"].sort(key=lambda run: run["created"], reverse=True)
    evaluations = [run.id for run in found if run.kind == "evaluation"]
    for pair in permutations(evaluations, 2) if len(evaluations) <= MOST_COMPARED else ():
        with suppress(BadRequest, NotServed):
            data["compare"][" ".join(pair)] = answers.compare(runs, dict(zip("ab", pair, strict=True)))
    note = "; ".join(left_out) or None
    page = page_of({**data, "note": note, "home": None})
    write_text(path, page)
    return Exported(path, len(found), sum(map(len, data["episodes"].values())), len(page.encode()), note)


def _fitting(found: Iterable[Found], most: int) -> Iterator[Found]:
    """Episodes as long as they have no more bytes than that together."""
    for file, row in found:
        most -= row.size
        if most < 0:
            return
        yield file, row


def _in_turn(files: Iterable[EpisodeFile]) -> Iterator[Found]:
    """The episodes that count, one of each file in turn."""
    rows = [[(file, row) for row in file.rows if not row.superseded] for file in files]
    return (found for turn in zip_longest(*rows) for found in turn if found is not None)


def static_files() -> dict[str, tuple[str, bytes]]:
    """The page's own files by name: their content type and content. No other file is ever served."""
    entries = sorted((package_files("agentgym.viewer") / "static").iterdir(), key=lambda entry: entry.name)
    kinds = ((entry, TYPES.get(entry.name.rpartition(".")[2])) for entry in entries)
    return {entry.name: (kind, entry.read_bytes()) for entry, kind in kinds if kind}


@functools.cache
def _around_data() -> tuple[str, str]:
    """The page with its styles and scripts, before its data and after. Its own policy lets nothing else run, or be fetched."""
    files = {name: content.decode() for name, (_, content) in static_files().items()}
    page = files["index.html"]
    # Line ends as a browser reads them, or its hash would differ.
    styles, scripts = ([files[n].replace("\r\n", "\n") for n in kind.findall(page)] for kind in (_STYLE, _SCRIPT))
    page = _SCRIPT.sub("", _STYLE.sub("", page))
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src {' '.join(map(_hash, styles))}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    head = f'<head>\n<meta http-equiv="Content-Security-Policy" content="{policy}">'
    page = page.replace("<head>", head, 1)
    page = page.replace("</head>", "".join(f"<style>{style}</style>\n" for style in styles) + "</head>", 1)
    before, after = page.split("</body>", 1)
    own = "".join(f"\n<script>{script}</script>" for script in scripts)
    return f'{before}<script type="application/json" id="agentgym-data">', f"</script>{own}\n</body>{after}"


def page_of(data: dict[str, Any]) -> str:
    return embedded(data).join(_around_data())


def embedded(data: Any) -> str:
    """JSON for the inside of a script element: no `<` is left in it that could end the element or begin a comment."""
    return encoded(data).decode("ascii").replace("<", "\\u003c")


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
