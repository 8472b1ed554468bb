"""The table of `agent-train plan`: for each number of GPUs the best split between learner and engine, and what it costs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agent_train.cluster.placement import past_servers
from agent_train.config.compose import compose, config_folder
from agent_train.config.model_folder import COUNTED, ModelShape, shape_of
from agent_train.config.schema import Config, ConfigError, get
from agent_train.config.validation import wrong_values
from agent_train.learner.roles import own_players
from agent_train.plan import formulas
from agent_train.plan.formulas import Assumptions, LearnerTime

MEASURED, DERIVED = "measured", "derived"  # against a small case, in the tests; from assumptions
# The formulas know these values only.
NEEDED = {
    "mode": "rl",
    "engine.name": "vllm",
    "engine.placement": "own",
    "learner.offload": False,
    "learner.optimizer": "adamw",
    "learner.placement": "shared",
    "learner.tensor_parallel": 1,
    "learner.sequence_parallel": 1,
    "learner.shared_prefix": False,
}


@dataclass(frozen=True)
class Split:
    """So many ranks and servers, and the seconds of a training step."""

    ranks: int
    servers: int
    at_once: int  # episodes on a server
    learner: LearnerTime
    rollout: float
    sync: float

    @property
    def in_turns(self) -> float:
        return self.learner.seconds + self.rollout + self.sync

    @property
    def overlapped(self) -> float:
        """Seconds of a step with `trainer.staleness` of 1 or more."""
        return max(self.learner.seconds, self.rollout) + self.sync


def sizes() -> list[str]:
    """The models that a plan knows by their size."""
    return sorted((path.name for path in (config_folder() / "shapes").iterdir()), key=lambda name: float(name[:-1]))


def scaling_table(size: str | None, gpus: Sequence[int], settings: Sequence[str], given: Assumptions) -> str:
    """The text that the command prints. ConfigError for settings that a run or the formulas refuse."""
    if size is not None:
        settings = [*settings, f"model.path='{config_folder() / 'shapes' / size}'"]
    config = compose(settings, gpu=True)
    shape = _checked(config, given)
    splits = {count: best_split(shape, config, given, count) for count in gpus}
    name = size or Path(str(config.model.path)).name
    read = shape.parameters - shape.layers * (shape.matrices(shape.experts) - shape.matrices(shape.experts_read))
    lines = [
        f"{name}: {shape.parameters:,} parameters, of which a token reads {read:,}",
        f"a step: {formulas.episodes_of(config):,} episodes that read {given.read:,} tokens and sample {given.sampled:,}",
    ]
    cells = [
        ("GPUs", *(f"{count:,}" for count in gpus), ""),
        *((label, *row, how) for label, row, how in _rows(shape, config, given, splits)),
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for label, *row in cells:
        numbers = "  ".join(f"{cell:>{width}}" for cell, width in zip(row[:-1], widths[1:], strict=False))
        lines.append(f"{label:<{widths[0]}}  {numbers}  {row[-1]}".rstrip())
    return "\n".join(lines)


def best_split(shape: ModelShape, config: Config, given: Assumptions, gpus: int) -> Split | None:
    """The split with the shortest step that fits into memory; None if none does. One GPU is shared by a rank and a server."""
    share, parts = 0.5 if gpus == 1 else 1.0, config.engine.tensor_parallel
    at_once = formulas.fits_at_once(shape, config, given, share)
    taken = config.engine.gpu_memory_utilization * share * given.memory if gpus == 1 else 0.0
    found = []
    for servers in range(1, gpus // parts + 1):
        ranks = 1 if gpus == 1 else gpus - servers * parts
        if ranks < 1 or not at_once:
            continue
        if sum(formulas.rank_bytes(shape, config, ranks).values()) > 1e9 * (given.memory - given.reserve - taken):
            continue
        rollout = formulas.rollout_seconds(shape, config, given, servers, at_once)
        sync = formulas.sync_seconds(shape, config, given, ranks, gpus)
        learner = formulas.learner_time(shape, config, given, ranks)
        found.append(Split(ranks, servers, at_once, learner, rollout, sync))
    return min(found, key=lambda split: (split.overlapped, split.in_turns), default=None)


def _rows(
    shape: ModelShape, config: Config, given: Assumptions, splits: Mapping[int, Split | None]
) -> Iterator[tuple[str, list[str], str]]:
    """Label, a cell for each number of GPUs, and how the numbers were found."""

    def row(label: str, how: str, number: Callable[[Split], float | str]) -> tuple[str, list[str], str]:
        return label, [_cell(number(split)) if split else "-" for split in splits.values()], how

    element, parts = formulas.ELEMENT[config.model.dtype], config.engine.tensor_parallel
    yield "learner.workers", [str(split.ranks) if split else "does not fit" for split in splits.values()], DERIVED
    yield row("engine.replicas", DERIVED, lambda split: split.servers)
    memory = {split: formulas.rank_bytes(shape, config, split.ranks) for split in splits.values() if split}
    yield row("rank, weights, gradients, averages, GB", MEASURED, lambda split: memory[split]["states"] / 1e9)
    yield row("rank, gathered by FSDP, GB", DERIVED, lambda split: memory[split]["gathered"] / 1e9)
    yield row("rank, activations, GB", MEASURED, lambda split: memory[split]["activations"] / 1e9)
    yield row("rank, logits and the head's gradient, GB", DERIVED, lambda split: memory[split]["head"] / 1e9)
    yield row("rank, at most, GB", MEASURED, lambda split: sum(memory[split].values()) / 1e9)
    yield row("server, weights, GB", MEASURED, lambda _: element * shape.parameters / 1e9)
    yield row(
        "server, a token's keys and values, KB", MEASURED, lambda _: formulas.kv_bytes(shape, element, parts) / 1e3
    )
    yield row("server, episodes at once", DERIVED, lambda split: split.at_once)
    yield row("learner, micro-batches of a rank", DERIVED, lambda split: split.learner.micro_batches)
    yield row("learner, sent by a rank, GB", MEASURED, lambda split: split.learner.traffic / 1e9)
    yield row("learner, computing, s", DERIVED, lambda split: split.learner.compute)
    yield row("learner, sending, s", DERIVED, lambda split: split.learner.link)
    yield row("engine, rollout, s", DERIVED, lambda split: split.rollout)
    yield row("weights to a server, GB", MEASURED, lambda _: formulas.sync_bytes(shape, config) / 1e9)
    yield row("weights to all servers, s", DERIVED, lambda split: split.sync)
    yield row("step in turns, s", DERIVED, lambda split: split.in_turns)
    yield row("step with staleness, s", DERIVED, lambda split: split.overlapped)
    yield row("steps an hour with staleness", DERIVED, lambda split: 3600 / split.overlapped)
    yield row("learner waits", DERIVED, lambda split: f"{1 - split.learner.seconds / split.overlapped:.0%}")
    yield row("engine waits", DERIVED, lambda split: f"{1 - split.rollout / split.overlapped:.0%}")


def _cell(number: float | str) -> str:
    """A number with about three digits."""
    if isinstance(number, str):
        return number
    if number >= 100 or number == int(number):
        return f"{number:,.0f}"
    return f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def _checked(config: Config, given: Assumptions) -> ModelShape:
    problems = list(wrong_values(config))
    wrong = [(key, value) for key, value in NEEDED.items() if get(config, key) != value]
    problems += [f"{key}={get(config, key)}: a plan knows {key}={value} only" for key, value in wrong]
    if own_players(config):
        problems.append("env.players: a plan knows one policy that learns: leave the players with their own out")
    if past_servers(config):
        problems.append("env.players: a plan knows no server of past policies: leave it out, and count one more server")
    if given.read + given.sampled > config.engine.max_model_len:
        longest = f"engine.max_model_len={config.engine.max_model_len}"
        problems.append(
            f"episodes of {given.read + given.sampled:,} tokens do not fit {longest}: raise it, or lower --read or --sampled"
        )
    shape = shape_of(config.model.path) if config.model.path else None
    if shape is None or shape.kind not in COUNTED:
        path = f"model.path={config.model.path}"
        problems.append(f"{path}: a plan needs the config.json of one of {', '.join(COUNTED)}, or --model SIZE")
    else:
        if shape.heads % config.engine.tensor_parallel:
            problems.append(
                f"engine.tensor_parallel={config.engine.tensor_parallel}: must divide the {shape.heads} attention heads of the model"
            )
        try:
            formulas.adapter_parameters(shape, config)
        except ValueError as error:
            problems.append(str(error))
    if problems or shape is None:
        raise ConfigError(*problems)
    return shape
