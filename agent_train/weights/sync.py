"""One weight sync: learner sends, engine receives, both say what they saw, and the two must agree."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from typing import Protocol

from agent_train.weights.manifest import TensorInfo


class Sender(Protocol):
    """The learner's side."""

    def manifest(self) -> list[TensorInfo]:
        """The tensors to send, in order."""
        ...

    async def send_weights(self) -> dict[str, int]:
        """Send everything; the checksum of each tensor by name."""
        ...


class Receiver(Protocol):
    """The engine's side."""

    async def receive_weights(self, manifest: Sequence[TensorInfo], version: int) -> dict[str, int]:
        """Receive and load; answer, with checksums, only when the new weights serve and the prefix cache is cleared."""
        ...


class WeightSyncError(RuntimeError):
    """The engine's weights differ from those that the learner sent."""


async def sync(learner: Sender, engine: Receiver, version: int) -> int:
    """Move the learner's weights into the engine as `version`.

    Returns:
        One checksum of all tensors together: equal weights, equal number.

    Raises:
        WeightSyncError: a tensor's checksum differs, or the two sides saw different tensors.
    """
    manifest = learner.manifest()
    sent, arrived = await asyncio.gather(learner.send_weights(), engine.receive_weights(manifest, version))
    if sent != arrived:
        wrong = sorted(name for name in sent.keys() | arrived.keys() if sent.get(name) != arrived.get(name))
        raise WeightSyncError(
            f"weight sync to version {version}: {len(wrong)} of {len(sent)} tensors did not arrive as sent, first {wrong[0]!r} "
            f"(sent {sent.get(wrong[0])}, arrived {arrived.get(wrong[0])}); the engine must not be used"
        )
    return int(hashlib.sha256(json.dumps(sorted(sent.items())).encode()).hexdigest()[:12], 16)
