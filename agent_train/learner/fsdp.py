"""Loading a model, sharding it with FSDP2, and getting whole tensors back out."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AttentionInterface, AutoModelForCausalLM

from agent_train.config.schema import Config
from agent_train.learner.attention import PACKED, register
from agent_train.learner.head import PackedPolicy
from agent_train.learner.loading import build_empty, file_name, fill
from agent_train.learner.lora import (
    adapter_tensors,
    has_adapters,
    initial_adapter,
    merged,
    write_adapter,
)
from agent_train.learner.parallel import ParallelDims, check_model, split_layers
from agent_train.learner.sequence_parallel import spread_over, ulysses_attention
from agent_train.weights.checksum import checksum

UNCOMPILED = f"{PACKED}_uncompiled"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Packed = TypeVar("Packed", bound=nn.Module)


def load_policy(
    model_dir: str | Path, head_chunk: int, gradient_checkpointing: bool = False, vocab_chunk: int = 0
) -> PackedPolicy:
    """A Hugging Face folder as a policy to train, on the host, with fp32 weights and without dropout.

    Where the folder's files allow it, the parameters have no memory yet: `shard` reads each rank's own.

    Raises:
        FileNotFoundError: the folder has no config.json.
    """
    model_dir = Path(model_dir)
    if not (model_dir / "config.json").is_file():
        raise FileNotFoundError(f"{model_dir} is not a model folder: it has no config.json")
    model = build_empty(AutoModelForCausalLM, model_dir, register())
    if model is None:
        model = AutoModelForCausalLM.from_pretrained(
            str(model_dir), dtype=torch.float32, attn_implementation=register()
        )
    return PackedPolicy(plain(model, gradient_checkpointing), head_chunk, vocab_chunk)


def plain(model: Any, gradient_checkpointing: bool) -> Any:
    """The model in training mode, its dropout off."""
    if hasattr(model.config, "attention_dropout"):
        model.config.attention_dropout = 0.0
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        # Attention modules read the probability from the config when they are built.
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def shard(policy: Packed, layout: ParallelDims, config: Config, model_dir: str | Path, device: torch.device) -> Packed:
    """Shard each transformer block and then the rest over the ranks, in place. Weights and gradient sums stay fp32.

    Args:
        policy: a `PackedPolicy` or `PackedValue`, on the host; it is moved to the device block by block, and what has no memory
            is read from the files.
        layout: of the ranks.
        config: of the run: `model.dtype` is what the layers compute in.
        model_dir: of the files.
        device: of this rank.

    Raises:
        ValueError: an architecture that cannot be split as the settings ask.
    """
    model, settings = policy.model, config.learner
    blocks = blocks_of(model)
    if layout.spread is not None:
        check_model(model, layout)
    if layout.tensor_mesh is not None:
        split_layers(model, blocks, layout.tensor_mesh)
    if settings.compile:
        compile_blocks(model, blocks)
    options: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=DTYPES[config.model.dtype], reduce_dtype=torch.float32)
    }
    if settings.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    for block in blocks:
        fully_shard(block, mesh=layout.fsdp, **options)
    fully_shard(policy, mesh=layout.world, **options)
    fill(policy, model, model_dir, torch.device("cpu") if settings.offload else device, initial_adapter)
    if layout.spread is not None:
        spread_over(policy, layout.spread)
    return policy


def compile_blocks(model: Any, blocks: Sequence[nn.Module]) -> None:
    """Compile each block in place; attention over packed rows, whose lengths change with each batch, stays as it is."""
    AttentionInterface.register(UNCOMPILED, torch.compiler.disable(ulysses_attention))
    model.config._attn_implementation = UNCOMPILED
    for block in blocks:
        block.compile()


def blocks_of(model: Any) -> list[nn.Module]:
    """The model's transformer blocks, by the class names that the architecture says must not be split."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def full_tensors(policy: Packed, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Each parameter whole, under its Hugging Face name, one at a time; tied weights once, under their first name.

    Adapters are added to the weights that they belong to. Every rank must go through the whole iteration, since each step gathers
    from all.
    """
    named = merged(policy.model, whole_tensor) if has_adapters(policy.model) else _whole(policy.model)
    for name, whole in named:
        yield name, whole if dtype is None else whole.to(dtype)


def full_adapter(policy: Packed) -> Iterator[tuple[str, Tensor]]:
    """Each weight of the adapters whole, under its name in PEFT's file. As `full_tensors` otherwise."""
    return adapter_tensors(policy.model, whole_tensor)


def shapes_of(policy: Packed) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of what `full_tensors` gives, in its order."""
    named = policy.model.named_parameters()
    return [(file_name(name), tuple(p.shape)) for name, p in named if ".lora_" not in name]


def whole_tensor(parameter: Tensor) -> Tensor:
    """A parameter gathered from all ranks, on their device, also where the shards lie on the host. A collective."""
    value = parameter.detach()
    if not isinstance(value, DTensor):
        return value
    return value.to(value.device_mesh.device_type).full_tensor()


def _whole(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        yield name, whole_tensor(parameter)


def save_model(policy: Packed, folder: str | Path, model_dir: str | Path, rank: int, dtype: str) -> None:
    """Write a Hugging Face folder: weights in `dtype`, adapters added to them, config, and the tokenizer's files of `model_dir`.

    All ranks call it; rank 0 writes, next to `folder`, and renames at the end, so that `folder` is whole or not there.
    A folder that was there is replaced.
    """
    weights = whole_on_host(policy, rank, dtype, merge=True)
    if rank == 0:
        write_model(policy, weights, folder, model_dir, dtype)


def save_adapter(policy: Packed, folder: str | Path, model_dir: str | Path, rank: int, dtype: str) -> dict[str, int]:
    """Write the adapters alone, in PEFT's format; otherwise as `save_model`. The checksum of each tensor on rank 0."""
    weights = whole_on_host(policy, rank, dtype)
    if rank == 0:
        write_model(policy, weights, folder, model_dir, dtype)
    return {name: checksum(weight) for name, weight in weights.items()}


def whole_on_host(policy: Packed, rank: int, dtype: str, merge: bool = False) -> dict[str, Tensor]:
    """A copy of what is saved, in `dtype`, in the memory of rank 0; nothing on other ranks. A collective.

    That is every parameter as `full_tensors` gives it; or the adapters alone where there are any, unless they are to `merge`.
    """
    weights = {}
    named = full_adapter(policy) if has_adapters(policy.model) and not merge else full_tensors(policy)
    for name, whole in named:
        if rank == 0:
            weights[name] = whole.to("cpu", DTYPES[dtype], copy=True)
    return weights


def write_model(
    policy: Packed, weights: dict[str, Tensor], folder: str | Path, model_dir: str | Path, dtype: str
) -> None:
    """Write what `save_model` or `save_adapter` writes, from weights gathered before.

    The policy is asked for its config alone.
    """
    folder, model_dir = Path(folder), Path(model_dir)
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    adapter = any(".lora_" in name for name in weights)
    if adapter:
        write_adapter(partial, policy.model, weights, model_dir)
    else:
        policy.model.save_pretrained(str(partial), state_dict=weights)
        _write_dtype(partial / "config.json", dtype)
    for source in sorted(model_dir.iterdir()):
        if (
            source.is_file()
            and source.suffix != ".safetensors"
            and not (partial / source.name).exists()
            and _wanted(source)
            and not (adapter and source.name == "config.json")
        ):
            shutil.copy2(source, partial / source.name)
    replace_folder(partial, folder)


def _write_dtype(config: Path, dtype: str) -> None:
    """Say in the config which type the file holds: transformers writes that of the model in memory, which is fp32."""
    record = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps({**record, "dtype": dtype}, indent=2) + "\n", encoding="utf-8")


def _wanted(source: Path) -> bool:
    """Tokenizer and generation files; not the old weights in any form, nor their index."""
    return source.suffix in (".json", ".jinja", ".txt", ".model") and not source.name.endswith(".index.json")


def replace_folder(partial: Path, folder: Path) -> None:
    """Rename `partial` to `folder`, and remove what was there before only once the new one is in place."""
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
