"""Loads weights from the files of a model folder straight into the shards of a meta-device model.

A model is built with its parameters on the meta device, where they have a shape and no memory; its buffers (rotary frequencies) are
computed as ever. It is sharded like that, and then each rank reads the rows of its own shards and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Ranges = tuple[slice, ...]
# What a parameter that no file holds begins as: its name and whole shape -> its values, the same on every rank.
Initial = Callable[[str, tuple[int, ...]], Tensor]


@dataclass(frozen=True)
class WeightFiles:
    """The file of each tensor of a model folder, by its name in the files."""

    files: dict[str, Path]

    @classmethod
    def of(cls, model_dir: str | Path) -> WeightFiles:
        """The safetensors files of a folder, none where it has another format. Reads no tensor."""
        index = Path(model_dir) / "model.safetensors.index.json"
        if index.is_file():
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return cls({name: index.parent / file for name, file in names.items()})
        single = Path(model_dir) / "model.safetensors"
        if not single.is_file():
            return cls({})
        with safe_open(str(single), "pt") as tensors:
            return cls(dict.fromkeys(tensors.keys(), single))

    @contextmanager
    def open(self) -> Iterator[Callable[[str, Ranges | None], Tensor]]:
        """A function that reads a tensor, or some ranges of it: of a file that is mapped, so what is not asked for is not read."""
        with ExitStack() as stack:
            opened: dict[Path, Any] = {}

            def read(name: str, ranges: Ranges | None) -> Tensor:
                path = self.files[name]
                if path not in opened:
                    opened[path] = stack.enter_context(safe_open(str(path), "pt"))
                if ranges is None:
                    return opened[path].get_tensor(name)  # type: ignore[no-any-return]
                return opened[path].get_slice(name)[ranges]  # type: ignore[no-any-return]

            yield read

    def hold(self, model: nn.Module, new: str | None = None) -> bool:
        """True if the files hold every parameter and saved buffer of a model, under its own names and in its shapes.

        Args:
            new: name of a parameter that they need not hold.
        """
        with ExitStack() as stack:
            opened: dict[Path, Any] = {}
            for name, wanted in _stored(model).items():
                path = self.files.get(name)
                if path is None and name == new:
                    continue
                if path is None:
                    return False
                if path not in opened:
                    opened[path] = stack.enter_context(safe_open(str(path), "pt"))
                if tuple(opened[path].get_slice(name).get_shape()) != tuple(wanted.shape):
                    return False
        return True


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
    """A model of a folder's config without weights, fp32; None where its files are not simply its parameters.

    That is so for weights in another format than safetensors, for quantised ones, and for architectures whose tensors transformers
    renames or joins when it loads them: such a model has to be loaded whole.

    Args:
        auto_class: transformers' `AutoModelForCausalLM` or the like.
        model_dir: a Hugging Face folder.
        attention: name of the attention function.
        new: name of a parameter that no file need hold; whoever calls gives it its values.
        settings: of the config.
    """
    from transformers import AutoConfig, GenerationConfig
    from transformers.conversion_mapping import get_model_conversion_mapping

    config = AutoConfig.from_pretrained(str(model_dir), **settings)
    files = WeightFiles.of(model_dir)
    if not files.files or getattr(config, "quantization_config", None):
        return None
    with meta_parameters():
        model = auto_class.from_config(config, dtype=torch.float32, attn_implementation=attention)
    if get_model_conversion_mapping(model, add_legacy=False) or not files.hold(model, new):
        return None
    if (Path(model_dir) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(str(model_dir))
    return model


def fill(module: nn.Module, model: Any, model_dir: str | Path, device: torch.device, initial: Initial) -> None:
    """Give the parameters of `model` that are on the meta device their values, each rank its own shards. Not a collective.

    Args:
        module: what was sharded, with `model` in it.
        model: whose names the files use.
        model_dir: of the files.
        device: where the shards live.
        initial: values of the parameters that no file holds.
    """
    owners = _owners(module)
    files = WeightFiles.of(model_dir)
    with files.open() as read, torch.no_grad():
        for name, buffer in model.named_buffers():
            if file_name(name) in files.files:
                buffer.copy_(read(file_name(name), None))
        for name, parameter in list(model.named_parameters()):
            if not parameter.is_meta:
                continue
            shape, key = tuple(parameter.shape), file_name(name)
            if key in files.files:
                local = read(key, _ranges(parameter))
            else:
                local = initial(name, shape)[_ranges(parameter)]
            # Not a view: the file's mapping is closed, and a whole initial value is not kept.
            local = local.to(device, torch.float32, copy=True).contiguous()
            filled = nn.Parameter(_like(parameter, local), requires_grad=parameter.requires_grad)
            for owner, attribute in owners[id(parameter)]:
                setattr(owner, attribute, filled)


def file_name(name: str) -> str:
    """The name in the files of a parameter of the model: that of the layer which an adapter was put around."""
    return name.replace(".base_layer.", ".")


def _stored(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that the files should hold: each parameter once, tied or not, and the saved buffers."""
    saved = model.state_dict(keep_vars=True)
    parameters = dict(model.named_parameters())
    return parameters | {name: value for name, value in saved.items() if not isinstance(value, nn.Parameter)}


def _owners(module: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """The modules and attributes that hold each parameter: several where weights are tied."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for attribute, parameter in owner._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((owner, attribute))
    return owners


def _ranges(parameter: Tensor) -> Ranges:
    """The part of the whole parameter that this rank holds."""
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


def _like(parameter: Tensor, local: Tensor) -> Tensor:
    """The parameter with this rank's part of the values; a plain tensor where it is not sharded."""
    if not isinstance(parameter, DTensor):
        return local
    if tuple(parameter.to_local().shape) != tuple(local.shape):
        raise RuntimeError(f"a shard of {tuple(parameter.to_local().shape)} cannot hold {tuple(local.shape)}")
    sharded = DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    # It moves to the mesh's device by itself: what is offloaded goes back.
    return sharded.to(local.device)
