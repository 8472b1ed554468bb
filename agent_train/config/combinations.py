"""Checks combinations of settings. Each problem is one line: the key, the reason, and what to do. Nothing here imports torch."""

import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from agent_train.cluster.placement import visible_gpus
from agent_train.config.extensions import WHOLE_SAMPLE_LOSSES, advantages, losses
from agent_train.config.model_folder import is_tiny
from agent_train.config.schema import EXTERNAL, Config
from agent_train.learner.roles import WITH_CRITIC, has_critic, learns, own_players, roles_of, sends_adapters
from agent_train.rollout.pools import BANDS
from agent_train.trainer.offline.records import DataError, form_of, read_examples
from agentgym.agents.programs import Agent, agent_of
from agentgym.core.install import pip_install
from agentgym.gateway.upstream import Passed
from agentgym.service.client.address import is_url

CAPPED = ("tis", "sequence-is", "geometric-is")
BANDED = ("icepop", "seq-mask-tis", "sequence-mask", "geometric-mask")
# What these corrections do not use: some drop nothing, some weigh nothing.
UNREAD = dict.fromkeys(CAPPED, ("low", "high")) | dict.fromkeys(("sequence-mask", "geometric-mask"), ("cap",))
# Compared inside a group, so that one episode alone teaches nothing.
IN_GROUPS = ("rloo", "opo", "maxrl", "best_of", "reinforce_pp_baseline", "turn", "gigpo", "prime")
MAX_LORA_RANK = 512  # of vLLM
# One number for all tokens of an episode, whatever its rewards and settings; the others may differ from turn to turn.
OF_EPISODES = ("group", "rloo", "opo", "maxrl", "best_of", "reinforce_pp_baseline", "constant")
# Each sample weighs the same, or each trajectory, however long it is.
OF_SAMPLES = ("seq-mean-token-mean", "trajectory-mean")
WITHOUT_REWARDS = ("distill", "constant")
MODES = {"sft": "imitates the assistant's messages", "dpo": "prefers answers to others", "rm": "learns a reward model"}
# Learning rates that are usual for all weights of a model of this size, by mode.
TINY_RATES = (1e-4, 1e-2)
RATES = {"rl": (1e-7, 1e-5), "sft": (1e-6, 1e-4), "dpo": (5e-8, 1e-5), "rm": (1e-6, 1e-4)}
ADAPTERS = 100.0  # factor of the usual range's upper end for adapters
SHORT, LONG = 64, 256  # tokens: too short an answer for an instruct model, too long a one for a tiny model


def wrong_combinations(config: Config) -> Iterator[str]:
    """Problems of the settings of the algorithm and its roles, taken together. `trial` tries the formulas themselves."""
    yield from _wrong_loss(config)
    yield from _wrong_advantage(config)
    yield from _wrong_rewards(config)
    yield from _wrong_roles(config)
    yield from _wrong_teacher(config)
    yield from _wrong_judge(config)
    if min(config.trainer.dump, default=1) < 1:
        yield f"trainer.dump={config.trainer.dump}: steps are numbered from 1"
    yield from _wrong_pools(config)
    yield from _wrong_memory(config)
    yield from _wrong_agent(config)
    yield from _wrong_servers(config)


def _wrong_loss(config: Config) -> Iterator[str]:
    algorithm, advantage, correction = config.algorithm, config.algorithm.advantage.name, config.algorithm.correction
    for name, value in algorithm.loss_settings.items():
        if algorithm.loss in losses.shipped and isinstance(value, int | float) and value < 0:
            yield f"algorithm.loss_settings.{name}={value}: must be a number of 0 or more"
    if correction.name in CAPPED and correction.cap is None:
        yield f"algorithm.correction.name={correction.name}: needs algorithm.correction.cap, as in 2"
    if correction.high is not None and correction.low >= correction.high:
        yield f"algorithm.correction.low={correction.low}: must be below algorithm.correction.high={correction.high}"
    if correction.name in BANDED and correction.high is None and not correction.low:
        yield f"algorithm.correction.name={correction.name}: needs algorithm.correction.low and algorithm.correction.high, as in 0.5 and 2"
    for key in UNREAD.get(correction.name or "", ()):
        if value := getattr(correction, key):
            yield f"algorithm.correction.{key}={value}: algorithm.correction.name={correction.name} does not use it: leave it out"
    if algorithm.reduction == "constant" and algorithm.reduction_length is None:
        yield "algorithm.reduction=constant: needs algorithm.reduction_length, which divides the sum of a trajectory"
    if algorithm.loss not in WHOLE_SAMPLE_LOSSES:
        return
    if advantage in advantages.shipped and advantage not in OF_EPISODES:
        instead = "algorithm.loss=gspo_token" if algorithm.loss == "gspo" else "algorithm.loss=gspo_token or ppo"
        yield f"algorithm.loss={algorithm.loss}: its ratio is that of a whole sequence, which averages out the per-token credit of advantage {advantage}: set {instead}"
    if algorithm.reduction not in OF_SAMPLES:
        instead = " (or algorithm.loss=gspo_token)" if algorithm.loss == "gspo" else ""
        yield f"algorithm.reduction={algorithm.reduction}: loss {algorithm.loss} gives one number per sequence, which this reduction would weigh by length: set algorithm.reduction=seq-mean-token-mean{instead}"


def _wrong_advantage(config: Config) -> Iterator[str]:
    algorithm, advantage, chosen = config.algorithm, config.algorithm.advantage, config.algorithm.filter
    if advantage.whiten and advantage.name in ("reinforce_pp", "reinforce_pp_baseline"):
        yield f"algorithm.advantage.whiten=true: {advantage.name} whitens by itself: leave it out"
    elif advantage.whiten and advantage.name in ("group", *IN_GROUPS):
        yield f"algorithm.advantage.whiten=true: would train on groups without spread, by their distance from the others: with {advantage.name} leave it out, or take algorithm=reinforce_pp_baseline"
    if algorithm.group_size > 1:
        return
    grouped = advantage.name == "group" and "group" in (advantage.mean_level, advantage.std_level)
    if advantage.name in IN_GROUPS or grouped:
        yield f"algorithm.group_size={algorithm.group_size}: advantage {advantage.name} compares the episodes of a group, so it needs at least 2"
    if chosen.name != "none":
        yield f"algorithm.filter.name={chosen.name}: groups of one episode never differ: set algorithm.group_size to 2 or more"


def _wrong_pools(config: Config) -> Iterator[str]:
    pools = config.pools
    for band, weight in pools.weights.items():
        if band not in BANDS:
            yield f"pools.weights.{band}={weight:g}: no such band: take {', '.join(BANDS)}"
        elif not 0 <= weight < math.inf:
            yield f"pools.weights.{band}={weight:g}: must be a number of 0 or more"
    if not any(pools.weights.values()):
        yield "pools.weights: all are 0: at least one band must be drawn from"
    if pools.hard > pools.easy:
        yield f"pools.hard={pools.hard:g}: must be at most pools.easy={pools.easy:g}"


def _wrong_memory(config: Config) -> Iterator[str]:
    memory, context = config.memory, config.engine.max_model_len
    if memory.name != "none" and config.reward_model.path is not None:
        yield f"reward_model.path={config.reward_model.path}: would judge an episode by its last training sample alone: leave it out, or set memory.name=none"
    if memory.name != "summary":
        return
    written = config.sampling.max_tokens + memory.tokens
    if memory.room is not None and memory.room < written:
        yield f"memory.room={memory.room}: must be at least the {written} tokens of an answer and a summary (sampling.max_tokens, memory.tokens), with some for the request"
    if (memory.room or written) >= context:
        key = f"memory.tokens={memory.tokens}" if memory.room is None else f"memory.room={memory.room}"
        yield f"{key}: leaves no room for the conversation in engine.max_model_len={context}: lower it, or raise engine.max_model_len"


def run_agent(run: str, config: Config) -> Agent:
    """The agent that plays the episodes, `agent.run`. Raises ValueError if it cannot play."""
    return agent_of(run, config.agent.image, None if config.sandbox == "auto" else config.sandbox)


def _wrong_agent(config: Config) -> Iterator[str]:
    """Problems of `agent.run`: an agent's calls are a tree, so settings that read an episode from its first turn to its last are refused."""
    agent, advantage = config.agent, config.algorithm.advantage.name
    if agent.run is None:
        return
    for text in agent.passed:
        try:
            Passed.named(text)
        except ValueError as error:
            yield f"agent.passed: {error}"
    if advantage in advantages.shipped and advantage not in (*OF_EPISODES, "distill"):
        yield f"algorithm.advantage.name={advantage}: the calls of agent.run may branch: take one of {', '.join(OF_EPISODES)}, distill"
    alone = {"memory.name": (config.memory.name, "none"), "env.rollout": (config.env.rollout, "episode")}
    for key, (value, plain) in {**alone, "reward_model.path": (config.reward_model.path, None)}.items():
        if value != plain:
            yield f"{key}={value}: agent.run plays whole episodes itself: leave one of the two out"


def _wrong_rewards(config: Config) -> Iterator[str]:
    """Problems of the terms that are subtracted from rewards: the KL, and the penalty of overlong episodes."""
    algorithm, kl, overlong = config.algorithm, config.algorithm.kl, config.algorithm.overlong
    name, in_reward = algorithm.advantage.name, kl.coef > 0 and kl.place == "reward"
    if name == "maxrl" and (overlong.length or in_reward):
        cause = "algorithm.overlong.length" if overlong.length else "algorithm.kl.place=reward"
        yield f"algorithm.advantage.name=maxrl: needs rewards of at least 0, and {cause} lowers them: leave one of the two out"
    if in_reward and name in WITHOUT_REWARDS:
        yield f"algorithm.kl.place=reward: advantage {name} uses no reward: set algorithm.kl.place=loss"
    most = algorithm.group_size * config.trainer.groups_per_step
    if kl.coef and kl.target is not None and kl.horizon < most:
        yield f"algorithm.kl.horizon={kl.horizon}: must be at least the {most} episodes of a step"
    if overlong.length is not None and overlong.buffer > overlong.length:
        yield f"algorithm.overlong.buffer={overlong.buffer}: must be at most algorithm.overlong.length={overlong.length}"
    if overlong.length is not None and name in WITHOUT_REWARDS:
        yield f"algorithm.overlong.length={overlong.length}: advantage {name} uses no reward: leave it out"


def _wrong_roles(config: Config) -> Iterator[str]:
    """Problems of roles that have settings and no use, and of folders that hold no model."""
    yield from _wrong_role_folders(config)
    name, critic = config.algorithm.advantage.name, config.critic
    if not has_critic(config):
        unused = {
            "alone_steps": critic.alone_steps,
            "clip": critic.clip,
            "path": None if name == "prime" else critic.path,
        }
        for key, value in unused.items():
            if value:
                yield f"critic.{key}={value}: advantage {name} has no critic ({', '.join(WITH_CRITIC)} have one): leave it out"
    elif critic.alone_steps >= config.trainer.steps:
        yield f"critic.alone_steps={critic.alone_steps}: must be below trainer.steps={config.trainer.steps}, or the policy never learns"
    if config.reference.path is not None and not config.algorithm.kl.coef and name != "prime":
        yield f"reference.path={config.reference.path}: nothing uses it: set algorithm.kl.coef above 0, or leave it out"
    if config.reference.reset_every is not None:
        told = f"reference.reset_every={config.reference.reset_every}"
        if name == "prime":
            yield f"{told}: advantage prime needs the reference that its reward model started from: leave it out"
        if own_players(config):
            yield f"{told}: players with policies of their own share one reference: leave it out"
    if name == "remax" and config.reward_model.path is not None:
        yield f"reward_model.path={config.reward_model.path}: the greedy episode of advantage remax has the environment's reward alone: leave one of the two out"


def _wrong_judge(config: Config) -> Iterator[str]:
    judge = config.judge
    if judge.url is None:
        return
    if not is_url(judge.url):
        yield f"judge.url={judge.url}: is not a URL: write http://HOST:PORT/v1"
    if not judge.model:
        yield f"judge.url={judge.url}: needs judge.model, the judge's model name"
    if config.algorithm.group_size < 2:
        yield f"judge.url={judge.url}: compares the episodes of a group, and algorithm.group_size={config.algorithm.group_size}: raise it"
    if config.algorithm.advantage.name == "remax":
        yield f"judge.url={judge.url}: ReMax's greedy episodes are in no group, so they get no verdict: take another algorithm.advantage.name"


def _wrong_teacher(config: Config) -> Iterator[str]:
    teacher, name = config.teacher, config.algorithm.advantage.name
    given = [f"teacher.{key}={getattr(teacher, key)}" for key in ("path", "url") if getattr(teacher, key)]
    if name == "distill" and not given:
        yield "algorithm.advantage.name=distill: needs a teacher: set teacher.path to a model folder, or teacher.url to a vLLM endpoint"
    elif len(given) > 1:
        yield f"{given[0]}: and {given[1]}: a run has one teacher: leave one of the two out"
    if teacher.url and not is_url(teacher.url):
        yield f"teacher.url={teacher.url}: is not a URL: write http://HOST:PORT"


def _wrong_servers(config: Config) -> Iterator[str]:
    """Settings that an engine run by others cannot follow."""
    engine = config.engine
    if engine.name not in EXTERNAL:
        return
    if not engine.urls:
        yield f"engine.name={engine.name}: has no server: set engine.urls=[http://HOST:PORT]"
    if config.model.path is None:
        yield f"model.path: is missing: the servers of engine.name={engine.name} already have a model: name its folder"
    for url in engine.urls:
        if why := _why_no_server(url):
            yield f"engine.urls: {why}"
    if len({url.rstrip("/").removesuffix("/v1") for url in engine.urls}) < len(engine.urls):
        yield f"engine.urls=[{','.join(engine.urls)}]: names a server twice: leave one of the two out"
    for key in ("replicas", "tensor_parallel"):
        if (value := getattr(engine, key)) != 1:
            yield f"engine.{key}={value}: the servers of engine.urls were started by others: leave it out"
    if engine.weights != "disk":
        yield f"engine.weights={engine.weights}: servers that others run read all weights from the run folder: set engine.weights=disk, as engine={engine.name} does"
    if engine.name == "sglang" and config.sampling.temperature != 1:
        yield f"sampling.temperature={config.sampling.temperature:g}: SGLang's log-probabilities may be those before the temperature (SGLANG_RETURN_ORIGINAL_LOGPROB), which a run cannot find out: set sampling.temperature=1"


def _why_no_server(url: str) -> str:
    """The reason why a text is not a server's URL; "" if it is one."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        return f"{url!r} is not a URL: {error}"
    if parts.username or parts.password:
        return f"{host} comes with a secret, which the run folder would keep: put the key into ENGINE_API_KEY"
    if not is_url(url) or not host or parts.query or parts.fragment or parts.path.rstrip("/") not in ("", "/v1"):
        return f"{url!r} is not a URL of a server: write http://HOST:PORT"
    return ""


def wrong_files(config: Config) -> Iterator[str]:
    """Problems of the settings of a mode that learns from files, which are read whole."""
    data = config.data
    yield from _wrong_role_folders(config)
    if config.mode != "dpo" and config.reference.path:
        yield f"reference.path={config.reference.path}: mode={config.mode} has no reference: leave it out"
    if data.train is None:
        yield f"data.train: is missing: mode={config.mode} {MODES[config.mode]} of a file: set data.train=FILE.jsonl"
        return
    if data.test is not None and Path(data.test).expanduser().resolve() == Path(data.train).expanduser().resolve():
        yield f"data.test={data.test}: is data.train too: held-out examples need their own file"
    for name, path in (("data.train", data.train), ("data.test", data.test)):
        try:
            if path is not None:
                read_examples(path, form_of(config), data.min_reward)
        except DataError as error:
            yield f"{name}: {error}"


def _wrong_role_folders(config: Config) -> Iterator[str]:
    for role in ("reference", "critic", "reward_model", "teacher"):
        path = getattr(config, role).path
        if path is not None and not (Path(path).expanduser() / "config.json").is_file():
            yield f"{role}.path={path}: not a model folder: it has no config.json"


def wrong_colocation(config: Config) -> Iterator[str]:
    """Problems of `engine.placement=colocated`, whose servers and ranks take turns on the same devices."""
    engine, learner = config.engine, config.learner
    if engine.placement != "colocated":
        return
    told = "engine.placement=colocated"
    if config.trainer.staleness:
        yield f"{told}: servers sleep while the learner learns, and trainer.staleness={config.trainer.staleness} makes them sample meanwhile: set trainer.staleness=0"
    if engine.tensor_parallel > 1:
        yield f"{told}: each server has one device of the learner's: set engine.tensor_parallel=1 and raise engine.replicas"
    if engine.replicas > learner.workers:
        yield f"{told}: engine.replicas={engine.replicas} servers need one device each, but the learner has learner.workers={learner.workers}"
    if learner.placement == "own" and len(roles_of(config)) > 1:
        yield f"{told}: each rank shares its device with all roles and a server: set learner.placement=shared"
    if visible_gpus() and not learner.offload:
        yield f"{told}: the learner's weights would stay on the GPUs while servers sample: set learner.offload=true"


def wrong_learner(config: Config) -> Iterator[str]:
    """Problems of parallelism, adapters and optimizer, in all modes."""
    learner = config.learner
    for key in ("tensor_parallel", "sequence_parallel"):
        ranks = getattr(learner, key)
        if ranks > 0 and learner.workers % ranks:
            yield f"learner.{key}={ranks}: must divide learner.workers={learner.workers}"
    both = learner.tensor_parallel * learner.sequence_parallel
    if min(learner.tensor_parallel, learner.sequence_parallel) > 1 and learner.workers % both:
        yield f"learner.tensor_parallel={learner.tensor_parallel} x learner.sequence_parallel={learner.sequence_parallel}: must divide learner.workers={learner.workers} together"
    if config.lora.rank and importlib.util.find_spec("peft") is None:
        yield f"lora.rank={config.lora.rank}: peft is not installed: {pip_install('agentgym-toolkit[lora]')}, or set lora.rank=0"
    if config.lora.rank > MAX_LORA_RANK and sends_adapters(config) and config.mode == "rl":
        yield f"lora.rank={config.lora.rank}: vLLM takes adapters of ranks up to {MAX_LORA_RANK}: set lora.merge=true"
    if config.engine.weights != "collective" and sends_adapters(config):
        yield f"engine.weights={config.engine.weights}: vLLM gets the adapters of lora.rank={config.lora.rank} as files in any case: leave it out, or set lora.merge=true"
    if learner.optimizer == "adamw8bit" and importlib.util.find_spec("torchao") is None:
        yield "learner.optimizer=adamw8bit: torchao is not installed: pip install torchao, or take learner.optimizer=adamw"


def unusual(config: Config) -> Iterator[str]:
    """Settings that can run and are far from what the model's size wants, a line each; a run prints them before it starts."""
    tiny = is_tiny(config.model.path)
    yield from _unusual_rates(config, tiny)
    dtype = config.model.dtype
    if dtype == "float16":
        yield "model.dtype=float16: overflows more easily than bfloat16, and the loss is not scaled; bfloat16 is usual"
    elif dtype == "float32" and not tiny and visible_gpus():
        yield "model.dtype=float32: takes twice the memory and time of bfloat16 on a GPU; bfloat16 is usual"
    elif dtype == "bfloat16" and tiny:
        yield "model.dtype=bfloat16: coarse for a tiny model; float32 is usual"
    if config.mode != "rl":
        return
    most = config.sampling.max_tokens
    if not tiny and most < SHORT:
        yield f"sampling.max_tokens={most}: short for an instruct model: long answers will be cut; 1,024 is usual"
    proximal, correction = config.algorithm.proximal, config.algorithm.correction.name
    if config.trainer.staleness and proximal != "behaviour" and correction is None:
        yield f"trainer.staleness={config.trainer.staleness}: nothing corrects for the older weights of the samples; algorithm.proximal=behaviour is usual, which clips against them"
    if tiny and most > LONG:
        yield f"sampling.max_tokens={most}: long for a tiny model: set model.path=DIR, or lower it"


def _unusual_rates(config: Config, tiny: bool) -> Iterator[str]:
    roles = roles_of(config)
    usual = TINY_RATES if tiny else RATES[config.mode]
    if config.lora.rank:
        usual = usual[0], usual[1] * ADAPTERS
    rates = {"learner.lr": (config.learner.lr, usual)}
    if config.mode == "rl" and config.sft.episodes:
        rates["sft.lr"] = config.sft.lr, TINY_RATES if tiny else RATES["sft"]
    if any(role != "policy" and learns(config, role) for role in roles):
        rates["critic.lr"] = config.critic.lr, TINY_RATES if tiny else RATES["sft"]
    size = "a tiny model" if tiny else "a model of this size"
    for key, (rate, (low, high)) in rates.items():
        if rate and not low <= rate <= high:
            word = "high" if rate > high else "low"
            yield f"{key}={rate:g}: {word} for {size} with mode={config.mode}; {low:g} to {high:g} is usual"
