"""One sync of an adapter: the learner writes it to a disk that the engine reads too, and both say what they saw."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Protocol

from agent_train.weights.sync import WeightSyncError

# vLLM reads an adapter anew when it has dropped it: the newest, and the one before while requests with it end.
KEPT = 2


class AdapterSender(Protocol):
    """The learner's side."""

    async def save_adapter(self, folder: str | Path) -> dict[str, int]:
        """Write the adapter in PEFT's format; the checksum of each tensor by name."""
        ...


class AdapterReceiver(Protocol):
    """The engine's side."""

    async def load_adapter(self, folder: str | Path, version: int) -> dict[str, int]:
        """Serve the adapter; answer, with checksums, only when it serves and the prefix cache is cleared."""
        ...


async def sync_adapter(learner: AdapterSender, engine: AdapterReceiver, folder: Path, version: int) -> int:
    """Move the learner's adapter into the engine as `version`.

    Args:
        learner: that trains it.
        engine: that holds the model which it belongs to.
        folder: on a disk that both see. Each sync writes a new folder in it, and the oldest are removed.
        version: of the weights with it.

    Returns:
        One checksum of all tensors together: equal weights, equal number.

    Raises:
        WeightSyncError: a tensor's checksum differs, or the two sides saw different tensors.
    """
    earlier, new = _folders(folder)
    sent = await learner.save_adapter(new)
    arrived = await engine.load_adapter(new, version)
    if sent != arrived:
        wrong = sorted(name for name in sent.keys() | arrived.keys() if sent.get(name) != arrived.get(name))
        raise WeightSyncError(
            f"adapter sync to version {version}: {len(wrong)} of {len(sent)} tensors are not in {new} as they were written, first "
            f"{wrong[0]!r}; the engine must not be used"
        )
    for old in [*earlier, new][:-KEPT]:
        shutil.rmtree(old)
    return int(hashlib.sha256(json.dumps(sorted(sent.items())).encode()).hexdigest()[:12], 16)


def _folders(folder: Path) -> tuple[list[Path], Path]:
    """The adapters that a folder holds, the oldest first, and where the next one goes. It is made where it is missing."""
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    earlier = sorted((old for old in folder.iterdir() if old.name.isdigit()), key=lambda old: int(old.name))
    return earlier, folder / f"{int(earlier[-1].name) + 1 if earlier else 0:06d}"
