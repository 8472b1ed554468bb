"""The models of a run: their roles, the folder that each starts from, and which of them learn. Nothing here imports torch."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from agent_train.config.extensions import advantages
from agent_train.config.schema import OWN, Config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Those that give a number for each position in place of log-probabilities.
VALUED = ("critic", "reward_model")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
# Shipped advantages that ask for a critic; your own says so by an attribute `targets`.
WITH_CRITIC = ("gae", "bilevel_gae")


class VocabularyError(ValueError):
    """A model beside the policy maps an id to another token. Names the model and the first such id."""


def roles_of(config: Config) -> tuple[str, ...]:
    """The roles of a run, the trained one first. A teacher behind an endpoint is not among them."""
    if config.mode != "rl":
        return {"sft": ("policy",), "dpo": ("policy",), "rm": ("reward_model",)}[config.mode]
    advantage = config.algorithm.advantage.name
    wanted = {
        "policy": True,
        "reference": needs_reference(config) and not reference_is_base(config),
        "critic": has_critic(config),
        "prm": advantage == "prime",
        "teacher": advantage == "distill" and config.teacher.url is None,
        "reward_model": config.reward_model.path is not None,
    }
    return tuple(role for role, is_wanted in wanted.items() if is_wanted)


def own_players(config: Config) -> list[str]:
    """The players with policies of their own that learn."""
    return sorted(player for player, agent in config.env.players.items() if agent == OWN) if config.mode == "rl" else []


def learner_count(config: Config) -> int:
    """The models of the run that have ranks: its roles, and the policies of players."""
    return len(roles_of(config)) + len(own_players(config))


def has_critic(config: Config) -> bool:
    """True if the advantage reads the values of a critic."""
    name = config.algorithm.advantage.name
    with contextlib.suppress(ValueError):  # validation refuses such a name
        return name in WITH_CRITIC or (name not in advantages.shipped and hasattr(advantages.load(name), "targets"))
    return False


def needs_reference(config: Config) -> bool:
    """True if anything of a run with episodes asks for the log-probabilities of a reference."""
    return config.algorithm.kl.coef > 0 or config.algorithm.advantage.name == "prime"


def reference_is_base(config: Config) -> bool:
    """True if the reference is the policy without its adapters, which needs no second model: no other is named, warmed up or reset."""
    begins_as_base = config.reference.path is None and config.sft.episodes == 0
    return config.lora.rank > 0 and begins_as_base and config.reference.reset_every is None


def sends_adapters(config: Config) -> bool:
    """True if the engine is given the adapters alone, in place of all weights."""
    return config.lora.rank > 0 and not config.lora.merge and config.engine.name == "vllm"


def learns(config: Config, role: str) -> bool:
    """True if a role has an optimizer. A reward model learns only in mode=rm."""
    return role in ("policy", "critic", "prm") or (role == "reward_model" and config.mode == "rm")


def source_of(config: Config, role: str) -> str | None:
    """The folder that the settings name for a role; None for the policy as the run starts. PRIME's model begins as its reference."""
    paths = {
        "reference": config.reference.path,
        "critic": config.critic.path,
        "prm": config.critic.path or config.reference.path,
        "teacher": config.teacher.path,
        "reward_model": config.reward_model.path,
    }
    return paths.get(role)


def start_of(config: Config, role: str, policy_dir: str | Path) -> Path:
    source = source_of(config, role)
    return Path(source).expanduser().absolute() if source else Path(policy_dir)


def learning_rate(config: Config, role: str) -> tuple[float, int]:
    """The learning rate of a role that learns, and the steps of its warm-up: `critic` has those of the roles beside a policy."""
    settings = config.critic if role in ("critic", "prm") else config.learner
    return settings.lr, settings.warmup_steps


def lr_scale(config: Config, step: int, steps: int) -> float:
    """The share of the learning rate in step `step` of `steps`, from 1, before the warm-up. Linear: from 1 to 1 / steps, never 0."""
    return 1.0 if config.learner.schedule == "constant" else 1 - (step - 1) / steps


def check_folder(folder: str | Path, policy_dir: str | Path, name: str) -> None:
    """Raise VocabularyError unless a model's tokenizer gives every token of the policy's the same id; `name` is its setting."""
    folder = Path(folder)
    if not any((folder / file).is_file() for file in TOKENIZER_FILES):
        raise VocabularyError(
            f"{name}={folder}: has no tokenizer to compare with the policy's: copy the policy's there if the vocabularies are the same"
        )
    there, here = tokenizer_of(folder).get_vocab(), tokenizer_of(policy_dir).get_vocab()
    for token, number in sorted(here.items(), key=lambda item: item[1]):
        if there.get(token) != number:
            raise VocabularyError(
                f"{name}={folder}: another vocabulary than the policy's: token {token!r} is {number} for the policy and"
                f" {there.get(token, 'unknown')} there: take a model with the policy's tokenizer"
            )


def tokenizer_of(model_dir: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder. One that is a `tokenizer.json` alone does without the import of torch and all models."""
    from transformers import PreTrainedTokenizerFast

    file = Path(model_dir) / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if settings.get("tokenizer_class") == PreTrainedTokenizerFast.__name__:
        return PreTrainedTokenizerFast.from_pretrained(str(model_dir))
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(model_dir))  # type: ignore[no-any-return]
