"""The optimizers by name, and the saved state of a role, from which it goes on as if it had never stopped.

A state is a folder of `torch.distributed.checkpoint` with the trained weights in fp32 under `model.NAME`, the
optimizer's averages under `optimizer.NAME.KEY`, and a `rank-N.json` for each rank: the counters of the role and the
states of that rank's random numbers. Frozen weights and buffers are those of the model folder and are not in it. Tied
weights are in it once.
"""

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.tensor import DTensor

from agent_train.config.schema import LearnerConfig, first_line
from agent_train.learner.loading import like
from agentgym.storage.files import write_json

Counters = Mapping[str, int | str]
Held = Mapping[str, Any]  # DCP's metadata of each tensor in a folder, by its name


def make_optimizer(parameters: Iterable[tuple[str, nn.Parameter]], settings: LearnerConfig) -> optim.Optimizer:
    """The optimizer that `learner.optimizer` names, over those parameters that are trained.

    `learner.weight_decay` is of matrices only. `adamw` keeps two fp32 averages for each weight; `adamw8bit` keeps them
    in 8 bits, and in fp32 for tensors of less than 4096 weights.
    """
    common = {"lr": settings.lr, "betas": (settings.beta1, settings.beta2)}
    members: dict[tuple[object, bool], list[nn.Parameter]] = {}
    for name, parameter in parameters:
        if parameter.requires_grad:
            # A fused step takes tensors of one device mesh only.
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            # A sharded parameter has the dimensions of the whole one. The biases of experts lie in one matrix.
            decays = parameter.ndim > 1 and not name.endswith("bias")
            members.setdefault((mesh, decays), []).append(parameter)
    groups = [{"params": own, "weight_decay": settings.weight_decay * decays} for (_, decays), own in members.items()]
    if settings.optimizer == "adamw":
        return optim.AdamW(groups, fused=True, **common)
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


class StateError(RuntimeError):
    """A folder does not hold the state of this model and optimizer."""


class StateStore:
    """Saves the state of one rank beside training, and loads it on any number of ranks.

    Files are written by a thread, from a copy in host memory. The ranks talk in a process group of their own, so that a
    save never meets the collectives of an update. `timeout` is the seconds of one exchange.
    """

    def __init__(self, rank: int, timeout: float):
        self._rank = rank
        self._timeout = timedelta(seconds=timeout)
        self._group: dist.ProcessGroup | None = None
        self._writer = ThreadPoolExecutor(1)
        self._running: Future[None] | None = None

    def begin(
        self,
        module: nn.Module,
        optimizer: optim.Optimizer,
        counters: Counters,
        folder: str | Path,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Copy the state to the host and start to write it into a new folder. A collective, as fast as the copy.

        The thread calls `then` once the tensors are written on all ranks. Raises RuntimeError if the save before has
        not ended.
        """
        if self._running is not None and not self._running.done():
            raise RuntimeError(f"a save into {folder} began while the one before was being written")
        folder = Path(folder)
        record = {"counters": dict(counters), "rng": rng_state()}
        saved = dcp.async_save(
            tensors_of(module, optimizer),
            storage_writer=dcp.FileSystemWriter(folder, sync_files=True),
            process_group=self._process_group(),
            async_stager=BlockingAsyncStager(),
        )

        def finish() -> None:
            saved.result()
            if then is not None:
                then()
            write_json(folder / f"rank-{self._rank}.json", record)

        self._running = self._writer.submit(finish)

    def saved(self) -> str | None:
        """The outcome of the last save: None while it is written, "" for success or no save, else the failure."""
        if self._running is None:
            return ""
        if not self._running.done():
            return None
        if (error := self._running.exception()) is None:
            return ""
        if failures := getattr(error, "failures", None):
            error = next(iter(failures.values()))[0]
        return f"rank {self._rank}: {type(error).__name__}: {first_line(error)}"

    def load(self, module: nn.Module, optimizer: optim.Optimizer, folder: str | Path) -> dict[str, Any]:
        """Set weights, optimizer and random numbers from a folder, and return its counters. A collective.

        A rank that the saving run did not have keeps its random numbers. Raises StateError for another model's folder.
        """
        folder = Path(folder)
        record = json.loads((folder / "rank-0.json").read_text(encoding="utf-8"))
        reader = dcp.FileSystemReader(folder)
        held = reader.read_metadata().state_dict_metadata
        _check(module, held, folder)
        _make_state(module, optimizer, held, folder)
        tensors = tensors_of(module, optimizer)
        dcp.load(tensors, storage_reader=reader, process_group=self._process_group())
        for name, parameter in _trained(module):
            for key, value in optimizer.state.get(parameter, {}).items():
                _set_average(value, tensors[f"optimizer.{name}.{key}"])
        own = folder / f"rank-{self._rank}.json"
        if own.is_file():
            set_rng_state(json.loads(own.read_text(encoding="utf-8"))["rng"])
        return dict(record["counters"])

    def _process_group(self) -> dist.ProcessGroup:
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=self._timeout)
        return self._group


def tensors_of(module: nn.Module, optimizer: optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor that training changes, by its name in the folder: in place, but averages in 8 bits are copies in fp32."""
    found = {}
    for name, parameter in _trained(module):
        found[f"model.{name}"] = parameter.detach()
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"optimizer.{name}.{key}"] = _average(value)
    return found


def _average(value: Tensor) -> Tensor:
    """The state as tensors that can be copied and written: fp32 where it is kept in 8 bits."""
    local = value.to_local() if isinstance(value, DTensor) else value
    if not _packed(local):
        return value
    return like(value, local.dequantize())


def _set_average(value: Tensor, wide: Tensor) -> None:
    """The reverse of `_average`, in place; nothing where that shared its memory."""
    local = value.to_local() if isinstance(value, DTensor) else value
    if _packed(local):
        local.copy_(wide.to_local() if isinstance(wide, DTensor) else wide)


def _packed(local: Tensor) -> bool:
    return type(local) not in (Tensor, nn.Parameter)


def rng_state() -> dict[str, Any]:
    """The states of the random numbers of this process as JSON: Python's, NumPy's, torch's, and the present GPU's."""
    kind, keys, *rest = numpy.random.get_state(legacy=True)
    version, words, gauss = random.getstate()
    return {
        "python": [version, list(words), gauss],
        "numpy": [kind, keys.tolist(), *rest],  # type: ignore[union-attr]
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "cuda": torch.cuda.get_rng_state().numpy().tobytes().hex() if torch.cuda.is_initialized() else None,
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = state["numpy"]
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))
    torch.set_rng_state(_bytes(state["torch"]))
    if state["cuda"] is not None and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(_bytes(state["cuda"]))


def _trained(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad)


def _check(module: nn.Module, held: Held, folder: Path) -> None:
    wanted = {f"model.{name}": tuple(parameter.shape) for name, parameter in _trained(module)}
    found = {name: tuple(tensor.size) for name, tensor in held.items() if name.startswith("model.")}
    if wrong := sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name)):
        there, here = found.get(wrong[0], "not there"), wanted.get(wrong[0], "not in this one")
        raise StateError(f"{folder}: it is of another model: {wrong[0]} is {there}, not {here}")


def _make_state(module: nn.Module, optimizer: optim.Optimizer, held: Held, folder: Path) -> None:
    """Have the optimizer keep the state that the folder has of each parameter, by a step at a rate of 0, which moves nothing."""
    optimizer.state.clear()
    stepped = [(name, p) for name, p in _trained(module) if any(h.startswith(f"optimizer.{name}.") for h in held)]
    if stepped:
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        set_lr(optimizer, 0.0)
        for _, parameter in stepped:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate
    made = {f"optimizer.{name}.{key}" for name, p in stepped for key in optimizer.state[p]}
    if wrong := sorted(made ^ {name for name in held if name.startswith("optimizer.")}):
        raise StateError(f"{folder}: it is of another optimizer: {wrong[0]} is in one of the two alone")


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
