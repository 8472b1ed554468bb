"""Shapes of models, and how many floating-point operations one token of training takes. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """A Qwen3 with tied embeddings."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int

    @property
    def block_weights(self) -> int:
        """Weights of one block that tokens are multiplied with."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def parameters(self) -> int:
        """All of them, norms too; the embedding counts once."""
        norms = 2 * self.hidden + 2 * self.head_dim
        return self.vocab * self.hidden + self.layers * (self.block_weights + norms) + self.hidden

    def config(self, **more: Any) -> Any:
        from transformers import Qwen3Config

        return Qwen3Config(
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate,
            vocab_size=self.vocab,
            tie_word_embeddings=True,
            **more,
        )


SHAPES = {
    "Qwen3-0.6B": Shape(1024, 28, 16, 8, 128, 3072, 151936),
    "Qwen3-4B": Shape(2560, 36, 32, 8, 128, 9728, 151936),
}
# Dense bf16 operations a second, as the vendor states them.
PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}


def training_flops(shape: Shape, context: int, sampled: float = 1.0) -> float:
    """Operations of forward and backward for one token, the mean over a row.

    Each weight costs 2 forward and 4 backward. A token attends to half of the row on average: scores and their use cost 2
    each for every number of the query, forward, and twice that backward. What is computed a second time (checkpoints, the
    chunked head) does not count, and neither does the look-up of embeddings.

    Args:
        shape: of the model.
        context: tokens of a row.
        sampled: share of the tokens that reach the head.
    """
    weights = shape.layers * shape.block_weights + sampled * shape.vocab * shape.hidden
    attention = shape.layers * 2 * 2 * shape.heads * shape.head_dim * context / 2
    return 6 * weights + 3 * attention


def utilisation(tokens_per_second: float, flops_per_token: float, peak: float) -> float:
    """Share of the device's operations that went into the model (MFU)."""
    return tokens_per_second * flops_per_token / peak


def peak_of(device: str) -> float | None:
    """Dense bf16 operations a second of a device by its name; None where it is not known."""
    return next((peak for name, peak in PEAKS.items() if name in device), None)
