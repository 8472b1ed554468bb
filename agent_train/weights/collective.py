"""Weights from a sender to receivers by broadcast, in buckets of bytes, and the checksum that both sides compare.

Rank 0 sends. The process group needs no `init_process_group` and disturbs none. NCCL carries the bytes where every rank
has a GPU of its own; otherwise gloo does, by way of the CPU. Both sides cut the same buckets from the same manifest.

While a bucket travels, the sender fills the next one and the receivers use the one before.

Legend: B bytes of one bucket or tensor, W 32-bit words of one block, R rows of words.
"""

import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from agent_train.cluster.network import address_towards
from agent_train.config.schema import first_line
from agent_train.weights.sync import TensorInfo, WeightAddress, WeightTransferError, manifest_digest

BUCKET_BYTES = 32 * 1024 * 1024  # malloc keeps up to so much for the next bucket, whose pages are then there
CONNECT_SECONDS = 120.0
TRANSFER_SECONDS = 300.0
_ALIGNMENT = 16
_BLOCK = 1 << 24  # words of one step of `checksum`
_ROW, _ROWS = 1024, 256  # words of a row, and rows of one step, on a CPU


class MissingError(WeightTransferError):
    """Ranks of a group, `missing`, did not come, for no fault of the one that waited."""

    def __init__(self, message: str, missing: list[int]):
        super().__init__(message)
        self.missing = missing


@dataclass
class WeightGroup:
    """A joined group. `device` is where buckets live while they are sent: the CPU with gloo."""

    process_group: Any
    store: Any
    rank: int
    world_size: int
    backend: str
    device: torch.device

    def close(self) -> None:
        """Leave the group. May be called twice."""
        if self.process_group is not None and self.backend == "nccl":
            self.process_group.abort()
        self.process_group = self.store = None


def pick_backend(devices: Sequence[str]) -> str:
    """`nccl` where every rank has a GPU that no other rank has, else `gloo`. `devices` are ids, "cpu" for none."""
    distinct_gpus = "cpu" not in devices and len(set(devices)) == len(devices)
    return "nccl" if distinct_gpus else "gloo"


def make_group(
    address: WeightAddress,
    rank: int,
    device: torch.device | str,
    connect_seconds: float = CONNECT_SECONDS,
    transfer_seconds: float = TRANSFER_SECONDS,
) -> WeightGroup:
    """Join the group as `rank`; returns when all `address.world_size` ranks have joined.

    `device` is of this rank's tensors. `transfer_seconds` is the limit of one bucket. Raises MissingError if others did not come
    in time, WeightTransferError if this rank cannot join: the port is taken, say.
    """
    device = torch.device(device)
    here = f"{address.host}:{address.port} within {connect_seconds:g} s"
    try:
        store = distributed.TCPStore(
            address.host,
            address.port,
            address.world_size,
            is_master=rank == 0,
            timeout=timedelta(seconds=connect_seconds),
            wait_for_workers=False,
        )
        own = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "cpu"
        store.set(f"device/{rank}", own)
        keys = [f"device/{other}" for other in range(address.world_size)]
        try:
            store.wait(keys, timedelta(seconds=connect_seconds))
        except distributed.DistStoreError as error:
            missing = [other for other, key in enumerate(keys) if not store.check([key])]
            told = f"weight group: ranks {missing} did not come to rank {rank} of {address.world_size} at {here}"
            raise MissingError(f"{told}. Check that they were started.", missing) from error
        backend = pick_backend([store.get(key).decode() for key in keys])
        process_group = _process_group(backend, store, address, rank, transfer_seconds)
    except WeightTransferError:
        raise
    except (RuntimeError, ValueError, OSError) as error:
        raise WeightTransferError(
            f"weight group: rank {rank} of {address.world_size} could not join at {here}: {first_line(error)}. "
            "Check that every rank was started and that the port is free."
        ) from error
    where = device if backend == "nccl" else torch.device("cpu")
    return WeightGroup(process_group, store, rank, address.world_size, backend, where)


def broadcast_buckets(
    group: WeightGroup,
    manifest: Sequence[TensorInfo],
    tensors: Iterable[torch.Tensor],
    bucket_bytes: int = BUCKET_BYTES,
) -> dict[str, int]:
    """Send tensors, one for each entry of the manifest and in its order. Returns the checksum of each by name.

    `tensors` may be a generator; two buckets are held at a time. After an error (WeightTransferError if a receiver
    failed, is late, or has another manifest) the group is left and must be made anew, here and for `receive_buckets`.
    """
    sums: dict[str, int] = {}
    source = iter(tensors)
    with _leaving_if_it_fails(group):
        _agree(group, manifest)
        buckets = list(_buckets(manifest, bucket_bytes))
        most = max((size for _, size in buckets), default=0)
        memory = [torch.zeros(most, dtype=torch.uint8, device=group.device) for _ in buckets[:2]]
        sent = _nothing
        for number, (bucket, size) in enumerate(buckets):
            flat_B = memory[number % 2][:size]
            for info, start in bucket:
                tensor = _checked(info, next(source, None))
                sums[info.name] = checksum(tensor)
                bytes_B = tensor.detach().contiguous().view(-1).view(torch.uint8)
                flat_B[start : start + bytes_B.numel()].copy_(bytes_B)
            sent()
            sent = _broadcast(group, flat_B, bucket[0][0].name)
        sent()
    return sums


def receive_buckets(
    group: WeightGroup, manifest: Sequence[TensorInfo], bucket_bytes: int = BUCKET_BYTES
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of `broadcast_buckets`: (name, tensor) in the manifest's order, on `group.device`. Raises likewise.

    A tensor is a view of its bucket, whose memory lives as long as one of its tensors is held.
    """

    def begin(bucket: list[tuple[TensorInfo, int]], size: int) -> tuple[torch.Tensor, Callable[[], None]]:
        flat_B = torch.empty(size, dtype=torch.uint8, device=group.device)
        return flat_B, _broadcast(group, flat_B, bucket[0][0].name)

    with _leaving_if_it_fails(group):
        _agree(group, manifest)
        buckets = list(_buckets(manifest, bucket_bytes))
        coming = [begin(*each) for each in buckets[:1]]
        for number, (bucket, _) in enumerate(buckets):
            flat_B, arrived = coming.pop()
            arrived()
            coming = [begin(*each) for each in buckets[number + 1 : number + 2]]
            for info, start in bucket:
                bytes_B = flat_B[start : start + size_bytes(info)]
                yield info.name, bytes_B.view(_dtype(info)).view(info.shape)


@contextmanager
def _leaving_if_it_fails(group: WeightGroup) -> Iterator[None]:
    """A rank that fails in the middle leaves, so that the others see a closed connection and not a long silence."""
    try:
        yield
    except BaseException:
        group.close()
        raise


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """A variable of the environment, which other process groups do not see."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _process_group(backend: str, store: Any, address: WeightAddress, rank: int, seconds: float) -> Any:
    prefixed = distributed.PrefixStore("weights", store)
    if backend == "nccl":
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=seconds)
        with _variable("TORCH_NCCL_BLOCKING_WAIT", "1"):  # else NCCL's watchdog ends this process when a peer is lost
            return distributed.ProcessGroupNCCL(prefixed, rank, address.world_size, options)
    options = distributed.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=seconds)
    own = address_towards(address.host, address.port)
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname=own)]
    return distributed.ProcessGroupGloo(prefixed, rank, address.world_size, options)


def _buckets(manifest: Sequence[TensorInfo], most: int) -> Iterator[tuple[list[tuple[TensorInfo, int]], int]]:
    """Runs of tensors with their offsets, and the bytes of each run. A tensor larger than `most` bytes has its own."""
    bucket: list[tuple[TensorInfo, int]] = []
    end = 0
    for info in manifest:
        start = math.ceil(end / _ALIGNMENT) * _ALIGNMENT
        if bucket and start + size_bytes(info) > most:
            yield bucket, end
            bucket, start = [], 0
        bucket.append((info, start))
        end = start + size_bytes(info)
    if bucket:
        yield bucket, end


def size_bytes(info: TensorInfo) -> int:
    return math.prod(info.shape) * _dtype(info).itemsize


def _dtype(info: TensorInfo) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, info.dtype)
    return dtype


def _checked(info: TensorInfo, tensor: torch.Tensor | None) -> torch.Tensor:
    if tensor is None:
        raise ValueError(f"weights: no tensor was given for {info.name}, which the manifest lists")
    if tuple(tensor.shape) != info.shape or tensor.dtype != _dtype(info):
        raise ValueError(
            f"weights: the manifest lists {info.name} as {info.dtype} {info.shape}, "
            f"but it is {tensor.dtype} {tuple(tensor.shape)}"
        )
    return tensor


def _agree(group: WeightGroup, manifest: Sequence[TensorInfo]) -> None:
    """Compare manifests over all ranks, so that a difference is an error on each and not a hang."""
    digest = manifest_digest(manifest)
    pair = torch.tensor([digest, -digest], dtype=torch.int64, device=group.device)
    options = distributed.AllreduceOptions()
    options.reduceOp = distributed.ReduceOp.MAX
    _begin(group, lambda: group.process_group.allreduce([pair], options), "comparing manifests")()
    if int(pair[0]) != -int(pair[1]):
        raise WeightTransferError(
            f"weight group: rank {group.rank} has a manifest of {len(manifest)} tensors that is not the other ranks'. "
            "Give sender and receivers the same list of names, shapes and dtypes."
        )


def _nothing() -> None:
    """A wait that returns at once."""


def _broadcast(group: WeightGroup, flat_B: torch.Tensor, first_name: str) -> Callable[[], None]:
    """Begin to send or receive a bucket. What is returned waits for its end."""
    options = distributed.BroadcastOptions()
    options.rootRank = 0
    what = f"the bucket of {flat_B.numel()} bytes that begins with {first_name}"
    return _begin(group, lambda: group.process_group.broadcast([flat_B], options), what)


def _begin(group: WeightGroup, start: Callable[[], Any], what: str) -> Callable[[], None]:
    def failed(error: RuntimeError) -> WeightTransferError:
        where = f"rank {group.rank} of {group.world_size}"
        return WeightTransferError(f"weight group: {where} failed at {what}: {first_line(error)}")

    def wait() -> None:
        try:
            work.wait()
            if group.backend == "nccl":
                torch.cuda.synchronize(group.device)
        except RuntimeError as error:
            raise failed(error) from error

    if group.process_group is None:
        raise WeightTransferError(f"weight group: rank {group.rank} has left the group")
    try:
        work = start()
    except RuntimeError as error:
        raise failed(error) from error
    return wait


def checksum(tensor: torch.Tensor) -> int:
    """sum over i of word_i * (2 i + 1), in 64-bit arithmetic that wraps around; the same on every device.

    The bytes, in row-major order, are padded with zeros to whole words. Every factor is odd and another, so that a
    change of one word changes the sum, and so do words that change places.
    """
    bytes_B = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if bytes_B.numel() % 4 or bytes_B.storage_offset() % 4:
        bytes_B = torch.nn.functional.pad(bytes_B, (0, -bytes_B.numel() % 4))
    words = bytes_B.view(torch.int32)
    in_rows = 0 if words.is_cuda else words.numel() // _ROW * _ROW
    total = _sum_of_rows(words[:in_rows].view(-1, _ROW))
    for start in range(in_rows, words.numel(), _BLOCK):
        block_W = words[start : start + _BLOCK].to(torch.int64)
        factors_W = torch.arange(2 * start + 1, 2 * (start + block_W.numel()), 2, device=words.device)
        total += int((block_W * factors_W).sum())
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


class _Scratch(threading.local):
    """A thread's buffer for sums of rows: allocating it anew costs more than the sums of a small tensor."""

    def __init__(self) -> None:
        self.block = torch.empty(_ROWS, _ROW, dtype=torch.float64)
        self.factors_W = torch.arange(1, 2 * _ROW, 2, dtype=torch.float64)
        self.ones_W = torch.ones(_ROW, dtype=torch.float64)
        self.before_R = torch.arange(0, 2 * _ROW * _ROWS, 2 * _ROW)


_scratch = _Scratch()


def _sum_of_rows(rows: torch.Tensor) -> int:
    """The part of `checksum` of whole rows, in less than half the time: a row's sums, below 2^53, are exact in float64."""
    own, total = _scratch, 0
    for start in range(0, len(rows), _ROWS):
        part = own.block[: len(rows) - start].copy_(rows[start : start + _ROWS])
        plain_R = torch.mv(part, own.ones_W).long()
        total += int(torch.mv(part, own.factors_W).long().sum()) + int(plain_R.dot(own.before_R[: len(part)]))
        total += 2 * _ROW * start * int(plain_R.sum())
    return total
