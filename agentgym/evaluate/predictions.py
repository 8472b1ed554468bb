"""Patches of an evaluation as predictions, in the form that SWE-bench's own harness takes.

An episode that ends in a patch has it, a git diff, as `model_patch` in the `info` of its last step; the id of its task is
that of the instance. It is a convention of environments, and one of them need not be installed here.
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentgym.core.trajectory import Trajectory
from agentgym.evaluate.store import cells_of, effective, read_run
from agentgym.storage.files import write_json

KEY = "model_patch"
_STORED = f'"{KEY}": '.encode()  # in a text its quotes would have backslashes


def write_predictions(out: Path) -> list[Path]:
    """Write `preds.json` into a run folder whose episodes end in patches; of another one, nothing.

    With several cells or samples of a task, which the harness cannot tell apart, a file each: `preds/CELL-SAMPLE.json`. Failed
    episodes are left out. One that ended without a patch has the empty one.

    Returns the files. Raises OSError if one cannot be written.
    """
    found: dict[str, dict[str, Any]] = {}
    for cell, file in cells_of(out, read_run(out)):
        if not _has_patches(file):
            continue
        for episode in effective(file):
            if not episode.failed:
                of_file = found.setdefault(f"{file.stem}-{episode.sample}", {})
                of_file[episode.task_id] = _prediction(episode, cell.agent.name)
    if not found:
        return []
    if len(found) == 1:
        files: Mapping[Path, dict[str, Any]] = {out / "preds.json": next(iter(found.values()))}
    else:
        (out / "preds.json").unlink(missing_ok=True)  # of an earlier start, with fewer samples
        (out / "preds").mkdir(exist_ok=True)
        files = {out / "preds" / f"{name}.json": predictions for name, predictions in found.items()}
    for path, predictions in files.items():
        write_json(path, dict(sorted(predictions.items())))
    return list(files)


def _prediction(episode: Trajectory, model: str) -> dict[str, str]:
    patch = episode.turns[-1].info.get(KEY) if episode.turns else None
    return {
        "instance_id": episode.task_id,
        "model_name_or_path": model,
        "model_patch": patch if isinstance(patch, str) else "",
    }


def _has_patches(file: Path) -> bool:
    """True if an episode of a file may have a patch. The JSON is not parsed: files are large, and most have no patch."""
    with contextlib.suppress(FileNotFoundError), file.open("rb") as lines:
        return any(_STORED in line for line in lines)
    return False
