"""The optimizers by name."""

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor

from agent_train.config.schema import LearnerConfig

NAMES = ("adamw", "adamw8bit")


def make_optimizer(parameters: Iterable[tuple[str, nn.Parameter]], settings: LearnerConfig) -> optim.Optimizer:
    """The optimizer that `learner.optimizer` names, over those parameters that are trained.

    `learner.weight_decay` is of matrices only. `adamw` keeps two fp32 averages for each weight; `adamw8bit` keeps them
    in 8 bits with an fp32 scale for each block of 256, and in fp32 for tensors of less than 4096 weights.
    """
    common = {"lr": settings.lr, "betas": (settings.beta1, settings.beta2)}
    groups = _groups(((name, p) for name, p in parameters if p.requires_grad), settings.weight_decay)
    if settings.optimizer == "adamw":
        return optim.AdamW(groups, fused=True, **common)
    if settings.optimizer != "adamw8bit":
        raise ValueError(f"learner.optimizer={settings.optimizer}: there are {', '.join(NAMES)}")
    if find_spec("torchao") is None:
        raise ValueError("learner.optimizer=adamw8bit needs torchao: pip install torchao, or learner.optimizer=adamw")
    from torchao.optim import AdamW8bit

    return AdamW8bit(groups, **common)  # type: ignore[no-any-return]


def set_lr(optimizer: optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # torchao's, which its compiled step reads
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def average(value: Tensor) -> Tensor:
    """The state of an optimizer as tensors that can be copied and written: fp32 where it is kept in 8 bits."""
    local = value.to_local() if isinstance(value, DTensor) else value
    if not _packed(local):
        return value
    wide = local.dequantize()
    if not isinstance(value, DTensor):
        return wide
    given = {"run_check": False, "shape": value.shape, "stride": value.stride()}
    return DTensor.from_local(wide, value.device_mesh, value.placements, **given).to(wide.device)


def set_average(value: Tensor, wide: Tensor) -> None:
    """The reverse of `average`, in place; nothing where that shared its memory."""
    local = value.to_local() if isinstance(value, DTensor) else value
    if _packed(local):
        local.copy_(wide.to_local() if isinstance(wide, DTensor) else wide)


def _packed(local: Tensor) -> bool:
    return type(local) not in (Tensor, nn.Parameter)


def _groups(parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """A group for each device mesh, since a fused step takes tensors of one mesh only; those that decay and those that do not."""
    groups: dict[tuple[object, bool], list[nn.Parameter]] = {}
    for name, parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        # A sharded parameter has the dimensions of the whole one. The biases of experts lie in one matrix.
        decays = parameter.ndim > 1 and not name.endswith("bias")
        groups.setdefault((mesh, decays), []).append(parameter)
    return [{"params": own, "weight_decay": weight_decay * decays} for (_, decays), own in groups.items()]
