"""The JSON of a run for the page: RUN, CELL and STEP of `agentgym.viewer`."""

import json
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from agentgym.storage.jsonl import finite
from agentgym.storage.locks import lock_held
from agentgym.viewer.index import EpisodeFile
from agentgym.viewer.rows import means_of, result_of
from agentgym.viewer.run import STEP, Run, agent_name, newest, object_in, text_in

# A training step, or an evaluation between steps, may take minutes in which nothing is written.
WRITTEN_SECONDS = 120.0
_ENV_ID = re.compile(r"^env:\s*\n(?:[ \t]+.*\n)*?[ \t]+id:[ \t]*(.+?)[ \t]*$", re.MULTILINE)


def summary(run: Run) -> dict[str, Any]:
    training = run.kind == "training"
    problems = run.problems
    return {
        "id": run.id,
        "name": run.path.name,
        "path": str(run.path),
        "kind": run.kind,
        "indexing": 1.0 if training else run.indexing,  # numbers of training are of its metrics, which are read whole
        **(_of_training(run, run.metrics.updated()) if training else _of_evaluation(run)),
        "updated": _updated(run),
        "live": is_live(run),
        "problem": problems[0] if problems else None,
    }


def is_live(run: Run) -> bool:
    """True while a process writes it: an evaluation's lock is held; a training run has recent writes and no result."""
    if run.kind == "evaluation":
        return lock_held(run.path / "lock")
    return not (run.path / "result.json").exists() and time.time() - _updated(run) < WRITTEN_SECONDS


def details(run: Run) -> dict[str, Any]:
    if run.kind == "evaluation":
        settings = {name: run.manifest.get(name) for name in ("command", "settings", "prices", "cells")}
        config = json.dumps(settings, indent=2, ensure_ascii=False) if run.manifest else None
        particulars = {
            "cells": [_cell(run, name, stem) for name, stem in _cells(run)],
            "steps": [],
            "results": object_in(run.path, "results.json"),
            "config": config,
        }
        versions = run.manifest.get("versions")
    else:
        steps = [(stem, found) for stem in run.files if (found := STEP.fullmatch(stem))]
        particulars = {
            "cells": [],
            "steps": [{"cell": stem, "step": int(found[2]), "kind": found[1]} for stem, found in steps],
            "results": object_in(run.path, "result.json"),
            "config": text_in(run.path, "config.yaml") or None,
        }
        versions = object_in(run.path, "versions.json")
    versions = versions if isinstance(versions, dict) else None
    return {**summary(run), **particulars, "versions": versions, "problems": run.problems}


def with_results(shown: dict[str, Any]) -> dict[str, Any]:
    """The details of an evaluation with the numbers of `results.json` in place of those of the episodes that were read."""
    results = {cell["name"]: cell for cell in shown["results"]["cells"]}
    cells = [
        {
            **cell,
            **{name: result[name] for name in ("planned", "errors", "reward", "success", "turns")},
            "episodes": result["episodes"] + result["errors"],
            "low": result["success_low"],
            "high": result["success_high"],
            "result": finite(result),
        }
        for cell in shown["cells"]
        if (result := results.get(cell["name"]))
    ]
    sums = {name: sum(cell[name] for cell in cells) for name in ("episodes", "errors")}
    return {**shown, **sums, "cells": cells, "indexing": 1.0, "headline": _headline(cells)}


def _of_evaluation(run: Run) -> dict[str, Any]:
    created, files = run.manifest.get("created"), run.files
    return {
        "created": created if isinstance(created, int | float) else _updated(run),
        "episodes": sum(file.episodes for file in files.values()),
        "errors": sum(file.failed for file in files.values()),
        "headline": None if run.indexing < 1.0 else _headline([_means(run, *file) for file in files.items()]),
        "envs": _unique(str(e.get("id", "")) for c in run.cells if isinstance(e := c.get("env"), dict)),
        "agents": _unique(map(agent_name, run.cells)),
    }


def _of_training(run: Run, records: list[dict[str, Any]]) -> dict[str, Any]:
    played = [r for r in records if r.get("kind") in ("eval", "train")]
    headline = None
    if last := next((r for r in reversed(played) if r.get("kind") == "eval"), None):
        numbers = {"value": last.get("success"), "low": last.get("low"), "high": last.get("high")}
        headline = {"label": f"success at step {last.get('step')}", **finite(numbers)}
    env = _ENV_ID.search(text_in(run.path, "config.yaml"))
    return {
        "created": newest([run.path / "config.yaml"]),
        "episodes": sum(_count(r, "episodes") + _count(r, "failed") for r in played),
        "errors": sum(_count(r, "failed") for r in played),
        "headline": headline,
        "envs": [env[1].strip("'\"")] if env else [],
        "agents": ["policy"],
    }


def _count(record: dict[str, Any], name: str) -> int:
    value = record.get(name)
    return int(value) if isinstance(value, int) else 0


def _updated(run: Run) -> float:
    own = ("run.json", "results.json", "config.yaml", "metrics.jsonl")
    return newest([*(run.path / name for name in own), *(file.path for file in run.files.values())])


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name for name in names if name))


def _headline(cells: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The success of one cell with its interval, or the mean over several cells."""
    cells = [cell for cell in cells if cell["success"] is not None]
    if not cells:
        return None
    if len(cells) == 1:
        return {"label": "success", "value": cells[0]["success"], "low": cells[0]["low"], "high": cells[0]["high"]}
    mean = sum(cell["success"] for cell in cells) / len(cells)
    return {"label": f"success, mean of {len(cells)} cells", "value": mean, "low": None, "high": None}


def _means(run: Run, stem: str, file: EpisodeFile | None) -> dict[str, float | None]:
    """The means of a file's episodes, updated when it has grown; empty during the first read."""
    if file is None or file.share < 1.0:
        return means_of([])
    state, known = (file.generation, len(file.rows)), run.made.get(("means", stem))
    if known is None or known[0] != state:
        known = run.made["means", stem] = (state, means_of(list(file.rows)))
    return known[1]


def _cells(run: Run) -> list[tuple[str, str]]:
    """Names of the cells and of their files: those of `run.json`, then files that it does not name."""
    planned = [(str(c.get("name", "")), Path(str(c.get("file", ""))).stem) for c in run.cells]
    stems = {stem for _, stem in planned}
    return planned + [(file.name, stem) for stem, file in run.files.items() if stem not in stems]


def _cell(run: Run, name: str, stem: str) -> dict[str, Any]:
    cell, file = run.cell(name), run.files.get(stem)
    env = cell.get("env")
    tasks, k = cell.get("tasks", cell.get("n")), cell.get("k")
    known = {
        "name": name,
        "env": str(env.get("id", "")) if isinstance(env, dict) else "",
        "agent": agent_name(cell),
        "split": str(cell.get("split", "")),
        "planned": tasks * k if isinstance(tasks, int) and isinstance(k, int) else None,
        "episodes": file.episodes if file else 0,
        "errors": file.failed if file else 0,
    }
    samples = k if isinstance(k, int) and k > 0 else 1
    return {**known, **_means(run, stem, file), "result": _result(run, stem, file, known, samples)}


def _result(run: Run, stem: str, file: EpisodeFile | None, cell: dict[str, Any], samples: int) -> dict[str, Any] | None:
    """The entry of `results.json` for a cell as of now; None while its file is being read, or without episodes.

    Of a live run with thousands of episodes it may be of up to 2% fewer than there are: to make it takes up to a second.
    """
    if file is None or not file.rows or file.share < 1.0:
        return None
    state, known = (file.generation, len(file.rows)), run.made.get(("result", stem))
    generation, rows = known[0] if known else (-1, 0)
    near = generation == file.generation and len(file.rows) - rows <= rows // 50
    if known is None or (known[0] != state and not (near and is_live(run))):
        names = {name: cell[name] for name in ("env", "agent", "split", "planned")}
        result = {**result_of(list(file.rows), samples=samples, **names).to_json(), "name": cell["name"]}
        known = run.made["result", stem] = (state, finite(result))
    return known[1]
