"""The settings of a run: name, type, default, range, what each needs, and one line of documentation, in one place.

Validation, `--dry-run` and the table in docs/training.md are made from it. Hydra merges `configs/` and the command line onto these
dataclasses. Nothing writes to a config after `validate`. The defaults are for a real instruct model; those of the tiny policy are
in `configs/model/tiny.yaml` and `configs/tiny/`.
"""

# ruff: noqa: RUF009 - `setting` makes a dataclass field
import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, get_type_hints


class ConfigError(ValueError):
    """Settings that cannot be run. `problems` has a line for each problem: the key, why, and what to do."""

    def __init__(self, *problems: str):
        super().__init__("\n".join(problems))
        self.problems = list(problems)


@dataclass(frozen=True)
class Setting:
    """Facts of a setting. `settings()` gives them with its type (`kind`) and default."""

    doc: str  # one line for `docs/training.md`
    choices: tuple[str | None, ...] = ()  # the only values, if there are few; None is null
    bounds: str = "(0, inf)"  # interval of a number
    needs: str | None = None  # what a value other than the default goes with: "KEY=A|B", or "KEY": neither null nor 0
    extensions: str | None = None  # the extension point (`agent_train.config.extensions`) whose names are the choices
    by_mode: Mapping[str, Any] = field(default_factory=dict)  # defaults of single modes
    on_gpu: Any = None  # default on a machine with a GPU; None: the same
    share_of_context: float = 0.0  # the default is at most this share of the tokens that the model reads; 0: no limit
    kind: Any = None
    default: Any = None


def setting(default: Any, doc: str, **more: Any) -> Any:
    """A field of a section: its default and its `Setting`, its choices as one text ("null" is None)."""
    choices = tuple(None if name == "null" else name for name in more.pop("choices", "").split())
    metadata = {"setting": Setting(doc, choices, **more)}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


ZERO = "[0, inf)"
UNIT = "[0, 1]"
REAL = "(-inf, inf)"
LEVELS = "group batch none"
KL_IN_LOSS = "algorithm.kl.place=loss"
OFFLINE = "mode=sft|dpo|rm"
DISTILL = "algorithm.advantage.name=distill"


@dataclass
class EnvConfig:
    id: str = setting("frozen_lake", "the environment; the same as `+env=`")
    url: list[str] = setting([], "servers of a [served](#environments-on-other-machines) environment; empty: made here")
    kwargs: dict[str, Any] = setting({}, "arguments of the environment: `env.kwargs.size=6`")
    train_split: str = setting("train", "tasks to train on")
    test_split: str = setting("test", "held-out tasks, for evaluation only")
    step_timeout: float = setting(60.0, "seconds for one `step`")
    placement: str = setting(
        "local",
        "local: environments run beside the trainer; ray: [spread over a Ray cluster](#environments-over-a-ray-cluster)",
        choices="local ray",
    )
    workers: int = setting(
        0, "servers of them; 0: what fits beside the learner", bounds=ZERO, needs="env.placement=ray"
    )
    cpus: float = setting(1.0, "CPUs of each of these servers")
    rollout: str = setting("episode", "function that plays one episode", extensions="rollouts")


@dataclass
class TinyConfig:
    hidden: int = setting(128, "width of the tiny model")
    layers: int = setting(4, "its layers")
    heads: int = setting(4, "its attention heads; hidden / heads must be a head size of vLLM")
    intermediate: int = setting(384, "width of its feed-forward layers")
    vocab: int = setting(512, "upper limit of its vocabulary")


@dataclass
class ModelConfig:
    path: str | None = setting(None, "Hugging Face folder; null builds the tiny model")
    dtype: str = setting(
        "float32",
        "type of the computation and of the engine's weights; the trainer's weights and optimizer states stay float32",
        choices="float32 bfloat16 float16",
        on_gpu="bfloat16",
    )
    tiny: TinyConfig = field(default_factory=TinyConfig)


@dataclass
class EngineConfig:
    name: str = setting("vllm", "the engine; the same as `engine=`", extensions="engines")
    replicas: int = setting(1, "vLLM servers")
    tensor_parallel: int = setting(1, "devices of one server")
    max_model_len: int = setting(
        8192, 'tokens of prompt and answer; longer episodes end with "context"', share_of_context=1.0
    )
    max_concurrent: int = setting(64, "concurrent requests to one server; times the replicas, concurrent episodes")
    batch_wait: float = setting(
        10.0,
        "seconds that a batch of the embedded engine waits for an episode in a long step; with `trainer.deterministic` it "
        "waits for all",
    )
    port: int = setting(0, "of the first server, the next ones follow; 0 takes free ones", bounds="[0, 65535]")
    kv_cache_bytes: int = setting(4 << 30, "key-value cache of a CPU server")
    gpu_memory_utilization: float = setting(0.85, "share of a GPU's memory that a server takes", bounds="(0, 1]")
    start_timeout: float = setting(300.0, "seconds until a server must answer")
    request_timeout: float = setting(120.0, "seconds for one answer")


@dataclass
class SamplingConfig:
    temperature: float = setting(1.0, "divides the logits, in the engine and in the trainer")
    max_tokens: int = setting(1024, "limit of one answer, in tokens", share_of_context=0.5)


@dataclass
class AdvantageConfig:
    name: str = setting("group", "see [advantages](algorithms.md#advantages)", extensions="advantages")
    mean_level: str = setting("group", "of group: scope of the baseline", choices=LEVELS)
    std_level: str = setting("group", "of group: scope of the divisor; turn and gigpo take none too", choices=LEVELS)
    std: str = setting("sample", "standard deviation with n-1 or with n", choices="sample population")
    eps: float = setting(1.0e-6, "added to the standard deviation", bounds=ZERO)
    gamma: float = setting(1.0, "discount per sampled token", bounds=UNIT)
    lam: float = setting(1.0, "lambda of GAE per sampled token", bounds=UNIT)
    lam_alpha: float | None = setting(None, "replaces lambda by the length-adaptive 1 - 1 / (alpha length)")
    value_lam: float | None = setting(None, "lambda of the critic's targets; null: the same", bounds=UNIT)
    turn_gamma: float = setting(0.95, "discount per turn, of bilevel_gae and gigpo", bounds=UNIT)
    turn_lam: float | None = setting(None, "lambda per turn, of bilevel_gae; null: that of tokens", bounds=UNIT)
    step_weight: float = setting(1.0, "weight of gigpo's step advantages beside its episode advantages", bounds=ZERO)
    prime_beta: float = setting(0.05, "scale of prime's process rewards")
    whiten: bool = setting(False, "normalize the advantages of a step to mean 0 and spread 1 over its sampled tokens")


@dataclass
class CorrectionConfig:
    name: str | None = setting(
        None,
        "importance weights for the gap between engine and trainer; see [corrections](algorithms.md#corrections)",
        extensions="corrections",
    )
    cap: float | None = setting(None, "the largest weight", needs="algorithm.correction.name")
    low: float = setting(0.0, "the weight is 0 below it", bounds=ZERO)
    high: float | None = setting(None, "the weight is 0 above it", needs="algorithm.correction.name")
    drift: float | None = setting(
        None, "drop samples with a negative advantage that drifted by more nats a token", bounds=ZERO
    )


@dataclass
class KlConfig:
    coef: float = setting(0.0, "pull towards the reference policy; 0: none, and no reference is loaded", bounds=ZERO)
    place: str = setting("loss", "where the KL is added", choices="loss reward")
    value: str = setting("k3", "estimator of the number", choices="k1 k2 k3 abs")
    gradient: str | None = setting(
        None, "the one that is differentiated; null: `value`", choices="null k1 k2 k3 abs", needs=KL_IN_LOSS
    )
    importance: str = setting("none", "effect of the off-policy ratio", choices="none detached full", needs=KL_IN_LOSS)
    max_value: float | None = setting(None, "upper limit of the estimate", needs=KL_IN_LOSS)
    target: float | None = setting(
        None, "nats a token to which `coef` adapts; null: it is fixed", needs="algorithm.kl.coef"
    )
    horizon: int = setting(10000, "episodes over which it moves by at most a fifth")


@dataclass
class OverlongConfig:
    length: int | None = setting(None, "sampled tokens of an episode above which the penalty is whole; null: none")
    buffer: int = setting(0, "tokens before that in which it grows", bounds=ZERO, needs="algorithm.overlong.length")
    factor: float = setting(1.0, "the largest penalty", bounds=ZERO)
    mask: bool = setting(False, "leave truncated episodes out of the loss")
    baseline: bool = setting(True, "count truncated episodes in their group's baseline, masked or not")


@dataclass
class FilterConfig:
    name: str = setting(
        "none",
        "which groups of a step are trained on; see [filters](algorithms.md#filters-and-lengths)",
        extensions="filters",
    )
    share: float = setting(0.25, "of the groups (uncertain), or of the spread of rewards (top_p)", bounds="(0, 1]")
    rounds: int = setting(
        1, "most rollouts of a step, to replace groups without spread", needs="algorithm.filter.name=spread"
    )


@dataclass
class AlgorithmConfig:
    name: str = setting("grpo", "of the recipe, for people; see [algorithms](algorithms.md#recipes)")
    group_size: int = setting(8, "episodes of one task in a step; comparisons within a group need at least 2")
    updates_per_step: int = setting(1, "optimizer steps per training step, each on its part of the episodes")
    loss: str = setting("ppo", "policy loss; see [losses](algorithms.md#losses)", extensions="losses")
    loss_settings: dict[str, Any] = setting({}, "its settings: `algorithm.loss_settings.clip_high=0.28`")
    reduction: str = setting(
        "token-mean",
        "weight of a token in the loss",
        choices="token-mean seq-mean-token-mean seq-mean-token-sum constant prompt-mean trajectory-mean",
    )
    reduction_length: float | None = setting(None, "divides a trajectory's sum", needs="algorithm.reduction=constant")
    proximal: str = setting(
        "recomputed",
        "denominator of the loss's ratio: the trainer's policy at the start of the step, interpolated, or behaviour (the "
        "engine's)",
        choices="recomputed interpolated behaviour",
    )
    entropy_coef: float = setting(0.0, "bonus for entropy", bounds=REAL)
    reward_shaping: str | None = setting(
        None, "function that changes the turn rewards before the advantages", extensions="reward_shaping"
    )
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    kl: KlConfig = field(default_factory=KlConfig)
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    filter: FilterConfig = field(default_factory=FilterConfig)


@dataclass
class LearnerConfig:
    workers: int = setting(2, "FSDP2 ranks; one GPU each where there are any")
    tensor_parallel: int = setting(1, "ranks that share the layers of one replica; divides `learner.workers`")
    sequence_parallel: int = setting(1, "ranks that share the tokens of one micro-batch; divides `learner.workers`")
    lr: float = setting(1.0e-6, "learning rate", bounds=ZERO, by_mode={"sft": 1.0e-5, "dpo": 5.0e-7, "rm": 1.0e-5})
    warmup_steps: int = setting(2, "optimizer steps of linear warm-up", bounds=ZERO)
    schedule: str = setting(
        "constant", "linear falls to 1/N at the last of N steps; warm-up comes on top", choices="constant linear"
    )
    optimizer: str = setting("adamw", "adamw8bit needs torchao", choices="adamw adamw8bit")
    weight_decay: float = setting(0.0, "AdamW's, of matrices (adapters too), not of norms and biases", bounds=ZERO)
    beta1: float = setting(0.9, "AdamW's", bounds="[0, 1)")
    beta2: float = setting(0.95, "AdamW's", bounds="[0, 1)")
    max_grad_norm: float = setting(1.0, "the gradient is scaled down to this norm")
    microbatch_tokens: int = setting(4096, "limit of tokens of one forward pass; bounds memory, not the result")
    shared_prefix: bool = setting(False, "compute the prompt of a group once")
    head_chunk: int = setting(1024, "sampled tokens whose logits exist at one time; bounds memory, not the result")
    vocab_chunk: int = setting(0, "vocabulary entries whose logits exist at one time, as above; 0: all", bounds=ZERO)
    gradient_checkpointing: bool = setting(False, "recompute activations in the backward pass", on_gpu=True)
    offload: bool = setting(False, "keep parameters and optimizer in host memory between uses")
    compile: bool = setting(False, "compile the blocks")
    placement: str = setting("shared", "shared: roles share each device; own: each has its own", choices="shared own")
    timeout: float = setting(600.0, "seconds for one call of the ranks")


@dataclass
class LoraConfig:
    rank: int = setting(0, "rank of low-rank adapters in place of all weights; 0: none", bounds=ZERO)
    alpha: float = setting(32.0, "their scale is alpha / rank")
    targets: list[str] = setting(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], "the layers that get one"
    )


@dataclass
class ReferenceConfig:
    path: str | None = setting(None, "the reference policy; null: the policy as the run starts")


@dataclass
class RewardModelConfig:
    path: str | None = setting(None, "its score is added to the last turn's reward; null: none")


@dataclass
class TeacherConfig:
    path: str | None = setting(None, "the teacher of distillation: a model folder", needs=DISTILL)
    url: str | None = setting(None, "or a vLLM endpoint", needs=DISTILL)
    model: str = setting("", "the endpoint's name for it; empty: its only model")
    coef: float = setting(1.0, "weight of a nat of difference to the teacher")


@dataclass
class CriticConfig:
    path: str | None = setting(
        None,
        "start of the critic and of prime's reward model; null: the policy as the run starts, with a new value head",
    )
    lr: float = setting(1.0e-5, "its learning rate", bounds=ZERO)
    warmup_steps: int = setting(0, "its warm-up", bounds=ZERO)
    clip: float | None = setting(None, "how far a value may move from that of the rollout; null: no bound")
    alone_steps: int = setting(0, "first training steps in which the critic learns alone", bounds=ZERO)


@dataclass
class SftConfig:
    episodes: int = setting(0, "expert episodes of the warm start; 0 skips it", bounds=ZERO, needs="mode=rl")
    mistakes: float = setting(
        0.3, "share of random actions, which are learned too: more make a weaker start", bounds=UNIT
    )
    epochs: int = setting(1, "passes over the samples")
    batch_rows: int = setting(64, "samples of one step of the warm start")
    lr: float = setting(1.0e-5, "its learning rate, falling linearly to 1/N of it at the last of N steps", bounds=ZERO)


@dataclass
class DataConfig:
    train: str | None = setting(
        None, "data of the [modes](#modes): a file (JSON Lines, Parquet) or a run folder", needs=OFFLINE
    )
    test: str | None = setting(None, "the same, held out: measured as evaluations of mode=rl are", needs=OFFLINE)
    epochs: int = setting(1, "passes over the examples")
    batch_rows: int = setting(64, "examples of one optimizer step")
    max_tokens: int | None = setting(
        None, "longer examples are left out; null: what the model cannot read", bounds="[2, inf)"
    )
    min_reward: float | None = setting(None, "episodes with less are not imitated; kto dislikes them", bounds=REAL)
    loss: str = setting("dpo", "loss of mode=dpo", choices="dpo ipo kto", needs="mode=dpo")
    beta: float = setting(0.1, "how strongly its reference holds")


@dataclass
class TrainerConfig:
    name: str | None = setting(None, "of the run folder; null makes one from environment, algorithm and time")
    runs_dir: str = setting("runs", "parent of the run folders")
    steps: int = setting(50, "training steps")
    groups_per_step: int = setting(16, "tasks of one step; times `algorithm.group_size`, its episodes")
    seed: int = setting(0, "of everything that is drawn", bounds=ZERO)
    eval_every: int = setting(10, "steps between evaluations; others come before the first step and after the last")
    eval_episodes: int = setting(200, "held-out tasks of an evaluation, each played once, always with the same seeds")
    save_every: int = setting(10, "steps between checkpoints; others come before the first step and after the last")
    keep_checkpoints: int = setting(3, "newest checkpoints that stay on disk")
    resume: str = setting("auto", "auto: go on with a run of that name; never: refuse it; or the folder to go on with")
    deterministic: bool = setting(False, "refuse operations whose result may differ from run to run")
    record: str | None = setting(None, "a further file for the run's result, besides `result.json`", needs="mode=rl")
    trackers: list[str] = setting([], "receive every record of `metrics.jsonl` as well", extensions="trackers")


MODES = ("rl", "sft", "dpo", "rm")


@dataclass
class Config:
    mode: str = setting(
        "rl", "rl plays episodes; sft, dpo and rm learn from files, see [modes](#modes)", choices=" ".join(MODES)
    )
    sandbox: str = setting(
        "auto",
        "where environments with a [sandbox](sandboxes.md) run an agent's programs; auto: `AGENTGYM_SANDBOX`, or docker if an "
        "engine has the image. `env.kwargs.sandbox` comes first",
    )
    env: EnvConfig = field(default_factory=EnvConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    data: DataConfig = field(default_factory=DataConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)


def settings(section: Any = None, prefix: str = "") -> dict[str, Setting]:
    """Every setting by its dotted key, as `learner.lr`, in the order of the schema; of a section alone if one is given."""
    found: dict[str, Setting] = {}
    section = Config() if section is None else section
    kinds = get_type_hints(type(section))
    for each in fields(section):
        value, key = getattr(section, each.name), prefix + each.name
        if is_dataclass(value):
            found |= settings(value, f"{key}.")
        else:
            found[key] = replace(each.metadata["setting"], kind=kinds[each.name], default=value)
    return found


def get(config: Any, key: str) -> Any:
    """The value of a dotted key."""
    return functools.reduce(getattr, key.split("."), config)


def default_config(mode: str = "rl", gpu: bool = False, context: int | None = None) -> Config:
    """The defaults of a mode on a machine, for a model that reads `context` tokens (None: not known)."""
    config = Config(mode=mode)
    for key, known in settings().items():
        value = known.by_mode.get(mode, known.default)
        if gpu and known.on_gpu is not None:
            value = known.on_gpu
        if context is not None and known.share_of_context:
            value = min(value, int(context * known.share_of_context))
        section, _, name = key.rpartition(".")
        setattr(get(config, section) if section else config, name, value)
    return config


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its class if it is empty."""
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return (text.strip().splitlines() or [type(error).__name__])[0]
