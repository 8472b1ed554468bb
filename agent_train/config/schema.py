"""The settings of a run. Each group is a dataclass; `configs/` holds named choices for each.

The dataclasses are the schema: Hydra's compose API merges YAML and command line onto them, so that an unknown key or a
value of the wrong type fails before anything starts. Nothing writes to a config after `validate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


class ConfigError(ValueError):
    """Settings that cannot be run. `problems` has one line for each thing that is wrong: the key, why, and what to do."""

    def __init__(self, problems: Sequence[str]):
        super().__init__("\n".join(problems))
        self.problems = list(problems)


@dataclass
class EnvConfig:
    """Which environment, what it is made with, and where it runs.

    `url` lists the servers of one that is served; `id` is then its name here. `placement` ray spreads it over the CPUs of a
    Ray cluster: `workers` servers, 0 for as many as fit, which take `cpus` CPUs each.
    """

    id: str = "frozen_lake"
    url: list[str] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)
    train_split: str = "train"
    test_split: str = "test"
    step_timeout: float = 60.0
    placement: str = "local"
    workers: int = 0
    cpus: float = 1.0


@dataclass
class TinyConfig:
    """Shape of the model that is built by code when `model.path` is not set (Qwen3 architecture)."""

    hidden: int = 128
    layers: int = 4
    heads: int = 4
    intermediate: int = 384
    vocab: int = 512


@dataclass
class ModelConfig:
    """The policy. `path` is a Hugging Face folder; null builds the tiny one."""

    path: str | None = None
    dtype: str = "float32"
    tiny: TinyConfig = field(default_factory=TinyConfig)


@dataclass
class EngineConfig:
    """What samples. `vllm` starts servers; `embedded` runs in this process.

    `port` 0 takes a free one. Times are seconds, `kv_cache_bytes` is for CPU engines. `batch_wait` is how long a batch of the
    embedded engine waits for episodes that have not asked; with `trainer.deterministic` it waits for all of them, however long.
    """

    name: str = "vllm"
    replicas: int = 1
    tensor_parallel: int = 1
    max_model_len: int = 1024
    max_concurrent: int = 64
    batch_wait: float = 10.0
    port: int = 0
    kv_cache_bytes: int = 268435456
    gpu_memory_utilization: float = 0.85
    start_timeout: float = 300.0
    request_timeout: float = 120.0


@dataclass
class SamplingConfig:
    """How actions are sampled, in training and in evaluation."""

    temperature: float = 1.0
    max_tokens: int = 8


@dataclass
class AdvantageConfig:
    """From rewards to one number per sampled token. Docs: docs/algorithms.md.

    Attributes:
        name: group (GRPO and its kin), rloo, opo, maxrl, remax, best_of, reinforce_pp, reinforce_pp_baseline, gae,
            bilevel_gae, turn (process supervision), gigpo, prime, distill (on-policy distillation), constant (all 1).
        mean_level, std_level: of `group`: what the baseline is the mean of and what is divided by: group, batch or none.
        std: sample (n-1) or population (n); `eps` is added to it.
        gamma, lam: discount and lambda per sampled token.
        lam_alpha: length-adaptive lambda of this alpha in place of `lam`; null: `lam`.
        value_lam: lambda of what the critic learns; null: the same.
        turn_gamma, turn_lam: the same over turns: of bilevel_gae and gigpo; turn_lam null: `lam`.
        step_weight: weight of GiGPO's step advantages.
        prime_beta: scale of PRIME's process rewards.
        whiten: whether the advantages of a step are made to have mean 0 and spread 1 over all sampled tokens.
    """

    name: str = "group"
    mean_level: str = "group"
    std_level: str = "group"
    std: str = "sample"
    eps: float = 1.0e-6
    gamma: float = 1.0
    lam: float = 1.0
    lam_alpha: float | None = None
    value_lam: float | None = None
    turn_gamma: float = 0.95
    turn_lam: float | None = None
    step_weight: float = 1.0
    prime_beta: float = 0.05
    whiten: bool = False


@dataclass
class CorrectionConfig:
    """Weights for what the engine sampled and the trainer's proximal policy would not have. `name` null: none.

    `name` is one of tis, icepop, seq-mask-tis, sequence-is, geometric-is, sequence-mask, geometric-mask; `cap` cuts weights,
    `low` and `high` are the band outside of which they are 0. `drift` (OPSM) drops rows with a negative advantage from which
    the policy has moved by more nats per token.
    """

    name: str | None = None
    cap: float | None = None
    low: float = 0.0
    high: float | None = None
    drift: float | None = None


@dataclass
class KlConfig:
    """The pull towards the reference policy; coefficient 0: none, and no reference model is loaded.

    Attributes:
        coef: the coefficient; of the first step where it adapts.
        place: loss or reward.
        value: estimator of the number: k1, k2, k3 or abs.
        gradient: estimator whose gradient is taken; null: that of `value`. For `place` loss only, as the next two.
        importance: none, detached or full: what the off-policy ratio does.
        max_value: bounds the estimate; null: no bound.
        target: the KL that an adaptive coefficient steers to; null: the coefficient is fixed.
        horizon: trajectories over which it moves by at most a fifth.
    """

    coef: float = 0.0
    place: str = "loss"
    value: str = "k3"
    gradient: str | None = None
    importance: str = "none"
    max_value: float | None = None
    target: float | None = None
    horizon: int = 10000


@dataclass
class OverlongConfig:
    """Episodes that sampled many tokens or were cut off. Lengths are sampled tokens of a whole episode.

    Attributes:
        length: the most that is wanted; null: no shaping.
        buffer: before `length` in which the penalty grows (DAPO).
        factor: the largest penalty.
        mask: whether episodes that a limit cut off are left out of the loss.
        baseline: whether those count in their group's baseline all the same.
    """

    length: int | None = None
    buffer: int = 0
    factor: float = 1.0
    mask: bool = False
    baseline: bool = True


@dataclass
class FilterConfig:
    """Which groups of a step are trained on, by the spread of their rewards.

    Attributes:
        name: none (all), spread (those with any), uncertain (StarPO-S: the `share` of the groups that differ most), or top_p
            (RAGEN: the fewest that hold `share` of the spread).
        share: over 0 up to 1.
        rounds: most rollouts of a step: above 1, groups without spread are replaced by those of further tasks until
            `trainer.groups_per_step` have some (DAPO's dynamic sampling).
    """

    name: str = "none"
    share: float = 0.25
    rounds: int = 1


@dataclass
class AlgorithmConfig:
    """What is optimised. A recipe of a paper is a file of `configs/algorithm/`.

    Attributes:
        name: of the recipe, for people; nothing is decided by it.
        group_size: episodes of each task.
        updates_per_step: optimizer steps, each on its part of the rows of a training step.
        loss: of agent_train.algorithms.registry, or "package.module:function".
        loss_settings: its settings.
        reduction: what a token weighs: token-mean, seq-mean-token-mean, seq-mean-token-sum, constant, prompt-mean or
            trajectory-mean.
        reduction_length: of constant alone: what a trajectory's sum is divided by.
        proximal: recomputed (decoupled: what the ratio divides by is the trainer's own policy at the start of the step),
            interpolated, or behaviour (the engine's).
        entropy_coef: bonus for entropy.
    """

    name: str = "grpo"
    group_size: int = 8
    updates_per_step: int = 1
    loss: str = "ppo"
    loss_settings: dict[str, Any] = field(default_factory=dict)
    reduction: str = "token-mean"
    reduction_length: float | None = None
    proximal: str = "recomputed"
    entropy_coef: float = 0.0
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    kl: KlConfig = field(default_factory=KlConfig)
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    filter: FilterConfig = field(default_factory=FilterConfig)


@dataclass
class LearnerConfig:
    """The FSDP2 workers and their optimizer, of every role. `microbatch_tokens` bounds one forward pass.

    With `schedule` constant the learning rate stays. With linear it falls in a line from the whole rate at the first of N steps to
    1/N of it at the last, so that no step is made at rate 0. The warm-up over `warmup_steps` multiplies either.

    Attributes:
        workers: ranks of each role.
        tensor_parallel, sequence_parallel: ranks that share the layers of one replica, or the tokens of one micro-batch; both
            divide `workers`.
        optimizer: adamw, or adamw8bit (needs torchao).
        weight_decay: of matrices; norms, biases and other parameters of one dimension are left alone.
        offload: whether parameters and optimizer lie in host memory between uses.
        compile: whether blocks are compiled.
        shared_prefix: whether the prompt of a group is computed once.
        head_chunk, vocab_chunk: tokens and vocabulary entries whose logits exist at one time; vocab_chunk 0: all.
        placement: shared (roles share each device) or own (each role has its own).
    """

    workers: int = 2
    tensor_parallel: int = 1
    sequence_parallel: int = 1
    lr: float = 1.0e-3
    warmup_steps: int = 2
    schedule: str = "constant"
    optimizer: str = "adamw"
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    max_grad_norm: float = 1.0
    microbatch_tokens: int = 4096
    shared_prefix: bool = False
    head_chunk: int = 1024
    vocab_chunk: int = 0
    gradient_checkpointing: bool = False
    offload: bool = False
    compile: bool = False
    placement: str = "shared"
    timeout: float = 600.0


@dataclass
class LoraConfig:
    """Low-rank adapters in place of all weights; rank 0: none. Files are in PEFT's format."""

    rank: int = 0
    alpha: float = 32.0
    targets: list[str] = field(
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )


@dataclass
class RoleConfig:
    """A frozen model beside the policy. `path` null: the policy as the run starts."""

    path: str | None = None


@dataclass
class TeacherConfig:
    """Whose log-probabilities on-policy distillation follows: a model folder (`path`), or a vLLM endpoint (`url`, `model`)."""

    path: str | None = None
    url: str | None = None
    model: str = ""
    coef: float = 1.0


@dataclass
class CriticConfig:
    """The value model of GAE and its optimizer. `path` null: the policy as the run starts, with a new value head.

    `clip` bounds how far a value moves from that of the rollout; null: nothing does. In the first `alone_steps` training steps
    the critic learns alone.
    """

    path: str | None = None
    lr: float = 1.0e-3
    warmup_steps: int = 0
    clip: float | None = None
    alone_steps: int = 0


@dataclass
class SftConfig:
    """Warm start from the environment's scripted expert; 0 episodes skips it. `mistakes` is the share of random actions."""

    episodes: int = 0
    mistakes: float = 0.3
    epochs: int = 1
    batch_rows: int = 64
    lr: float = 2.0e-3


@dataclass
class DataConfig:
    """What the modes sft, dpo and rm learn from. See docs/training.md for the fields of the files.

    Attributes:
        train: a file (JSON Lines, Parquet), or the folder of a run whose episodes are learned from.
        test: the same, held out.
        epochs: times over the examples.
        batch_rows: examples of an optimizer step.
        max_tokens: longer examples are left out; null: what the model reads.
        min_reward: episodes with less are not imitated, and disliked by kto; null: all are imitated, and successes liked.
        loss: of mode dpo: dpo, ipo or kto.
        beta: how strongly the reference holds.
    """

    train: str | None = None
    test: str | None = None
    epochs: int = 1
    batch_rows: int = 64
    max_tokens: int | None = None
    min_reward: float | None = None
    loss: str = "dpo"
    beta: float = 0.1


@dataclass
class TrainerConfig:
    """The run: how long, how it is measured, where it is kept. `name` null makes one from env, algorithm and time.

    `keep_checkpoints` is how many of the newest checkpoints stay on disk. `resume` is auto (a run of that name goes on from its
    newest checkpoint), never (a run of that name is refused), or the folder of a run to go on with. `deterministic` has torch
    refuse operations whose result may differ from run to run. `record` names a file that gets the run's result (success at the
    start and at the end, curve, minutes, command), besides `result.json` in the run folder.
    """

    name: str | None = None
    runs_dir: str = "runs"
    steps: int = 50
    groups_per_step: int = 16
    seed: int = 0
    eval_every: int = 10
    eval_episodes: int = 200
    save_every: int = 10
    keep_checkpoints: int = 3
    resume: str = "auto"
    deterministic: bool = False
    record: str | None = None


@dataclass
class Config:
    """Everything `agent-train` reads.

    `mode` is rl, or sft, dpo or rm, which learn from the files that `data` names and play no episode.

    `sandbox` is where environments run what an agent writes: docker, bubblewrap, or auto, which is what AGENTGYM_SANDBOX says
    and otherwise docker where an engine has the image. `env.kwargs.sandbox` goes before it.
    """

    mode: str = "rl"
    sandbox: str = "auto"
    env: EnvConfig = field(default_factory=EnvConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reference: RoleConfig = field(default_factory=RoleConfig)
    reward_model: RoleConfig = field(default_factory=RoleConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    data: DataConfig = field(default_factory=DataConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
