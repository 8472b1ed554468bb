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

    `port` 0 takes a free one. Times are seconds, `kv_cache_bytes` is for CPU engines.
    """

    name: str = "vllm"
    replicas: int = 1
    tensor_parallel: int = 1
    max_model_len: int = 1024
    max_concurrent: int = 64
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
class AlgorithmConfig:
    """Group-relative policy optimisation. `std` is what advantages are divided by: sample, population or none."""

    name: str = "grpo"
    group_size: int = 8
    std: str = "sample"
    eps: float = 1.0e-6
    clip_low: float = 0.2
    clip_high: float = 0.28
    updates_per_step: int = 1


@dataclass
class LearnerConfig:
    """The FSDP2 workers and their optimizer. `microbatch_tokens` bounds one forward pass.

    After `warmup_steps` the learning rate stays (`schedule` constant) or falls in a line to 0 at the last step (linear).
    """

    workers: int = 2
    lr: float = 1.0e-3
    warmup_steps: int = 2
    schedule: str = "constant"
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    max_grad_norm: float = 1.0
    microbatch_tokens: int = 4096
    head_chunk: int = 1024
    gradient_checkpointing: bool = False
    timeout: float = 600.0


@dataclass
class SftConfig:
    """Warm start from the environment's scripted expert; 0 episodes skips it. `mistakes` is the share of random actions."""

    episodes: int = 0
    mistakes: float = 0.3
    epochs: int = 1
    batch_rows: int = 64
    lr: float = 2.0e-3


@dataclass
class TrainerConfig:
    """The run: how long, how it is measured, where it is kept. `name` null makes one from env, algorithm and time.

    `keep_checkpoints` is how many of the newest checkpoints stay on disk. `record` names a file that gets the run's result
    (success at the start and at the end, curve, minutes, command), besides `result.json` in the run folder.
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
    record: str | None = None


@dataclass
class Config:
    """Everything `agent-train` reads.

    `sandbox` is where environments run what an agent writes: docker, bubblewrap, or auto, which is what AGENTGYM_SANDBOX says
    and otherwise docker where an engine has the image. `env.kwargs.sandbox` goes before it.
    """

    sandbox: str = "auto"
    env: EnvConfig = field(default_factory=EnvConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
