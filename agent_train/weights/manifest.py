"""The manifest of a weight sync: names, shapes and types, known to both sides before a byte moves. Imports no torch."""

import hashlib
import json
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass


class WeightTransferError(RuntimeError):
    """Weights did not arrive: a rank did not join, the two sides disagree, or the transfer took too long."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a model, under its Hugging Face name. `dtype` is torch's name without the prefix ("float32")."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class WeightAddress:
    """The rendezvous of a weight group."""

    host: str  # of the store, which rank 0 (the sender) serves
    port: int
    world_size: int  # the sender and all receiver ranks of all engines: `1 + engine.receivers`
    rank_offset: int = 1  # rank of the engine's first receiver. A sender ignores it.


def manifest_to_json(manifest: Sequence[TensorInfo]) -> str:
    return json.dumps([asdict(info) for info in manifest])


def manifest_from_json(text: str) -> list[TensorInfo]:
    return [TensorInfo(item["name"], tuple(item["shape"]), item["dtype"]) for item in json.loads(text)]


def manifest_digest(manifest: Sequence[TensorInfo]) -> int:
    """62 bits that differ when two manifests do."""
    return int.from_bytes(hashlib.sha256(manifest_to_json(manifest).encode()).digest()[:8], "big") >> 2


def free_port(host: str = "") -> int:
    """A port that nothing listens on now. Bind it soon: nothing reserves it."""
    with socket.socket() as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])
