"""One weight sync: the learner sends, the engine receives, and the checksums of both sides must be equal. Imports no torch.

The manifest of names, shapes and types is known to both sides before a byte moves.
"""

import asyncio
import hashlib
import json
import logging
import shutil
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from agent_train.cluster.lost import LostError
from agent_train.config.schema import first_line
from agent_train.engine.base import Engine, EngineError, EngineLostError

if TYPE_CHECKING:
    from agent_train.learner.actor_group import Learner

T = TypeVar("T")
U = TypeVar("U")
TRIES = 5
# vLLM reads an adapter anew when it has dropped it: the newest, and the one before while requests with it end.
KEPT = 2

log = logging.getLogger(__name__)


class WeightSyncError(RuntimeError):
    """The engine's weights differ from those that the learner sent."""


class WeightTransferError(LostError):
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


async def sync(learner: "Learner", engine: Engine, version: int) -> int:
    """Move the learner's weights into the engine as `version`, by broadcast. Returns one checksum of all tensors together.

    The weight group is made where there is none yet, anew without a part of the engine that died, and once more if the transfer
    failed and no part is to blame. Raises WeightSyncError if a tensor's checksum differs, EngineLostError if the weights cannot be
    sent.
    """

    async def move(anew: bool = False) -> tuple[dict[str, int], dict[str, int]]:
        await engine.live()  # a part that is being started again is waited for: a group needs a receiver
        if anew or not engine.connected:
            address = await learner.weight_address(engine.receivers)
            await _both(learner.connect_weights(address), engine.connect_weights(address))
        return await _both(learner.send_weights(), engine.receive_weights(learner.manifest(), version))

    what = f"weight sync to version {version}"
    try:
        sent, arrived = await _unless_lost(engine, move)
    except EngineLostError:
        raise
    except (EngineError, WeightTransferError) as error:
        log.warning("%s: weights are sent again, by a new group: %s", what, first_line(error))
        try:
            sent, arrived = await _unless_lost(engine, lambda: move(anew=True))
        except (EngineError, WeightTransferError) as twice:
            raise EngineLostError(f"{what} failed twice: {twice}") from twice
    return _checked(sent, arrived, what)


async def _both(learner: Awaitable[T], engine: Awaitable[U]) -> tuple[T, U]:
    """The results of both sides, which end together. A loss goes first: it is the cause; then the engine's failure: it says more."""
    ended = await asyncio.gather(engine, learner, return_exceptions=True)
    for end in sorted(ended, key=lambda each: not isinstance(each, LostError) or isinstance(each, WeightTransferError)):
        if isinstance(end, BaseException):
            raise end
    return cast("T", ended[1]), cast("U", ended[0])


async def _unless_lost(engine: Engine, move: Callable[[], Awaitable[T]]) -> T:
    """The result of `move`, tried again if parts of the engine died meanwhile; EngineLostError if they do each time."""
    for _ in range(TRIES):
        losses = await engine.losses()
        try:
            return await move()
        except (RuntimeError, ValueError) as error:
            if await engine.losses() == losses:
                raise
            failure = error
            log.warning("weights are sent again, since a part of the engine died: %s", first_line(error))
    raise EngineLostError(
        f"at each of {TRIES} attempts to send weights a part of the engine died: {failure}"
    ) from failure


async def sync_adapter(learner: "Learner", engine: Engine, folder: Path, version: int) -> int:
    """As `sync`, of the learner's adapter, by a new folder in `folder`, which both see; the oldest are removed."""
    new = _next(folder)
    sent = await learner.save_adapter(new)
    arrived = await _unless_lost(engine, lambda: engine.load_adapter(new, version))
    return _checked(sent, arrived, f"adapter sync to version {version}, {new}")


async def sync_files(learner: "Learner", engine: Engine, folder: Path, version: int) -> int:
    """As `sync`, by new folders in `folder`, which both see: all weights, or with `engine.weights=delta` their changes.

    Nothing is loaded before every worker has read what was written. Where one has not, for example as it holds other
    weights than those that changed, all weights are sent.
    """

    async def fetched(whole: bool) -> tuple[dict[str, int], list[dict[str, int]]]:
        new = _next(folder)
        sent = await learner.save_weights(new, whole)
        return sent, [read for read in await engine.fetch_weights(new) if read != sent]

    async def move() -> tuple[dict[str, int], dict[str, int]]:
        sent, wrong = await fetched(whole=False)
        if wrong:
            log.info("%d workers of the engine lack what version %d changes: all weights are sent", len(wrong), version)
            sent, wrong = await fetched(whole=True)
        _checked(sent, (wrong or [sent])[0], f"weight sync to version {version}, reading {folder}")
        return sent, await engine.load_fetched(version)

    sent, arrived = await _unless_lost(engine, move)
    return _checked(sent, arrived, f"weight sync to version {version}, {folder}")


async def load_saved(engine: Engine, folder: Path, version: int, sums: Mapping[str, int]) -> None:
    """Load a folder of `save_weights`, which told these checksums. Raises WeightSyncError if others arrive."""
    what = f"loading the weights of step {version}, {folder}"

    async def move() -> dict[str, int]:
        for read in await engine.fetch_weights(folder):
            _checked(sums, read, what)
        return await engine.load_fetched(version)

    _checked(sums, await _unless_lost(engine, move), what)


def _next(folder: Path) -> Path:
    """The place of the next sync in a folder, which is made where it is missing. With it, the newest KEPT remain."""
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    earlier = sorted((old for old in folder.iterdir() if old.name.isdigit()), key=lambda old: int(old.name))
    for old in earlier[: 1 - KEPT]:
        shutil.rmtree(old)
    return folder / f"{int(earlier[-1].name) + 1 if earlier else 0:06d}"


def _checked(sent: Mapping[str, int], arrived: Mapping[str, int], what: str) -> int:
    if sent != arrived:
        wrong = sorted(name for name in sent.keys() | arrived.keys() if sent.get(name) != arrived.get(name))
        raise WeightSyncError(
            f"{what}: {len(wrong)} of {len(sent)} tensors did not arrive as sent, first {wrong[0]!r} "
            f"(sent {sent.get(wrong[0])}, arrived {arrived.get(wrong[0])}); the engine must not be used"
        )
    return checksum_of_all(sent)


def checksum_of_policies(sums: Sequence[int]) -> int:
    """One number for the checksums of a run's policies: that of the run's own, where it has no other."""
    return sums[0] if len(sums) == 1 else checksum_of_all({str(number): own for number, own in enumerate(sums)})


def checksum_of_all(sums: Mapping[str, int]) -> int:
    """One number for the checksums of all tensors, by name."""
    return int(hashlib.sha256(json.dumps(sorted(sums.items())).encode()).hexdigest()[:12], 16)
