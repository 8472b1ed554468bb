"""`agent-train replay RUN step=N`: trains steps of a run again, from a checkpoint before them and their episodes.

No engine and no environment is started, and the run's folder is only read. With the run's own settings, ranks and packages the
weights are the same to the last bit. Nothing heavy is imported before all has been looked at.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, nullcontext
from pathlib import Path
from typing import Any

from agent_train.cluster.placement import own_ray_cpus
from agent_train.cluster.ray_cluster import start_ray
from agent_train.config.combinations import wrong_combinations, wrong_learner
from agent_train.config.compose import compose
from agent_train.config.schema import Config, ConfigError, get, settings
from agent_train.config.validation import wrong_values
from agent_train.learner.role_start import learning, start_models
from agent_train.learner.roles import roles_of
from agent_train.report.metrics import OF_FAILURES, Clock, Record, read_metrics
from agent_train.rollout.ahead import Rollout
from agent_train.rollout.draws import surplus_of
from agent_train.trainer.checkpoint import Checkpoint, Progress, newest_before
from agent_train.trainer.resume import resume_command
from agent_train.trainer.run_folder import RunFolder, step_of
from agent_train.weights.sync import checksum_of_all, checksum_of_policies
from agentgym.core.trajectory import Group, read_jsonl
from agentgym.storage.jsonl import finite

# The other settings made the episodes, which are as they are.
MAY_DIFFER = ("algorithm.", "learner.", "critic.", "reference.", "reward_model.", "teacher.", "trainer.steps")
WEIGHTS = "weights_checksum"
SHOWN = (
    *(WEIGHTS, "advantage_mean", "advantage_std", "kl_coef", "critic.loss", "prm.loss"),
    *(f"update.{name}" for name in ("loss", "kl_k3", "kl_reference", "grad_norm", "clip_fraction", "entropy")),
)


def replay(words: Sequence[str]) -> int:
    """Train steps again, and print how they compare. `words` are the run's folder, `step=N`, perhaps `through=M`, and settings.

    Returns the exit code: 0 replayed, equal or not, 1 failed. Raises ConfigError for what cannot be replayed.
    """
    if not words or "=" in words[0]:
        raise ConfigError("replay: names no run: write agent-train replay RUN step=12")
    run = RunFolder(Path(words[0]).expanduser().absolute())
    asked, overrides = _asked(words[1:])
    recorded, config = _settings(run, overrides)
    records = {record["step"]: record for record in read_metrics(run.metrics) if record["kind"] == "train"}
    checkpoint = _checkpoint(run, asked, records)
    for step in range(checkpoint.step + 1, asked.stop):
        rollout_of(run, recorded, records[step])
    from agent_train.trainer.run import FAILURES

    changed = [key for key in settings() if get(config, key) != get(recorded, key)]
    told = ", ".join(f"{key}={get(config, key)} ({get(recorded, key)} there)" for key in changed)
    print(f"from {checkpoint.path.name} of {run.name}, with {told or 'its own settings'}", flush=True)
    try:
        asyncio.run(_train_again(run, recorded, config, checkpoint, records, asked))
    except FAILURES as failure:
        print(f"agent-train: error: {failure}", file=sys.stderr)
        return 1
    return 0


def _asked(words: Sequence[str]) -> tuple[range, list[str]]:
    """The steps and the settings of a command line."""
    steps: dict[str, int] = {}
    overrides = []
    for word in words:
        key, _, value = word.partition("=")
        if key in ("step", "through") and value.isdecimal():
            steps[key] = int(value)
        elif key.startswith(MAY_DIFFER) and key != "algorithm.group_size":
            overrides.append(word)
        else:
            keys = ", ".join(f"{name}*" if name.endswith(".") else name for name in MAY_DIFFER)
            raise ConfigError(f"{word}: a replay takes step=N, through=M, and settings of learning alone: {keys}")
    if "step" not in steps:
        raise ConfigError("replay: names no step: write agent-train replay RUN step=12")
    asked = range(steps["step"], steps.get("through", steps["step"]) + 1)
    if not asked:
        raise ConfigError(f"through={steps['through']}: comes before step={asked.start}")
    return asked, overrides


def _settings(run: RunFolder, overrides: Sequence[str]) -> tuple[Config, Config]:
    """The settings of the run, and those of the replay."""
    if not run.config.is_file() or not run.metrics.is_file():
        raise ConfigError(f"{run.path}: no run that trained: it has no config.yaml or no metrics.jsonl")
    recorded, config = (compose([resume_command(run)[1], *more]) for more in ([], overrides))
    if recorded.mode != "rl":
        raise ConfigError(f"{run.path}: its mode={recorded.mode} has no episodes: a replay is of mode=rl")
    problems = [*wrong_values(config), *wrong_learner(config), *wrong_combinations(config)]
    if new := [role for role in roles_of(config) if role not in roles_of(recorded)]:
        problems.append(f"{' '.join(overrides)}: asks for a {new[0]}, which the run did not have")
    if overrides and not problems:
        from agent_train.config.trial import wrong_formulas

        problems = list(wrong_formulas(config))
    if problems:
        raise ConfigError(*problems)
    return recorded, config


def _checkpoint(run: RunFolder, asked: range, records: Mapping[int, Record]) -> Checkpoint:
    checkpoint = newest_before(run, asked.start)
    again = range(asked.start if checkpoint is None else checkpoint.step + 1, asked.stop)
    if missing := [step for step in (*asked, *again) if step not in records]:
        raise ConfigError(
            f"step={missing[0]}: {run.metrics} has steps up to {max(records, default=0)}, and not this one"
        )
    if checkpoint is None:
        saved = [step_of(path) for path in run.saved_checkpoints()]
        raise ConfigError(
            f"step={asked.start}: {run.checkpoints} has no whole checkpoint before it, but those of steps {saved}: "
            f"replay a later step; trainer.dump=[{asked.start}] would have kept one"
        )
    return checkpoint


def rollout_of(run: RunFolder, recorded: Config, record: Record) -> Rollout:
    """The episodes that a step of a run was trained on, from its files. Raises ConfigError if they are not whole."""
    step, played, size = record["step"], record["episodes"] + record["failed"], recorded.algorithm.group_size
    path, greedy = run.episodes("train", step), run.episodes("greedy", step)
    try:
        found = list(read_jsonl(path))
        alone = list(read_jsonl(greedy)) if greedy.exists() else []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"step={step}: its episodes cannot be read: {error}") from error
    if len(found) != played:
        raise ConfigError(f"step={step}: {path} has {len(found)} of its {played} episodes")
    groups = [Group(found[n].task_id, found[n : n + size]) for n in range(0, played, size)]
    return Rollout(groups, alone, record["selection"]["rounds"])


async def _train_again(
    run: RunFolder,
    recorded: Config,
    config: Config,
    checkpoint: Checkpoint,
    records: Mapping[int, Record],
    asked: range,
) -> None:
    """Train from the checkpoint through the last step that is `asked` for; print a line for each step, and a table for those."""
    from agent_train.trainer.following import reset_before, restore_reference
    from agent_train.trainer.loop import model_folder
    from agent_train.trainer.rl import left_by, train_on

    model_dir, progress = model_folder(config, run), checkpoint.progress
    if config.algorithm.kl.coef != recorded.algorithm.kl.coef:
        progress = dataclasses.replace(progress, kl_coef=config.algorithm.kl.coef)
    async with AsyncExitStack() as stack:
        await start_ray(own_ray_cpus(config), stack)
        models = await start_models(config, model_dir, run.start if run.start.is_dir() else model_dir, stack)
        loading = (each.load_state(checkpoint.state(each.name)) for each in learning(config, models))
        await asyncio.gather(*loading)

        async def checksum(_: Progress) -> int:
            return checksum_of_policies([checksum_of_all(await each.checksums()) for each in models.policies])

        carried = surplus_of(checkpoint.tasks())
        for step in range(checkpoint.step + 1, asked.stop):
            if step == checkpoint.step + 1 or step - 1 == reset_before(config, step - 1):
                await restore_reference(config, run, models, step - 1)
            rollout = dataclasses.replace(rollout_of(run, recorded, records[step]), carried=carried)
            carried = left_by(config, rollout, step - 1)
            progress, metrics = await train_on(config, models, progress, rollout, Clock(), nullcontext(), checksum)
            replayed = json.loads(json.dumps(finite(dataclasses.asdict(metrics))))
            print("\n".join(compared(records[step], replayed, step in asked)), flush=True)


def compared(recorded: Record, replayed: Record, table: bool) -> Iterator[str]:
    """Lines for people: whether a step gave the same weights as before, and a table of the main numbers and of all that differ."""
    before, now = dict(numbers(recorded)), dict(numbers(replayed))
    other = [name for name in now if before.get(name) != now[name]]
    same = "other weights" if WEIGHTS in other else "the same weights, bit for bit"
    yield f"step {recorded['step']}: {same}" + (f"; {len(other)} of {len(now)} numbers differ" if other else "")
    if table:
        yield f"  {'':<28}{'recorded':>24}{'replayed':>24}"
    for name, new in now.items() if table else ():
        if name in other or (name in SHOWN and new is not None):
            old = before.get(name)
            by = "" if name not in other or name == WEIGHTS or None in (old, new) else f"  {new - old:+.3g}"
            yield f"  {name:<28}{old!s:>24}{new!s:>24}{by}"


def numbers(record: Record, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The fields of a record except times and failures, by dotted names."""
    for name, value in record.items():
        if isinstance(value, dict):
            yield from numbers(value, f"{prefix}{name}.")
        elif name not in OF_FAILURES | {"kind", "elapsed", "tokens_per_second"} and not name.endswith("seconds"):
            yield prefix + name, value
