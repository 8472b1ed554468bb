"""Low-rank adapters in place of all weights, with PEFT: its layers in the model, its files on disk.

Without its adapters the model is the policy as the run began, which is the reference of a KL.
"""

import copy
import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from agent_train.config.schema import LoraConfig
from agent_train.learner.loading import file_name, whole_tensor
from agentgym.core.install import pip_install

ADAPTER = "default"
WEIGHTS_FILE = "adapter_model.safetensors"


def add_adapters(model: Any, settings: LoraConfig) -> None:
    """Put an adapter, on the meta device, around each layer that `settings.targets` names and freeze everything else, in place."""
    try:
        from peft import LoraConfig as PeftConfig
        from peft import inject_adapter_in_model
    except ImportError as error:
        todo = pip_install("agentgym-toolkit[lora]")
        raise ValueError(f"lora.rank={settings.rank} needs peft: {todo} ({error})") from error
    head = model.get_output_embeddings()
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head]
    names = {name.rsplit(".", 1)[-1] for name in linear}
    if unknown := sorted(set(settings.targets) - names):
        raise ValueError(f"lora.targets: {type(model).__name__} has no linear layers {unknown}: it has {sorted(names)}")
    peft_config = PeftConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # PEFT takes fractions too
        lora_dropout=0.0,
        bias="none",
        target_modules=sorted(settings.targets),
        task_type="CAUSAL_LM",
    )
    inject_adapter_in_model(peft_config, model, ADAPTER, low_cpu_mem_usage=True)


def initial_adapter(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """The initial weight of an adapter, the same on every rank: A uniform within 1 / sqrt(inputs), B zeros."""
    if ".lora_B." in name:
        return torch.zeros(shape)
    if ".lora_A." not in name:
        raise ValueError(f"the model's files have no {name}")
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The model computes as without adapters, to the bit. Not for training."""
    layers: list[Any] = [m for m in model.modules() if hasattr(m, "lora_A") and hasattr(m, "scaling")]
    scales = [layer.scaling[ADAPTER] for layer in layers]
    for layer in layers:
        layer.scaling[ADAPTER] = 0.0
    try:
        yield
    finally:
        for layer, scale in zip(layers, scales, strict=True):
            layer.scaling[ADAPTER] = scale


def merged(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Each weight whole with its adapter, if any, added, under its name without adapters. Each step is a collective."""
    layers = {f"{name}.base_layer.weight": layer for name, layer in model.named_modules() if hasattr(layer, "lora_A")}
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            continue
        value = whole_tensor(parameter)
        if (layer := layers.get(name)) is not None:
            up, down = (whole_tensor(part[ADAPTER].weight) for part in (layer.lora_B, layer.lora_A))
            value = value.float() + layer.scaling[ADAPTER] * (up.float() @ down.float())
        yield file_name(name), value


def adapter_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Each weight of the adapters whole, under its name in PEFT's file. Each step is a collective."""
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            yield "base_model.model." + name.replace(f".{ADAPTER}.", "."), whole_tensor(parameter)


def write_adapter(folder: Path, model: Any, tensors: dict[str, Tensor], model_dir: str | Path) -> None:
    """Write `adapter_tensors` of a model of the folder `model_dir` as PEFT does, into a folder that is there."""
    config = copy.copy(model.peft_config[ADAPTER])
    config.base_model_name_or_path = str(model_dir)
    config.inference_mode = True
    config.save_pretrained(str(folder))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(folder / WEIGHTS_FILE))
