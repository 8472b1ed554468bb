"""Settings that can run and are far from what the model's size wants. Each is one line; a run prints them before it starts."""

from collections.abc import Iterator

from agent_train.cluster.placement import visible_gpus
from agent_train.config.model_folder import is_tiny
from agent_train.config.schema import Config
from agent_train.learner.roles import learns, roles_of

# Learning rates that are usual for all weights of a model of this size, by mode.
TINY_RATES = (1e-4, 1e-2)
RATES = {"rl": (1e-7, 1e-5), "sft": (1e-6, 1e-4), "dpo": (5e-8, 1e-5), "rm": (1e-6, 1e-4)}
ADAPTERS = 100.0  # factor of the usual range's upper end for adapters
SHORT, LONG = 64, 256  # tokens: too short an answer for an instruct model, too long a one for a tiny model


def unusual(config: Config) -> Iterator[str]:
    """One line for each setting that is far from the usual."""
    tiny = is_tiny(config.model.path)
    yield from _unusual_rates(config, tiny)
    yield from _unusual_precision(config, tiny)
    if config.mode != "rl":
        return
    most = config.sampling.max_tokens
    if not tiny and most < SHORT:
        yield f"sampling.max_tokens={most}: short for an instruct model, whose answers are cut off there; 1,024 is usual"
    if tiny and most > LONG:
        yield f"sampling.max_tokens={most}: long for a tiny model, which knows no language: set model.path=DIR, or lower it"


def _unusual_rates(config: Config, tiny: bool) -> Iterator[str]:
    roles = roles_of(config)
    usual = TINY_RATES if tiny else RATES[config.mode]
    if config.lora.rank:
        usual = usual[0], usual[1] * ADAPTERS
    rates = {"learner.lr": (config.learner.lr, usual)}
    if config.mode == "rl" and config.sft.episodes:
        rates["sft.lr"] = config.sft.lr, TINY_RATES if tiny else RATES["sft"]
    if any(role != "policy" and learns(config, role) for role in roles):
        rates["critic.lr"] = config.critic.lr, TINY_RATES if tiny else RATES["sft"]
    size = "a tiny model" if tiny else "a model of this size"
    for key, (rate, (low, high)) in rates.items():
        if rate and not low <= rate <= high:
            word = "high" if rate > high else "low"
            yield f"{key}={rate:g}: {word} for {size} with mode={config.mode}; {low:g} to {high:g} is usual"


def _unusual_precision(config: Config, tiny: bool) -> Iterator[str]:
    dtype = config.model.dtype
    if dtype == "float16":
        yield "model.dtype=float16: overflows where bfloat16 does not, and there is no loss scaling; bfloat16 is usual"
    elif dtype == "float32" and not tiny and visible_gpus():
        yield "model.dtype=float32: takes twice the memory and time of bfloat16 on a GPU; bfloat16 is usual"
    elif dtype == "bfloat16" and tiny:
        yield "model.dtype=bfloat16: coarse for a tiny model; float32 is usual"
