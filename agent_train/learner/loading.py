"""Loads weights from the files of a model folder straight into the shards of a meta-device model.

Parameters on the meta device have a shape and no memory. The model is sharded like that, and each rank reads its own
shards.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# Initial values of a parameter that no file holds: its name and whole shape -> values, the same on every rank.
Initial = Callable[[str, tuple[int, ...]], Tensor]


def weight_files(model_dir: str | Path) -> dict[str, Path]:
    """The safetensors file of each tensor of a folder, by its name; none where it has another format. Reads no tensor."""
    index = Path(model_dir) / "model.safetensors.index.json"
    if index.is_file():
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: index.parent / file for name, file in names.items()}
    single = Path(model_dir) / "model.safetensors"
    if not single.is_file():
        return {}
    with safe_open(str(single), "pt") as tensors:
        return dict.fromkeys(tensors.keys(), single)


@contextmanager
def _mapped(files: dict[str, Path]) -> Iterator[Callable[[str], Any]]:
    with ExitStack() as stack:
        open_once = cache(lambda path: stack.enter_context(safe_open(str(path), "pt")))
        yield lambda name: open_once(files[name])


@contextmanager
def meta_parameters() -> Iterator[None]:
    """Modules built in here get parameters without memory, and buffers as usual."""
    register = nn.Module.register_parameter

    def without_memory(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = without_memory  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def build_empty(
    auto_class: Any, model_dir: str | Path, attention: str, new: str | None = None, **settings: Any
) -> Any | None:
    """A model of a folder's config, with these settings, without weights, fp32; None where it has to be loaded whole.

    That is so for weights in another format than safetensors, for quantised ones, and for architectures whose tensors
    transformers renames or joins. No file need hold the parameter `new`.
    """
    from transformers import AutoConfig, GenerationConfig
    from transformers.conversion_mapping import get_model_conversion_mapping

    config = AutoConfig.from_pretrained(str(model_dir), **settings)
    files = weight_files(model_dir)
    if not files or getattr(config, "quantization_config", None):
        return None
    with meta_parameters():
        model = auto_class.from_config(config, dtype=torch.float32, attn_implementation=attention)
    # The files hold every parameter, once if tied, but `new`, and every saved buffer under its name and in its shape.
    saved = model.state_dict(keep_vars=True)
    buffers = {name: value for name, value in saved.items() if not isinstance(value, nn.Parameter)}
    with _mapped(files) as file_of:
        whole = all(
            tuple(file_of(name).get_slice(name).get_shape()) == tuple(wanted.shape) if name in files else name == new
            for name, wanted in {**dict(model.named_parameters()), **buffers}.items()
        )
    if not whole or get_model_conversion_mapping(model, add_legacy=False):
        return None
    if (Path(model_dir) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(str(model_dir))
    return model


def fill(module: nn.Module, model: Any, model_dir: str | Path, device: torch.device, initial: Initial) -> None:
    """Give the parameters of `model`, a part of `module`, that are on the meta device their values, each rank its own shards.

    `initial` gives those that no file holds. Not a collective.
    """
    # The modules and attributes that hold each parameter: several where weights are tied.
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for attribute, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(parameter), []).append((owner, attribute))
    files = weight_files(model_dir)
    with _mapped(files) as file_of, torch.no_grad():
        for name, buffer in model.named_buffers():
            if (key := file_name(name)) in files:
                buffer.copy_(file_of(key).get_tensor(key))
        for name, parameter in list(model.named_parameters()):
            if not parameter.is_meta:
                continue
            shape, key = tuple(parameter.shape), file_name(name)
            if key in files:
                local = file_of(key).get_slice(key)[_ranges(parameter)]
            else:
                local = initial(name, shape)[_ranges(parameter)]
            # Not a view: the file's mapping is closed, and a whole initial value is not kept.
            local = local.to(device, parameter.dtype, copy=True).contiguous()
            filled = nn.Parameter(like(parameter, local), requires_grad=parameter.requires_grad)
            for owner, attribute in owners[id(parameter)]:
                setattr(owner, attribute, filled)


def file_name(name: str) -> str:
    """The name in the files of a parameter of the model: without the layers that adapters add."""
    return name.replace(".base_layer.", ".")


def _ranges(parameter: Tensor) -> tuple[slice, ...]:
    if not isinstance(parameter, DTensor):
        return tuple(slice(0, size) for size in parameter.shape)
    begin, size = [0] * parameter.ndim, list(parameter.shape)
    # The mesh's later dimension (tensor parallel) cuts first, the earlier one (FSDP) cuts what is left: as torch shards them.
    for dim in reversed(range(parameter.device_mesh.ndim)):
        placement = parameter.placements[dim]
        if placement.is_replicate():
            continue
        cut: int = placement.dim  # type: ignore[attr-defined]
        part = -(-size[cut] // parameter.device_mesh.size(dim))
        skip = min(part * parameter.device_mesh.get_local_rank(dim), size[cut])
        begin[cut], size[cut] = begin[cut] + skip, min(part, size[cut] - skip)
    return tuple(slice(start, start + length) for start, length in zip(begin, size, strict=True))


def whole_tensor(parameter: Tensor) -> Tensor:
    """A parameter gathered from all ranks, on their device, also where the shards lie on the host. A collective."""
    value = parameter.detach()
    if not isinstance(value, DTensor):
        return value
    return value.to(value.device_mesh.device_type).full_tensor()


def like(parameter: Tensor, local: Tensor) -> Tensor:
    """A tensor that is sharded as `parameter` is, from this rank's shard. It lies where that does."""
    if not isinstance(parameter, DTensor):
        return local
    if parameter.to_local().shape != local.shape:
        raise RuntimeError(f"a shard of {tuple(parameter.to_local().shape)} cannot hold {tuple(local.shape)}")
    whole = {"shape": parameter.shape, "stride": parameter.stride(), "run_check": False}
    # Moved to the mesh's device first; offloaded tensors return to the host.
    return DTensor.from_local(local, parameter.device_mesh, parameter.placements, **whole).to(local.device)
