"""The output of `agent-train --dry-run`: a table of the run, and every setting with its documentation."""

import re

from agent_train.cluster.placement import servers_of, visible_gpus
from agent_train.config.combinations import MODES
from agent_train.config.compose import to_yaml
from agent_train.config.model_folder import longest_sample
from agent_train.config.schema import Config, settings
from agent_train.config.validation import env_spec, sandbox_choice
from agent_train.learner.roles import learner_count, learning_rate, learns, own_players, roles_of, source_of
from agent_train.trainer.offline.records import form_of, read_examples
from agent_train.trainer.resume import run_path
from agent_train.trainer.schedule import step_count
from agentgym.core.env import close_unused

Rows = list[tuple[str, str]]
LOSSES = {"dpo": "DPO", "ipo": "IPO, margins per token", "kto": "KTO"}
DOC_COLUMN = 40


def what_runs(config: Config) -> Rows:
    """The rows of the table: what, and how. The config must have passed `validate`."""
    if config.mode != "rl":
        return [*_data(config), _model(config), ("learner", _learner(config)), ("files", _files(config))]
    updates, every = _count(config.algorithm.updates_per_step, "update"), _count(config.trainer.eval_every, "step")
    held_out = min(config.trainer.eval_episodes, len(env_spec(config).tasks(config.env.test_split)))
    held_out *= config.trainer.eval_samples
    evaluation = f"{_count(held_out, 'held-out episode')} before the first step, every {every} and after the last"
    rows = [
        *_tasks(config),
        ("sandbox", sandbox_choice(config) or ""),
        ("each step", _each_step(config)),
        ("rollout", _rollout(config)),
        ("agent", " in ".join(filter(None, (config.agent.run, config.agent.image)))),
        ("algorithm", _algorithm(config)),
        ("trained on", _chosen(config)),
        ("learner", f"{_learner(config)}, {updates} a step"),
        ("beside it", _roles(config)),
        ("evaluation", evaluation),
        ("processes", _processes(config)),
        ("files", _files(config)),
    ]
    return [(name, text) for name, text in rows if text]


def as_text(rows: Rows) -> str:
    """The table as aligned lines."""
    width = max(len(name) for name, _ in rows) + 2
    lines = [(name if i == 0 else "", line) for name, text in rows for i, line in enumerate(text.splitlines())]
    return "\n".join(f"  {name:<{width}}{line}" for name, line in lines)


def documented(config: Config) -> str:
    """The settings as YAML, each followed by its documentation as a comment."""
    lines, sections, all_of_them = to_yaml(config).splitlines(), [""], settings()
    for number, line in enumerate(lines):
        if found := re.match(r"( *)(\w+):", line):
            sections[len(found[1]) // 2 :] = [found[2]]
            if known := all_of_them.get(".".join(sections)):
                doc = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", known.doc)  # without links
                lines[number] = f"{line:<{DOC_COLUMN}} # {doc}"
    return "\n".join(lines)


def _data(config: Config) -> Rows:
    """The rows about data and objective of a mode that learns from files."""
    data, form, longest = config.data, form_of(config), longest_sample(config)
    train, held_out = (read_examples(path, form, data.min_reward) if path else [] for path in (data.train, data.test))
    noun = "pair" if train[0].is_pair else "conversation"
    testing = (
        f"{_count(len(held_out), noun)} of {data.test}" if held_out else "nothing: set data.test=FILE to measure on"
    )
    rows = [
        ("mode", f"{config.mode}: {MODES[config.mode]}"),
        ("data", f"{_count(len(train), noun)} of {data.train} to learn from"),
        ("held out", testing),
    ]
    if longest is not None:
        rows.append(("length", f"examples of more than {longest:,} tokens are left out"))
    if config.mode == "dpo":
        asked = f"{config.reference.path or 'the model as the run starts'}, asked once before the first step"
        rows.append(("loss", f"{LOSSES[data.loss]}, beta {data.beta:g}; reference: {asked}"))
    steps = _count(step_count(len(train), data.batch_rows, data.epochs), "step")
    return [*rows, ("steps", f"{data.batch_rows:,} examples a step, {steps} in {_count(data.epochs, 'epoch')}")]


def _tasks(config: Config) -> Rows:
    spec, env, sft = env_spec(config), config.env, config.sft
    train, test = (spec.tasks(split) for split in (env.train_split, env.test_split))
    source = f" ({train.source})" if train.source else ""
    told = f": {spec.description}" if spec.description else ""
    counts = f"{len(train):,} in {env.train_split!r} to train on, {len(test):,} in {env.test_split!r} held out{source}"
    if config.pools.groups:
        counts += f", drawn by their solve rate in the last {_count(config.pools.groups, 'group')}"
    warm = f"{sft.episodes:,} expert episodes with {sft.mistakes:.0%} random actions, {_count(sft.epochs, 'epoch')}"
    cold = "none" if config.model.path else "none: a tiny model then starts from random weights and knows no language"
    return [
        ("environment", f"{env.id}{told}"),
        ("tasks", counts),
        _model(config),
        ("warm start", warm if sft.episodes else cold),
    ]


def _model(config: Config) -> tuple[str, str]:
    model, tiny = config.model, config.model.tiny
    if model.path is not None:
        return "model", f"{model.path}, {model.dtype}"
    # Without the norms; the embedding is tied to the head.
    size = tiny.vocab * tiny.hidden + tiny.layers * (4 * tiny.hidden**2 + 3 * tiny.hidden * tiny.intermediate)
    shape = f"{tiny.layers} layers of {tiny.hidden}, about {size / 1e6:.1f} M parameters"
    return "model", f"tiny, built by code: {shape}, {model.dtype}"


def _learner(config: Config) -> str:
    learner = config.learner
    device = "CUDA, NCCL" if visible_gpus() else "CPU, gloo"
    falling = ", falling in a line to 1/N of it at the last of N steps" if learner.schedule == "linear" else ""
    rate = f"learning rate {learner.lr:g} after {_count(learner.warmup_steps, 'warm-up step')}{falling}"
    return f"{_count(learner.workers, 'FSDP2 worker')} ({device}), {rate}"


def _each_step(config: Config) -> str:
    trainer, group, tokens = config.trainer, config.algorithm.group_size, config.sampling.max_tokens
    episodes = trainer.groups_per_step * group
    env = env_spec(config).make()
    turns = env.unwrapped.max_turns  # type: ignore[attr-defined]
    close_unused(env)
    return (
        f"{episodes:,} episodes ({trainer.groups_per_step} tasks x {group}), at most {_count(turns, 'turn')} of "
        f"{_count(tokens, 'token')}: up to {episodes * turns * tokens:,} sampled tokens\n"
        f"{_count(trainer.steps, 'step')}, {trainer.steps * episodes:,} episodes in all"
    )


def _rollout(config: Config) -> str:
    engine = config.engine
    where = "in this process"
    if engine.urls:
        where = f"run by others at {', '.join(engine.urls)}"
    elif engine.name != "embedded":
        port = f"from port {engine.port}" if engine.port else "on a free port"
        where = f"{_count(engine.replicas, 'server')} of {_count(engine.tensor_parallel, 'device')}, {port}"
        if engine.placement == "colocated":
            where += ", on the learner's devices by turns"
    at_once = engine.max_concurrent * engine.servers
    return (
        f"{engine.name}, {where}; {at_once:,} episodes at once, contexts of {engine.max_model_len:,} tokens, "
        f"temperature {config.sampling.temperature:g}"
    )


def _algorithm(config: Config) -> str:
    algorithm, kl = config.algorithm, config.algorithm.kl
    parts = [f"{algorithm.name}: advantages {algorithm.advantage.name}, loss {algorithm.loss} ({algorithm.reduction})"]
    if algorithm.correction.name or algorithm.proximal != "recomputed":
        parts.append(f"proximal policy {algorithm.proximal}, correction {algorithm.correction.name or 'none'}")
    if kl.coef:
        adapts = f", steered to {kl.target:g} nats a token" if kl.target else ""
        parts.append(f"KL to the reference in the {kl.place}, coefficient {kl.coef:g}{adapts}")
    return "; ".join(parts)


def _chosen(config: Config) -> str:
    """Which episodes are trained on, where not all are."""
    chosen, overlong, wanted = config.algorithm.filter, config.algorithm.overlong, config.trainer.groups_per_step
    filters = {
        "none": "",
        "spread": "groups whose rewards differ",
        "uncertain": f"the {chosen.share:.0%} of the groups whose rewards differ most",
        "top_p": f"the fewest groups that hold {chosen.share:.0%} of the spread of rewards",
    }
    told = filters.get(chosen.name, f"groups that {chosen.name} chooses")
    if chosen.rounds > 1:
        told += f", further tasks until there are {wanted}, at most {chosen.rounds} rollouts a step"
    parts = [told] if told else []
    if overlong.length is not None:
        limit = overlong.length - overlong.buffer
        parts.append(f"episodes of over {limit:,} sampled tokens lose up to {overlong.factor:g}")
    if overlong.mask:
        parts.append("episodes that a limit cut off are left out")
    return "; ".join(parts)


def _roles(config: Config) -> str:
    """The models beside the policy."""
    rows = []
    for role in roles_of(config)[1:]:
        default = "the policy, with a new value head" if role == "critic" else "the policy as the run starts"
        follows = config.reference.reset_every if role == "reference" else None
        how = f", reset to the policy every {_count(follows, 'step')}" if follows else ", frozen"
        if learns(config, role):
            how = f", learning rate {learning_rate(config, role)[0]:g}"
        rows.append(f"{role.replace('_', ' ')} from {source_of(config, role) or default}{how}")
    rows += [f"a policy of {player}'s own, which learns as the run's does" for player in own_players(config)]
    if config.teacher.url and config.algorithm.advantage.name == "distill":
        rows.append(f"teacher at {config.teacher.url}")
    if config.critic.alone_steps and "critic" in roles_of(config):
        rows.append(f"the critic learns alone for {_count(config.critic.alone_steps, 'step')}")
    return "\n".join(rows)


def _processes(config: Config) -> str:
    env, engine = config.env, config.engine
    parts = ["this one", "Ray", _count(config.learner.workers * learner_count(config), "learner worker")]
    if env.placement == "ray":
        workers = _count(env.workers, "env worker") if env.workers else "env workers"
        parts.append(f"{workers} of {env.cpus:g} CPU each in Ray")
    if engine.name == "vllm":
        parts.append(_count(servers_of(config), "vLLM server"))
    return ", ".join(parts)


def _files(config: Config) -> str:
    trainer = config.trainer
    episodes = "trajectories/ (every episode), " if config.mode == "rl" else ""
    saved = f"every {_count(trainer.save_every, 'step')} and after the last, the newest {trainer.keep_checkpoints} kept"
    return (
        f"{run_path(config)}/\n  config.yaml, versions.json, metrics.jsonl, report.html, logs/\n"
        f"  {episodes}checkpoints/ ({saved})"
    )


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"
