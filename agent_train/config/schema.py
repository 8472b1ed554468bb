"""The settings of a run: name, type, default, range, what each needs, and one line of documentation, in one place.

Validation, `--dry-run` and the table in docs/settings.md are made from it. Hydra merges `configs/` and the command line onto these
dataclasses. Nothing writes to a config after `validate`. The defaults are for a real instruct model; those of the tiny policy are
in `configs/model/tiny.yaml` and `configs/tiny/`.
"""

# ruff: noqa: RUF009 - `setting` makes a dataclass field
import functools
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, get_type_hints

from agent_train.config.setting import Setting, setting


class ConfigError(ValueError):
    """Settings that cannot be run. `problems` has a line for each problem: the key, why, and what to do."""

    def __init__(self, *problems: str):
        super().__init__("\n".join(problems))
        self.problems = list(problems)


ZERO = "[0, inf)"
UNIT = "[0, 1]"
REAL = "(-inf, inf)"
LEVELS = "group batch none"
KL_IN_LOSS = "algorithm.kl.place=loss"
OFFLINE = "mode=sft|dpo|rm"
EXTERNAL = ("openai", "sglang")  # engines that others run
PAST = "past"  # in `env.players`: played by the policy as it was at an earlier step
OWN = "own"  # played by a policy of its own, which learns too
SUMMARY = "memory.name=summary"
JUDGE = "judge.url"
DISTILL = "algorithm.advantage.name=distill"


@dataclass
class EnvConfig:
    id: str = setting("frozen_lake", "the same as `+env=`")
    url: list[str] = setting([], "servers of a [served](machines.md#environments-on-other-machines) environment")
    kwargs: dict[str, Any] = setting({}, "arguments of the environment: `env.kwargs.size=6`")
    train_split: str = setting("train", "tasks to train on")
    test_split: str = setting("test", "held-out tasks, for evaluation")
    step_timeout: float = setting(0.0, "seconds for one `step`; 0: the environment's limit, at least 60", bounds=ZERO)
    placement: str = setting(
        "local", "ray: on a [Ray cluster](machines.md#environments-over-a-ray-cluster)", choices="local ray"
    )
    workers: int = setting(0, "environment workers; 0: as many as fit", bounds=ZERO, needs="env.placement=ray")
    cpus: float = setting(1.0, "CPUs of each environment worker")
    rollout: str = setting("episode", "function that plays one episode", extensions="rollouts")
    players: dict[str, str] = setting(
        {}, "[players](algorithms.md#players) that have other policies than the run's: `env.players.O=expert`"
    )
    past_every: int = setting(10, "steps between [past policies](algorithms.md#past-policies)", needs="env.players")
    past_keep: int = setting(10, "past policies that may play, with the start", bounds="[2, inf)", needs="env.players")


@dataclass
class TinyConfig:
    hidden: int = setting(128, "width of the tiny model")
    layers: int = setting(4, "layers of the tiny model")
    heads: int = setting(4, "attention heads of the tiny model; hidden / heads must be a head size of vLLM")
    intermediate: int = setting(384, "width of the feed-forward layers of the tiny model")
    vocab: int = setting(512, "largest vocabulary of the tiny model")


@dataclass
class ModelConfig:
    path: str | None = setting(None, "Hugging Face folder; null: build the tiny model")
    dtype: str = setting(
        "float32",
        "data type of computation and engine; master weights and optimizer stay float32",
        choices="float32 bfloat16 float16",
        on_gpu="bfloat16",
    )
    tiny: TinyConfig = field(default_factory=TinyConfig)


@dataclass
class EngineConfig:
    name: str = setting(
        "vllm", "engine; choose it by `engine=`, which sets what goes with it, too", extensions="engines"
    )
    urls: list[str] = setting(
        [],
        "servers of [an engine that others run](engines.md#engines-that-others-run): `engine.urls=[http://HOST:8000]`",
        needs=f"engine.name={'|'.join(EXTERNAL)}",
    )
    replicas: int = setting(1, "vLLM servers")
    tensor_parallel: int = setting(1, "GPUs of one server")
    max_model_len: int = setting(
        8192, 'context length, prompt and answer; longer episodes end with "context"', share_of_context=1.0
    )
    max_concurrent: int = setting(64, "requests in flight to one server; episodes in flight: this times the servers")
    adaptive: bool = setting(
        False,
        "start with a quarter of these episodes, then adapt to the servers' [load](engines.md#concurrency)",
        needs="engine.name=vllm",
    )
    placement: str = setting(
        "own",
        "own: servers have GPUs of their own; colocated: they [share](engines.md#colocated-servers) the learner's",
        choices="own colocated",
        needs="engine.name=vllm",
    )
    batch_wait: float = setting(
        10.0,
        "seconds without a request, after which the embedded engine starts a batch; not with `trainer.deterministic`",
    )
    port: int = setting(0, "port of the first server; the others follow; 0: free ports", bounds="[0, 65535]")
    kv_cache_bytes: int = setting(4 << 30, "bytes of the key-value cache of a server on CPUs")
    weights: str = setting(
        "collective",
        "[how new weights reach the engine](engines.md#how-weights-travel)",
        choices="collective disk delta",
        needs=f"engine.name={'|'.join(('vllm', *EXTERNAL))}",
    )
    keep_cache: bool = setting(
        False,
        "keep keys and values of interrupted requests over a weight update; false: compute them again",
        needs="engine.name=vllm",
    )
    gpu_memory_utilization: float = setting(0.85, "share of a GPU's memory that a server takes", bounds="(0, 1]")
    start_timeout: float = setting(300.0, "seconds that a server may take to start")
    request_timeout: float = setting(600.0, "seconds for one answer")

    @property
    def servers(self) -> int:
        """The number of its servers, the run's own or others'; the embedded engine is one."""
        return len(self.urls) or (1 if self.name == "embedded" else self.replicas)


@dataclass
class SamplingConfig:
    temperature: float = setting(1.0, "sampling temperature")
    max_tokens: int = setting(1024, "tokens of one answer", share_of_context=0.5)


@dataclass
class MemoryConfig:
    name: str = setting(
        "none",
        "part of a [long episode](training.md#long-episodes) that the model sees; none: all of it, until the context is full",
        choices="none recent summary",
        needs="mode=rl",
    )
    turns: int = setting(4, "last turns that the model sees", needs="memory.name=recent")
    tokens: int = setting(1024, "most tokens of one summary", needs=SUMMARY)
    room: int | None = setting(
        None,
        "summarise when fewer tokens are left; null: the tokens of an answer, the request and a summary",
        needs=SUMMARY,
    )
    summaries: int = setting(8, "most summaries of one episode", needs=SUMMARY)


AGENT = "agent.run"


@dataclass
class AgentConfig:
    run: str | None = setting(
        None,
        "[agent](gateway.md#training-an-agent) that plays: `command:WORDS`, `package.module:function` or [a name](gateway.md#agents-of-other-projects); the same as `agent=`",
        needs="mode=rl",
    )
    image: str | None = setting(None, "image of a command's [sandbox](gateway.md#a-command-in-a-sandbox)", needs=AGENT)
    settings: str = setting(
        "override",
        "[what to do](gateway.md#settings) when the agent's sampling settings differ from those of training",
        choices="override strict mask",
        needs=AGENT,
    )
    timeout: float = setting(3600.0, "most seconds of an episode", needs=AGENT)
    max_turns: int | None = setting(None, "most model calls of an episode", needs=AGENT)
    max_episode_tokens: int | None = setting(None, "most tokens of an episode, in prompts and answers", needs=AGENT)
    incomplete: bool = setting(False, "also train on episodes that failed at a limit", needs=AGENT)
    passed: list[str] = setting(
        [], "other models that the agent may call, by name and [URL](gateway.md#training-an-agent)", needs=AGENT
    )


@dataclass
class JudgeConfig:
    url: str | None = setting(
        None, "endpoint of a [judge of groups](training.md#a-judge-of-groups); null: none", needs="mode=rl"
    )
    model: str = setting("", "the judge's model name", needs=JUDGE)
    rubric: str = setting("How well does the agent do what the task asks?", "criterion of the judge", needs=JUDGE)
    by: str = setting("ranking", "verdict: an order of the episodes, or scores", choices="ranking scores", needs=JUDGE)
    weight: float = setting(1.0, "weight of the verdict (0 to 1) in the reward", bounds=REAL, needs=JUDGE)
    samples: int = setting(1, "verdicts on a group; their mean counts", needs=JUDGE)
    max_tokens: int = setting(4096, "most tokens of a verdict", needs=JUDGE)


@dataclass
class AdvantageConfig:
    name: str = setting("group", "[advantage](algorithms.md#advantages)", extensions="advantages")
    mean_level: str = setting("group", "advantage group: scope of the baseline", choices=LEVELS)
    std_level: str = setting("group", "advantage group: scope of the divisor; turn, gigpo: none or any", choices=LEVELS)
    std: str = setting("sample", "standard deviation by n-1 (sample) or n (population)", choices="sample population")
    eps: float = setting(1.0e-6, "added to the standard deviation", bounds=ZERO)
    gamma: float = setting(1.0, "discount per sampled token", bounds=UNIT)
    lam: float = setting(1.0, "lambda of GAE per sampled token", bounds=UNIT)
    lam_alpha: float | None = setting(None, "alpha of a length-adaptive lambda, 1 - 1 / (alpha * length); null: `lam`")
    value_lam: float | None = setting(None, "lambda of the critic's targets; null: `lam`", bounds=UNIT)
    turn_gamma: float = setting(0.95, "discount per turn in bilevel_gae and gigpo", bounds=UNIT)
    turn_lam: float | None = setting(None, "lambda per turn in bilevel_gae; null: `lam`", bounds=UNIT)
    step_weight: float = setting(1.0, "weight of gigpo's step advantages", bounds=ZERO)
    prime_beta: float = setting(0.05, "scale of prime's process rewards")
    whiten: bool = setting(False, "normalize advantages over a step's sampled tokens")


@dataclass
class CorrectionConfig:
    name: str | None = setting(
        None, "[weights](algorithms.md#corrections) for the gap between engine and trainer", extensions="corrections"
    )
    cap: float | None = setting(None, "largest weight", needs="algorithm.correction.name")
    low: float = setting(0.0, "smaller weights become 0", bounds=ZERO, needs="algorithm.correction.name")
    high: float | None = setting(None, "larger weights become 0", needs="algorithm.correction.name")
    drift: float | None = setting(
        None, "drop samples with a negative advantage if they drifted by more nats per token", bounds=ZERO
    )


@dataclass
class KlConfig:
    coef: float = setting(0.0, "weight of the KL to the reference policy; 0: no reference is loaded", bounds=ZERO)
    place: str = setting("loss", "add the KL to the loss or to the reward", choices="loss reward")
    value: str = setting("k3", "[estimator](algorithms.md#kl) of the KL's value", choices="k1 k2 k3 abs")
    gradient: str | None = setting(
        None, "[gradient's](algorithms.md#kl) estimator; null: `value`", choices="null k1 k2 k3 abs", needs=KL_IN_LOSS
    )
    importance: str = setting(
        "none", "use of the [off-policy ratio](algorithms.md#kl)", choices="none detached full", needs=KL_IN_LOSS
    )
    max_value: float | None = setting(None, "largest value of the estimate", needs=KL_IN_LOSS)
    target: float | None = setting(None, "nats per token; `coef` adapts to reach it", needs="algorithm.kl.coef")
    horizon: int = setting(10000, "episodes in which `coef` changes by at most a fifth")


@dataclass
class OverlongConfig:
    length: int | None = setting(None, "sampled tokens at which the penalty is largest; null: no penalty")
    buffer: int = setting(0, "tokens over which the penalty grows", bounds=ZERO, needs="algorithm.overlong.length")
    factor: float = setting(1.0, "largest penalty", bounds=ZERO, needs="algorithm.overlong.length")
    mask: bool = setting(False, "leave truncated episodes out of the loss")
    baseline: bool = setting(
        True, "count truncated episodes in their group's baseline", needs="algorithm.overlong.mask"
    )


@dataclass
class FilterConfig:
    name: str = setting(
        "none", "[which groups](algorithms.md#filters-and-lengths) of a step are trained on", extensions="filters"
    )
    share: float = setting(0.25, "share kept, of groups (uncertain) or reward spread (top_p)", bounds="(0, 1]")
    rounds: int = setting(1, "most rollouts of a step, for groups with spread", needs="algorithm.filter.name=spread")


@dataclass
class AlgorithmConfig:
    name: str = setting("grpo", "name of the [recipe](algorithms.md#recipes), a label")
    group_size: int = setting(8, "episodes of one task in a step")
    updates_per_step: int = setting(1, "optimizer steps per training step")
    loss: str = setting("ppo", "[policy loss](algorithms.md#losses)", extensions="losses")
    loss_settings: dict[str, Any] = setting({}, "settings of the loss: `algorithm.loss_settings.clip_high=0.28`")
    reduction: str = setting(
        "token-mean",
        "[weight of a token](algorithms.md#reductions) in the loss",
        choices="token-mean seq-mean-token-mean seq-mean-token-sum constant prompt-mean trajectory-mean",
    )
    reduction_length: float | None = setting(None, "divides a trajectory's sum", needs="algorithm.reduction=constant")
    proximal: str = setting(
        "recomputed",
        "[denominator](algorithms.md#corrections) of the loss's ratio",
        choices="recomputed interpolated behaviour",
    )
    entropy_coef: float = setting(0.0, "weight of the entropy bonus", bounds=REAL)
    credit: str = setting(
        "own",
        "reward of each [player](algorithms.md#players): own, team's, or the difference that it made",
        choices="own team difference",
    )
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
    workers: int = setting(2, "FSDP2 ranks, on one GPU each if the machine has GPUs")
    tensor_parallel: int = setting(1, "ranks that share the layers of one replica")
    sequence_parallel: int = setting(1, "ranks that share the tokens of one micro-batch")
    lr: float = setting(1.0e-6, "learning rate", bounds=ZERO, by_mode={"sft": 1.0e-5, "dpo": 5.0e-7, "rm": 1.0e-5})
    warmup_steps: int = setting(2, "optimizer steps of linear warm-up", bounds=ZERO)
    schedule: str = setting("constant", "linear: falls to 1/N at the last of N steps", choices="constant linear")
    optimizer: str = setting("adamw", "adamw8bit needs torchao", choices="adamw adamw8bit")
    weight_decay: float = setting(0.0, "weight decay of AdamW, for matrices only", bounds=ZERO)
    beta1: float = setting(0.9, "beta1 of AdamW", bounds="[0, 1)")
    beta2: float = setting(0.95, "beta2 of AdamW", bounds="[0, 1)")
    max_grad_norm: float = setting(1.0, "gradients are clipped to this norm")
    microbatch_tokens: int = setting(4096, "tokens of one forward pass")
    shared_prefix: bool = setting(False, "compute once what prompts begin with")
    head_chunk: int = setting(1024, "sampled tokens whose logits exist at one time")
    vocab_chunk: int = setting(0, "vocabulary entries whose logits exist at one time; 0: all", bounds=ZERO)
    gradient_checkpointing: bool = setting(True, "recompute activations in the backward pass")
    offload: bool = setting(False, "keep parameters and optimizer in host memory between uses")
    compile: bool = setting(False, "compile the model's blocks with Inductor")
    placement: str = setting("shared", "shared: roles share each device; own: each has its own", choices="shared own")
    timeout: float = setting(600.0, "seconds that one call of the ranks may take")


@dataclass
class LoraConfig:
    rank: int = setting(0, "rank of low-rank adapters, trained in place of all weights; 0: no adapters", bounds=ZERO)
    alpha: float = setting(32.0, "adapters are scaled by alpha / rank")
    merge: bool = setting(True, "give vLLM all weights, adapters merged; false: adapters alone", on_gpu=False)
    targets: list[str] = setting(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], "layers that get an adapter"
    )


@dataclass
class ReferenceConfig:
    path: str | None = setting(None, "folder of the reference; null: the initial policy")
    reset_every: int | None = setting(
        None, "steps after which the policy becomes the reference; null: never", needs="algorithm.kl.coef"
    )


@dataclass
class RewardModelConfig:
    path: str | None = setting(None, "folder of a reward model; its score is added to the last turn's reward")


@dataclass
class TeacherConfig:
    path: str | None = setting(None, "folder of the teacher of distillation", needs=DISTILL)
    url: str | None = setting(None, "vLLM endpoint of the teacher, in place of `teacher.path`", needs=DISTILL)
    model: str = setting("", "the teacher's model name; empty: the endpoint's only model")
    coef: float = setting(1.0, "weight of the log-probability difference to the teacher")


@dataclass
class CriticConfig:
    path: str | None = setting(None, "folder of the critic; null: the initial policy with a new value head")
    lr: float = setting(1.0e-5, "learning rate of the critic", bounds=ZERO)
    warmup_steps: int = setting(0, "optimizer steps of the critic's warm-up", bounds=ZERO)
    clip: float | None = setting(None, "largest change of a value from that of the rollout")
    alone_steps: int = setting(0, "first training steps, in which only the critic learns", bounds=ZERO)


@dataclass
class SftConfig:
    episodes: int = setting(0, "expert episodes of the SFT warm start; 0: no warm start", bounds=ZERO, needs="mode=rl")
    mistakes: float = setting(0.3, "share of random actions in them, which are learned too", bounds=UNIT)
    epochs: int = setting(1, "passes over the warm start's samples")
    batch_rows: int = setting(64, "samples of one optimizer step")
    lr: float = setting(1.0e-5, "learning rate of the warm start, falls linearly", bounds=ZERO)


@dataclass
class DataConfig:
    train: str | None = setting(None, "[file](training.md#modes) or run folder to train on", needs=OFFLINE)
    test: str | None = setting(None, "held-out file or run folder", needs=OFFLINE)
    epochs: int = setting(1, "passes over the examples")
    batch_rows: int = setting(64, "examples of one optimizer step")
    max_tokens: int | None = setting(None, "longer examples are left out; null: the model's context", bounds="[2, inf)")
    min_reward: float | None = setting(None, "sft drops episodes with less reward; kto dislikes them", bounds=REAL)
    loss: str = setting("dpo", "loss", choices="dpo ipo kto", needs="mode=dpo")
    beta: float = setting(0.1, "beta of the loss: pull towards the reference")


@dataclass
class TrainerConfig:
    name: str | None = setting(None, "name of the run folder; null: environment, algorithm and time")
    runs_dir: str = setting("runs", "parent of the run folders")
    steps: int = setting(50, "training steps", needs="mode=rl")
    groups_per_step: int = setting(16, "groups of one step, each of one task", needs="mode=rl")
    staleness: int = setting(
        0, "weight versions that rollouts may [run ahead](engines.md#asynchrony) of training", bounds=ZERO
    )
    seed: int = setting(0, "seed of all random draws", bounds=f"[0, {2**63})")
    eval_every: int = setting(10, "steps between evaluations; also at the start and the end")
    eval_episodes: int = setting(200, "held-out tasks of an evaluation")
    eval_samples: int = setting(1, "episodes of each of these tasks")
    save_every: int = setting(10, "steps between checkpoints; also at the start and the end")
    keep_checkpoints: int = setting(3, "newest checkpoints that are kept")
    dump: list[int] = setting(
        [], "steps to [replay](runs.md#replay-a-step) later: keeps the checkpoint before each", needs="mode=rl"
    )
    resume: str = setting("auto", "auto: resume a run of that name; never: refuse to; or a run folder to resume")
    restarts: int = setting(3, "times in a row that a run may [go back](runs.md#when-a-part-fails)", bounds=ZERO)
    deterministic: bool = setting(False, "refuse operations whose results are not deterministic")
    record: str | None = setting(None, "another file for the run's result", needs="mode=rl")
    trackers: list[str] = setting(
        [], "[trackers](runs.md#trackers) that get all of `metrics.jsonl`", extensions="trackers"
    )


@dataclass
class PoolsConfig:
    groups: int = setting(
        0,
        "number of last groups in a task's [solve rate](training.md#the-tasks-of-a-step); 0: no pools",
        bounds=ZERO,
        needs="mode=rl",
    )
    weights: dict[str, float] = setting(
        {"unseen": 4.0, "unsolved": 1.0, "hard": 4.0, "medium": 4.0, "easy": 2.0, "solved": 1.0},
        "relative frequency of each band",
        needs="pools.groups",
    )
    hard: float = setting(0.25, "tasks with a lower solve rate are hard", bounds=UNIT, needs="pools.groups")
    easy: float = setting(0.75, "tasks with a higher solve rate are easy", bounds=UNIT, needs="pools.groups")
    revisit: int = setting(50, "steps until a retired task comes back", needs="pools.groups")


MODES = ("rl", "sft", "dpo", "rm")


@dataclass
class Config:
    mode: str = setting(
        "rl", "rl plays episodes; sft, dpo and rm learn from [files](training.md#modes)", choices=" ".join(MODES)
    )
    sandbox: str = setting("auto", "[back end](sandboxes.md#choose-a-back-end); `env.kwargs.sandbox` comes first")
    env: EnvConfig = field(default_factory=EnvConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    data: DataConfig = field(default_factory=DataConfig)
    pools: PoolsConfig = field(default_factory=PoolsConfig)
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
