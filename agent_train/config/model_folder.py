"""A model's size and context by the `config.json` of its folder, without torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_train.config.schema import Config
from agentgym.storage.files import read_object

TINY_PARAMETERS = 20e6  # a model of fewer gets the defaults of the tiny one
COUNTED = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder. Counts are exact for the kinds of `COUNTED`, and about right for others.

    `biases` are those of the attention; `intermediate` is the width of one expert, of which a token is read by `experts_read`.
    """

    kind: str  # transformers' `model_type`
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocab: int
    tied: bool  # the output embedding is the input's
    biases: bool = False
    experts: int = 1
    experts_read: int = 1

    def matrices(self, experts: int) -> int:
        """Weights of a block's matrices, with so many of its experts."""
        router = self.hidden * self.experts if self.experts > 1 else 0
        projections = 2 * self.hidden * self.head_size * (self.heads + self.kv_heads)
        return projections + router + 3 * self.hidden * self.intermediate * experts

    @property
    def block(self) -> int:
        """Parameters of one transformer block."""
        inputs = self.head_size * (self.heads + 2 * self.kv_heads) * (self.biases or self.kind == "qwen2")
        outputs = self.hidden * (self.biases and self.kind != "qwen2")
        head_norms = 2 * self.head_size * self.kind.startswith("qwen3")
        return self.matrices(self.experts) + 2 * self.hidden + inputs + outputs + head_norms

    @property
    def outside(self) -> int:
        """Parameters outside the blocks: embeddings and the last norm."""
        return self.vocab * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.block + self.outside


def context_of(folder: str | Path) -> int | None:
    """Most tokens that the model reads; None: the folder does not say.

    Beyond the original length LongRoPE turns all positions otherwise: numbers would depend on the samples packed together.
    """
    found = _text_config(folder)
    longest, rope = found.get("max_position_embeddings"), found.get("rope_parameters") or found.get("rope_scaling")
    if isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) in ("longrope", "su"):
        original = "original_max_position_embeddings"
        longest = rope.get(original) or found.get(original) or longest
    return longest if isinstance(longest, int) and longest > 0 else None


def longest_sample(config: Config) -> int | None:
    """Most tokens of a sample of a data file: `data.max_tokens`, and no more than the model reads. None: any number."""
    # A tiny model is built for `engine.max_model_len` tokens.
    reads = context_of(config.model.path) if config.model.path else config.engine.max_model_len
    return min((bound for bound in (config.data.max_tokens, reads) if bound is not None), default=None)


def shape_of(folder: str | Path) -> ModelShape | None:
    """The sizes that `config.json` names; None: it does not say."""
    found = _text_config(folder)
    try:
        hidden, layers, vocab = (int(found[key]) for key in ("hidden_size", "num_hidden_layers", "vocab_size"))
        heads = int(found.get("num_attention_heads") or 1)
        experts = int(found.get("num_experts") or found.get("num_local_experts") or 1)
        intermediate = found.get("moe_intermediate_size") or found.get("intermediate_size") or 4 * hidden
        # Biases of the feed-forward layers, and experts in some layers only, are not counted.
        uneven = any(map(found.get, ("mlp_bias", "mlp_only_layers"))) or found.get("decoder_sparse_step", 1) != 1
        return ModelShape(
            kind="" if uneven else str(found.get("model_type", "")),
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=int(found.get("num_key_value_heads") or heads),
            head_size=int(found.get("head_dim") or hidden // heads),
            intermediate=int(intermediate),
            vocab=vocab,
            tied=bool(found.get("tie_word_embeddings")),
            biases=bool(found.get("attention_bias")),
            experts=experts,
            experts_read=int(found.get("num_experts_per_tok") or 1) if experts > 1 else 1,
        )
    except (KeyError, TypeError, ValueError):
        return None


def is_tiny(folder: str | Path | None) -> bool:
    """True if the run's model is a tiny one: built by code (no folder), or a folder of one."""
    if folder is None:
        return True
    shape = shape_of(folder)
    return shape is not None and shape.parameters < TINY_PARAMETERS


def _text_config(folder: str | Path) -> dict[str, Any]:
    found = read_object(Path(folder).expanduser() / "config.json")
    text = found.get("text_config")
    return text if isinstance(text, dict) else found
