"""Formulas of `agent-train plan`: the bytes, floating-point operations (FLOPs) and seconds of a run, without torch.

Pure functions of the model's shape, the run's settings and assumptions. docs/scaling.md says which of them were measured.

Legend: P parameters, n ranks, e bytes of a number of `model.dtype`.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from agent_train.config.model_folder import ModelShape
from agent_train.config.schema import Config
from agent_train.learner.roles import learns, needs_reference, reference_is_base, roles_of, sends_adapters

ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2}
FULL = 4  # bytes of an fp32 number: weights, sums of gradients, averages, logits
TRAINED = 4 * FULL  # bytes a parameter: weight, gradient and AdamW's two averages


def _assumed(default: float, doc: str) -> Any:
    return field(default=default, metadata={"doc": doc})


@dataclass(frozen=True)
class Assumptions:
    """The GPUs, links and episodes that a plan is for. The defaults are those of nodes of eight H200."""

    read: int = _assumed(1024, "tokens that an episode reads: prompts and observations")
    sampled: int = _assumed(1024, "tokens that an episode samples")
    node: int = _assumed(8, "GPUs of a node")
    memory: float = _assumed(141.0, "GB of a GPU")
    reserve: float = _assumed(6.0, "GB of a GPU that CUDA, NCCL, graphs and fragmentation take")
    tflops: float = _assumed(989.0, "TFLOP/s of a GPU in bfloat16")
    compute_use: float = _assumed(0.3, "share of them that is reached; 0.17 to 0.35 were measured on an H200")
    bandwidth: float = _assumed(4800.0, "GB/s of a GPU's memory")
    bandwidth_use: float = _assumed(0.6, "share of them that is reached")
    overhead: float = _assumed(4.0, "ms that a server needs for one token of all its episodes, besides the GPU's work")
    nvlink: float = _assumed(400.0, "GB/s between GPUs of a node")
    link: float = _assumed(40.0, "GB/s of a GPU to other nodes")
    gloo: float = _assumed(1.0, "GB/s of weights between processes that share a GPU")

    @property
    def flops(self) -> float:
        """FLOP/s that a GPU reaches."""
        return self.tflops * 1e12 * self.compute_use

    def rate(self, gpus: int) -> float:
        """Bytes a second of the slowest link between so many GPUs."""
        return 1e9 * (self.nvlink if gpus <= self.node else self.link)


def kv_bytes(shape: ModelShape, element: int, gpus: int) -> int:
    """Bytes of a token's keys and values in a server of so many GPUs, each of which has at least one head."""
    return 2 * shape.layers * max(shape.kv_heads, gpus) * shape.head_size * element


def activation_bytes(shape: ModelShape, element: int) -> int:
    """Bytes that one block keeps of a token for the backward pass: norms and rotations in fp32, the inputs of matrices in e.

    Counted from Qwen3's block; others keep less. The small sums of norms and of attention are among them.
    """
    e, heads, kv = element, shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    sums = 8 * shape.heads + 4 * shape.kv_heads + 8
    inside = 4 * e * shape.intermediate * shape.experts_read
    return (4 * e + 8) * shape.hidden + (4 * e + 4) * heads + (3 * e + 4) * kv + inside + sums


def adapter_parameters(shape: ModelShape, config: Config) -> int:
    """Parameters of a block's adapters, two matrices for each target; none without `lora.rank`. Raises ValueError for other targets."""
    heads, kv = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    widths = {"q_proj": heads, "k_proj": kv, "v_proj": kv, "o_proj": heads}
    if shape.experts == 1:
        widths |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), shape.intermediate)
    if config.lora.rank and (other := sorted(set(config.lora.targets) - widths.keys())):
        raise ValueError(f"lora.targets: a plan knows adapters of {', '.join(widths)}, not of {', '.join(other)}")
    return config.lora.rank * sum(shape.hidden + widths[target] for target in config.lora.targets if config.lora.rank)


def rank_bytes(shape: ModelShape, config: Config, ranks: int) -> dict[str, float]:
    """Memory of one GPU of the learner, with a shard of every role, by what takes it. The peak is at most their sum."""
    learner, e, roles = config.learner, ELEMENT[config.model.dtype], roles_of(config)
    adapters = adapter_parameters(shape, config)
    whole = [role for role in roles if learns(config, role) and not (role == "policy" and adapters)]
    a_parameter = sum(TRAINED if role in whole else e for role in roles)
    states = a_parameter * shape.parameters + TRAINED * shape.layers * adapters
    outside, block = (shape.outside, shape.block) if whole else (0, adapters)  # what has gradients
    kept = learner.microbatch_tokens * shape.layers
    a_token = activation_bytes(shape, e) + e * config.lora.rank * len(config.lora.targets)
    if learner.gradient_checkpointing:
        activations = kept * e * shape.hidden + learner.microbatch_tokens * a_token
    else:
        activations = kept * a_token
    logits = 2 * FULL * min(learner.head_chunk, learner.microbatch_tokens) * (learner.vocab_chunk or shape.vocab)
    return {
        "states": states / ranks,
        # FSDP holds what lies outside the blocks, this block and the next; the gradient of each goes through fp32.
        "gathered": e * (shape.outside + 2 * (shape.block + adapters)) + (e + FULL) * (outside + block),
        "activations": activations,
        "head": logits + (0 if adapters else FULL * shape.vocab * shape.hidden),
    }


def fits_at_once(shape: ModelShape, config: Config, given: Assumptions, share: float = 1.0) -> int:
    """Episodes of full length whose keys and values a server holds, at most `engine.max_concurrent`; `share` of its GPUs is its."""
    e, parts = ELEMENT[config.model.dtype], config.engine.tensor_parallel
    a_gpu = config.engine.gpu_memory_utilization * share * given.memory - given.reserve
    room = 1e9 * a_gpu * parts - e * shape.parameters
    return max(
        0, min(config.engine.max_concurrent, int(room / (kv_bytes(shape, e, parts) * (given.read + given.sampled))))
    )


def forward_flops(shape: ModelShape, tokens: float, context: float, answered: float) -> float:
    """FLOPs of a forward pass over tokens that attend to `context` tokens on average; logits are those of `answered` tokens."""
    attention = 4 * context * shape.heads * shape.head_size
    blocks = tokens * shape.layers * (2 * shape.matrices(shape.experts_read) + attention)
    return blocks + 2 * answered * shape.vocab * shape.hidden


def micro_batch_traffic(shape: ModelShape, element: int, trains: bool, adapters: int = 0) -> int:
    """Bytes that FSDP gathers and reduces for one micro-batch, times (n - 1) / n those that a rank sends.

    Blocks are gathered again for the backward pass; gradients, of all parameters or of `adapters` in all, are summed in fp32.
    """
    blocks = shape.parameters - shape.outside + adapters
    return element * (blocks + shape.outside) + trains * (element * blocks + FULL * (adapters or shape.parameters))


@dataclass(frozen=True)
class LearnerTime:
    """One training step on one rank."""

    micro_batches: int
    traffic: float  # bytes
    compute: float  # seconds
    link: float  # seconds, which compute hides if it takes longer

    @property
    def seconds(self) -> float:
        return max(self.compute, self.link)


def learner_time(shape: ModelShape, config: Config, given: Assumptions, ranks: int) -> LearnerTime:
    """A training step: each role scores the episodes once or learns from them, and the policy is asked again for later updates."""
    algorithm, roles = config.algorithm, roles_of(config)
    episodes, length = episodes_of(config) / ranks, given.read + given.sampled
    adapters = shape.layers * adapter_parameters(shape, config)
    trainings = sum(learns(config, role) for role in roles) - 1  # beside the policy's
    later = 1 - 1 / algorithm.updates_per_step
    scorings = len(roles) - 1 + later * (algorithm.proximal == "recomputed")
    scorings += needs_reference(config) and reference_is_base(config)
    micro_batches = math.ceil(episodes * length / config.learner.microbatch_tokens)
    e, passes = ELEMENT[config.model.dtype], 3 + config.learner.gradient_checkpointing
    traffic = trainings * micro_batch_traffic(shape, e, True) + scorings * micro_batch_traffic(shape, e, False)
    traffic += micro_batch_traffic(shape, e, True, adapters)
    sent = micro_batches * traffic * (ranks - 1) / ranks
    one = forward_flops(shape, episodes * length, length / 2, episodes * given.sampled)
    # Frozen weights have no gradient, which is a third of the work of learning; that of adapters is left out.
    compute = (trainings * passes + passes - (adapters > 0) + scorings) * one / given.flops
    return LearnerTime(micro_batches, sent, compute, sent / given.rate(ranks))


def episodes_of(config: Config) -> int:
    """Episodes of a step."""
    return config.trainer.groups_per_step * config.algorithm.group_size


def rollout_seconds(shape: ModelShape, config: Config, given: Assumptions, servers: int, at_once: int) -> float:
    """All episodes of a step on servers of `at_once` each, equally long: reading, and a token of all in each pass over the weights."""
    e, gpus = ELEMENT[config.model.dtype], config.engine.tensor_parallel
    own = math.ceil(episodes_of(config) / servers)
    together = min(own, at_once)
    used = 1 - (1 - shape.experts_read / shape.experts) ** together  # share of the experts that some episode reads
    experts = 3 * shape.hidden * shape.intermediate * (used * shape.experts - 1)  # beyond the first
    weights = shape.layers * (shape.matrices(1) + experts) + shape.vocab * shape.hidden
    cache = together * kv_bytes(shape, e, gpus) * (given.read + given.sampled / 2)
    moved = (e * weights + cache) / (1e9 * given.bandwidth * given.bandwidth_use)
    computed = forward_flops(shape, together, given.read + given.sampled / 2, together) / given.flops
    reading = own * forward_flops(shape, given.read, given.read / 2, 0) / given.flops / gpus
    return reading + own / together * given.sampled * (max(moved, computed) / gpus + given.overhead / 1e3)


def sync_bytes(shape: ModelShape, config: Config) -> int:
    """Bytes that every worker of every server receives."""
    adapters = shape.layers * adapter_parameters(shape, config)
    return ELEMENT[config.model.dtype] * (adapters if sends_adapters(config) else shape.parameters)


def sync_seconds(shape: ModelShape, config: Config, given: Assumptions, ranks: int, gpus: int) -> float:
    """Gathering weights on rank 0, and the broadcast to all workers; by gloo if all share the only GPU."""
    sent, e = sync_bytes(shape, config), ELEMENT[config.model.dtype]
    kept = e if config.lora.rank else FULL  # trained weights are kept in fp32
    gathered = kept / e * sent * (ranks - 1) / ranks / given.rate(ranks)
    return gathered + sent / (given.rate(gpus) if gpus > 1 else given.gloo * 1e9)
