"""Parallelism of the ranks: replicas of the model, the tokens of one micro-batch, the layers.

`learner.workers` ranks lie in a mesh of data x sequence x tensor; ranks of one replica are neighbours. FSDP shards over
data and sequence ranks together, and the parameters outside the blocks over all.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from agent_train.config.schema import LearnerConfig
from agent_train.data.balance import TOKENS, Cost
from agent_train.data.packing import RankBatch, rank_batches
from agent_train.data.samples import TrainingSample
from agent_train.learner.sequence_parallel import SequenceParallelGroup, check_heads

COLWISE = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROWWISE = ("o_proj", "down_proj")
# Norms over the size of one head. Their input is split by heads, which lie in this dimension.
HEAD_NORMS = ("q_norm", "k_norm")
_HEADS_DIM = 2


@dataclass(frozen=True)
class ParallelDims:
    """The coordinates of one rank."""

    rank: int  # of all
    tensor: int  # ranks that share the layers
    fsdp: DeviceMesh  # mesh over which blocks are sharded: data x sequence
    world: DeviceMesh  # mesh over which the rest is
    tensor_mesh: DeviceMesh | None = None  # over which the layers of a block are split
    data_group: dist.ProcessGroup | None = None  # one rank of each replica, which hold different tokens; None is all
    spread: SequenceParallelGroup | None = None  # the ranks of this replica; None where it is one rank


def replica_size(settings: LearnerConfig) -> int:
    """Ranks that get the same samples and together do the work of one."""
    return settings.sequence_parallel * settings.tensor_parallel


def deal_to_ranks(samples: Sequence[TrainingSample], settings: LearnerConfig, cost: Cost = TOKENS) -> list[RankBatch]:
    """One optimizer step dealt to all ranks: those of one replica get the same batch. See `packing.rank_batches`."""
    size, budget = replica_size(settings), settings.microbatch_tokens
    dealt = rank_batches(samples, settings.workers // size, budget, cost=cost, shared_prefix=settings.shared_prefix)
    return [batch for batch in dealt for _ in range(size)]


def parallel_dims(settings: LearnerConfig, rank: int, world: int, device: str) -> ParallelDims:
    """The coordinates of one rank of `world`, `settings.workers` or 1, with its process groups. A collective of the default one."""
    sequence, tensor = settings.sequence_parallel, settings.tensor_parallel
    if sequence == tensor == 1:
        mesh = init_device_mesh(device, (world,), mesh_dim_names=("fsdp",))
        return ParallelDims(rank, tensor, mesh, mesh)
    shape = (world // (sequence * tensor), sequence, tensor)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("data", "sequence", "tensor"))
    fsdp = mesh["data", "sequence"]._flatten("fsdp")
    replica = mesh["sequence", "tensor"]._flatten("replica")
    everyone = mesh._flatten("world")
    spread = SequenceParallelGroup(mesh["sequence"].get_group(), replica.get_group())
    tensor_mesh = mesh["tensor"] if tensor > 1 else None
    return ParallelDims(rank, tensor, fsdp, everyone, tensor_mesh, mesh["data"].get_group(), spread)


def check_model(model: Any, settings: LearnerConfig) -> None:
    """Raises ValueError where the model's heads cannot be divided among the ranks."""
    config = model.config.get_text_config()  # a multimodal model has its language model's apart
    query = config.num_attention_heads
    key = getattr(config, "num_key_value_heads", None) or query
    tensor = settings.tensor_parallel
    if query % tensor or key % tensor:
        raise ValueError(
            f"learner.tensor_parallel={tensor} has to divide the model's {query} query and {key} key/value heads"
        )
    check_heads(query // tensor, key // tensor, settings.sequence_parallel)


def split_layers(model: Any, blocks: Iterable[nn.Module], mesh: DeviceMesh) -> None:
    """Split the layers of each block over the ranks of a mesh, in place; the head's and the embedding's stay whole."""
    for block in blocks:
        frozen = [name for name, parameter in block.named_parameters() if not parameter.requires_grad]
        parallelize_module(block, mesh, plan_of(type(model).__name__, block, mesh.size()))
        # Some styles make new parameters without asking.
        for name in frozen:
            block.get_parameter(name).requires_grad_(False)


def plan_of(architecture: str, block: nn.Module, ranks: int) -> dict[str, ParallelStyle]:
    """The split of each layer of a block over `ranks`. Raises as `split_layers`."""

    def refused(why: str) -> ValueError:
        return ValueError(f"learner.tensor_parallel={ranks}: {architecture} {why}: set learner.tensor_parallel=1")

    def inside(name: str, module: nn.Module) -> bool:
        """True of weights between split layers, whose gradients differ on each rank: those of attention and of the MLP."""
        return "." in name or any(True for _ in module.children())

    plan: dict[str, ParallelStyle] = {}
    for name, module in block.named_modules():
        layer, role = _layer(name)
        if isinstance(module, nn.Linear):
            if layer not in COLWISE + ROWWISE:
                raise refused(f"has a layer {name!r}, and only {', '.join(COLWISE + ROWWISE)} are known")
            size = module.out_features if layer in COLWISE else module.in_features
            if role != ("lora_A" if layer in COLWISE else "lora_B"):
                if size % ranks:
                    raise ValueError(f"learner.tensor_parallel={ranks} does not divide the {size} features of {name!r}")
                plan[name] = ColwiseParallel() if layer in COLWISE else RowwiseParallel()
        elif layer in HEAD_NORMS and any(True for _ in module.parameters()):
            # Each rank sees some heads only: the weight's gradient is added up over them.
            plan[name] = SequenceParallel(sequence_dim=_HEADS_DIM, use_local_output=True)
        elif own := [own for own, p in module.named_parameters(recurse=False) if inside(name, module) or p.dim() > 1]:
            raise refused(f"has weights {name}.{own[0]!r} that are neither a linear layer's nor of a known norm")
    if missing := set(COLWISE + ROWWISE) - {_layer(name)[0] for name in plan}:
        raise refused(f"has a block without {', '.join(sorted(missing))}")
    return plan


def _layer(name: str) -> tuple[str, str]:
    """The layer's own name and, of a layer with an adapter, which part of it this is: base_layer, lora_A or lora_B."""
    parts = name.split(".")
    for part in ("base_layer", "lora_A", "lora_B"):
        if part in parts:
            return parts[parts.index(part) - 1], part
    return parts[-1], ""


def clip_gradients(module: nn.Module, limit: float, dims: ParallelDims, device: torch.device) -> Tensor:
    """Scale the gradients to a norm of at most `limit` over all shards; the norm before, on `device`. A collective."""

    def is_split(parameter: Tensor) -> bool:
        """True if ranks that share the layers hold different parts of it."""
        if not isinstance(parameter, DTensor) or parameter.device_mesh == dims.world:
            return isinstance(parameter, DTensor)
        return parameter.device_mesh.ndim > 1 and not parameter.placements[-1].is_replicate()

    counted, everything = [], []
    for parameter in module.parameters():
        if parameter.grad is None:
            continue
        local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        everything.append(local)
        if dims.tensor == 1 or dims.rank % dims.tensor == 0 or is_split(parameter):
            counted.append(local)
    norms = torch._foreach_norm(counted) if counted else [torch.zeros(())]
    square = torch.stack([norm.float() for norm in norms]).square().sum().to(device)
    dist.all_reduce(square)
    norm = square.sqrt()
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
    for local in everything:
        local.mul_(factor.to(local.device, local.dtype))
    return norm
