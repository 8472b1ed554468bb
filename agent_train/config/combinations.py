"""Checks combinations of settings. Each problem is one line: the key, the reason, and what to do.

Nothing here imports torch: the parameters of a shipped loss are read from its source.
"""

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from agent_train.config.extensions import WHOLE_SAMPLE_LOSSES, advantages, losses
from agent_train.config.schema import Config
from agent_train.learner.roles import WITH_CRITIC, has_critic
from agent_train.trainer.offline.records import DataError, form_of, read_examples
from agentgym.service.client.address import is_url

# Inputs of a loss; every other parameter of its function is a setting.
INPUTS = (
    *("logprobs_T", "advantages_T", "mask_T", "old_T", "behaviour_T", "entropy_T", "segment_T", "n_segments"),
    "drift_limit",
)
CAPPED = ("tis", "sequence-is", "geometric-is")
BANDED = ("icepop", "seq-mask-tis", "sequence-mask", "geometric-mask")
# Compared inside a group, so that one episode alone teaches nothing.
IN_GROUPS = ("rloo", "opo", "maxrl", "best_of", "reinforce_pp_baseline", "turn", "gigpo", "prime")
MAX_LORA_RANK = 512  # of vLLM
# One number for all tokens of an episode, whatever its rewards and settings; the others may differ from turn to turn.
OF_EPISODES = ("group", "rloo", "opo", "maxrl", "best_of", "reinforce_pp_baseline", "constant")
# Each sample weighs the same, or each trajectory, however long it is.
OF_SAMPLES = ("seq-mean-token-mean", "trajectory-mean")
WITHOUT_REWARDS = ("distill", "constant")
MODES = {"sft": "imitates the assistant's messages", "dpo": "prefers answers to others", "rm": "learns a reward model"}


def wrong_combinations(config: Config) -> Iterator[str]:
    """Problems of the settings of the algorithm and its roles, taken together."""
    yield from _wrong_loss(config)
    yield from _wrong_weights(config)
    try:
        advantages.path(config.algorithm.advantage.name)
    except ValueError:  # `wrong_values` tells it
        return
    yield from _wrong_advantage(config)
    yield from _wrong_for_whole_samples(config)
    yield from _wrong_groups(config)
    yield from _wrong_kl(config)
    yield from _wrong_overlong(config)
    yield from _wrong_roles(config)
    yield from _wrong_teacher(config)


def loss_parameters(name: str) -> list[str]:
    """The names of the parameters of a shipped loss."""
    module, _, function = losses.shipped[name].partition(":")
    path = Path(__file__).parents[1].joinpath(*module.split(".")[1:]).with_suffix(".py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function)
    return [argument.arg for argument in (*found.args.args, *found.args.kwonlyargs)]


def _wrong_loss(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    try:
        losses.path(algorithm.loss)
    except ValueError as error:
        yield f"algorithm.loss={algorithm.loss}: {error}"
        return
    if algorithm.loss not in losses.shipped:
        from agent_train.algorithms.policy_loss import policy_loss

        try:
            policy_loss(algorithm.loss, algorithm.loss_settings)
        except ValueError as error:
            yield f"algorithm.loss={algorithm.loss}: {error}"
        return
    known = [name for name in loss_parameters(algorithm.loss) if name not in INPUTS]
    for name, value in algorithm.loss_settings.items():
        key = f"algorithm.loss_settings.{name}={value}"
        if name not in known:
            yield f"{key}: loss {algorithm.loss} has no such setting: it has {', '.join(known) or 'none'}"
        elif value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0):
            yield f"{key}: must be a number of 0 or more"


def _wrong_weights(config: Config) -> Iterator[str]:
    """Settings that would weigh the gap between engine and trainer twice, or do nothing."""
    algorithm, correction = config.algorithm, config.algorithm.correction
    own = algorithm.loss in losses.shipped and "behaviour_T" in loss_parameters(algorithm.loss)
    if own and algorithm.proximal != "behaviour":
        yield f"algorithm.proximal={algorithm.proximal}: loss {algorithm.loss} divides by the engine's policy itself: set algorithm.proximal=behaviour"
    name = f"algorithm.correction.name={correction.name}"
    if correction.name is None:
        return
    if algorithm.proximal == "behaviour":
        yield f"{name}: with algorithm.proximal=behaviour the loss covers the gap to the engine already, and it would count twice: leave one of the two out"
    if correction.name in CAPPED and correction.cap is None:
        yield f"{name}: needs algorithm.correction.cap, as in 2"
    if correction.name in BANDED and correction.high is None and not correction.low:
        yield f"{name}: needs algorithm.correction.low and algorithm.correction.high, as in 0.5 and 2"
    if correction.high is not None and correction.low >= correction.high:
        yield f"algorithm.correction.low={correction.low}: must be below algorithm.correction.high={correction.high}"


def _wrong_advantage(config: Config) -> Iterator[str]:
    algorithm, advantage = config.algorithm, config.algorithm.advantage
    name = f"algorithm.advantage.name={advantage.name}"
    if algorithm.reduction == "constant" and algorithm.reduction_length is None:
        yield "algorithm.reduction=constant: needs algorithm.reduction_length, which divides the sum of a trajectory"
    if advantage.name == "bilevel_gae" and advantage.lam_alpha is not None and advantage.turn_lam is None:
        yield f"algorithm.advantage.lam_alpha={advantage.lam_alpha}: with bilevel_gae, set algorithm.advantage.turn_lam too: the lambda over turns"
    if advantage.whiten and advantage.name in ("reinforce_pp", "reinforce_pp_baseline"):
        yield f"algorithm.advantage.whiten=true: {advantage.name} whitens by itself: leave it out"
    elif advantage.whiten and advantage.name in ("group", *IN_GROUPS):
        yield f"algorithm.advantage.whiten=true: groups without spread would teach, by how far they are from the rest: with {advantage.name} leave it out, or take algorithm=reinforce_pp_baseline"
    if advantage.name == "maxrl" and (
        algorithm.overlong.length or (algorithm.kl.coef > 0 and algorithm.kl.place == "reward")
    ):
        cause = "algorithm.overlong.length" if algorithm.overlong.length else "algorithm.kl.place=reward"
        yield f"{name}: needs rewards of at least 0, and {cause} takes from them: leave one of the two out"


def _wrong_for_whole_samples(config: Config) -> Iterator[str]:
    """Credit that differs inside a sample, or weights by its length, with a loss of whole samples."""
    algorithm = config.algorithm
    if algorithm.loss not in WHOLE_SAMPLE_LOSSES:
        return
    if algorithm.advantage.name in advantages.shipped and algorithm.advantage.name not in OF_EPISODES:
        instead = "algorithm.loss=gspo_token" if algorithm.loss == "gspo" else "algorithm.loss=gspo_token or ppo"
        yield f"algorithm.loss={algorithm.loss}: its ratio is of a whole sequence, and would average the credit of advantage {algorithm.advantage.name} away, which differs inside a sequence: set {instead}"
    if algorithm.reduction not in OF_SAMPLES:
        instead = " (or algorithm.loss=gspo_token)" if algorithm.loss == "gspo" else ""
        yield f"algorithm.reduction={algorithm.reduction}: loss {algorithm.loss} is one number for a whole sequence, and this would weigh it by its length: set algorithm.reduction=seq-mean-token-mean{instead}"


def _wrong_groups(config: Config) -> Iterator[str]:
    algorithm, advantage, chosen = config.algorithm, config.algorithm.advantage, config.algorithm.filter
    if algorithm.group_size > 1:
        return
    grouped = advantage.name == "group" and "group" in (advantage.mean_level, advantage.std_level)
    if advantage.name in IN_GROUPS or grouped:
        yield f"algorithm.group_size={algorithm.group_size}: advantage {advantage.name} compares the episodes of a group, so it needs at least 2"
    if chosen.name != "none":
        yield f"algorithm.filter.name={chosen.name}: groups of one episode never differ: set algorithm.group_size to 2 or more"


def _wrong_kl(config: Config) -> Iterator[str]:
    algorithm, kl = config.algorithm, config.algorithm.kl
    if kl.coef == 0:
        return
    if kl.place == "reward" and algorithm.advantage.name in WITHOUT_REWARDS:
        yield f"algorithm.kl.place=reward: advantage {algorithm.advantage.name} looks at no reward: set algorithm.kl.place=loss"
    most = algorithm.group_size * config.trainer.groups_per_step
    if kl.target is not None and kl.horizon < most:
        yield f"algorithm.kl.horizon={kl.horizon}: must be at least the {most} episodes of a step"


def _wrong_overlong(config: Config) -> Iterator[str]:
    overlong, name = config.algorithm.overlong, config.algorithm.advantage.name
    if overlong.length is None:
        return
    if overlong.buffer > overlong.length:
        yield f"algorithm.overlong.buffer={overlong.buffer}: must be at most algorithm.overlong.length={overlong.length}"
    if name in WITHOUT_REWARDS:
        yield f"algorithm.overlong.length={overlong.length}: advantage {name} looks at no reward: leave it out"


def _wrong_roles(config: Config) -> Iterator[str]:
    """Roles that are described and would not be asked, and folders that hold no model."""
    yield from _wrong_role_folders(config)
    name, critic = config.algorithm.advantage.name, config.critic
    if not has_critic(config):
        unused = {"alone_steps": critic.alone_steps, "path": None if name == "prime" else critic.path}
        for key, value in unused.items():
            if value:
                yield f"critic.{key}={value}: advantage {name} has no critic ({', '.join(WITH_CRITIC)} have one): leave it out"
    elif critic.alone_steps >= config.trainer.steps:
        yield f"critic.alone_steps={critic.alone_steps}: must be below trainer.steps={config.trainer.steps}, or the policy never learns"
    if config.reference.path is not None and not config.algorithm.kl.coef and name != "prime":
        yield f"reference.path={config.reference.path}: nothing is compared with it: set algorithm.kl.coef above 0, or leave it out"
    if name == "remax" and config.reward_model.path is not None:
        yield f"reward_model.path={config.reward_model.path}: the greedy episode of advantage remax has the environment's reward alone: leave one of the two out"


def _wrong_teacher(config: Config) -> Iterator[str]:
    teacher, name = config.teacher, config.algorithm.advantage.name
    given = [f"teacher.{key}={getattr(teacher, key)}" for key in ("path", "url") if getattr(teacher, key)]
    if name == "distill" and not given:
        yield "algorithm.advantage.name=distill: needs a teacher: set teacher.path to a model folder, or teacher.url to a vLLM endpoint"
    elif len(given) > 1:
        yield f"{given[0]}: and {given[1]}: a run has one teacher: leave one of the two out"
    if teacher.url and not is_url(teacher.url):
        yield f"teacher.url={teacher.url}: is no URL: write http://HOST:PORT"


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
        yield f"data.test={data.test}: is data.train too: what is held out needs a file of its own"
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
            yield f"{role}.path={path}: no model folder: there is no config.json in it"


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
        yield f"lora.rank={config.lora.rank}: peft is not installed: pip install 'agentgym-toolkit[lora]', or set lora.rank=0"
    if config.lora.rank > MAX_LORA_RANK and config.engine.name == "vllm" and config.mode == "rl":
        yield f"lora.rank={config.lora.rank}: vLLM takes ranks up to {MAX_LORA_RANK}"
    if learner.optimizer == "adamw8bit" and importlib.util.find_spec("torchao") is None:
        yield "learner.optimizer=adamw8bit: torchao is not installed: pip install torchao, or take learner.optimizer=adamw"
