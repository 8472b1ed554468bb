"""The table of `agent-train --dry-run`."""

from __future__ import annotations

from agent_train.cluster.placement import visible_gpus
from agent_train.config.schema import Config
from agent_train.config.validation import env_spec, sandbox_choice
from agent_train.learner.roles import learning_rate, learns, roles_of, source_of
from agent_train.trainer.offline import plan as files
from agent_train.trainer.resume import run_path
from agentgym.core.env import close_unused


def plan(config: Config) -> list[tuple[str, str]]:
    """The rows of the table: what, and how. The config must have passed `validate`."""
    if config.mode != "rl":
        return [*files.what(config), _model(config), ("learner", _file_learner(config)), ("files", _files(config))]
    return [
        *_what(config),
        *_sandboxes(config),
        ("each step", _each_step(config)),
        ("rollout", _rollout(config)),
        ("algorithm", _algorithm(config)),
        *_chosen(config),
        ("learner", _learner(config)),
        *_roles(config),
        ("evaluation", _evaluation(config)),
        ("processes", _processes(config)),
        ("files", _files(config)),
    ]


def as_text(rows: list[tuple[str, str]]) -> str:
    """The table as aligned lines."""
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(f"  {name:<{width}}{line}" for name, text in rows for name, line in _with_indent(name, text))


def _with_indent(name: str, text: str) -> list[tuple[str, str]]:
    return [(name if i == 0 else "", line) for i, line in enumerate(text.splitlines())]


def _what(config: Config) -> list[tuple[str, str]]:
    spec = env_spec(config)
    env, sft = config.env, config.sft
    tasks = [spec.tasks(split) for split in (env.train_split, env.test_split)]
    source = f" ({tasks[0].source})" if tasks[0].source else ""
    told = f": {spec.description}" if spec.description else ""
    rows = [
        ("environment", f"{env.id}{told}"),
        (
            "tasks",
            f"{len(tasks[0]):,} in {env.train_split!r} to train on, {len(tasks[1]):,} in {env.test_split!r} held out{source}",
        ),
    ]
    rows.append(_model(config))
    warm = f"{sft.episodes:,} expert episodes with {sft.mistakes:.0%} random actions, {_count(sft.epochs, 'epoch')}"
    cold = (
        "none: a tiny model then starts from random weights and knows no language"
        if config.model.path is None
        else "none"
    )
    rows.append(("warm start", warm if sft.episodes else cold))
    return rows


def _model(config: Config) -> tuple[str, str]:
    model, tiny = config.model, config.model.tiny
    if model.path is not None:
        return "model", f"{model.path}, {model.dtype}"
    size = _tiny_size(config) / 1e6
    return (
        "model",
        f"tiny, built by code: {tiny.layers} layers of {tiny.hidden}, about {size:.1f} M parameters, {model.dtype}",
    )


def _file_learner(config: Config) -> str:
    learner = config.learner
    device = "CUDA, NCCL" if visible_gpus() else "CPU, gloo"
    falling = ", falling in a line to 1/N of it at the last of N steps" if learner.schedule == "linear" else ""
    return (
        f"{_count(learner.workers, 'FSDP2 worker')} ({device}), learning rate {learner.lr:g} after "
        f"{_count(learner.warmup_steps, 'warm-up step')}{falling}"
    )


def _sandboxes(config: Config) -> list[tuple[str, str]]:
    choice = sandbox_choice(config)
    return [] if choice is None else [("sandbox", choice)]


def _tiny_size(config: Config) -> int:
    """Parameters of the tiny model, norms left out; the embedding is tied to the head."""
    tiny = config.model.tiny
    return tiny.vocab * tiny.hidden + tiny.layers * (4 * tiny.hidden**2 + 3 * tiny.hidden * tiny.intermediate)


def _each_step(config: Config) -> str:
    trainer, group = config.trainer, config.algorithm.group_size
    episodes = trainer.groups_per_step * group
    env = env_spec(config).make()
    turns = env.unwrapped.max_turns  # type: ignore[attr-defined]
    close_unused(env)
    most = episodes * turns * config.sampling.max_tokens
    return (
        f"{episodes:,} episodes ({trainer.groups_per_step} tasks x {group}), at most {_count(turns, 'turn')} of {_count(config.sampling.max_tokens, 'token')}: "
        f"up to {most:,} sampled tokens\n{_count(trainer.steps, 'step')}, {trainer.steps * episodes:,} episodes in all"
    )


def _rollout(config: Config) -> str:
    engine = config.engine
    if engine.name == "embedded":
        where = "in this process"
    else:
        port = f"from port {engine.port}" if engine.port else "on a free port"
        where = f"{_count(engine.replicas, 'server')} of {_count(engine.tensor_parallel, 'device')}, {port}"
    return (
        f"{engine.name}, {where}; {engine.max_concurrent} episodes at once, contexts of {engine.max_model_len:,} tokens, "
        f"temperature {config.sampling.temperature:g}"
    )


def _learner(config: Config) -> str:
    return f"{_file_learner(config)}, {_count(config.algorithm.updates_per_step, 'update')} a step"


def _algorithm(config: Config) -> str:
    """Rows of the algorithm, and of settings that differ from their defaults."""
    algorithm, kl = config.algorithm, config.algorithm.kl
    parts = [f"{algorithm.name}: advantages {algorithm.advantage.name}, loss {algorithm.loss} ({algorithm.reduction})"]
    if algorithm.correction.name or algorithm.proximal != "recomputed":
        parts.append(f"proximal policy {algorithm.proximal}, correction {algorithm.correction.name or 'none'}")
    if kl.coef:
        adapts = f", steered to {kl.target:g} nats a token" if kl.target else ""
        parts.append(f"KL to the reference in the {kl.place}, coefficient {kl.coef:g}{adapts}")
    return "; ".join(parts)


def _chosen(config: Config) -> list[tuple[str, str]]:
    """Rows of the filters, where not all episodes are trained on."""
    chosen, overlong = config.algorithm.filter, config.algorithm.overlong
    told = {
        "none": "",
        "spread": "groups whose rewards differ",
        "uncertain": f"the {chosen.share:.0%} of the groups whose rewards differ most",
        "top_p": f"the fewest groups that hold {chosen.share:.0%} of the spread of rewards",
    }[chosen.name]
    if chosen.rounds > 1:
        told += (
            f", further tasks until there are {config.trainer.groups_per_step}, at most {chosen.rounds} rollouts a step"
        )
    parts = [told] if told else []
    if overlong.length is not None:
        parts.append(
            f"episodes of over {overlong.length - overlong.buffer:,} sampled tokens lose up to {overlong.factor:g}"
        )
    if overlong.mask:
        parts.append("episodes that a limit cut off are left out")
    return [("trained on", "; ".join(parts))] if parts else []


def _roles(config: Config) -> list[tuple[str, str]]:
    """The models beside the policy."""
    rows = []
    for role in roles_of(config)[1:]:
        source = source_of(config, role)
        start = source or ("the policy as the run starts" if role != "critic" else "the policy, with a new value head")
        lr = f", learning rate {learning_rate(config, role)[0]:g}" if learns(config, role) else ", frozen"
        rows.append(f"{role.replace('_', ' ')} from {start}{lr}")
    if config.teacher.url and config.algorithm.advantage.name == "distill":
        rows.append(f"teacher at {config.teacher.url}")
    if config.critic.alone_steps and "critic" in roles_of(config):
        rows.append(f"the critic learns alone for {_count(config.critic.alone_steps, 'step')}")
    return [("beside it", "\n".join(rows))] if rows else []


def _evaluation(config: Config) -> str:
    trainer = config.trainer
    episodes = min(trainer.eval_episodes, len(env_spec(config).tasks(config.env.test_split)))
    return f"{_count(episodes, 'held-out episode')} before the first step, every {_count(trainer.eval_every, 'step')} and after the last"


def _processes(config: Config) -> str:
    engine, workers = config.engine, config.learner.workers
    servers = engine.replicas if engine.name == "vllm" else 0
    parts = ["this one", "Ray", _count(workers * len(roles_of(config)), "learner worker")]
    if config.env.placement == "ray":
        workers_of_env = _count(config.env.workers, "env worker") if config.env.workers else "env workers"
        parts.append(f"{workers_of_env} of {config.env.cpus:g} CPU each in Ray")
    return ", ".join([*parts, _count(servers, "vLLM server")] if servers else parts)


def _files(config: Config) -> str:
    trainer = config.trainer
    folder = run_path(config)
    episodes = "trajectories/ (every episode), " if config.mode == "rl" else ""
    return (
        f"{folder}/\n  config.yaml, versions.json, metrics.jsonl, report.html, logs/\n"
        f"  {episodes}checkpoints/ (every {_count(trainer.save_every, 'step')} and after the last, the newest {trainer.keep_checkpoints} kept)"
    )


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"
