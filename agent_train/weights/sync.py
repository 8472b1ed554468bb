"""One weight sync: the learner sends, the engine receives, and the checksums of both sides must be equal. Imports no torch.

The manifest of names, shapes and types is known to both sides before a byte moves.
"""

import asyncio
import hashlib
import json
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

# vLLM reads an adapter anew when it has dropped it: the newest, and the one before while requests with it end.
KEPT = 2


class WeightSyncError(RuntimeError):
    """The engine's weights differ from those that the learner sent."""


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
    with socket.create_server((host, 0)) as listener:
        return int(listener.getsockname()[1])


class Sender(Protocol):
    """The learner's side. It answers with checksums."""

    def manifest(self) -> list[TensorInfo]: ...

    async def send_weights(self) -> dict[str, int]: ...

    async def save_adapter(self, folder: str | Path) -> dict[str, int]: ...


class Receiver(Protocol):
    """The engine's side. It answers, with checksums, only when the new weights serve and the prefix cache is cleared."""

    async def receive_weights(self, manifest: Sequence[TensorInfo], version: int) -> dict[str, int]: ...


class AdapterReceiver(Protocol):
    """As `Receiver`, of an engine that loads adapters."""

    async def load_adapter(self, folder: str | Path, version: int) -> dict[str, int]: ...


async def sync(learner: Sender, engine: Receiver, version: int) -> int:
    """Move the learner's weights into the engine as `version`, by broadcast. Returns one checksum of all tensors together.

    Raises WeightSyncError if a tensor's checksum differs.
    """
    manifest = learner.manifest()
    sent, arrived = await asyncio.gather(learner.send_weights(), engine.receive_weights(manifest, version))
    return _checked(sent, arrived, f"weight sync to version {version}")


async def sync_adapter(learner: Sender, engine: AdapterReceiver, folder: Path, version: int) -> int:
    """As `sync`, of the learner's adapter, by a new folder in `folder`, which both see; the oldest are removed."""
    earlier, new = _adapters(folder)
    sent = await learner.save_adapter(new)
    arrived = await engine.load_adapter(new, version)
    checksum = _checked(sent, arrived, f"adapter sync to version {version}, {new}")
    for old in [*earlier, new][:-KEPT]:
        shutil.rmtree(old)
    return checksum


def _adapters(folder: Path) -> tuple[list[Path], Path]:
    """Those of earlier syncs, the oldest first, and the place of the next one. The folder is made where it is missing."""
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    earlier = sorted((old for old in folder.iterdir() if old.name.isdigit()), key=lambda old: int(old.name))
    return earlier, folder / f"{int(earlier[-1].name) + 1 if earlier else 0:06d}"


def _checked(sent: Mapping[str, int], arrived: Mapping[str, int], what: str) -> int:
    if sent != arrived:
        wrong = sorted(name for name in sent.keys() | arrived.keys() if sent.get(name) != arrived.get(name))
        raise WeightSyncError(
            f"{what}: {len(wrong)} of {len(sent)} tensors did not arrive as sent, first {wrong[0]!r} "
            f"(sent {sent.get(wrong[0])}, arrived {arrived.get(wrong[0])}); the engine must not be used"
        )
    return int(hashlib.sha256(json.dumps(sorted(sent.items())).encode()).hexdigest()[:12], 16)
