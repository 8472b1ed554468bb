"""Chooses the folder of a run: a new one, or one to resume.

A run continues from its newest whole checkpoint. Later files are moved aside, to names that end in `.before-resume-N`, so
that the files read as those of an undisturbed run; later turns stay, and are played again. Nothing here imports torch.
"""

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString

from agent_train.config.compose import config_from_yaml, to_yaml
from agent_train.config.schema import Config, ConfigError, get, settings
from agent_train.report.metrics import record_of
from agent_train.trainer.checkpoint import REPLACED, Checkpoint, OtherVersionError, newest_whole
from agent_train.trainer.run_folder import RunFolder, run_name, step_of, versions
from agentgym.storage.files import write_json, write_text
from agentgym.storage.locks import hold, lock_held

# A resumed run may change how long, how often, where and how fast it works, but not what is learned from what.
MAY_CHANGE = (
    *("trainer.name", "trainer.runs_dir", "trainer.resume", "trainer.record"),
    *("trainer.steps", "trainer.eval_every", "trainer.save_every", "trainer.keep_checkpoints"),
    *("trainer.dump", "trainer.restarts", "trainer.trackers"),
    *("learner.workers", "learner.tensor_parallel", "learner.sequence_parallel", "learner.timeout"),
    *("learner.microbatch_tokens", "learner.head_chunk", "learner.vocab_chunk", "learner.gradient_checkpointing"),
    *("learner.offload", "learner.compile", "learner.shared_prefix", "learner.placement"),
    *("engine.port", "engine.replicas", "engine.tensor_parallel", "engine.max_concurrent", "engine.batch_wait"),
    *("engine.kv_cache_bytes", "engine.gpu_memory_utilization", "engine.start_timeout", "engine.request_timeout"),
    *("engine.weights", "engine.adaptive", "engine.placement", "engine.urls"),
    *("sandbox", "env.url", "env.placement", "env.workers", "env.cpus", "env.step_timeout"),
)
MAY_MOVE = ("judge.url", "teacher.url")  # endpoints, which may neither come nor go
_OWN = frozenset({"lock", "trajectories", "checkpoints", "logs", "turns"})
_STEP_FILE = re.compile(r"(?:\w+)-(\d{6,})\.jsonl")
_ASIDE = ".before-resume-"
_ASIDE_NUMBER = re.compile(re.escape(_ASIDE) + r"(\d+)$")


@dataclass(frozen=True)
class OpenRun:
    """A run folder that only this process writes."""

    folder: RunFolder
    checkpoint: Checkpoint | None  # where the run continues; None: at the beginning
    told: list[str]  # lines for people
    lock: int  # the descriptor that holds the folder's lock until this process ends


def run_path(config: Config) -> Path:
    """The absolute path of the run folder that the settings name."""
    trainer = config.trainer
    if trainer.resume not in ("auto", "never"):
        return Path(trainer.resume).expanduser().absolute()
    return Path(trainer.runs_dir).expanduser().absolute() / (trainer.name or run_name(config))


def refusals(config: Config) -> Iterator[str]:
    """The reasons why the folder of the settings cannot be written or resumed, a line each. Changes nothing."""
    path, trainer = run_path(config), config.trainer
    by_path = trainer.resume not in ("auto", "never")
    key = f"trainer.resume={trainer.resume}" if by_path else f"trainer.name={path.name}"
    run = RunFolder(path)
    if not run.config.is_file():
        if by_path:
            yield f"{key}: no run to go on with there: no config.yaml"
        elif path.is_dir() and any(e.name not in _OWN or (e.is_dir() and any(e.iterdir())) for e in path.iterdir()):
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
    newest = run.latest_checkpoint() or next(reversed(run.saved_checkpoints()), None)
    step = step_of(newest) if newest else 0
    if (run.path / "result.json").is_file() and step >= trainer.steps:
        yield f"{key}: {path} already holds a run that is done with {step} steps: choose another name, or a larger trainer.steps"


def open_run(config: Config, command: Sequence[str] = ()) -> OpenRun:
    """Take the folder that the settings name for this process, with the state that the run continues from."""
    if problems := list(refusals(config)):
        raise ConfigError(*problems)
    run = RunFolder(run_path(config))
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        lock = hold(run.path)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    except OSError as error:  # of a file system without locks it names no file
        why = f"{run.path}: cannot be written ({error.strerror}): choose another trainer.runs_dir"
        raise OSError(why) from error
    if not run.config.is_file():
        run.write_settings(config, command)
        return OpenRun(run, None, [], lock)
    run.make_folders()
    try:
        return go_back(OpenRun(run, None, [], lock), config, command)
    except ConfigError:
        os.close(lock)
        raise


def go_back(opened: OpenRun, config: Config, command: Sequence[str], lost: str | None = None) -> OpenRun:
    """The run at its newest whole checkpoint, with what it wrote later set aside. `lost`: the part that it lost, if it did not end."""
    run = opened.folder
    try:
        checkpoint, torn = newest_whole(run)
    except OtherVersionError as error:
        instead = "resume it with that version, which versions.json names, or start a new run from it by model.path"
        raise ConfigError(f"{error}: another version of agentgym wrote it: {instead}") from error
    if config.mode == "rl" and checkpoint is not None and checkpoint.step > config.trainer.steps:
        raise ConfigError(
            f"trainer.steps={config.trainer.steps}: {run.path} is at step {checkpoint.step} already: take more steps"
        )
    # A crash may leave an unfinished copy, whose name goes on.
    aside = (_ASIDE_NUMBER.search(path.name) for path in run.path.rglob(f"*{_ASIDE}*"))
    number = 1 + max((int(found[1]) for found in aside if found), default=0)
    cut = _set_aside(run, checkpoint, number)
    resumed = {"step": checkpoint.step if checkpoint else None, "lost": lost, **versions(command)}
    _write_settings_again(run, config, resumed, number)
    where = f"from step {checkpoint.step}" if checkpoint else "from the beginning: it has no whole checkpoint"
    told = f"{lost + '; ' if lost else ''}going on with {run.path.name} {where}"
    return replace(opened, checkpoint=checkpoint, told=[*map(str, torn), *cut, told])


def resume_command(run: RunFolder) -> list[str]:
    path = str(run.path)
    if not re.fullmatch(r"[\w./-]+", path):
        path = QuotedString(path, quote=Quote.single).with_quotes()
    return ["agent-train", f"trainer.resume={path}"]


def _differences(config: Config, run: RunFolder, key: str) -> Iterator[str]:
    try:
        old = config_from_yaml(run.config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # a ConfigError is one, and so is what is no UTF-8
        yield f"{key}: the settings of the run there cannot be read: {error}"
        return
    # Which optimizer step a sample belongs to follows from shared prefixes.
    fixed = {"learner.shared_prefix"} if config.algorithm.updates_per_step > 1 else set()
    moved = {name for name in MAY_MOVE if get(old, name) and get(config, name)}
    kept = (name for name in settings() if name in fixed or name not in {*MAY_CHANGE, *moved})
    if differing := [name for name in kept if get(old, name) != get(config, name)]:
        told = ", ".join(f"{name} ({get(old, name)} there, {get(config, name)} now)" for name in differing)
        yield f"{key}: {run.path} already holds a run with other settings: {told}: take the same ones, or choose another name"


def _wrong_latest(run: RunFolder) -> str | None:
    """The reason why `checkpoints/latest` is invalid: it names no checkpoint, or a missing one."""
    named, saved = run.named_latest(), run.saved_checkpoints()
    # One that was being replaced when the machine stopped gets its name back when the run is opened.
    if named is None or named in [path.name for path in saved] or (run.checkpoints / f"{REPLACED}{named}").is_dir():
        return None
    what = "which is not there" if re.fullmatch(r"step-\d{6,}", named) else "which is no name of a checkpoint"
    newest = f"from the newest there, {saved[-1].name}" if saved else "from the beginning: there is no checkpoint"
    return f"{run.checkpoints / 'latest'} names {named[:40]!r}, {what}: delete that file to go on {newest}"


def _set_aside(run: RunFolder, checkpoint: Checkpoint | None, number: int) -> list[str]:
    """Move what the run wrote after the checkpoint to other names; lines for people. The next call makes good a crash in between."""
    step = checkpoint.step if checkpoint else -1
    # First, so that it never names what was moved away.
    if checkpoint is not None:
        write_text(run.checkpoints / "latest", checkpoint.path.name + "\n")
    else:
        (run.checkpoints / "latest").unlink(missing_ok=True)
    later = [
        path
        for path in sorted(run.trajectories.iterdir())
        if (named := _STEP_FILE.fullmatch(path.name)) and int(named[1]) > step
    ]
    later += [path for path in run.saved_checkpoints() if step_of(path) > step]
    later += [path for path in (run.path / "result.json", *([] if checkpoint else [run.start])) if path.exists()]
    for path in later:
        path.rename(path.with_name(f"{path.name}{_ASIDE}{number}"))
    return _cut(run.metrics, checkpoint.metrics_bytes if checkpoint else 0, number)


def _cut(metrics: Path, size: int, number: int) -> list[str]:
    """Move what follows `size` bytes of a file, and earlier lines that are no records, into another one; lines for people."""
    whole = metrics.read_bytes() if metrics.is_file() else b""
    lines = whole[:size].splitlines(keepends=True)
    broken = [line for line in lines if record_of(line) is None]
    kept = b"".join(line.rstrip(b"\n") + b"\n" for line in lines if record_of(line) is not None)
    rest = metrics.with_name(f"{metrics.name}{_ASIDE}{number}")
    if kept != whole:
        write_text(rest, b"".join([*broken, whole[size:]]).decode("utf-8", errors="replace"))
        write_text(metrics, kept.decode())
    told = [f"{metrics.name}: {len(broken)} of its lines were no records: they are in {rest.name}"] if broken else []
    if len(kept) < size:
        told.append(f"{metrics.name}: {size - len(kept)} of the {size} bytes that it had at the checkpoint are lost")
    return told


def _write_settings_again(run: RunFolder, config: Config, resumed: dict[str, Any], number: int) -> None:
    """The settings as they are now, and in `versions.json` that the run was resumed, by what and where."""
    text, old = to_yaml(config), run.config.read_text(encoding="utf-8")
    if old != text:
        write_text(run.config.with_name(f"{run.config.name}{_ASIDE}{number}"), old)
        write_text(run.config, text)
    try:
        before = json.loads(run.versions.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # it is written after the settings
        before = versions(resumed["command"])
    write_json(run.versions, {**before, "resumed": [*before.get("resumed", []), resumed]})
