"""How large a model is and how much it reads, by the `config.json` of its folder, without torch."""

from pathlib import Path
from typing import Any

from agent_train.config.schema import Config
from agentgym.storage.files import read_object

TINY_PARAMETERS = 20e6  # a model of fewer gets the defaults of the tiny one


def context_of(folder: str | Path) -> int | None:
    """Most tokens that the model reads; None: the folder does not say."""
    longest = _text_config(folder).get("max_position_embeddings")
    return longest if isinstance(longest, int) and longest > 0 else None


def longest_sample(config: Config) -> int | None:
    """Most tokens of a sample of a data file: `data.max_tokens`, and no more than the model reads. None: any number."""
    # A tiny model is built for `engine.max_model_len` tokens.
    reads = context_of(config.model.path) if config.model.path else config.engine.max_model_len
    return min((bound for bound in (config.data.max_tokens, reads) if bound is not None), default=None)


def parameters_of(folder: str | Path) -> float | None:
    """About how many parameters the model has; None: the folder does not say. A mixture of experts counts as one expert."""
    shape = _text_config(folder)
    try:
        hidden, layers, vocab = (int(shape[key]) for key in ("hidden_size", "num_hidden_layers", "vocab_size"))
    except (KeyError, TypeError, ValueError):
        return None
    intermediate = shape.get("intermediate_size") or 4 * hidden
    return float(vocab * hidden + layers * (4 * hidden**2 + 3 * hidden * intermediate))


def is_tiny(folder: str | Path | None) -> bool:
    """True if the run's model is a tiny one: built by code (no folder), or a folder of one."""
    if folder is None:
        return True
    size = parameters_of(folder)
    return size is not None and size < TINY_PARAMETERS


def _text_config(folder: str | Path) -> dict[str, Any]:
    found = read_object(Path(folder).expanduser() / "config.json")
    text = found.get("text_config")
    return text if isinstance(text, dict) else found
