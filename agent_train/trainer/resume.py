"""Chooses the folder of a run: a new one, or one to resume.

`trainer.resume` auto goes on with the run of that name, never refuses it, a path goes on with that folder. A run goes on from its
newest whole checkpoint. What it wrote after that is moved aside, to names that end in `.before-resume-N`, so that the files
read as those of a run that nobody disturbed. Nothing here imports torch.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString

from agent_train.config.compose import config_from_yaml, to_yaml
from agent_train.config.keys import get, settings
from agent_train.config.schema import Config, ConfigError
from agent_train.report.metrics import record_of
from agent_train.trainer.checkpoint import REPLACED, Checkpoint, newest_whole
from agent_train.trainer.run_folder import RunFolder, run_name, versions
from agentgym.storage.files import write_json, write_text
from agentgym.storage.locks import hold, lock_held

# What may be another when a run goes on: how long, how often, where and how fast, but not what is learned from what.
MAY_CHANGE = (
    *("trainer.name", "trainer.runs_dir", "trainer.resume", "trainer.record"),
    *("trainer.steps", "trainer.eval_every", "trainer.save_every", "trainer.keep_checkpoints"),
    *(
        "learner.workers",
        "learner.tensor_parallel",
        "learner.sequence_parallel",
        "learner.timeout",
        "learner.placement",
    ),
    *("learner.microbatch_tokens", "learner.head_chunk", "learner.vocab_chunk", "learner.gradient_checkpointing"),
    *("learner.offload", "learner.compile", "learner.shared_prefix"),
    *(
        "engine.port",
        "engine.replicas",
        "engine.tensor_parallel",
        "engine.max_concurrent",
        "engine.batch_wait",
        "engine.kv_cache_bytes",
    ),
    *("engine.gpu_memory_utilization", "engine.start_timeout", "engine.request_timeout"),
    *("sandbox", "env.url", "env.placement", "env.workers", "env.cpus", "env.step_timeout"),
)
_OWN = frozenset({"lock", "trajectories", "checkpoints", "logs"})
_STEP_FILE = re.compile(r"(?:\w+)-(\d{6,})\.jsonl")
_ASIDE = ".before-resume-"


@dataclass(frozen=True)
class OpenRun:
    """A run folder that this process alone writes.

    Attributes:
        folder: its paths.
        checkpoint: where the run goes on; None where it starts from the beginning.
        told: what was found that people should know, a line each.
        lock: the descriptor that holds the folder's lock until this process ends.
    """

    folder: RunFolder
    checkpoint: Checkpoint | None
    told: list[str]
    lock: int


def run_path(config: Config) -> Path:
    """The absolute path of the run folder that the settings name."""
    trainer = config.trainer
    if trainer.resume not in ("auto", "never"):
        return Path(trainer.resume).expanduser().absolute()
    return Path(trainer.runs_dir).expanduser().absolute() / (trainer.name or run_name(config))


def refusals(config: Config) -> Iterator[str]:
    """The reasons why the folder of the settings cannot be written or resumed, a line each. Changes nothing."""
    path, trainer = run_path(config), config.trainer
    key = f"trainer.name={path.name}" if trainer.resume in ("auto", "never") else f"trainer.resume={trainer.resume}"
    run = RunFolder(path)
    if not run.config.is_file():
        if trainer.resume not in ("auto", "never"):
            yield f"{key}: no run to go on with there: no config.yaml"
        elif path.is_dir() and any(_holds_something(entry) for entry in path.iterdir()):
            yield f"{key}: {path} already holds other things: choose another name or move it away"
        return
    if trainer.resume == "never":
        yield f"{key}: {path} already holds a run: choose another name or move it away; trainer.resume=auto goes on with it"
        return
    if lock_held(path / "lock"):
        writer = (path / "lock").read_text(errors="replace").strip()
        yield f"{key}: {path} already holds a run that is being written ({writer}): wait for it, or choose another name"
        return
    yield from _differences(config, run, key)
    if problem := _wrong_latest(run):
        yield f"{key}: {problem}"
        return
    if (run.path / "result.json").is_file() and (step := _last_step(run)) >= trainer.steps:
        yield f"{key}: {path} already holds a run that is done with {step} steps: choose another name, or a larger trainer.steps"


def open_run(config: Config, command: Sequence[str] = ()) -> OpenRun:
    """Take the folder that the settings name for this process, and leave in it what the run goes on from.

    Raises:
        ConfigError: as `refusals`; or the run is past `trainer.steps`.
        OSError: it cannot be written.
    """
    if problems := list(refusals(config)):
        raise ConfigError(problems)
    run = RunFolder(run_path(config))
    run.path.mkdir(parents=True, exist_ok=True)
    try:
        lock = hold(run.path)
    except ValueError as error:
        raise ConfigError([str(error)]) from error
    if not run.config.is_file():
        run.write_settings(config, command)
        return OpenRun(run, None, [], lock)
    run.make_folders()
    checkpoint, torn = newest_whole(run)
    if config.mode == "rl" and checkpoint is not None and checkpoint.step > config.trainer.steps:
        os.close(lock)
        raise ConfigError(
            [f"trainer.steps={config.trainer.steps}: {run.path} is at step {checkpoint.step} already: take more steps"]
        )
    number = _next_number(run)
    lost = _set_aside(run, checkpoint, number)
    _write_settings_again(run, config, command, checkpoint, number)
    where = f"from step {checkpoint.step}" if checkpoint else "from the beginning: it has no whole checkpoint"
    return OpenRun(run, checkpoint, [*map(str, torn), *lost, f"going on with {run.path.name} {where}"], lock)


def resume_command(run: RunFolder) -> list[str]:
    """The command that goes on with a run; its settings are in its folder."""
    path = str(run.path)
    if not re.fullmatch(r"[\w./-]+", path):
        path = QuotedString(path, quote=Quote.single).with_quotes()
    return ["agent-train", f"trainer.resume={path}"]


def _holds_something(entry: Path) -> bool:
    """True if an entry of a folder is more than what a run makes first."""
    return entry.name not in _OWN or (entry.is_dir() and any(entry.iterdir()))


def _differences(config: Config, run: RunFolder, key: str) -> Iterator[str]:
    try:
        old = config_from_yaml(run.config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # a ConfigError is one, and so is what is no UTF-8
        yield f"{key}: the settings of the run there cannot be read: {error}"
        return
    there, here = _flat(old), _flat(config)
    differing = [name for name in here if not _may_change(name, config) and there[name] != here[name]]
    if differing:
        told = ", ".join(f"{name} ({there[name]} there, {here[name]} now)" for name in differing)
        yield f"{key}: {run.path} already holds a run with other settings: {told}: take the same ones, or choose another name"


def _may_change(name: str, config: Config) -> bool:
    if name == "learner.shared_prefix" and config.algorithm.updates_per_step > 1:
        return False  # which optimizer step a row belongs to follows from it
    return name in MAY_CHANGE


def _flat(config: Config) -> dict[str, Any]:
    """Every setting by its dotted key; the kwargs of an environment are one."""
    return {key: get(config, key) for key in settings()}


def _wrong_latest(run: RunFolder) -> str | None:
    """The reason why `checkpoints/latest` is invalid: it names no checkpoint, or a missing one."""
    named, saved = run.named_latest(), run.saved_checkpoints()
    # One that was being replaced when the machine stopped gets its name back when the run is opened.
    if named is None or named in [path.name for path in saved] or (run.checkpoints / f"{REPLACED}{named}").is_dir():
        return None
    what = "which is not there" if re.fullmatch(r"step-\d{6,}", named) else "which is no name of a checkpoint"
    newest = f"from the newest there, {saved[-1].name}" if saved else "from the beginning: there is no checkpoint"
    return f"{run.checkpoints / 'latest'} names {named[:40]!r}, {what}: delete that file to go on {newest}"


def _last_step(run: RunFolder) -> int:
    newest = run.latest_checkpoint() or next(iter(run.saved_checkpoints()[::-1]), None)
    return int(newest.name.removeprefix("step-")) if newest else 0


def _next_number(run: RunFolder) -> int:
    found = [int(path.name.rpartition(_ASIDE)[2]) for path in run.path.rglob(f"*{_ASIDE}*")]
    return 1 + max(found, default=0)


def _set_aside(run: RunFolder, checkpoint: Checkpoint | None, number: int) -> list[str]:
    """Move what the run wrote after the checkpoint to other names. A crash in between is made good by the next call.

    Returns:
        What people should know of the metrics that are left, a line each.
    """
    step = checkpoint.step if checkpoint else -1
    # First, so that it never names what was moved away.
    if checkpoint is not None:
        write_text(run.checkpoints / "latest", checkpoint.path.name + "\n")
    else:
        (run.checkpoints / "latest").unlink(missing_ok=True)
    for path in sorted(run.trajectories.iterdir()):
        named = _STEP_FILE.fullmatch(path.name)
        if named and int(named[1]) > step:
            _aside(path, number)
    for path in run.saved_checkpoints():
        if int(path.name.removeprefix("step-")) > step:
            _aside(path, number)
    for path in (run.path / "result.json", *([] if checkpoint else [run.start])):
        if path.exists():
            _aside(path, number)
    return _cut(run.metrics, checkpoint.metrics_bytes if checkpoint else 0, number)


def _aside(path: Path, number: int) -> None:
    path.rename(path.with_name(f"{path.name}{_ASIDE}{number}"))


def _cut(metrics: Path, size: int, number: int) -> list[str]:
    """Move what a file has after so many bytes into another one, and the lines before that are no records. Says what was wrong.

    What is left is a new file: who reads along begins again.
    """
    whole = metrics.read_bytes() if metrics.is_file() else b""
    lines = whole[:size].splitlines(keepends=True)
    broken = [line for line in lines if record_of(line) is None]
    kept = b"".join(line.rstrip(b"\n") + b"\n" for line in lines if record_of(line) is not None)
    rest = metrics.with_name(f"{metrics.name}{_ASIDE}{number}")
    if kept != whole:
        write_text(rest, b"".join([*broken, whole[size:]]).decode("utf-8", errors="replace"))
        write_text(metrics, kept.decode())
    told = []
    if broken:
        told.append(f"{metrics.name}: {len(broken)} of its lines were no records: they are in {rest.name}")
    if len(kept) < size:
        told.append(f"{metrics.name}: {size - len(kept)} of the {size} bytes that it had at the checkpoint are lost")
    return told


def _write_settings_again(
    run: RunFolder, config: Config, command: Sequence[str], checkpoint: Checkpoint | None, number: int
) -> None:
    """The settings as they are now, and in `versions.json` that the run was resumed, by what and where."""
    text = to_yaml(config)
    if run.config.read_text(encoding="utf-8") != text:
        write_text(run.config.with_name(f"{run.config.name}{_ASIDE}{number}"), run.config.read_text(encoding="utf-8"))
        write_text(run.config, text)
    try:
        before = json.loads(run.versions.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # it is written after the settings
        before = versions(command)
    resumed = {"step": checkpoint.step if checkpoint else None, **versions(command)}
    write_json(run.versions, {**before, "resumed": [*before.get("resumed", []), resumed]})
