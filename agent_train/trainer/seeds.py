"""Seeds that follow from what they are for, never from the order in which things happen."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A seed of 48 bits from a run's seed and the place it is for, for example `derive_seed(run, "train", step, task, k)`.

    The same parts give the same seed in every process; parts that differ give seeds that have nothing in common.
    """
    text = "/".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")
